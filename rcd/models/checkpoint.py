"""Reading a checkpoint into a DiffusionLM: an ordinary Hugging Face folder in the family's own parameter names, with or
without rcd.json, or a GGUF file. `rcd.models.writing` writes one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rcd import registry
from rcd.diffusion.attention import ATTENTION
from rcd.errors import RCDError, first_line, unknown_name, whole
from rcd.models import learnt
from rcd.models import source as src
from rcd.models.dtypes import pick_dtype as pick_dtype
from rcd.models.dtypes import wide
from rcd.models.experts import EXPERTS, Router
from rcd.models.family import FamilySpec
from rcd.models.lm import DiffusionLM, ModelSettings, WideNorm
from rcd.models.settings import RCDFile, resolve
from rcd.models.tensors import count, layout_of, put, shape_of

MASK_TEXT = "<|MASK|>"
MASK_TEXTS = (MASK_TEXT, "<MASK>", "[MASK]", "<mask>", "<|mdm_mask|>", "<|mask|>", "|<MASK>|")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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
    tensors: Iterable[tuple[str, Tensor]]
    mask_added: bool


def open_checkpoint(
    source: str | Path, *, family: str | None = None, revision: str | None = None, **overrides: Any
) -> Opened:
    """Read everything but the tensors; `load` goes on from here, `rcd info` stops here."""
    overrides = {key: value for key, value in overrides.items() if value is not None}
    path = src.locate(source, revision)
    generation: dict[str, Any] = {}
    if path.is_file():
        if path.suffix != ".gguf":
            raise RCDError(f"{path} is a file; give the checkpoint's folder, or a .gguf file.")
        config, state, tokenizer = src.read_gguf(path)
        rcd = RCDFile()
        named: Iterable[tuple[str, Tensor]] = state.items()
    else:
        if not (path / "config.json").is_file():
            raise RCDError(f"{path} is no checkpoint: it has no config.json.")
        config, generation = src.read_optional(path, "config.json"), src.read_optional(path, "generation_config.json")
        rcd, tokenizer = RCDFile.read(path), src.tokenizer(path)
        named = src.tensors(path)
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
    return Opened(path, spec, settings, backbone_config, config, rcd, tokenizer, named, added)


def load(
    source: str | Path,
    *,
    family: str | None = None,
    device: str | torch.device | None = "auto",
    dtype: str | torch.dtype | None = "auto",
    revision: str | None = None,
    **overrides: Any,
) -> Checkpoint:
    """Read a folder, a hub name or a GGUF file. `overrides`: mask_token_id, eos_token_ids, block_length, attention,
    shift; a None leaves the checkpoint's own value."""
    target = pick_device(device)
    opened = open_checkpoint(source, family=family, revision=revision, **overrides)
    model = build(opened.spec, opened.settings, opened.backbone_config)
    stored = _fill(model, opened.tensors, target, dtype, opened.path, grow=opened.mask_added)
    folder = opened.path if opened.path.is_dir() else None
    if folder is not None:
        learnt.read(model, opened.rcd, folder)
    changed = opened.mask_added or folder is None
    return Checkpoint(model, opened.config, opened.tokenizer, opened.rcd, stored, folder, tokenizer_changed=changed)


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
        raise RCDError(f"config.json of this {spec.name} checkpoint lacks the key {error}.") from error
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


def _fill(
    model: DiffusionLM,
    named: Iterable[tuple[str, Tensor]],
    device: torch.device,
    dtype: str | torch.dtype | None,
    path: Path,
    grow: bool,
) -> dict[str, torch.dtype]:
    """Put the tensors in place, each checked: known, of the right shape, finite, and none missing."""
    spec = model.spec
    wanted = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    layout, parameters = layout_of(spec, wanted), count(wanted)
    state: dict[str, Tensor] = {}
    stored: dict[str, torch.dtype] = {}
    for name, tensor in named:
        if name.endswith(spec.unused):
            continue
        if name not in layout:
            raise RCDError(f"{path} holds the tensor {name}, which the family {spec.name} does not have.")
        expected = shape_of(layout[name])
        if grow and layout[name][0].name in ("backbone.embed_tokens.weight", "head.weight"):
            tensor = _with_rows(tensor, expected[0])
        if tuple(tensor.shape) != expected:
            raise RCDError(
                f"the tensor {name} of {path} has shape {list(tensor.shape)}, "
                f"but its config.json means {list(expected)}."
            )
        if tensor.dtype not in FLOATS:
            raise RCDError(
                f"the tensor {name} of {path} is {tensor.dtype}; quantised weights are not read, only floats."
            )
        check_finite(tensor, name, path)
        stored[name] = tensor.dtype
        chosen = pick_dtype(dtype, tensor.dtype, device, parameters)
        if layout[name][0].name.endswith(spec.wide):
            chosen = wide(chosen)
        put(state, wanted, layout[name], tensor.to(device=device, dtype=chosen))
    tied = bool(getattr(model.backbone.config, "tie_word_embeddings", False))
    embeddings = state.get("backbone.embed_tokens.weight")
    if (
        tied
        and embeddings is not None
        and ("head.weight" not in state or torch.equal(state["head.weight"], embeddings))
    ):
        state["head.weight"] = embeddings
    else:
        tied = False
    held = {*stored, spec.from_stock("head.weight")} if tied else stored
    missing = [name for name in layout if name not in held]
    if missing or embeddings is None:
        raise RCDError(f"{path} lacks {len(missing)} tensor(s) of the family {spec.name}, first {missing[0]}.")
    dtypes = {name: wide(embeddings.dtype) if name.endswith(spec.wide) else embeddings.dtype for name in wanted}
    model.load_state_dict({name: state.pop(name).to(kind) for name, kind in dtypes.items()}, assign=True)
    if tied:
        model.head.weight = model.backbone.embed_tokens.weight  # type: ignore[assignment, union-attr]
    model.backbone.rotary_emb.to(device)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return stored


def _with_rows(tensor: Tensor, rows: int) -> Tensor:
    """New rows (a token that was added) begin as the mean of the others."""
    missing = rows - tensor.shape[0]
    if missing <= 0:
        return tensor
    mean = tensor.float().mean(0, keepdim=True).to(tensor.dtype)
    return torch.cat((tensor, mean.expand(missing, -1)))


def check_finite(tensor: Tensor, name: str, path: Path) -> None:
    """A sum is finite exactly when its terms are (or overflows, which the second look tells apart)."""
    if not bool(torch.isfinite(tensor.sum(dtype=torch.float32))) and not bool(torch.isfinite(tensor).all()):
        raise RCDError(f"the tensor {name} of {path} holds NaN or inf; the checkpoint is damaged.")


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
