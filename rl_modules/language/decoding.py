"""Aliases of :mod:`rl_modules.language.sampling.decode`, kept for code that imports them from here."""

from rl_modules.language.sampling.decode import decode, generate, transformers_model
from rl_modules.language.sampling.rows import Prompts, Record

__all__ = ["Prompts", "Record", "decode", "generate", "transformers_model"]
