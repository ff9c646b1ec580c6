"""The algorithms that train language models, and what they share: models, tokenizers, the sampler."""
