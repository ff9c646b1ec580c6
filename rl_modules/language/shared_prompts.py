"""Aliases of :mod:`rl_modules.language.sampling.prefix`, kept for code that imports them from here."""

from rl_modules.language.sampling.prefix import SharedPromptCache, can_share_prompts

__all__ = ["SharedPromptCache", "can_share_prompts"]
