"""The settings of a checkpoint: an override, else rcd.json, else the family's own files, else the family's default."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rcd.carry.base import make
from rcd.errors import RCDError, one_of, told, unknown_name, whole
from rcd.jsons import NotJSON, parsed
from rcd.models.family import ATTENTIONS, FamilySpec
from rcd.models.lm import ModelSettings

RCD_JSON = "rcd.json"
FORMAT = 1
OVERRIDABLE = ("mask_token_id", "eos_token_ids", "block_length", "attention", "shift")
LOADING = ("device", "device_map", "dtype", "family", "offload_folder", "quantize", "revision", "tokenizer")
"""What else `rcd.load` takes, for who misspells it."""


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
    max_new_tokens: int | None = None
    """The length of an answer where none is asked for."""
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
        kinds = {
            "family": str,
            "attention": str,
            "eos_token_ids": list,
            "carry": dict,
            "stage": str,
            "provenance": dict,
        }
        for key, value in content.items():
            one_of(f"key of {path}", key, [f.name for f in dataclasses.fields(cls)])
            if not isinstance(value, kinds.get(key, int)):
                raise RCDError(f"{path} has {key} = {value!r}, which is no {kinds.get(key, int).__name__}.")
        if content.get("format", FORMAT) != FORMAT:
            raise RCDError(f"{path} has format {content['format']}, and this version reads format {FORMAT}.")
        carry = dict(content.get("carry") or {"name": "none"})
        if "name" not in carry:
            raise RCDError(f'{path} has a carry without a name; write for example {{"name": "residual"}}.')
        make(carry.pop("name"), carry)
        return cls(**content)

    def write(self, folder: Path) -> None:
        content = {k: v for k, v in dataclasses.asdict(self).items() if v not in (None, {})}
        (folder / RCD_JSON).write_text(json.dumps(content, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = parsed(path.read_text(encoding="utf-8"))
    except (NotJSON, UnicodeDecodeError) as error:
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
    tokenizer: Any | None = None,
    tokenizer_mask: int | None = None,
) -> ModelSettings:
    def first(*values: Any) -> Any:
        return next((value for value in values if value is not None), None)

    def token(what: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
            raise RCDError(
                f"the {what} token id {value!r} is outside the vocabulary of {vocab_size} tokens; {way_out}."
            )
        return value

    for key in overrides:
        if key not in OVERRIDABLE:
            raise unknown_name("model setting", key, (*OVERRIDABLE, *LOADING))
    attention = first(overrides.get("attention"), rcd.attention, spec.attention)
    one_of("attention", attention, ATTENTIONS)

    way_out = "name the right one with mask_token_id (--mask-token-id)"
    mask = first(
        overrides.get("mask_token_id"),
        rcd.mask_token_id,
        config.get("mask_token_id"),
        tokenizer_mask,
        spec.mask_token_id,
    )
    if mask is None:
        raise RCDError(f"no mask token is known for this checkpoint; {way_out}.")
    mask = token("mask", mask)

    way_out = "name the right ones with eos_token_ids (--eos-token-id)"
    ends = first(overrides.get("eos_token_ids"), rcd.eos_token_ids, _own_eos(spec, config, generation, tokenizer))
    if not isinstance(ends, Collection) or isinstance(ends, (str, bytes, Mapping)):
        raise RCDError(f"eos_token_ids is a list of token ids, such as [{vocab_size - 1}], not {told(ends)}.")
    eos = tuple(token("end", end) for end in ends)
    if mask in eos:
        raise RCDError(f"the token {mask} is named both as the mask and as an end token; {way_out}.")

    block = first(
        overrides.get("block_length"),
        rcd.block_length,
        config.get("block_size"),
        config.get("block_length"),
        config.get("bd_size"),
        spec.block_length,
    )
    shift = whole("shift", first(overrides.get("shift"), rcd.shift, spec.shift), least=0, most=1)
    return ModelSettings(
        family=spec.name,
        attention=attention,
        vocab_size=vocab_size,
        mask_token_id=mask,
        eos_token_ids=eos,
        block_length=None if block is None else whole("block_length", block, least=1),
        context_length=context_length,
        shift=shift,
        tempered_confidence=spec.tempered_confidence,
        max_new_tokens=None if rcd.max_new_tokens is None else whole("max_new_tokens", rcd.max_new_tokens, least=1),
    )


def _own_eos(spec: FamilySpec, config: dict[str, Any], generation: dict[str, Any], tokenizer: Any | None) -> list[Any]:
    """generation_config.json's list, else config.json's, else the tokenizer's; the family's further end tokens (LLaDA's
    EOT, which no file names) join when its first one agrees."""
    for own in (generation.get("eos_token_id"), config.get("eos_token_id"), getattr(tokenizer, "eos_token_id", None)):
        listed = own if isinstance(own, list) else [own]
        if own is None or not listed:
            continue
        if spec.eos_token_ids and listed[0] == spec.eos_token_ids[0]:
            listed = [*listed, *(token for token in spec.eos_token_ids if token not in listed)]
        return listed
    return list(spec.eos_token_ids)
