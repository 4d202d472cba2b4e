"""Small random models in the families' own formats: for tests, benchmarks and the demo. They know nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from rcd import registry
from rcd.models.checkpoint import Checkpoint, build, changed_settings, pick_device
from rcd.models.family import FamilySpec
from rcd.models.settings import RCDFile, resolve

EXPERTS: dict[str, dict[str, Any]] = {
    "sdar_moe": {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "llada2_moe": {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True, "n_group": 4,
        "topk_group": 2, "num_shared_experts": 1, "routed_scaling_factor": 2.5,
        "score_function": "sigmoid", "use_qk_norm": True, "use_qkv_bias": False, "use_bias": False,
        "partial_rotary_factor": 0.5,
    },
}  # fmt: skip
"""What the config.json of a family with experts says of them."""


def toy_config(
    family: str,
    *,
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    kv_heads: int | None = None,
    ffn: int | None = None,
    vocab: int = 128,
    context: int = 4096,
    block_length: int | None = None,
) -> dict[str, Any]:
    """A config.json of that family; the last three ids are the mask, the turn's end and the text's end."""
    mask, eot, eos = vocab - 3, vocab - 2, vocab - 1
    if family == "llada":
        return {
            "architectures": ["LLaDAModelLM"], "model_type": "llada", "d_model": width, "n_heads": heads,
            "n_kv_heads": kv_heads or heads, "n_layers": layers, "mlp_hidden_size": ffn or 3 * width,
            "vocab_size": vocab, "embedding_size": vocab, "max_sequence_length": context, "rope": True,
            "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "activation_type": "silu", "block_type": "llama",
            "layer_norm_type": "rms", "weight_tying": False, "include_bias": False, "include_qkv_bias": False,
            "mask_token_id": mask, "eos_token_id": eos, "pad_token_id": eos,
        }  # fmt: skip
    names = {
        "sdar": ("SDARForCausalLM", "sdar"), "dream": ("DreamModel", "Dream"),
        "sdar_moe": ("SDARMoeForCausalLM", "sdar_moe"), "llada2_moe": ("LLaDA2MoeModelLM", "llada2_moe"),
        "fast_dllm_qwen": ("Fast_dLLM_QwenForCausalLM", "Fast_dLLM_Qwen"),
    }  # fmt: skip
    stock = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
    architecture, model_type = names.get(family) or (stock[family], family)
    config: dict[str, Any] = {
        "architectures": [architecture], "model_type": model_type, "vocab_size": vocab, "hidden_size": width,
        "intermediate_size": ffn or 3 * width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or max(1, heads // 2), "hidden_act": "silu",
        "max_position_embeddings": context, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "tie_word_embeddings": False, "eos_token_id": [eos, eot], "torch_dtype": "float32",
    }  # fmt: skip
    if family in ("sdar", "qwen3", *EXPERTS):
        config["head_dim"] = width // heads
    if family in names:
        config["mask_token_id"] = mask
    if family == "fast_dllm_qwen":
        config["bd_size"] = block_length or 8
    if family in ("sdar", *EXPERTS):
        config["block_size"] = block_length or 8
    if family == "llada2_moe":
        config["first_k_dense_replace"] = int(layers > 1)
    return {**config, **EXPERTS.get(family, {})}


def toy(
    family: str = "sdar",
    *,
    seed: int = 0,
    spread: float = 1.0,
    device: str | torch.device = "cpu",
    tokenizer: Any | None = None,
    rcd: RCDFile | None = None,
    to_train: bool = False,
    **shape: Any,
) -> Checkpoint:
    """A random checkpoint. `spread` scales the logits: a larger one makes the model surer of its nonsense. `to_train`:
    small weights, as training from nothing wants them."""
    config = toy_config(family, **shape)
    spec: FamilySpec = registry.get("family", family)
    backbone_config = spec.backbone_config(config)
    overrides = {"mask_token_id": config["vocab_size"] - 3} if spec.causal else {}
    settings = resolve(
        spec, config, {}, rcd or RCDFile(), overrides,
        vocab_size=backbone_config["vocab_size"], context_length=backbone_config["max_position_embeddings"],
    )  # fmt: skip
    model = build(spec, settings, backbone_config, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if to_train:
                last = name.endswith(("o_proj.weight", "down_proj.weight", "down_proj"))
                depth = len(model.backbone.layers)  # type: ignore[arg-type]
                fixed = 0.0 if name.endswith("bias") else 1.0
                deviation = 0.02 / (2 * depth) ** 0.5 if last else 0.02
                parameter.copy_(torch.full_like(noise, fixed) if parameter.dim() == 1 else noise * deviation)
            elif parameter.dim() == 1:
                sharp = 2.0 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
                parameter.copy_(0.1 * noise + (0.0 if name.endswith("bias") else sharp))
            elif parameter.dim() == 3:  # experts, one matrix each
                parameter.copy_(noise * parameter.shape[2] ** -0.5)
            elif name.endswith(("q_proj.weight", "k_proj.weight")):
                # attention that picks: positions then differ from one another, as in a trained model
                parameter.copy_(noise * parameter.shape[1] ** -0.5 * 2.0)
            elif name == "backbone.embed_tokens.weight":
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * parameter.shape[1] ** -0.5 * (spread if name == "head.weight" else 1.0))
            parameter.requires_grad_(False)
        for name, bias in model.named_buffers():
            if name.endswith(spec.wide):  # as a router's, after some training: it changes a few choices
                bias.copy_(torch.randn(bias.shape, generator=generator) * (0.0 if to_train else 0.1))
    model.to(pick_device(device))
    kept = replace(rcd or RCDFile(), **changed_settings(settings, spec, overrides, own_type=spec.name))
    return Checkpoint(model, config, tokenizer, kept)


WORDS = (
    "the a an one two three four five six seven eight nine ten red blue green old new small large warm cold quick slow "
    "cat dog bird fish fox hen bear wolf horse mouse house tree river hill road field stone cloud star moon sun rain "
    "snow wind fire sea boat bread milk apple pear plum nut book pen lamp door key clock box chair table runs sits "
    "sees finds takes gives makes keeps opens closes reads writes sings sleeps wakes waits walks falls and or but so "
    "then when where why who in on under over near far before after with without to from is was will can must"
).split()


def toy_tokenizer(vocab: int, mask: str = "<|MASK|>") -> Any:
    """A word-level tokenizer of that size: common words, numbers, and the three special tokens of `toy_config`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*WORDS, ".", ",", "?"]
    words += [f"{n}" for n in range(vocab - 4 - len(words))]
    tokens = ["<unk>", *words[: vocab - 4], mask, "<|im_end|>", "<|endoftext|>"]
    backend = Tokenizer(models.WordLevel({token: k for k, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", mask_token=mask, eos_token="<|endoftext|>",
        additional_special_tokens=["<|im_end|>"],
    )  # fmt: skip
