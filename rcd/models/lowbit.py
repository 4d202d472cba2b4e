"""Linear layers whose weights are kept in eight or four bits and multiplied as floats, a tile at a time.

A tile of weights is made in the dtype of the activations and multiplied at once (`rcd.residual.product`), so that it
stays in a core's cache and the whole matrix never exists as floats. What is computed is exactly the product with
`floats()`, but for the order of the sum.
Shapes: M tokens, K inputs, N outputs, C tiles of T outputs, S groups of weights that share a scale.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rcd.residual.product import product

TILE = 512
"""Outputs of a tile: of 4,096 inputs in fp32 it is 8 MiB."""
GROUP = 32
"""Weights of four bits that share a scale and an origin."""
FEW = 16
"""Tokens up to which torch's own kernel for eight bits and bf16 is faster than tiles: it reads a byte a weight."""
WHOLE = 16
"""Inputs that it reads at a time, past the end of a row and of its memory where they are not a multiple of it."""


class LowBitLinear(nn.Module):
    """A frozen linear layer: its numbers are buffers, so that nothing trains it."""

    bits: int

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.bias: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = self._product(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias

    def _product(self, x_MK: Tensor) -> Tensor:
        raise NotImplementedError

    def floats(self, every: int = 1) -> Tensor:
        """Every such row of the matrix [N, K], as it is multiplied with."""
        raise NotImplementedError

    @property
    def weights(self) -> int:
        return self.in_features * self.out_features

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, {self.bits} bits"


class Int8Linear(LowBitLinear):
    """w = scale[n] * q[n, k]: a scale for every output, so that the product is scaled and not the weights."""

    bits = 8
    q: Tensor
    scale: Tensor

    def __init__(self, q_NK: Tensor, scale_N: Tensor):
        super().__init__(q_NK.shape[1], q_NK.shape[0])
        self.register_buffer("q", q_NK.contiguous())
        self.register_buffer("scale", scale_N)

    def _product(self, x_MK: Tensor) -> Tensor:
        few = len(x_MK) <= FEW and self.in_features % WHOLE == 0
        if few and x_MK.dtype == torch.bfloat16 and x_MK.device.type == "cpu":
            return torch._weight_int8pack_mm(x_MK.contiguous(), self.q, self.scale)
        out = x_MK.new_empty(len(x_MK), self.out_features)
        for start in range(0, self.out_features, TILE):
            tile = slice(start, start + TILE)
            torch.mul(product(x_MK, self.q[tile].to(x_MK.dtype)), self.scale[tile], out=out[:, tile])
        return out

    def floats(self, every: int = 1) -> Tensor:
        return self.q[::every].to(self.scale.dtype) * self.scale[::every, None]


class Int4Linear(LowBitLinear):
    """w = scale[n, s] * (u[n, k] - origin[n, s]), u from 0 to 15, k in the group s.

    Kept by tiles of outputs, inputs first: every scale then multiplies runs of T numbers. A byte holds the input k in
    its low half and k + K/2 in its high one. The origins are added for whole groups: x W^T = x (scale u)^T - (sums of
    x over groups) (scale origin)^T. Example: K = 64, N = 700 gives C = 2 tiles of T = 350, of [32, 350] bytes each.
    """

    bits = 4
    packed: Tensor
    scale: Tensor
    shift: Tensor

    def __init__(self, u_NK: Tensor, scale_NS: Tensor, origin_NS: Tensor):
        (outputs, inputs), groups = u_NK.shape, scale_NS.shape[1]
        super().__init__(inputs, outputs)
        self.tiles = -(-outputs // TILE)
        self.tile = -(-outputs // self.tiles)
        self.groups = groups
        low_NH, high_NH = self._padded(u_NK).to(torch.uint8).chunk(2, dim=1)
        packed = (low_NH | high_NH << 4).view(self.tiles, self.tile, -1)
        scales = self._padded(scale_NS).view(self.tiles, self.tile, groups)
        shifts = self._padded(-origin_NS * scale_NS).view(self.tiles, self.tile, groups)
        self.register_buffer("packed", packed.transpose(1, 2).contiguous())  # [C, K/2, T]
        self.register_buffer("scale", scales.transpose(1, 2).contiguous())  # [C, S, T]
        self.register_buffer("shift", shifts.transpose(1, 2).contiguous())  # [C, S, T]

    def _padded(self, rows: Tensor) -> Tensor:
        return nn.functional.pad(rows, (0, 0, 0, self.tiles * self.tile - self.out_features))

    def _wide(self) -> torch.dtype:
        """Tiles are scaled in fp32 at least: on a CPU that is faster than in a half, and then rounds once."""
        return torch.promote_types(self.scale.dtype, torch.float32)

    def _scaled(self, number: int, wide_KT: Tensor) -> Tensor:
        """scale * u of a tile [K, T], written into `wide`."""
        half, byte = self.in_features // 2, self.packed[number]
        wide_KT[:half], wide_KT[half:] = byte & 15, byte >> 4
        wide_KT.view(self.groups, -1, self.tile).mul_(self.scale[number].to(wide_KT.dtype)[:, None])
        return wide_KT

    def _product(self, x_MK: Tensor) -> Tensor:
        out = x_MK.new_empty(len(x_MK), self.tiles * self.tile)
        wide = torch.empty(self.in_features, self.tile, dtype=self._wide(), device=x_MK.device)
        sums_MS = x_MK.view(len(x_MK), self.groups, -1).sum(-1)
        for number, (shift_ST, part_MT) in enumerate(zip(self.shift, out.split(self.tile, dim=1), strict=True)):
            tile_KT = self._scaled(number, wide).to(x_MK.dtype)
            torch.add(product(x_MK, tile_KT.t()), sums_MS @ shift_ST, out=part_MT)
        return out[:, : self.out_features]

    def floats(self, every: int = 1) -> Tensor:
        found = []
        for number in range(self.tiles):
            wide = torch.empty(self.in_features, self.tile, dtype=self._wide(), device=self.packed.device)
            wide = self._scaled(number, wide).view(self.groups, -1, self.tile) + self.shift[number][:, None]
            found.append(wide.view(self.in_features, -1).t().to(self.scale.dtype))
        return torch.cat(found)[: self.out_features : every]
