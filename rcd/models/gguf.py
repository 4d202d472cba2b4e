"""GGUF files as llama.cpp's converter writes them: LLaDA and Dream; Llama, Qwen2 and Qwen3 as starts of an adaptation.

Facts become the family's config.json, tensors get the family's names and are dequantised one by one, by the gguf
package. The converter reorders the rows of Q and K for architectures whose rotary embedding llama.cpp applies to
neighbouring rows (LLaDA, Llama); here they stand as the checkpoint has them.
Shapes: H heads, C head dimension, D width.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rcd import registry
from rcd.errors import RCDError, first_line
from rcd.models.families import check_eps, check_theta
from rcd.models.family import FamilySpec
from rcd.models.gguf_header import Header, Place, read_header

LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
FIXED = {"token_embd": "backbone.embed_tokens", "output_norm": "backbone.norm", "output": "head"}
FAMILIES = {"llada": True, "dream": False, "llama": True, "qwen2": False, "qwen3": False}
"""general.architecture, which is the family's name here -> whether the rows of Q and K are reordered."""
PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16, 28: torch.float64}
"""ggml's numbers of the types that are floats as they stand."""


@dataclass(frozen=True)
class Weights:
    """`rcd.models.source.Weights` of a file."""

    header: Header
    spec: FamilySpec
    heads: int
    kv_heads: int
    reordered: bool

    def headers(self) -> Iterable[tuple[str, tuple[int, ...], torch.dtype]]:
        for name, place in self.header.places.items():
            yield self._name(name), place.shape, PLAIN.get(place.kind, torch.float32)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        data = np.memmap(self.header.path, mode="r")
        for name, place in self.header.places.items():
            tensor = self._read(data, name, place)
            if self.reordered and name.endswith((".attn_q.weight", ".attn_k.weight")):
                tensor = self._restored(tensor, self.heads if ".attn_q." in name else self.kv_heads, name)
            yield self._name(name), tensor

    def _name(self, name: str) -> str:
        """Of blk.3.attn_q.weight, the family's own name."""
        stem, _, kind = name.rpartition(".")
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if kind in ("weight", "bias") and layer and layer[2] in LAYER:
            return self.spec.from_stock(f"backbone.layers.{layer[1]}.{LAYER[layer[2]]}.{kind}")
        if kind == "weight" and stem in FIXED:
            return self.spec.from_stock(f"{FIXED[stem]}.weight")
        raise RCDError(f"{self.header.path} holds the tensor {name}, which the family {self.spec.name} does not have.")

    def _read(self, data: Any, name: str, place: Place) -> Tensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        kind = GGMLQuantizationType(place.kind)
        block, width = GGML_QUANT_SIZES[kind]
        rows = place.shape[:-1]
        row = place.shape[-1] // block * width
        raw = np.array(data[place.start : place.start + row * int(np.prod(rows, dtype=np.int64))])
        if place.kind in PLAIN:
            return torch.from_numpy(raw).view(PLAIN[place.kind]).view(place.shape)
        try:
            floats = dequantize(raw.reshape(*rows, row), kind)
        except Exception as error:  # NotImplementedError and plain ValueErrors
            raise RCDError(
                f"the tensor {name} of {self.header.path} is {kind.name}, which the gguf package does not dequantise "
                f"({first_line(error)}); take a file of another type, such as Q8_0."
            ) from error
        return torch.from_numpy(np.ascontiguousarray(floats, dtype=np.float32)).view(place.shape)

    def _restored(self, tensor: Tensor, heads: int, name: str) -> Tensor:
        """Rows of a head from (0, C/2, 1, C/2 + 1, ...) to (0, 1, 2, ...)."""
        rows, width = tensor.shape if tensor.dim() == 2 else (0, 0)
        if not rows or rows % (2 * heads):
            raise RCDError(
                f"the tensor {name} of {self.header.path} has shape {list(tensor.shape)}, for {heads} heads."
            )
        return tensor.view(heads, -1, 2, width).transpose(1, 2).reshape(rows, width)


def read_gguf(path: Path) -> tuple[dict[str, Any], Weights, Any | None]:
    """(config.json's content, the tensors, the tokenizer)."""
    try:
        from gguf import GGML_QUANT_SIZES
    except ImportError as error:
        raise RCDError(
            "reading GGUF needs the gguf package: pip install 'residual-context-diffusion[gguf]'."
        ) from error
    from rcd.models.gguf_words import tokenizer

    header = read_header(path, {int(kind): size for kind, size in GGML_QUANT_SIZES.items()})
    config = _config(header)
    family = config["model_type"].lower()
    heads, kv_heads = _numbers(header, family, "attention.head_count", "attention.head_count_kv")
    weights = Weights(header, registry.get("family", family), heads, kv_heads or heads, FAMILIES[family])
    return config, weights, tokenizer(header, family)


def _config(header: Header) -> dict[str, Any]:
    """In the family's own keys."""
    path, facts = header.path, header.facts
    architecture = facts.get("general.architecture")
    if architecture not in FAMILIES:
        raise RCDError(
            f"the GGUF file {path} has the architecture {architecture!r}, which is not read; of GGUF files these are: "
            f"{', '.join(FAMILIES)}."
        )
    if "rope_freqs.weight" in header.places or f"{architecture}.rope.scaling.type" in facts:
        raise RCDError(f"the GGUF file {path} scales its rotary embedding, which is not read; take its safetensors.")
    if "token_embd.weight" not in header.places:
        raise RCDError(f"the GGUF file {path} lacks the tensor token_embd.weight; get the file again.")
    shape = header.places["token_embd.weight"].shape
    vocabulary, tied = shape[0] if shape else 0, "output.weight" not in header.places
    layers, width, inner, heads, kv_heads, context = _numbers(
        header, architecture, "block_count", "embedding_length", "feed_forward_length", "attention.head_count",
        "attention.head_count_kv", "context_length",
    )  # fmt: skip
    eps = facts.get(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    check_eps(f"{architecture}.attention.layer_norm_rms_epsilon of the GGUF file {path}", eps)
    theta = facts.get(f"{architecture}.rope.freq_base", 10000.0)
    check_theta(f"{architecture}.rope.freq_base of the GGUF file {path}", theta)
    ends = [facts.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    common = {
        "vocab_size": vocabulary, "rms_norm_eps": float(f"{eps:.6g}"),  # of an fp32: 1e-05
        "rope_theta": theta,
        "mask_token_id": facts.get("tokenizer.ggml.mask_token_id"),
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)) or None,
        "bos_token_id": facts.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": facts.get("tokenizer.ggml.padding_token_id"),
    }  # fmt: skip
    if architecture == "llada":
        own: dict[str, Any] = {
            "architectures": ["LLaDAModelLM"], "model_type": "llada", "d_model": width, "n_heads": heads,
            "n_kv_heads": kv_heads or heads, "n_layers": layers, "mlp_hidden_size": inner,
            "embedding_size": vocabulary, "max_sequence_length": context, "rope": True, "activation_type": "silu",
            "block_type": "llama", "layer_norm_type": "rms", "weight_tying": tied,
        }  # fmt: skip
    else:
        names = {"dream": ("DreamModel", "Dream"), "llama": ("LlamaForCausalLM", "llama")}
        stock = (f"{architecture.capitalize()}ForCausalLM", architecture)
        name, kind = names.get(architecture, stock)
        own = {
            "architectures": [name], "model_type": kind, "hidden_size": width, "intermediate_size": inner,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads or heads,
            "hidden_act": "silu", "max_position_embeddings": context, "tie_word_embeddings": tied,
            "head_dim": facts.get(f"{architecture}.attention.key_length"),
        }  # fmt: skip
    return {key: value for key, value in {**own, **common}.items() if value is not None}


def _numbers(header: Header, architecture: str, *names: str) -> list[int]:
    """Whole numbers among the facts; kv heads may be left out (0)."""
    found = []
    for name in names:
        value = header.facts.get(f"{architecture}.{name}", 0 if name.endswith("_kv") else None)
        if isinstance(value, bool) or not isinstance(value, int) or value < (0 if name.endswith("_kv") else 1):
            raise RCDError(f"the GGUF file {header.path} has {architecture}.{name} = {value!r}; get the file again.")
        found.append(value)
    return found
