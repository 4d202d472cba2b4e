"""A quantised model is decoded like any other: the engine gives the oracle's tokens, alone or in company."""

from __future__ import annotations

from functools import cache

import pytest

import rcd
from rcd.models.filling import quantise_all
from rcd.models.quantise import Quantisation
from tests.conftest import exact
from tests.equivalence import cases, fuzz
from tests.equivalence.setups import CARRIES, PROMPTS, WINDOWS, config, same


def low(family: str, method: str, seed: int = 3) -> rcd.Pipeline:
    """In fp64, so that equality is a fair claim."""
    pipeline = exact(family, seed)
    quantise_all(pipeline.model, Quantisation(method))
    return pipeline


@pytest.mark.parametrize("method", ["int8", "int4"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("carry", ["seqd", "rcd"])
def test_the_engine_equals_the_oracle(method: str, window: str, carry: str) -> None:
    family, settings = WINDOWS[window]
    chosen, pipeline = {"carry": CARRIES[carry], **settings}, low(family, method)
    got = pipeline.generate(PROMPTS, config(**chosen))
    assert got.sequences == pipeline.generate(PROMPTS, config(**chosen, oracle=True)).sequences
    assert got.sequences != exact(family).generate(PROMPTS, config(**chosen)).sequences


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_a_row_alone_gives_the_bits_of_a_batch(method: str) -> None:
    pipeline, chosen = low("sdar", method), config(carry="residual", batch_invariant=True)
    pipeline.model.float()
    together = pipeline.generate(PROMPTS, chosen)
    for row, prompt in enumerate(PROMPTS):
        assert pipeline.generate(prompt, chosen).sequences == [together.sequences[row]]


def test_a_quantised_reference_starts_a_carry() -> None:
    target, reference = low("sdar", "int8"), low("sdar", "int4", 8)
    chosen = config(carry=rcd.Residual(source="reference"))
    got = target.generate(PROMPTS, chosen, reference=reference)
    plain = target.generate(PROMPTS, config(carry=rcd.Residual(source="reference"), oracle=True), reference=reference)
    same(got, plain)


def test_a_kept_prefix_changes_nothing() -> None:
    pipeline, other = low("sdar", "int4"), low("sdar", "int4")
    pipeline.loop = type(pipeline.loop)(prefix_bytes=2**20)
    chosen = config(carry="residual")
    for _ in range(2):
        got = pipeline.generate(PROMPTS, chosen)
    assert got.sequences == other.generate(PROMPTS, chosen).sequences
    assert pipeline.loop.prefixes is not None and pipeline.loop.prefixes.found


def test_the_fuzz_holds_for_quantised_models(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = cases.model.__wrapped__

    @cache
    def quantised(family: str, seed: int, learnt: bool) -> rcd.Pipeline:
        made: rcd.Pipeline = plain(family, seed, learnt)
        quantise_all(made.model, Quantisation(("int8", "int4")[seed % 2]))
        return made

    monkeypatch.setattr(cases, "model", quantised)
    assert [wrong for wrong in (fuzz.check(seed)[0] for seed in range(10)) if wrong] == []
