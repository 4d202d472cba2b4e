"""What an evaluation's results depend on, as its run.json keeps it, and whether two of them may be put side by side.

Beside what was asked (`decode`) stands how it was computed: `dtype`, and how `delta` of Eq. 1 was (`exact` or `kept`;
None where the carry reads none that could be approximated). Folders of versions that did not say so are read as what
they were: the dtype is the one under `made_on`, and delta what the settings of then meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rcd.carry.base import Carry, describe, make
from rcd.decode.config import DecodeConfig
from rcd.errors import RCDError
from rcd.models.source import fingerprint

if TYPE_CHECKING:
    from rcd.api import Pipeline

MADE_ON = "made_on"
CHANGES_NOTHING = ("oracle", "passes", "batch_invariant", "logprobs")
"""Settings of decoding that say how an answer is computed, and not which it is."""
FORMER = ("engine",)
"""Settings of former versions that did the same."""
OF_KEPT = ("delta_tokens", "delta_rank")
"""Settings that matter only where delta is `kept`."""
STORED = tuple(f.name for f in fields(DecodeConfig) if f.name not in ("carry", *CHANGES_NOTHING))


def decode_settings(config: DecodeConfig) -> dict[str, Any]:
    """What an answer depends on, but for the carry, as JSON has it."""
    found = {name: getattr(config, name) for name in STORED}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def dtype_name(pipeline: Pipeline) -> str:
    dtype = str(pipeline.model.codebook.dtype).removeprefix("torch.")
    return f"{pipeline.model.quantised} in {dtype}" if pipeline.model.quantised else dtype


def delta_of(carry: Carry, delta: str | None, vocabulary: int) -> str | None:
    """How delta is computed with this setting of it."""
    if not carry.expects:
        return None
    return "kept" if DecodeConfig(delta=delta).keeps(vocabulary) else "exact"


def conditions(
    model: str, config: DecodeConfig, reference: str | None = None, *, vocabulary: int, dtype: str | None
) -> dict[str, Any]:
    """What the answers of a model depend on, but for what it is asked; `config` is resolved. `dtype`: None where it is
    not known before the model is loaded."""
    carry = config.travelling
    return {
        "model": model, "model_fingerprint": fingerprint(model), "carry": describe(carry), "dtype": dtype,
        "delta": delta_of(carry, config.delta, vocabulary), "decode": decode_settings(config), "reference": reference,
        "reference_fingerprint": None if reference is None else fingerprint(reference),
    }  # fmt: skip


def differing(held: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """The settings that are not the same. Those of another carry are others anyway: its name says it all."""
    keys = [key for key in {**held, **wanted} if held.get(key) != wanted.get(key)]
    if "carry.name" not in keys:
        return keys
    return [key for key in keys if key == "carry.name" or not (key.startswith("carry.") or key == "delta")]


def comparable(run: dict[str, Any], beside: dict[str, Any]) -> dict[str, Any]:
    """A run's settings in one layer, those that a version before did not have at what they meant then; `beside` is the
    run that it is compared with, whose default of delta tells what a delta by default was."""
    out: dict[str, Any] = {}
    for key, value in run.items():
        if key == "decode":
            out |= _decoded(value)
        elif isinstance(value, dict):
            out |= {f"{key}.{inner}": each for inner, each in value.items()}
        elif key != MADE_ON:
            out[key] = value
    if "decode" in run:
        out |= {"dtype": dtype_of(run), "delta": _delta(run, beside)}
        if out["delta"] != "kept":
            out = {key: value for key, value in out.items() if key not in OF_KEPT}
    return out


def _decoded(decode: dict[str, Any]) -> dict[str, Any]:
    """Settings that a version before did not have are at their defaults."""
    found = {**decode_settings(DecodeConfig()), **decode}
    return {key: value for key, value in found.items() if key not in (*CHANGES_NOTHING, *FORMER, "delta")}


def dtype_of(run: dict[str, Any]) -> str | None:
    """None: nothing was answered yet, or it is not known."""
    if run.get("dtype") is not None:
        return str(run["dtype"])
    found = {str(place.get("dtype")) for place in run.get(MADE_ON, [])}
    return " and ".join(sorted(found)) or None


def _delta(run: dict[str, Any], beside: dict[str, Any]) -> str | None:
    """Runs of a version before say what was asked alone: a default is what the other's default is."""
    if "delta" in run:
        return run["delta"]
    settings = dict(run["carry"])
    if not make(settings.pop("name"), settings).expects:
        return None
    asked: str | None = run["decode"].get("delta")
    if asked is None and beside["decode"].get("delta") is None and "delta" in beside:
        return beside["delta"]
    return asked or "computed by default"


def check_alike(runs: Sequence[dict[str, Any]], names: Sequence[object]) -> None:
    """Refuse to compare what was computed in two ways: their difference would be read as the method's."""
    (a, b), (one, other) = runs, names
    for run, name in zip(runs, names, strict=True):
        dtype = dtype_of(run)
        if dtype is None or " and " in dtype:
            told = "does not say in which dtype it was answered" if dtype is None else f"was answered in {dtype}"
            raise RCDError(f"{name} {told}, so it cannot be compared; evaluate it again in another folder.")
    if dtype_of(a) != dtype_of(b):
        raise RCDError(
            f"{one} was answered in {dtype_of(a)} and {other} in {dtype_of(b)}; evaluate both with the same --dtype."
        )
    deltas = _delta(a, b), _delta(b, a)
    if None not in deltas and deltas[0] != deltas[1]:
        raise RCDError(
            f"delta is {deltas[0]} in {one} and {deltas[1]} in {other}; evaluate both with the same --set delta=..."
        )
