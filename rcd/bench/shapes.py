"""Models of published shapes with random weights: what a step costs does not depend on what they know.

It does depend on how sure they are (a residual reads more of a flat distribution), so the weights are scaled until the
predictions at masks are about as sure as a language model's: a mean alpha of about 0.15, between 0 and 0.4.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rcd import registry
from rcd.errors import RCDError, meant
from rcd.models import bundled
from rcd.models import checkpoint as ckpt
from rcd.models.checkpoint import Checkpoint, build
from rcd.models.family import FamilySpec
from rcd.models.filling import quantise_all
from rcd.models.lm import DiffusionLM, ModelSettings
from rcd.models.quantise import Quantisation
from rcd.models.settings import RCDFile, resolve


def _qwen3(layers: int, width: int, ffn: int, heads: int = 32) -> dict[str, Any]:
    return {
        "architectures": ["SDARForCausalLM"], "model_type": "sdar", "vocab_size": 151936, "hidden_size": width,
        "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8,
        "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "tie_word_embeddings": False, "mask_token_id": 151669,
        "eos_token_id": [151645, 151643], "block_size": 4,
    }  # fmt: skip


def _llada(layers: int, width: int, ffn: int, heads: int) -> dict[str, Any]:
    return {
        "architectures": ["LLaDAModelLM"], "model_type": "llada", "d_model": width, "n_heads": heads,
        "n_kv_heads": heads, "n_layers": layers, "mlp_hidden_size": ffn, "vocab_size": 126464,
        "embedding_size": 126464, "max_sequence_length": 4096, "rope": True, "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5, "activation_type": "silu", "block_type": "llama", "layer_norm_type": "rms",
        "weight_tying": False, "include_bias": False, "include_qkv_bias": False, "mask_token_id": 126336,
        "eos_token_id": 126081, "pad_token_id": 126081,
    }  # fmt: skip


def _sdar_moe(layers: int, width: int, heads: int, experts: int, ffn: int) -> dict[str, Any]:
    return {
        **_qwen3(layers, width, 3 * width, heads), "architectures": ["SDARMoeForCausalLM"], "model_type": "sdar_moe",
        "num_key_value_heads": 4, "num_experts": experts, "num_experts_per_tok": 8, "moe_intermediate_size": ffn,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip


def _llada2(layers: int, width: int, ffn: int, heads: int, expert: int) -> dict[str, Any]:
    return {
        "architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe", "vocab_size": 157184, "hidden_size": width,
        "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 4,
        "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "rope_theta": 600000, "partial_rotary_factor": 0.5, "tie_word_embeddings": False, "num_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": expert, "num_shared_experts": 1, "n_group": 8,
        "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "score_function": "sigmoid",
        "first_k_dense_replace": 1, "use_qk_norm": True, "use_bias": False, "use_qkv_bias": False,
        "pad_token_id": 156892,
    }  # fmt: skip


TINY = {"head_dim": 16, "vocab_size": 2048, "mask_token_id": 2040, "eos_token_id": [2041]}

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "sdar-0.6b": ("sdar", _qwen3(28, 1024, 3072, heads=16)),
    "sdar-1.7b": ("sdar", _qwen3(28, 2048, 6144, heads=16)),
    "sdar-4b": ("sdar", _qwen3(36, 2560, 9728)),
    "sdar-8b": ("sdar", _qwen3(36, 4096, 12288)),
    "sdar-tiny": ("sdar", {**_qwen3(2, 128, 256, heads=8), **TINY}),
    "sdar-30b-a3b": ("sdar_moe", _sdar_moe(48, 2048, 32, 128, 768)),
    "llada-0.3b": ("llada", _llada(8, 1024, 3072, heads=16)),
    "llada-8b": ("llada", _llada(32, 4096, 12288, heads=32)),
    "llada2-mini": ("llada2_moe", _llada2(20, 2048, 5120, 16, 512)),
    "llada2-flash": ("llada2_moe", _llada2(32, 4096, 9216, 32, 1024)),
    "llada2-tiny": ("llada2_moe", {**_llada2(2, 128, 256, 8, 64), **TINY, "num_experts": 32}),
}
LOGIT_STD = 7.0
"""Of the logits of a position over the vocabulary."""
SCORE_GAIN = 4.0
"""Of the attention scores: where these are flat, all masks of a block predict the same."""


def described(shape: str, **changes: Any) -> tuple[FamilySpec, dict[str, Any], dict[str, Any], ModelSettings]:
    """(family, config.json, the backbone's configuration, settings) of a named shape. It never ends a text: its end
    tokens are none."""
    family, config = SHAPES[shape]
    spec, config = registry.get("family", family), {**config, **changes}
    backbone = spec.backbone_config(config)
    settings = resolve(
        spec, config, {}, RCDFile(), {},
        vocab_size=backbone["vocab_size"], context_length=backbone["max_position_embeddings"],
    )  # fmt: skip
    return spec, config, backbone, replace(settings, eos_token_ids=())


def random_model(shape: str, device: torch.device, dtype: torch.dtype, seed: int = 0, **changes: Any) -> Checkpoint:
    """A model of a named shape, its weights drawn on the device; `changes` are of its config.json."""
    spec, config, backbone, settings = described(shape, **changes)
    model = build(spec, settings, backbone, device="meta").to(dtype)
    model.to_empty(device=device)
    rotary: Any = model.backbone.rotary_emb
    model.backbone.rotary_emb = type(rotary)(config=model.backbone.config).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith(spec.wide):
                buffer.zero_()
        sharpen(model)
    return Checkpoint(model, config, None, RCDFile())


def sharpen(model: DiffusionLM) -> None:
    """Scale unit-gain random weights, in place, so that predictions are about as sure as a language model's and differ
    from mask to mask."""
    layers: Any = model.backbone.layers
    for layer in layers:
        attention = layer.self_attn  # a norm behind the product takes its scale away
        getattr(attention, "q_norm", attention.q_proj).weight.mul_(SCORE_GAIN)
    model.head.weight.mul_(LOGIT_STD)  # what enters it has unit norm, and its own gain is one


def check_shape(shape: str, paths: bool = True) -> None:
    """Refuse a name that is neither a shape nor, where these will do, a path."""
    if shape not in SHAPES and not (paths and (Path(shape).expanduser().exists() or shape.startswith("bundled:"))):
        other = ", the path of a checkpoint or bundled:NAME (rcd list model)" if paths else ""
        known = [*SHAPES, *bundled.names()] if paths else SHAPES
        raise RCDError(f"unknown shape {shape!r}{meant(shape, known)}; take one of {', '.join(SHAPES)}{other}.")


def settings_of(shape: str) -> ModelSettings:
    """Of a named shape or a checkpoint's path, before its tensors are made or read."""
    check_shape(shape)
    return described(shape)[3] if shape in SHAPES else ckpt.open_checkpoint(shape).settings


def checkpoint_for(shape: str, device: torch.device, dtype: str, quantize: str | None = None) -> Checkpoint:
    """A named shape, or a checkpoint's path, with its end tokens taken away: every run does equal work."""
    if shape in SHAPES:
        found = random_model(shape, device, ckpt.pick_dtype(dtype, torch.bfloat16, device))
        quantise_all(found.model, Quantisation.parse(quantize))
        return found
    found = ckpt.load(shape, device=device, dtype=dtype, quantize=quantize)
    found.model.settings = replace(found.model.settings, eos_token_ids=())
    return found
