"""Aliases of :mod:`rl_modules.language.sampling.draw`, kept for code that imports them from here."""

from rl_modules.language.sampling.draw import NextToken, uniforms

__all__ = ["NextToken", "uniforms"]
