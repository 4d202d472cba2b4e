"""The parts of a pass as kernels. Each has the signature of its plain twin in `rcd.kernels.plain`, which says what it
computes; tests compare the two, on a CPU through Triton's interpreter and on a GPU by hand."""

from rcd.kernels.attention import attend, rotate_store
from rcd.kernels.layers import add_norm, rms_norm, silu_mul
from rcd.kernels.plain import Normed
from rcd.kernels.products import added, gated, linear
from rcd.kernels.reading import expected_embedding, probabilities, project, summarise

__all__ = [
    "Normed", "add_norm", "added", "attend", "expected_embedding", "gated", "linear", "probabilities", "project",
    "rms_norm", "rotate_store", "silu_mul", "summarise",
]  # fmt: skip
