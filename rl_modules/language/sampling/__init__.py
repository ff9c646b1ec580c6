"""Samplers: from prompts to completions with their log-probabilities.

``sample`` decodes with the model itself; :class:`Sampler` is the interface of every sampler.
"""

from rl_modules.language.sampling.native import NativeSampler, sample
from rl_modules.language.sampling.protocol import Completions, Sampler, SamplingSettings

__all__ = ["Completions", "NativeSampler", "Sampler", "SamplingSettings", "sample"]
