"""A carry from what a user wrote: on a command line, as lm-eval's model argument, or in Python."""

from __future__ import annotations

import re
from typing import Any

from rcd import registry
from rcd.carry.base import Carry, is_carry, make
from rcd.errors import RCDError
from rcd.settings import entries, parse_pairs

TRAINED = "trained"


def parse_carry(spec: str | dict[str, Any] | Carry | None, trained: dict[str, Any] | None) -> Carry | None:
    """`trained` (what rcd.json says), NAME or NAME,setting=value,... (colons will do where commas part other things);
    a dict with a `name`; or a carry. None stays None. Over a checkpoint that was trained with the carry of that name
    only what is named changes."""
    if spec is None or is_carry(spec):
        return spec  # type: ignore[return-value]
    own = dict(trained or {"name": "none"})
    base = own.pop("name")
    if isinstance(spec, str):
        written, *pairs = (part.strip() for part in re.split("[,:]", spec))
        name = base if written == TRAINED else written
        chosen = _settings(name, pairs)
    elif isinstance(spec, dict):
        chosen = dict(spec)
        written = chosen.pop("name", TRAINED)
        name = base if written == TRAINED else written
    else:
        raise RCDError(f"a carry is a name, a dict with a name, or a carry, not {type(spec).__name__}.")
    return make(name, {**(own if name == base else {}), **chosen})


def _settings(name: str, pairs: list[str]) -> dict[str, Any]:
    """key=value, ... of the carry of that name."""
    kind = registry.get("carry", name)
    if pairs and not entries(kind):
        raise RCDError(f"carry {name!r} has no settings, so {pairs[0].partition('=')[0]!r} cannot be set.")
    return parse_pairs(kind, pairs, owner=f"carry {name!r}")
