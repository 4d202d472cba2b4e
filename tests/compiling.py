"""Compile every Triton kernel for a GPU that need not be there: `python -m tests.compiling`, a line for each one.

The kernels' own functions choose tiles and constants; a launch compiles instead of running. Not with TRITON_INTERPRET.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from rcd.kernels import attention, fused, launching, products
from rcd.residual.summary import Tail

HOPPER = GPUTarget("cuda", 90, 32)
KINDS = {
    torch.bfloat16: "bf16", torch.float32: "fp32", torch.int64: "i64", torch.int32: "i32", torch.bool: "i1",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "launch_pdl")
found: dict[str, int] = {}
"""Kernel -> bytes of its machine code, of all variants."""


def compiled(kernel: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
    """In place of a launch."""
    options = {name: named.pop(name) for name in OPTIONS if name in named}
    values = dict(zip(kernel.arg_names, given, strict=False)) | named
    signature, constants, attributes = dict[str, str](), dict[Any, Any](), dict[Any, Any]()
    for place, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[(place,)] = "constexpr", value
            continue
        if isinstance(value, Tensor):
            signature[parameter.name] = "*" + KINDS[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    binary = triton.compile(source, target=HOPPER, options=options).asm["cubin"]
    found[kernel.__name__] = found.get(kernel.__name__, 0) + len(binary)


def drawn(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def call_all() -> None:
    """Every kernel, as decoding a block of 32 tokens of a model with heads of 128 calls them."""
    width, tokens, heads, groups, c, rows = 1024, 32, 8, 2, 128, 4
    row, start = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    cache, end = drawn(rows, groups, 512, c), torch.zeros(2, tokens, dtype=torch.int32)
    x, weight, norm = drawn(1, tokens, width), drawn(width, width), drawn(width)
    qkv, turns = drawn(2, tokens, (heads + 2 * groups) * c), drawn(512, c)
    fused.rms_norm(x, norm, 1e-6)
    fused.silu_mul(x)
    query = fused.rotate_store(qkv, cache, cache, row, start, turns, turns, heads, (drawn(c), drawn(c), 1e-6))
    for processors in (1, 132):  # one part a row, and several
        with patch.object(attention, "processors", lambda _, count=processors: count):
            fused.attend(query, cache, cache, row, end, 0.1, row)
    counts = torch.zeros(width, dtype=torch.int32)
    stream, normed = fused.added(x, weight, None, x, norm, 1e-6, counts)
    fused.add_norm(x, stream, norm, 1e-6)
    fused.linear(normed, weight, norm)
    fused.gated(normed, weight)
    codebook = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits, tail = drawn(tokens, 1000), Tail.of(codebook, 16)
    read = fused.summarise(logits, 7, 0.9, 64)
    place = fused.project(logits, read.normaliser, tail.coordinates)
    fused.expected_embedding(read.kept_p, read.kept_ids, place, codebook, tail)
    fused.probabilities(logits, read.normaliser, torch.float32)


def main() -> None:
    with patch.object(JITFunction, "run", compiled), patch.object(products, "_skinny", lambda *_: True):
        early = patch.object(launching, "early", lambda: True)
        with early:
            call_all()
    for name, size in sorted(found.items()):
        print(name, size)


if __name__ == "__main__":
    main()
