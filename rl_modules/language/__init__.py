"""The algorithms that train language models, and their models, tokenizers and samplers."""
