"""Checkpoints that come quantised (`quantization_config` in config.json): transformers' own quantiser of that method
makes and fills the layers of the stock backbone, where its package is installed. Only safetensors are read."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import torch

from rcd.diffusion.attention import ATTENTION
from rcd.errors import RCDError, first_line, told
from rcd.models.family import FamilySpec, translate
from rcd.models.filling import FLOATS, check_finite
from rcd.models.lm import DiffusionLM, WideNorm
from rcd.models.room import free_memory, shown
from rcd.models.source import Weights, quiet
from rcd.models.tensors import layout_of

PACKAGES = {
    "torchao": "torchao", "compressed-tensors": "compressed-tensors", "bitsandbytes": "bitsandbytes",
    "gptq": "gptqmodel", "awq": "gptqmodel", "hqq": "hqq", "quanto": "optimum-quanto", "fp8": "torch with a GPU",
}  # fmt: skip
"""Method -> the package whose layers transformers uses."""
UNPACKED = "compressed-tensors"
"""Its layers become floats again before they compute, so that only the files are small."""


def method_of(config: dict[str, Any], path: Path) -> str | None:
    """How a checkpoint was quantised; None: it was not."""
    given = config.get("quantization_config")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise RCDError(f"{path} has a quantization_config that is no JSON object: {told(given)}.")
    bits = given.get("load_in_4bit") or given.get("load_in_8bit")
    method = given.get("quant_method", "bitsandbytes" if bits else None)
    if not isinstance(method, str) or method not in PACKAGES:
        raise RCDError(
            f"{path} is quantised by {told(method)}, which is not read; take one quantised by {', '.join(PACKAGES)}, "
            "or the checkpoint that it was made from, with --quantize."
        )
    return method


def load(
    path: Path, empty: DiffusionLM, backbone_config: dict[str, Any], config: dict[str, Any], weights: Weights,
    device: torch.device, dtype: torch.dtype,
) -> DiffusionLM:  # fmt: skip
    """The model, its layers as the method makes them. `empty`: the same, of floats."""
    method, spec = method_of(config, path), empty.spec
    assert method is not None
    own_names = spec.from_stock("backbone.norm.weight") != "model.norm.weight"
    if own_names and method == "torchao":  # its files say in their own words which tensors make up a weight
        raise RCDError(
            f"{path} is a {spec.name} quantised by torchao, which is read of families with transformers' names alone; "
            "take the checkpoint that it was made from, with --quantize."
        )
    if spec.experts or spec.fused:
        raise RCDError(
            f"{path} is a quantised {spec.name}, whose matrices are kept otherwise here than in its files; take the "
            "checkpoint that it was made from, with --quantize."
        )
    _check_quantised(path, method, empty, weights)
    stored = sum(prod(shape) * kind.itemsize for _, shape, kind in weights.headers())
    _check_room(path, empty.size * dtype.itemsize if method == UNPACKED else stored, device)
    for name, tensor in weights:  # as stored: packages keep their numbers where no list of a model's tensors has them
        if tensor.is_floating_point():
            check_finite(tensor if tensor.dtype in FLOATS else tensor.float(), name, path)
    import transformers

    stock = getattr(transformers, f"{spec.backbone}Config")(**backbone_config)
    stock.quantization_config = dict(config["quantization_config"])
    given: dict[str, Any] = {"pretrained_model_name_or_path": str(path), "use_safetensors": True}
    if own_names:
        given = {"pretrained_model_name_or_path": None, "state_dict": _renamed(weights, spec)}
    try:
        with quiet():
            found, report = getattr(transformers, f"{spec.backbone}ForCausalLM").from_pretrained(
                **given, config=stock, dtype=dtype, device_map={"": device}, attn_implementation=ATTENTION,
                local_files_only=True, trust_remote_code=False, output_loading_info=True,
            )  # fmt: skip
            if method == UNPACKED:  # else at the first call of the model as a whole, which never comes
                found.hf_quantizer.compressor.decompress_model(model=found)
    except Exception as error:  # a package that is missing or old, a device it does not know, tensors that do not fit
        raise RCDError(
            f"{path} is quantised by {method}, and its quantiser (pip install {PACKAGES[method]}) cannot load it here: "
            f"{first_line(error)}."
        ) from error
    _check_whole(path, report)
    if found.model.embed_tokens.weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise RCDError(f"{path} has quantised embeddings; they are the codebook of which residuals are made.")
    WideNorm.replace_all(found.model)
    model = DiffusionLM(spec, empty.settings, found.model, found.lm_head).eval()
    model.quantised = method
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def _check_quantised(path: Path, method: str, empty: DiffusionLM, weights: Weights) -> None:
    """From the headers: something is quantised, and each such tensor has a scale beside it. Quantisers take floats, and
    numbers without a scale, as they are, and say nothing."""
    spec = empty.spec
    plain = layout_of(spec, {name: tuple(tensor.shape) for name, tensor in empty.state_dict().items()})
    added: set[str] = set()
    low: dict[str, torch.dtype] = {}
    for name, _, kind in weights.headers():
        if name in plain:
            low |= {} if kind in FLOATS else {name: kind}
        elif not name.endswith(spec.unused):
            parts = name.rsplit(".", 3)  # `...up_proj.weight_scale`, `...up_proj.weight.quant_state.bitsandbytes__nf4`
            added |= {".".join(parts[:count]) for count in range(1, len(parts))} or {name}
    if not added and not low:
        raise RCDError(
            f"{path} is said to be quantised by {method}, and holds nothing but the floats of a {spec.name}; take "
            "quantization_config out of its config.json."
        )
    for name, kind in low.items():
        if name.rpartition(".")[0] not in added:
            raise RCDError(f"the tensor {name} of {path} is {kind}, and no scale is beside it; download the checkpoint "
                           "again.")  # fmt: skip


def _check_room(path: Path, needed: int, device: torch.device) -> None:
    free = free_memory(device)
    if free is not None and needed > free:
        raise RCDError(f"the weights of {path} take {shown(needed)}, and {shown(free)} are free on {device}; take a "
                       "smaller model, or free some memory.")  # fmt: skip


def _renamed(weights: Weights, spec: FamilySpec) -> dict[str, torch.Tensor]:
    """The tensors in transformers' names: what a method adds stands behind a parameter's own name."""
    ours = {name: translate(name, spec.rename) or name for name, _, _ in weights.headers()}
    stock = {
        name: found.replace("backbone.", "model.", 1).replace("head.", "lm_head.", 1) for name, found in ours.items()
    }
    return {stock[name]: tensor for name, tensor in weights}


def _check_whole(path: Path, report: Any) -> None:
    """Nothing may be missing, be left over or have another shape."""
    for what, says in (
        ("missing_keys", "lacks"),
        ("unexpected_keys", "holds"),
        ("mismatched_keys", "has other shapes of"),
    ):
        names = sorted(str(key[0] if isinstance(key, tuple) else key) for key in report.get(what) or ())
        names = [name for name in names if not name.endswith("rotary_emb.inv_freq")]
        if names:
            raise RCDError(
                f"{path} {says} {len(names)} tensor(s) that its quantization_config does not mean, first {names[0]}."
            )
