"""A part of the fuzz, and faults that it must catch: `python -m tests.equivalence.fuzz` and `.faults` run all."""

from __future__ import annotations

import pytest

from tests.equivalence import fuzz
from tests.equivalence.faults import FAULTS, caught

CASES = 60


def test_the_engine_tells_what_the_oracle_tells() -> None:
    """And the cases are worth something: half are long with a residual that is felt, half use a row again."""
    found = [fuzz.check(seed) for seed in range(CASES)]
    assert [wrong for wrong, _ in found if wrong] == []
    notes = [note for _, note in found]
    print(fuzz.summary(notes, 0))
    assert sum(note["deep"] for note in notes) >= CASES / 2
    assert sum(note["reused"] for note in notes) >= CASES / 2
    assert sum(note["long"] for note in notes) <= sum(note["requests"] for note in notes) / 20
    for kind in ("lagged", "stopped", "pieces"):
        assert sum(note[kind] for note in notes) >= CASES / 20


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name: str) -> None:
    """By one of the first 200 cases, which passes without the fault."""
    fault, seed = FAULTS[name]
    assert seed < 200
    assert caught(fault, seed)
    assert seed < CASES or fuzz.check(seed)[0] is None
