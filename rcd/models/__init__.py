"""Diffusion language models over stock transformers backbones: families, reading and writing checkpoints."""
