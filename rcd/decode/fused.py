"""The stock backbone's own weights, packed, run over slots: the fast pass, through kernels (`rcd.kernels`).

q, k and v are one matrix, and so are gate and up; the model's modules become views of these, so that nothing is kept
twice and an edit of a weight is seen here.
Shapes: N slots, Q tokens, D width, T positions, C head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rcd.decode.slots import Cache, Slots
from rcd.errors import RCDError
from rcd.models.lm import DiffusionLM

BACKBONES = ("Qwen3Model", "Qwen2Model", "LlamaModel")


@dataclass(frozen=True)
class Layer:
    """Views of one stock layer's parameters; q, k and v are one matrix, and so are gate and up."""

    before: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    norms: tuple[Tensor, Tensor, float] | None
    out: Tensor
    out_bias: Tensor | None
    after: Tensor
    gate_up: Tensor
    down: Tensor


def misfit(model: DiffusionLM) -> str | None:
    """Why this backbone cannot be run here, or None."""
    kind = type(model.backbone).__name__
    config: Any = getattr(model.backbone, "config", None)
    if model.quantised:
        return f"its weights are quantised ({model.quantised})"
    if model.spread:
        return "its layers are on several devices, or on disk"
    if kind not in BACKBONES:
        return f"the backbone {kind} is not one of {', '.join(BACKBONES)}"
    if getattr(config, "hidden_act", "silu") != "silu":
        return f"the activation {config.hidden_act!r} is not 'silu'"
    if getattr(config, "mlp_bias", False):
        return "its MLP has biases"
    packed = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    for name, module in model.backbone.named_modules():
        if name.endswith(packed) and not plain(module):
            return f"{name} is a {type(module).__name__}, not a plain linear layer"
    return None


def plain(module: nn.Module) -> bool:
    """Whether a module is a linear layer whose weight is a matrix of floats, and not a quantised one."""
    own = type(module) is nn.Linear and "forward" not in vars(module)  # what a package has replaced is another's
    return own and type(getattr(module, "weight", None)) in (nn.Parameter, Tensor)


class FusedBackbone:
    """`DiffusionLM.encode` over slots."""

    def __init__(self, model: DiffusionLM, parts: Any):
        reason = misfit(model)
        if reason:
            raise RCDError(f"this model cannot be run through packed weights: {reason}; leave passes='fused' out.")
        stock: Any = model.backbone
        self.model, self.parts = model, parts
        self.layers = [_packed(layer) for layer in stock.layers]
        self.norm, self.eps = stock.norm.weight, float(stock.norm.variance_epsilon)
        self.heads, self.scale = int(stock.config.num_attention_heads), float(stock.layers[0].self_attn.scaling)
        self._turns: tuple[Tensor, Tensor] | None = None

    def turns(self, capacity: int) -> tuple[Tensor, Tensor]:
        """cos and sin [T, C] of every position, as the stock rotary embedding gives them."""
        if self._turns is None or self._turns[0].shape[0] < capacity:
            rotary: Any = self.model.backbone.rotary_emb
            position = torch.arange(capacity, device=self.model.device)[None]
            cos, sin = rotary(self.model.codebook[:1], position)
            self._turns = cos[0].contiguous(), sin[0].contiguous()
        return self._turns

    def __call__(self, embeds_NQD: Tensor, slots: Slots, cache: Cache) -> Tensor:
        """The output after the final norm, [N, Q, D]."""
        ops, (cos, sin) = self.parts, self.turns(cache.capacity)
        stream = embeds_NQD
        x = ops.Normed(ops.rms_norm(stream, self.layers[0].before, self.eps))
        after = [*(layer.before for layer in self.layers[1:]), self.norm]
        for layer, norm, (keys, values) in zip(self.layers, after, cache.store, strict=True):
            query = ops.rotate_store(
                ops.linear(x, layer.qkv, layer.qkv_bias), keys, values, slots.row, slots.start, cos, sin, self.heads,
                layer.norms, slots.looking,
            )  # fmt: skip
            mixed = ops.attend(query, keys, values, slots.row, slots.end, self.scale, slots.order)
            stream, x = ops.added(mixed, layer.out, layer.out_bias, stream, layer.after, self.eps, cache.counts)
            stream, x = ops.added(ops.gated(x, layer.gate_up), layer.down, None, stream, norm, self.eps, cache.counts)
        normed: Tensor = x.value if x.squares is None else ops.rms_norm(stream, self.norm, self.eps)
        return normed


def _joined(*modules: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """The modules' weights as one matrix; they become views of it, so that nothing is kept twice."""
    weight = _one([module.weight for module in modules])
    return weight, None if modules[0].bias is None else _one([module.bias for module in modules])


def _one(parts: list[Tensor]) -> Tensor:
    """The parts behind one another; as they are where an earlier engine has put them so."""
    sizes, first = [len(part) for part in parts], parts[0].data
    ends = [part.data_ptr() + part.numel() * part.element_size() for part in parts]
    together = all(part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for part in parts)
    if together and ends[:-1] == [part.data_ptr() for part in parts[1:]]:
        return first.as_strided((sum(sizes), *first.shape[1:]), first.stride())
    joined = torch.cat([part.data for part in parts])
    for part, own in zip(parts, joined.split(sizes), strict=True):
        part.data = own
    return joined


def _packed(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, bias = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up, _ = _joined(mlp.gate_proj, mlp.up_proj)
    norms = None
    if hasattr(attention, "q_norm"):
        eps = float(attention.q_norm.variance_epsilon)
        norms = (attention.q_norm.weight.data, attention.k_norm.weight.data, eps)
    out = attention.o_proj
    return Layer(
        layer.input_layernorm.weight.data, qkv, bias, norms, out.weight.data,
        None if out.bias is None else out.bias.data, layer.post_attention_layernorm.weight.data, gate_up,
        mlp.down_proj.weight.data,
    )  # fmt: skip
