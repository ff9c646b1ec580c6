"""The names of :mod:`rl_modules.language.sampling.decode` under the path that they are imported from elsewhere."""

from rl_modules.language.sampling.decode import decode, generate, transformers_model
from rl_modules.language.sampling.rows import Prompts, Record

__all__ = ["Prompts", "Record", "decode", "generate", "transformers_model"]
