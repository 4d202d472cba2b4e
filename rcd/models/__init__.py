"""Diffusion language models over stock transformers backbones: families, reading and writing checkpoints."""

import logging

# transformers imports torchao where it is installed, and that warns of every kernel that another machine would have
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
