"""The parts of a pass as kernels. Each has the signature of its plain twin in `rcd.kernels.plain`, which says what it
computes; tests compare the two, on a CPU through Triton's interpreter and on a GPU by hand."""

from rcd.kernels.layers import add_norm, attend, rms_norm, rotate_store, silu_mul
from rcd.kernels.products import gated, linear, partial
from rcd.kernels.reading import expected_embedding, probabilities, project, summarise

__all__ = [
    "add_norm", "attend", "expected_embedding", "gated", "linear", "partial", "probabilities", "project", "rms_norm",
    "rotate_store", "silu_mul", "summarise",
]  # fmt: skip
