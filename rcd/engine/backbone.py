"""The stock backbone's own weights, run over slots: the pass of the fast engine.

A slot is a run of Q consecutive tokens of one row of the cache, and a pass is any number of slots. In every layer the
keys and values of all slots are written first, each at its position in its row; then every token sees the cache from 0
to its `end`. So one pass can denoise a block, store the one before it, refresh a canvas and prefill a prompt, each of
another row, and attention reads nothing but what is there.
Shapes: N slots, Q tokens, D width, R rows, G key/value heads, T positions, C head dimension.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rcd.errors import RCDError, out_of_memory
from rcd.models.lm import DiffusionLM

CACHE_SHARE = 0.85
"""Of the memory that is free, the part that a cache may take; the rest is for the passes."""
COUNTS = 4096
"""Counters of a product's parts: as many as a width has tiles, and more."""
BACKBONES = ("Qwen3Model", "Qwen2Model", "LlamaModel")


@dataclass(frozen=True)
class Slots:
    row: Tensor
    """[N] the row of the cache."""
    start: Tensor
    """[N] the position of the slot's first token."""
    end: Tensor
    """[N, Q] how much of its row each token sees."""
    order: Tensor | None = None
    """[N] the slots row by row, where some rows have several."""
    places: Tensor | None = None
    """[P, b] where in its slot the predicted positions are, if they are not the whole slot. There may be several such
    blocks of a slot: all slots' first ones, then their second ones."""
    sources: tuple[Tensor, Tensor] | None = None
    """[P, b] each: the slot and the place of the output that predicts them, if it is not their own."""
    looking: int = 0
    """Tokens at the beginning of every slot that only look: their keys and values stay as they are."""

    def ordered(self) -> Slots:
        return replace(self, order=self.row.argsort(stable=True).int())


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


def _head(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


class Cache:
    """Keys and values [layer][R, G, T, C]. The last row is no text's: unused slots write there."""

    def __init__(self, model: DiffusionLM, rows: int, capacity: int):
        config: Any = model.backbone.config
        shape = (config.num_hidden_layers, 2, rows + 1, config.num_key_value_heads, capacity, _head(config))
        self.rows, self.capacity = rows, capacity
        self.store = torch.zeros(shape, dtype=model.codebook.dtype, device=model.device)
        self.counts = torch.zeros(COUNTS, dtype=torch.int32, device=model.device)


def position_bytes(model: DiffusionLM) -> int:
    """Keys and values of one position, of all layers."""
    config: Any = model.backbone.config
    heads = config.num_hidden_layers * config.num_key_value_heads
    return int(2 * heads * _head(config) * model.codebook.element_size())


def cache_bytes(model: DiffusionLM, rows: int, capacity: int) -> int:
    return position_bytes(model) * (rows + 1) * capacity


def made_cache(model: DiffusionLM, rows: int, capacity: int) -> Cache:
    try:
        return Cache(model, rows, capacity)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise RCDError(
            f"the cache of {rows} rows of {capacity} positions ran out of memory; take fewer or shorter rows."
        ) from error


def check_room(model: DiffusionLM, rows: int, capacity: int) -> None:
    """Refuse a cache that cannot fit, and say what would."""
    if model.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(model.device)
        free += torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # all of it: other programs may give some back
    room, needed = int(CACHE_SHARE * free), cache_bytes(model, rows, capacity)
    if needed <= room:
        return
    fewer, shorter = room // cache_bytes(model, 0, capacity) - 1, room // cache_bytes(model, rows, 1) // 64 * 64
    ways = [f"{fewer} rows of that length"] if fewer > 0 else []
    ways += [f"{rows} rows of {shorter}"] if shorter > 0 else []
    where = "free" if model.device.type == "cuda" else "in this machine"
    fitting_ones = " or ".join(ways) + " would fit" if ways else "no cache fits beside this model"
    raise RCDError(
        f"the cache of {rows} rows of {capacity} positions needs {needed / 2**30:.1f} GiB and {free / 2**30:.1f} are "
        f"{where}; {fitting_ones}."
    )


def misfit(model: DiffusionLM) -> str | None:
    """Why this backbone cannot be run here, or None."""
    kind = type(model.backbone).__name__
    config: Any = getattr(model.backbone, "config", None)
    if kind not in BACKBONES:
        return f"the backbone {kind} is not one of {', '.join(BACKBONES)}"
    if getattr(config, "hidden_act", "silu") != "silu":
        return f"the activation {config.hidden_act!r} is not 'silu'"
    if getattr(config, "mlp_bias", False):
        return "its MLP has biases"
    return None


class Backbone:
    """`DiffusionLM.encode` over slots."""

    def __init__(self, model: DiffusionLM, parts: Any):
        reason = misfit(model)
        if reason:
            raise RCDError(f"the fast engine cannot run this model: {reason}; use engine='plain'.")
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
