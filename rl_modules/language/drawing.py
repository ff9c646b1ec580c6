"""The names of :mod:`rl_modules.language.sampling.draw` under the path that they are imported from elsewhere."""

from rl_modules.language.sampling.draw import NextToken, uniforms

__all__ = ["NextToken", "uniforms"]
