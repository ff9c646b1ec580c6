"""Aliases of :mod:`rl_modules.language.sampling.check`, kept for code that imports them from here."""

from rl_modules.language.sampling.check import decodes, generates

__all__ = ["decodes", "generates"]
