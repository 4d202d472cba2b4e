"""What a new engine of a server does before its first request."""

from __future__ import annotations

from rcd.decode.engine import Engine
from rcd.decode.fused import FusedBackbone
from rcd.residual.product import padded_rows, product

SMALL = 500_000
"""Numbers in a matrix up to which it is multiplied in all sizes: some milliseconds each."""
MOST = 1536
"""Tokens or masks of a pass; larger passes are compiled when they come."""


def compile_products(engine: Engine) -> None:
    """Multiply a small model's matrices with every number of rows that a pass may have, in the thread that decodes:
    oneDNN compiles a product for each and keeps it (`rcd.residual.product`), so that memory would otherwise grow, and
    steps stutter, for a server's first thousands of requests."""
    target = engine.target
    if target.model.device.type != "cpu" or not isinstance(target.backbone, FusedBackbone):
        return
    layer = target.backbone.layers[0]
    matrices = [layer.qkv, layer.out, layer.gate_up, layer.down, target.model.head.weight]
    matrices += [target.codebook.t()] if engine.window.terms.carry.expects else []
    for matrix in matrices:
        if matrix.numel() > SMALL:
            continue
        x = matrix.new_zeros(MOST, matrix.shape[1])
        for rows in dict.fromkeys(map(padded_rows, range(1, MOST + 1))):
            product(x[:rows], matrix)
