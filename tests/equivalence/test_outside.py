"""Parts that another package defines decode like those of this one: carries, and a commit rule that revises."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from rcd.carry.base import Carry
from rcd.carry.residual import Residual
from rcd.decode.events import Event, Finished, Step
from tests.equivalence import fuzz
from tests.equivalence.cases import Case, case_of, model
from tests.outside import Gated, Memory
from tests.revising import registered


@pytest.fixture
def rule() -> Iterator[str]:
    with registered() as name:
        yield name


def changed(seed: int, **settings: Any) -> Case:
    """A case of the fuzz with other settings; the engine's part stays the same in all of its requests."""
    case = case_of(seed)
    carry = settings.get("carry", case.configs[0].travelling)
    scalable = [1.0 if not carry.scalable else config.residual_scale for config in case.configs]
    case.configs = [
        replace(config, **{"residual_scale": scale, **settings})
        for config, scale in zip(case.configs, scalable, strict=True)
    ]
    if not carry.needs_reference:
        case.reference = None
    return case


@pytest.mark.parametrize("carry", [Memory(), Gated()], ids=["memory", "gated"])
def test_a_carry_from_outside_decodes_as_the_oracle_says(carry: Carry) -> None:
    felt = 0
    for seed in range(16):
        case = changed(seed, carry=carry)
        case.pipeline = model(case.family, seed % 6, True)
        torch.manual_seed(seed)
        case.pipeline.model.hold(None)
        case.pipeline.model.hold(carry)
        try:
            with fuzz.pieces_of(case):
                told, want = fuzz.decoded(case)[0], fuzz.wanted(case)
                assert fuzz.difference(case, told, want) is None, seed
                case.configs = [replace(config, residual_scale=0.0) for config in case.configs]
                without = fuzz.wanted(case)
            felt += any(_ids(without[row]) != _ids(want[row]) for row in want)
        finally:
            model.cache_clear()
    assert felt >= 4


def _ids(events: list[Event]) -> list[int]:
    assert isinstance(events[-1], Finished)
    return events[-1].ids


def test_a_rule_that_revises_decodes_as_the_oracle_says(rule: str) -> None:
    """And what is told as final stays as it is."""
    revised = 0
    for seed in range(16):
        case = changed(seed, commit=rule, threshold=0.9, block_length=8)
        case.watch = True
        with fuzz.pieces_of(case):
            told, want = fuzz.decoded(case)[0], fuzz.wanted(case)
        assert fuzz.difference(case, told, want) is None, seed
        for row, events in told.items():
            revised += _replayed(events, _ids(events), case.pipeline.settings.mask_token_id)
            assert [step.final for step in _steps(events)] == [step.final for step in _steps(want[row])]
    assert revised > 20


def _steps(events: list[Event]) -> list[Step]:
    return [event for event in events if isinstance(event, Step)]


def _replayed(events: list[Event], ids: list[int], mask: int) -> int:
    """How many tokens were revised."""
    text: dict[int, int] = {}
    told, revised = 0, 0
    for step in _steps(events):
        assert step.final >= told, "what was final stays so"
        assert not (step.revised & ~step.committed).any()
        for j in step.committed.nonzero().flatten().tolist():
            place, token = step.offset + j, int(step.draft[j])
            assert place >= told, "a token was told as final"
            assert bool(step.revised[j]) == (place in text) and text.get(place) != token != mask
            text[place], revised = token, revised + bool(step.revised[j])
        told = step.final
        assert ids[:told] == [text.get(k, ids[k]) for k in range(min(told, len(ids)))]
    return revised


def test_no_other_rule_revises() -> None:
    case = changed(3, carry=Residual())
    case.watch = True
    with fuzz.pieces_of(case):
        told, _ = fuzz.decoded(case)
    assert not any(step.revised.any() for events in told.values() for step in _steps(events))
