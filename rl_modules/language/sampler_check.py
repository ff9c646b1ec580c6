"""The names of :mod:`rl_modules.language.sampling.check` under the path that they are imported from elsewhere."""

from rl_modules.language.sampling.check import decodes, generates

__all__ = ["decodes", "generates"]
