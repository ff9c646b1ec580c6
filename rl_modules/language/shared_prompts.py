"""The names of :mod:`rl_modules.language.sampling.prefix` under the path that they are imported from elsewhere."""

from rl_modules.language.sampling.prefix import SharedPromptCache, can_share_prompts

__all__ = ["SharedPromptCache", "can_share_prompts"]
