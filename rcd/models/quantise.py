"""Weights in eight or four bits (`--quantize`): which layers, by which numbers, and what they take.

torchao chooses the numbers. On a GPU its own layers multiply with them; elsewhere `rcd.models.lowbit` does, because
torchao's products for CPUs make the whole matrix of floats anew in every pass (docs/quantise.md). The input
embeddings stay as they are: they are the codebook of which residuals are made (Eq. 1).
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from rcd.errors import RCDError, first_line, one_of
from rcd.models.lowbit import GROUP, TILE, Int4Linear, Int8Linear, LowBitLinear

METHODS = ("int8", "int4")
HEADS = (*METHODS, "exact")
INSTALL = "pip install 'residual-context-diffusion[quantize]'"
FITS = 2
GPU_GROUP = 128
"""Of torchao's kernel for four bits on a GPU."""


@dataclass(frozen=True)
class Quantisation:
    """`int8` or `int4` for the layers, and how the head is kept: eight bits unless told otherwise, since what a carry
    reads (probabilities, entropies) comes straight from it."""

    method: str
    head: str = "int8"

    def __post_init__(self) -> None:
        one_of("quantisation", self.method, METHODS)
        one_of("quantisation of the head", self.head, HEADS)

    @classmethod
    def parse(cls, given: str | Quantisation | None) -> Quantisation | None:
        """`int4`, or `int4,head=exact` (or int8, int4)."""
        if given is None or isinstance(given, Quantisation):
            return given
        if not isinstance(given, str):
            raise RCDError(f"quantize takes one of {', '.join(METHODS)} as a text, not {given!r}.")
        method, comma, rest = given.partition(",")
        key, equals, head = rest.partition("=")
        if comma and (key != "head" or not equals):
            raise RCDError(f"quantize knows one setting, head; write {method},head=exact, not {given!r}.")
        return cls(method, head) if comma else cls(method)

    def __str__(self) -> str:
        return self.method if self == Quantisation(self.method) else f"{self.method},head={self.head}"

    def of(self, name: str, shape: tuple[int, ...]) -> str | None:
        """How the weight of that name and shape is kept: int8, int4, or None, as it is. Inputs that are no multiple of
        a group are kept in eight bits."""
        if name == "head.weight":
            method = self.head
        elif name.startswith("backbone.layers.") and name.endswith(("_proj.weight", "_proj")):  # "_proj": experts
            method = self.method
        else:
            return None
        if method == "exact" or len(shape) < 2:
            return None
        return "int8" if shape[-1] % GROUP else method

    def bytes_of(self, name: str, shape: tuple[int, ...], itemsize: int) -> int | None:
        """What such a weight takes, with scales of that many bytes; None where it is kept as it is."""
        method = self.of(name, shape)
        if method is None:
            return None
        *others, inputs = shape
        return prod(others) * (inputs + itemsize if method == "int8" else inputs // 2 + 2 * itemsize * inputs // GROUP)


def check_installed() -> None:
    if importlib.util.find_spec("torchao") is None:
        raise RCDError(f"quantize needs the torchao package: {INSTALL}.")


def torchao() -> Any:
    check_installed()
    try:
        import torchao.quantization as found
    except Exception as error:  # whatever a package for another version of torch raises
        raise RCDError(f"the torchao package cannot be used here ({first_line(error)}): {INSTALL}.") from error
    return found


def quantised(weight_NK: Tensor, method: str, dtype: torch.dtype) -> Any:
    """The linear layer of that weight, on its device, for activations of `dtype`; its bias is the caller's to set."""
    ao = torchao()
    if weight_NK.device.type == "cuda":
        return _by_torchao(ao, weight_NK, method, dtype)
    make = _int8 if method == "int8" else _int4
    return make(ao, weight_NK.detach(), dtype)


def _int8(ao: Any, weight_NK: Tensor, dtype: torch.dtype) -> LowBitLinear:
    """Symmetric, a scale for every output; rounded to `dtype` before the weights are, so that it adds no error. Some
    rows at a time, so that no more than these are ever floats several times over."""
    parts = []
    for rows in weight_NK.split(TILE):
        wide = rows.float()
        scale_N1 = ao.Int8Tensor.from_hp(wide, ao.PerRow()).scale.to(dtype)
        parts.append((ao.Int8Tensor.from_hp(wide, ao.PerRow(), scale=scale_N1.float()).qdata, scale_N1[:, 0]))
    q_NK, scale_N = (torch.cat(part) for part in zip(*parts, strict=True))
    return Int8Linear(q_NK, scale_N)


def _int4(ao: Any, weight_NK: Tensor, dtype: torch.dtype) -> LowBitLinear:
    """Asymmetric, a scale and an origin for every group of inputs, fitted to the group's weights. Some rows at a time,
    which stay in a core's cache."""
    parts = [_fitted(ao, rows.float()) for rows in weight_NK.split(TILE)]
    u_NK, scale_NS, origin_NS = (torch.cat(part) for part in zip(*parts, strict=True))
    return Int4Linear(u_NK, scale_NS.to(dtype), origin_NS.to(dtype))


def _fitted(ao: Any, weight_NK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(u [N, K], scale [N, S], origin [N, S]): torchao's, which span the group's range, then the line that fits best
    through (u, weight), twice. Of normally distributed weights the error falls from 8.1% to 7.5%, as with HQQ."""
    four: Any = getattr(torch, "int4")  # noqa: B009 (a name that type checkers do not know)
    kind: Any = ao.quant_primitives.MappingType.ASYMMETRIC
    found = ao.IntxUnpackedToInt8Tensor.from_hp(weight_NK, (1, GROUP), four, mapping_type=kind)
    weight_NSG = weight_NK.unflatten(1, (-1, GROUP))
    u_NSG = (found.qdata + 8).float().view_as(weight_NSG)  # q from -8 to 7
    scale_NS1, mean_NS1 = found.scale[..., None], weight_NSG.mean(-1, keepdim=True)
    shift_NS1 = -scale_NS1 * (found.zero_point[..., None] + 8)
    for _ in range(FITS):
        centre_NS1 = u_NSG.mean(-1, keepdim=True)
        slope = torch.linalg.vecdot(u_NSG - centre_NS1, weight_NSG)[..., None]
        slope /= (u_NSG - centre_NS1).square_().sum(-1, keepdim=True).clamp_min_(1e-12)
        scale_NS1 = torch.where(slope > 0, slope, scale_NS1)  # all weights equal: nothing to fit
        shift_NS1 = mean_NS1 - scale_NS1 * centre_NS1
        u_NSG = ((weight_NSG - shift_NS1) / scale_NS1).round_().clamp_(0, 15)
    return u_NSG.view_as(weight_NK).to(torch.uint8), scale_NS1[..., 0], -(shift_NS1 / scale_NS1)[..., 0]


def _by_torchao(ao: Any, weight_NK: Tensor, method: str, dtype: torch.dtype) -> nn.Linear:
    """A plain linear layer whose weight is torchao's tensor."""
    if method == "int4" and dtype != torch.bfloat16:
        raise RCDError("int4 on a GPU computes in bfloat16; add --dtype bfloat16, or take --quantize int8.")
    linear = nn.Linear(weight_NK.shape[1], weight_NK.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight_NK.to(dtype), requires_grad=False)
    if method == "int4":
        config = ao.Int4WeightOnlyConfig(group_size=GPU_GROUP, int4_packing_format="tile_packed_to_4d")
    else:
        config = ao.Int8WeightOnlyConfig()
    ao.quantize_(linear, config)
    return linear
