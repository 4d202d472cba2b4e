"""The families with experts: SDAR-MoE and LLaDA2.0/2.1. Their files keep every matrix of every expert apart."""

from __future__ import annotations

from typing import Any

from rcd.errors import RCDError, number, whole
from rcd.models.families import STOCK_NAMES, rope_of, stock_config
from rcd.models.family import BLOCK_CAUSAL, Experts, FamilySpec, Fused

_EXPERTS = tuple(
    Experts(
        f"backbone.layers.{{n}}.mlp.experts.{ours}",
        tuple(f"model.layers.{{n}}.mlp.experts.{{e}}.{name}.weight" for name in theirs),
    )
    for ours, theirs in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",)))
)


def _experts_of(config: dict[str, Any]) -> dict[str, Any]:
    """Checked: how many experts, of what width, and how many of them a token goes to."""
    count = whole("num_experts in config.json", config["num_experts"], least=1)
    return {
        "num_experts": count,
        "num_experts_per_tok": whole(
            "num_experts_per_tok in config.json", config["num_experts_per_tok"], least=1, most=count
        ),
        "moe_intermediate_size": whole(
            "moe_intermediate_size in config.json", config["moe_intermediate_size"], least=1
        ),
    }


def _sdar_moe_config(config: dict[str, Any]) -> dict[str, Any]:
    """Qwen3-MoE's keys."""
    kept = {**stock_config(config), **_experts_of(config)}
    kept["norm_topk_prob"] = bool(config.get("norm_topk_prob", False))
    kept["decoder_sparse_step"] = whole("decoder_sparse_step", config.get("decoder_sparse_step") or 1, least=1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise RCDError(f"mlp_only_layers in config.json should be a list of layers' numbers, not {dense!r}.")
    last = kept["num_hidden_layers"] - 1
    kept["mlp_only_layers"] = [whole("a layer of mlp_only_layers", layer, least=0, most=last) for layer in dense]
    return kept


def _llada2_config(config: dict[str, Any]) -> dict[str, Any]:
    """LLaDA2's keys -> GLM-4.5's, whose layers are the same: queries and keys normalised by head, a part of each
    rotated, sigmoid routers with groups and a bias, shared experts. What these cannot express is refused."""
    if config.get("use_bias", True):
        raise RCDError("this LLaDA2 checkpoint has a bias on the attention's output, which is not supported.")
    for key, needed in (("score_function", "sigmoid"), ("norm_topk_prob", True), ("norm_head", False)):
        if config.get(key, needed) != needed:
            raise RCDError(f"this LLaDA2 checkpoint has {key} = {config[key]!r}; only {needed!r} is supported.")
    kept, experts = stock_config(config), _experts_of(config)
    share, scale = config.get("partial_rotary_factor", 0.5), config.get("routed_scaling_factor", 2.5)
    number("partial_rotary_factor in config.json", share, least=0, most=1)
    number("routed_scaling_factor in config.json", scale, least=0)
    kept["rope_parameters"] = {**rope_of(config), "partial_rotary_factor": share}
    count, used = experts.pop("num_experts"), experts["num_experts_per_tok"]
    groups = whole("n_group in config.json", config.get("n_group", 8), least=1)
    chosen = whole("topk_group in config.json", config.get("topk_group", 4), least=1, most=groups)
    if count % groups or count // groups < 2 or used > chosen * (count // groups):
        raise RCDError(
            f"config.json has {count} experts in {groups} groups, {chosen} of them to choose from, and {used} experts "
            "a token; groups must be equally large, of two experts or more, and the chosen ones hold enough experts."
        )
    return {
        **kept, **experts, "n_routed_experts": count, "n_group": groups, "topk_group": chosen,
        "n_shared_experts": whole("num_shared_experts in config.json", config.get("num_shared_experts"), least=1),
        "first_k_dense_replace": whole("first_k_dense_replace", config.get("first_k_dense_replace", 0), least=0),
        "routed_scaling_factor": scale,
        "norm_topk_prob": used > 1, "use_qk_norm": bool(config.get("use_qk_norm", True)),
        "attention_bias": bool(config.get("use_qkv_bias", False)),
    }  # fmt: skip


SDAR_MOE = FamilySpec(
    name="sdar_moe",
    backbone="Qwen3Moe",
    backbone_config=_sdar_moe_config,
    attention=BLOCK_CAUSAL,
    block_length=4,
    mask_token_id=151669,
    eos_token_ids=(151645, 151643),
    rename=STOCK_NAMES,
    experts=_EXPERTS,
)

_THEIRS, _OURS = "model.layers.{n}.", "backbone.layers.{n}."
LLADA2_MOE = FamilySpec(
    name="llada2_moe",
    backbone="Glm4Moe",
    backbone_config=_llada2_config,
    attention=BLOCK_CAUSAL,
    block_length=32,
    mask_token_id=156895,
    eos_token_ids=(156892,),
    rename=(
        ("model.word_embeddings.", "backbone.embed_tokens."),
        (_THEIRS + "attention.dense.", _OURS + "self_attn.o_proj."),
        (_THEIRS + "attention.query_layernorm.", _OURS + "self_attn.q_norm."),
        (_THEIRS + "attention.key_layernorm.", _OURS + "self_attn.k_norm."),
        (_THEIRS + "mlp.gate.expert_bias", _OURS + "mlp.gate.e_score_correction_bias"),
        *STOCK_NAMES,
    ),
    experts=_EXPERTS,
    fused=(
        Fused(
            _THEIRS + "attention.query_key_value.",
            tuple(_OURS + f"self_attn.{name}_proj." for name in "qkv"),
        ),
    ),
    wide=("e_score_correction_bias",),
)
