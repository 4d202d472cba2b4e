"""The families: SDAR, LLaDA, Dream and Fast-dLLM v2, and the causal ones that an adaptation starts from; those with
experts are in `moe_families.py`.

Each is what its config.json and its parameter names say, over a backbone that transformers already has. A new family
is one FamilySpec here and one line in `rcd.registry`.
"""

from __future__ import annotations

from typing import Any

from rcd.errors import RCDError, number, whole
from rcd.models.family import BIDIRECTIONAL, BLOCK_CAUSAL, FamilySpec

# Hugging Face's own layout: `model.` is the backbone, `lm_head` the head.
STOCK_NAMES = (("model.", "backbone."), ("lm_head.", "head."))

_SHARED_KEYS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "hidden_act max_position_embeddings rms_norm_eps tie_word_embeddings attention_bias mlp_bias initializer_range"
).split()


_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def check_eps(name: str, value: Any) -> None:
    """What a norm adds to the mean of the squares before the root."""
    number(name, value, least=0, most=1, below=True)


def check_theta(name: str, value: Any) -> None:
    """RoPE's base: below 1 its later channels would turn faster than its first; the largest in use is 10^7 or so."""
    number(name, value, least=1, most=1e15)


def _check_heads(heads: int, kv_heads: Any, key: str) -> None:
    """Every head of keys and values serves equally many of queries."""
    whole(f"{key} in config.json", kv_heads, least=1, most=heads)
    if heads % kv_heads:
        raise RCDError(f"{key} in config.json is {kv_heads}, by which the {heads} heads of queries cannot be divided.")


def stock_config(config: dict[str, Any]) -> dict[str, Any]:
    """Keys that the stock configurations share with SDAR's, Dream's and Fast-dLLM v2's."""
    for key in _REQUIRED:
        whole(f"{key} in config.json", config[key], least=1)
    kept = {key: config[key] for key in _SHARED_KEYS if config.get(key) is not None}
    if "head_dim" in kept:
        whole("head_dim in config.json", kept["head_dim"], least=1)
    if "rms_norm_eps" in kept:
        check_eps("rms_norm_eps in config.json", kept["rms_norm_eps"])
    if "num_key_value_heads" in kept:
        _check_heads(kept["num_attention_heads"], kept["num_key_value_heads"], "num_key_value_heads")
    kept["rope_parameters"] = rope_of(config)
    if config.get("use_sliding_window"):
        raise RCDError("this checkpoint uses sliding-window attention, which diffusion decoding does not support.")
    return kept


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """RoPE settings in either of transformers' spellings: `rope_parameters`, or `rope_theta` with `rope_scaling`."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise RCDError(f"config.json has RoPE settings that are no JSON object: {parameters!r}.")
    parameters = dict(parameters)
    parameters["rope_type"] = parameters.pop("type", None) or parameters.get("rope_type") or "default"
    parameters.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    check_theta("rope_theta in config.json", parameters["rope_theta"])
    for key, value in parameters.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            number(f"{key} of RoPE in config.json", value, least=0)
    if parameters.get("factor") is not None:
        number("factor of RoPE in config.json", parameters["factor"], least=1)
    return parameters


def _llada_config(config: dict[str, Any]) -> dict[str, Any]:
    """LLaDA's OLMo-style keys -> Llama's. What Llama cannot express is refused, not ignored."""
    for key, needed in (
        ("activation_type", "silu"),
        ("block_type", "llama"),
        ("layer_norm_type", "rms"),
        ("rope", True),
    ):
        if config.get(key, needed) != needed:
            raise RCDError(f"this LLaDA checkpoint has {key} = {config[key]!r}; only {needed!r} is supported.")
    for key in ("alibi", "attention_layer_norm", "include_bias", "input_emb_norm", "scale_logits"):
        if config.get(key):
            raise RCDError(f"this LLaDA checkpoint has {key} = true, which the Llama backbone does not have.")
    if (config.get("block_group_size") or 1) != 1:
        raise RCDError("this LLaDA checkpoint groups its blocks (block_group_size > 1), which is not supported.")
    if bool(config.get("include_qkv_bias")):
        raise RCDError("this LLaDA checkpoint has biases on Q, K and V, which the Llama backbone does not have.")
    for key in ("d_model", "n_heads", "n_layers", "vocab_size"):
        whole(f"{key} in config.json", config[key], least=1)
    for key in ("embedding_size", "mlp_hidden_size", "mlp_ratio", "n_kv_heads"):
        if config.get(key) not in (None, 0):
            whole(f"{key} in config.json", config[key], least=1)
    width, heads = config["d_model"], config["n_heads"]
    kv_heads = config.get("n_kv_heads") or (1 if config.get("multi_query_attention") else heads)
    _check_heads(heads, kv_heads, "n_kv_heads")
    eps, theta = config.get("rms_norm_eps", 1e-5), config.get("rope_theta", 10000.0)
    check_eps("rms_norm_eps in config.json", eps)
    check_theta("rope_theta in config.json", theta)
    return {
        "vocab_size": config.get("embedding_size") or config["vocab_size"],
        "hidden_size": width,
        "intermediate_size": config.get("mlp_hidden_size") or (config.get("mlp_ratio") or 4) * width,
        "num_hidden_layers": config["n_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": config.get("max_sequence_length", 1024),
        "rms_norm_eps": eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": bool(config.get("weight_tying", True)),
        "attention_bias": False,
    }


SDAR = FamilySpec(
    name="sdar",
    backbone="Qwen3",
    backbone_config=stock_config,
    attention=BLOCK_CAUSAL,
    block_length=4,
    mask_token_id=151669,
    eos_token_ids=(151645, 151643),
    rename=STOCK_NAMES,
)

_LLADA_LAYER, _LAYER = "model.transformer.blocks.{n}.", "backbone.layers.{n}."
LLADA = FamilySpec(
    name="llada",
    backbone="Llama",
    backbone_config=_llada_config,
    attention=BIDIRECTIONAL,
    mask_token_id=126336,
    eos_token_ids=(126081, 126348),
    tempered_confidence=False,
    rename=(
        ("model.transformer.wte.", "backbone.embed_tokens."),
        ("model.transformer.ln_f.", "backbone.norm."),
        ("model.transformer.ff_out.", "head."),
        (_LLADA_LAYER + "q_proj.", _LAYER + "self_attn.q_proj."),
        (_LLADA_LAYER + "k_proj.", _LAYER + "self_attn.k_proj."),
        (_LLADA_LAYER + "v_proj.", _LAYER + "self_attn.v_proj."),
        (_LLADA_LAYER + "attn_out.", _LAYER + "self_attn.o_proj."),
        (_LLADA_LAYER + "ff_proj.", _LAYER + "mlp.gate_proj."),
        (_LLADA_LAYER + "up_proj.", _LAYER + "mlp.up_proj."),
        (_LLADA_LAYER + "ff_out.", _LAYER + "mlp.down_proj."),
        (_LLADA_LAYER + "attn_norm.", _LAYER + "input_layernorm."),
        (_LLADA_LAYER + "ff_norm.", _LAYER + "post_attention_layernorm."),
    ),
)

DREAM = FamilySpec(
    name="dream",
    backbone="Qwen2",
    backbone_config=stock_config,
    attention=BIDIRECTIONAL,
    shift=1,
    mask_token_id=151666,
    eos_token_ids=(151643,),
    rename=STOCK_NAMES,
)

FAST_DLLM = FamilySpec(
    name="fast_dllm_qwen",
    backbone="Qwen2",
    backbone_config=stock_config,
    attention=BLOCK_CAUSAL,
    shift=1,
    block_length=32,
    mask_token_id=151665,
    eos_token_ids=(151645, 151643),
    rename=STOCK_NAMES,
)


def _causal(name: str, backbone: str) -> FamilySpec:
    """A causal family: the same backbone, made block-causal (or bidirectional, if asked) for adaptation."""
    return FamilySpec(
        name=name,
        backbone=backbone,
        backbone_config=stock_config,
        attention=BLOCK_CAUSAL,
        block_length=32,
        causal=True,
        rename=STOCK_NAMES,
    )


QWEN3 = _causal("qwen3", "Qwen3")
QWEN2 = _causal("qwen2", "Qwen2")
LLAMA = _causal("llama", "Llama")
