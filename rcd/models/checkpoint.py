"""Reading a checkpoint into a DiffusionLM: an ordinary Hugging Face folder in the family's own parameter names, with or
without rcd.json, or a GGUF file. `rcd.models.writing` writes one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rcd import registry
from rcd.diffusion.attention import ATTENTION
from rcd.errors import RCDError, first_line, unknown_name, whole
from rcd.models import learnt, prequantised
from rcd.models import source as src
from rcd.models.dtypes import pick_dtype as pick_dtype
from rcd.models.experts import EXPERTS, Router
from rcd.models.family import FamilySpec
from rcd.models.filling import CODEBOOK, fill
from rcd.models.gguf import read_gguf
from rcd.models.lm import DiffusionLM, ModelSettings, WideNorm
from rcd.models.placing import Placing
from rcd.models.quantise import Quantisation, check_installed
from rcd.models.room import check_room
from rcd.models.settings import RCDFile, resolve
from rcd.models.tensors import check_experts

MASK_TEXT = "<|MASK|>"
MASK_TEXTS = (MASK_TEXT, "<MASK>", "[MASK]", "<mask>", "<|mdm_mask|>", "<|mask|>", "|<MASK>|")


@dataclass
class Checkpoint:
    model: DiffusionLM
    config: dict[str, Any]
    """config.json as the family wrote it."""
    tokenizer: Any | None = None
    rcd: RCDFile = field(default_factory=RCDFile)
    stored: dict[str, torch.dtype] = field(default_factory=dict)
    """The family's tensor names, with the dtype of each on disk."""
    folder: Path | None = None
    tokenizer_changed: bool = False


def pick_device(device: str | torch.device | None = "auto") -> torch.device:
    """cuda, else mps, else cpu; or the one that is named."""
    if device is None or device == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        return torch.device(name)
    try:
        chosen = torch.device(device)
        torch.zeros(1, device=chosen).item()
    except (RuntimeError, AssertionError, TypeError) as error:
        there = ["auto", "cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        there += ["mps"] if torch.backends.mps.is_available() else []
        raise RCDError(f"the device {str(device)!r} cannot be used here; choose from: {', '.join(there)}.") from error
    return chosen


@dataclass
class Opened:
    """A checkpoint whose small files are read and whose tensors are not."""

    path: Path
    spec: FamilySpec
    settings: ModelSettings
    backbone_config: dict[str, Any]
    config: dict[str, Any]
    rcd: RCDFile
    tokenizer: Any | None
    weights: src.Weights
    mask_added: bool


def open_checkpoint(
    source: str | Path, *, family: str | None = None, revision: str | None = None, **overrides: Any
) -> Opened:
    """Read everything but the tensors; `load` goes on from here, `rcd info` stops here."""
    path = src.locate(source, revision)
    generation: dict[str, Any] = {}
    if path.is_file():
        if path.suffix != ".gguf":
            raise RCDError(f"{path} is a file; give the checkpoint's folder, or a .gguf file.")
        weights: src.Weights
        config, weights, tokenizer = read_gguf(path)
        rcd = RCDFile()
    else:
        if not (path / "config.json").is_file():
            raise RCDError(f"{path} is no checkpoint: it has no config.json.")
        config, generation = src.read_optional(path, "config.json"), src.read_optional(path, "generation_config.json")
        rcd, tokenizer = RCDFile.read(path), src.tokenizer(path)
        weights = src.Folder(path)
    return settled(path, config, generation, rcd, tokenizer, weights, family, overrides)


def settled(
    path: Path, config: dict[str, Any], generation: dict[str, Any], rcd: RCDFile, tokenizer: Any | None,
    weights: src.Weights, family: str | None, overrides: dict[str, Any],
) -> Opened:  # fmt: skip
    """The family and the settings of what was read."""
    overrides = {key: value for key, value in overrides.items() if value is not None}
    spec = find_family(family or rcd.family, config, path)
    mask, added = choose_mask(spec, config, rcd, overrides, tokenizer)
    settings, backbone_config = _prepare(spec, config, generation, rcd, overrides, tokenizer, mask, grow=added)
    if added:
        config = {**config, "vocab_size": settings.vocab_size}
    if spec.causal:
        rcd = replace(rcd, provenance={"started_from": path.name, **rcd.provenance})
    rcd = replace(
        rcd, **changed_settings(settings, spec, overrides, own_type=str(config.get("model_type", "")).lower())
    )
    return Opened(path, spec, settings, backbone_config, config, rcd, tokenizer, weights, added)


def load(
    source: str | Path,
    *,
    family: str | None = None,
    device: str | torch.device | None = "auto",
    dtype: str | torch.dtype | None = "auto",
    revision: str | None = None,
    quantize: str | Quantisation | None = None,
    device_map: str | dict[str, Any] | torch.device | None = None,
    offload_folder: str | Path | None = None,
    **overrides: Any,
) -> Checkpoint:
    """Read a folder, a hub name or a GGUF file. `quantize`: int8 or int4 (`rcd.models.quantise`); `device_map`: where
    the parts go, in transformers' spelling (`rcd.models.placing`). `overrides`: mask_token_id, eos_token_ids,
    block_length, attention, shift; a None leaves the checkpoint's own value."""
    quantise = Quantisation.parse(quantize)
    if quantise is not None:
        check_installed()
    placed = Placing.parse(device_map, device, offload_folder, quantise)
    opened = open_checkpoint(source, family=family, revision=revision, **overrides)
    return made(opened, pick_device(placed.main), dtype, quantise, placed)


def made(
    opened: Opened, device: torch.device, dtype: str | torch.dtype | None, quantise: Quantisation | None = None,
    placed: Placing | None = None,
) -> Checkpoint:  # fmt: skip
    """Go on with what was opened: build the model and put its tensors in place."""
    model = empty(opened)
    if placed is not None:
        placed.check(opened.backbone_config["num_hidden_layers"])
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    check_experts(opened.spec, shapes, [name for name, _, _ in opened.weights.headers()], opened.path)
    kind = computed(opened, model, device, dtype)
    spread = placed is not None and placed.several
    if prequantised.method_of(opened.config, opened.path) is not None:
        if quantise is not None or spread:
            raise RCDError(f"{opened.path} comes quantised; leave out {'device_map' if spread else 'quantize'}.")
        model = prequantised.load(
            opened.path, model, opened.backbone_config, opened.config, opened.weights, device, kind
        )  # fmt: skip
        learnt.read(model, opened.rcd, opened.path)
        return Checkpoint(model, opened.config, opened.tokenizer, opened.rcd, folder=opened.path)
    check_room(model, opened.weights, opened.path, torch.device("cpu") if spread else device, kind, quantise)
    stored = fill(
        model, opened.weights, opened.path, torch.device("cpu") if spread else device, kind, quantise,
        grow=opened.mask_added,
    )  # fmt: skip
    folder = opened.path if opened.path.is_dir() else None
    if folder is not None:
        learnt.read(model, opened.rcd, folder)
    if placed is not None and spread:
        placed.spread(model)
    changed = opened.mask_added or folder is None
    return Checkpoint(model, opened.config, opened.tokenizer, opened.rcd, stored, folder, tokenizer_changed=changed)


def empty(opened: Opened) -> DiffusionLM:
    """The model without its tensors. The numbers that cost time or memory even so (layers, the table of RoPE) are first
    compared with the tensors' shapes, so that a damaged one costs nothing."""
    shapes, config = [shape for _, shape, _ in opened.weights.headers()], opened.backbone_config
    layers, largest = config["num_hidden_layers"], max((size for shape in shapes for size in shape), default=0)
    if layers > len(shapes):
        raise RCDError(f"{opened.path} is said to have {layers} layers, and holds {len(shapes)} tensors.")
    heads = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for what, size in (("a width of", config["hidden_size"]), ("heads of a width of", heads)):
        if size > largest:
            raise RCDError(
                f"{opened.path} is said to have {what} {size}, and none of its {len(shapes)} tensors is so large; "
                "get its files again."
            )
    return build(opened.spec, opened.settings, config)


def computed(opened: Opened, model: DiffusionLM, device: torch.device, dtype: str | torch.dtype | None) -> torch.dtype:
    """The dtype of activations; `auto` depends on how the embeddings are stored, and on the model's size."""
    name = opened.spec.from_stock(CODEBOOK)
    stored = next((dtype for each, _, dtype in opened.weights.headers() if each == name), torch.float32)
    return pick_dtype(dtype, stored, device, model.size)


def find_family(name: str | None, config: dict[str, Any], path: Path) -> FamilySpec:
    found = name or str(config.get("model_type", "")).lower()
    if found not in registry.names("family"):
        if name:
            raise unknown_name("family", name, registry.names("family"))
        raise RCDError(
            f"{path} has model_type {config.get('model_type')!r}, which is no known family; "
            f"name one with family (--family): {', '.join(registry.names('family'))}."
        )
    spec: FamilySpec = registry.get("family", found)
    return spec


def choose_mask(
    spec: FamilySpec, config: dict[str, Any], rcd: RCDFile, overrides: dict[str, Any], tokenizer: Any | None
) -> tuple[int | None, bool]:
    """(the tokenizer's mask id, whether the token had to be added). Only a causal checkpoint gets a token added."""
    known = any(v is not None for v in (overrides.get("mask_token_id"), rcd.mask_token_id, config.get("mask_token_id")))
    if known or tokenizer is None:
        return None, False
    vocabulary = tokenizer.get_vocab()
    for text in (getattr(tokenizer, "mask_token", None), *MASK_TEXTS):
        if text in vocabulary:
            return int(vocabulary[text]), False
    if not spec.causal:
        return None, False
    tokenizer.add_special_tokens({"mask_token": MASK_TEXT})
    return int(tokenizer.convert_tokens_to_ids(MASK_TEXT)), True


def _prepare(
    spec: FamilySpec,
    config: dict[str, Any],
    generation: dict[str, Any],
    rcd: RCDFile,
    overrides: dict[str, Any],
    tokenizer: Any | None,
    mask: int | None,
    grow: bool,
) -> tuple[ModelSettings, dict[str, Any]]:
    try:
        backbone_config = spec.backbone_config(config)
    except KeyError as error:
        raise RCDError(
            f"the configuration lacks the key {error}, which {spec.name} checkpoints have; add it, or name the family "
            "that it is of."
        ) from error
    if grow and mask is not None:
        backbone_config["vocab_size"] = max(backbone_config["vocab_size"], mask + 1)
    settings = resolve(
        spec,
        config,
        generation,
        rcd,
        overrides,
        vocab_size=backbone_config["vocab_size"],
        context_length=whole("the context length", backbone_config.get("max_position_embeddings", 2048), least=1),
        tokenizer=tokenizer,
        tokenizer_mask=mask,
    )
    return settings, backbone_config


def build(
    spec: FamilySpec, settings: ModelSettings, backbone_config: dict[str, Any], device: str | torch.device = "meta"
) -> DiffusionLM:
    """The empty model: the stock backbone with our attention, and a head."""
    import transformers

    try:
        config = getattr(transformers, f"{spec.backbone}Config")(**backbone_config)
        config._attn_implementation = ATTENTION
        config._experts_implementation = EXPERTS
        with torch.device(device):
            backbone = getattr(transformers, f"{spec.backbone}Model")(config)
            head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # RoPE's tables are computed, not stored: never leave them on the meta device
        backbone.rotary_emb = type(backbone.rotary_emb)(config=config)
        WideNorm.replace_all(backbone)
        Router.replace_all(backbone)
    except Exception as error:  # whatever the configuration's own checks raise
        reason = first_line(error)
        raise RCDError(
            f"config.json of this {spec.name} checkpoint has a value that does not fit ({reason})."
        ) from error
    return DiffusionLM(spec, settings, backbone, head).eval()


def changed_settings(
    settings: ModelSettings, spec: FamilySpec, overrides: dict[str, Any], own_type: str = ""
) -> dict[str, Any]:
    """What rcd.json must say so that the next load comes to the same settings without the overrides."""
    changed: dict[str, Any] = {key: getattr(settings, key) for key in overrides}
    if spec.causal:
        changed |= {key: getattr(settings, key) for key in ("mask_token_id", "block_length", "attention")}
    if spec.causal or own_type != spec.name:
        changed["family"] = spec.name
    if "eos_token_ids" in changed:
        changed["eos_token_ids"] = list(changed["eos_token_ids"])
    return changed
