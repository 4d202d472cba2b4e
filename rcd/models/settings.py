"""The settings of a checkpoint: an override, else rcd.json, else the family's own files, else the family's default."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from rcd.errors import RCDError, unknown_name
from rcd.models.family import ATTENTIONS, FamilySpec
from rcd.models.lm import ModelSettings

RCD_JSON = "rcd.json"
FORMAT = 1
OVERRIDABLE = ("mask_token_id", "eos_token_ids", "block_length", "attention", "shift")


@dataclasses.dataclass(frozen=True)
class RCDFile:
    """rcd.json, the one file that this project adds to a Hugging Face folder. Every field may be absent."""

    format: int = FORMAT
    family: str | None = None
    attention: str | None = None
    mask_token_id: int | None = None
    eos_token_ids: list[int] | None = None
    block_length: int | None = None
    shift: int | None = None
    carry: dict[str, Any] | None = None
    """{"name": "residual", "t_res": ..., ...}: the carry that the checkpoint was trained for."""
    stage: str | None = None
    """`reference` or `target` (Algorithm 1), or none for a checkpoint that was not trained here."""
    provenance: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> RCDFile:
        path = folder / RCD_JSON
        if not path.is_file():
            return cls()
        content = read_json(path)
        fields = [f.name for f in dataclasses.fields(cls)]
        for key in content:
            if key not in fields:
                raise unknown_name(f"key of {path}", key, fields)
        if content.get("format", FORMAT) != FORMAT:
            raise RCDError(f"{path} has format {content['format']}, and this version reads format {FORMAT}.")
        return cls(**content)

    def write(self, folder: Path) -> None:
        content = {k: v for k, v in dataclasses.asdict(self).items() if v not in (None, {})}
        (folder / RCD_JSON).write_text(json.dumps(content, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RCDError(f"{path} is not valid JSON ({error}); download or write it again.") from error
    if not isinstance(content, dict):
        raise RCDError(f"{path} should hold one JSON object, not a {type(content).__name__}.")
    return content


def resolve(
    spec: FamilySpec,
    config: dict[str, Any],
    generation: dict[str, Any],
    rcd: RCDFile,
    overrides: dict[str, Any],
    *,
    vocab_size: int,
    context_length: int,
    tokenizer_mask: int | None = None,
) -> ModelSettings:
    def first(*values: Any) -> Any:
        return next((value for value in values if value is not None), None)

    for key in overrides:
        if key not in OVERRIDABLE:
            raise unknown_name("model setting", key, OVERRIDABLE)
    attention = first(overrides.get("attention"), rcd.attention, spec.attention)
    if attention not in ATTENTIONS:
        raise unknown_name("attention", attention, ATTENTIONS)
    mask = first(
        overrides.get("mask_token_id"),
        rcd.mask_token_id,
        config.get("mask_token_id"),
        tokenizer_mask,
        spec.mask_token_id,
    )
    if mask is None:
        raise RCDError("no mask token is known for this checkpoint; name its id with mask_token_id (--mask-token-id).")
    if not 0 <= mask < vocab_size:
        raise RCDError(
            f"the mask token id {mask} is outside the vocabulary of {vocab_size} tokens; "
            "name the right one with mask_token_id (--mask-token-id)."
        )
    eos = tuple(first(overrides.get("eos_token_ids"), rcd.eos_token_ids, _own_eos(spec, config, generation)))
    for token in eos:
        if not 0 <= token < vocab_size:
            raise RCDError(f"the end token id {token} is outside the vocabulary of {vocab_size} tokens.")
    block = first(
        overrides.get("block_length"),
        rcd.block_length,
        config.get("block_size"),
        config.get("block_length"),
        spec.block_length,
    )
    if block is not None and (not isinstance(block, int) or block < 1):
        raise RCDError(f"the block length must be 1 or more, not {block!r}.")
    return ModelSettings(
        family=spec.name,
        attention=attention,
        vocab_size=vocab_size,
        mask_token_id=mask,
        eos_token_ids=eos,
        block_length=block,
        context_length=context_length,
        shift=first(overrides.get("shift"), rcd.shift, spec.shift),
        tempered_confidence=spec.tempered_confidence,
    )


def _own_eos(spec: FamilySpec, config: dict[str, Any], generation: dict[str, Any]) -> list[int]:
    """generation_config.json's list, else config.json's; the family's further end tokens (LLaDA's EOT, which no file
    names) join when its first one agrees."""
    own = generation.get("eos_token_id")
    if own is None:
        own = config.get("eos_token_id")
    if own is None:
        return list(spec.eos_token_ids)
    listed = [int(token) for token in (own if isinstance(own, list) else [own])]
    if spec.eos_token_ids and listed[0] == spec.eos_token_ids[0]:
        listed += [token for token in spec.eos_token_ids if token not in listed]
    return listed
