"""Masked diffusion without a model: attention masks, sampling, commit rules."""
