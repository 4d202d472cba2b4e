"""Classifier-free guidance: LLaDA's formula in every window, with every carry, by a second pass that sees no prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import rcd
from rcd.carry.residual import Residual
from rcd.decode.config import DecodeConfig
from rcd.decode.events import Counts
from rcd.decode.probe import Look
from rcd.decode.slots import cache_bytes
from rcd.errors import RCDError
from rcd.models.lm import View
from tests.conftest import exact
from tests.equivalence.setups import CARRIES, PROMPTS, WINDOWS, asked, config, ends, engine, looped, same
from tests.equivalence.test_prefixes import KINDS, LONG, caching

SCALES = (0.5, 1.0, 2.5, 1.5)
"""Of the prompts."""


@pytest.fixture(scope="module")
def loops() -> dict[str, rcd.Pipeline]:
    return {family: looped(family) for family, _ in WINDOWS.values()}


def mixed(**settings: Any) -> list[DecodeConfig]:
    """A scale of its own for every prompt."""
    return [config(guidance=scale, **settings) for scale in SCALES]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("carry", CARRIES)
def test_guided_rows_share_a_batch_and_decode_as_the_oracle_does(
    loops: dict[str, rcd.Pipeline], window: str, carry: str
) -> None:
    family, settings = WINDOWS[window]
    settings = {**settings, "carry": CARRIES[carry]}
    want = loops[family].generate(PROMPTS, mixed(**settings, oracle=True))
    same(loops[family].generate(PROMPTS, mixed(**settings)), want)


@pytest.mark.parametrize("carry", [Residual(start="reference"), Residual(source="reference", t_res=0.9)])
@pytest.mark.parametrize("window", ["blockwise", "d2f", "bidirectional", "dual"])
def test_guidance_is_the_targets_and_a_reference_reads_the_prompt(window: str, carry: Residual) -> None:
    family, settings = WINDOWS[window]
    target, reference = exact(family), exact(family, seed=8)
    given: Any = dict(**settings, carry=carry)
    found = target.generate(PROMPTS, mixed(**given), reference=reference)
    same(found, target.generate(PROMPTS, mixed(**given, oracle=True), reference=reference))
    for one in found.results:
        assert one.counts.guidance == one.forwards - one.counts.reference - one.counts.guidance > 0


@pytest.mark.parametrize("window", WINDOWS)
def test_guidance_0_is_none(models: dict[str, rcd.Pipeline], window: str) -> None:
    """Also where the second pass is made, with a scale that is next to nothing."""
    family, settings = WINDOWS[window]
    settings = {**settings, "carry": "residual"}
    want = models[family].generate(PROMPTS, config(**settings))
    same(models[family].generate(PROMPTS, config(**settings, guidance=0.0)), want)
    faint = models[family].generate(PROMPTS, config(**settings, guidance=1e-13))
    assert faint.sequences == want.sequences
    assert [one.counts for one in faint.results] == [one.counts.guided() for one in want.results]
    strong = models[family].generate(PROMPTS, config(**settings, guidance=2.0))
    assert strong.sequences != want.sequences


def test_without_guidance_no_second_cache_is_made() -> None:
    pipeline = exact("sdar")
    plain, guided = engine(pipeline, config()), engine(pipeline, config(guidance=1.0))
    assert (len(plain.models), len(guided.models)) == (1, 2)
    assert guided.target.codebook is guided.models[1].codebook


def test_rows_of_any_scale_are_one_engines_and_those_of_none_are_not(models: dict[str, rcd.Pipeline]) -> None:
    settings = models["llada"].settings
    engines = [models["llada"].resolve(config(guidance=scale)).engine(settings) for scale in (0.5, 2.0, 0.0)]
    assert engines[0] == engines[1] != engines[2]


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_a_step_reads_lladas_formula(models: dict[str, rcd.Pipeline], family: str) -> None:
    """un + (s + 1) (cond - un), of two whole passes made by hand; Dream's are shifted by one."""
    pipeline, looks = models[family], list[Look]()
    prompt, new, scale = PROMPTS[0], 6, 1.7
    pipeline.generate(prompt, DecodeConfig(max_new_tokens=new, guidance=scale), probe=looks.append)
    model, mask = pipeline.model, pipeline.settings.mask_token_id
    both = torch.tensor([[*prompt, *[mask] * new], [mask] * (len(prompt) + new)])
    with torch.inference_mode():
        cond, un = model(both, View(torch.arange(both.shape[1]).expand_as(both))).logits
    torch.testing.assert_close(looks[0].logits, (un + (scale + 1) * (cond - un))[len(prompt) :])
    torch.testing.assert_close(model.head(looks[0].hidden), looks[0].logits)


def test_every_pass_of_the_target_has_a_second_one() -> None:
    """16 tokens behind one prompt block of 8, one a step; a start pass for each of the two blocks."""
    pipeline = exact("sdar")
    chosen = DecodeConfig(
        max_new_tokens=16, block_length=8, threshold=1.0, carry=Residual(start="self"), eos_suppression="logits",
        guidance=1.0,
    )  # fmt: skip
    (found,) = pipeline.generate(list(range(8)), chosen).results
    assert found.counts == Counts(denoising=16, prefill=1, start=2, store=1, guidance=16 + 1 + 2 + 1)
    assert (found.forwards, found.denoising_steps, found.tokens_per_forward) == (40, 16, 16 / 40)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "seqd"])
def test_the_turns_of_a_guided_chat_are_answered_as_if_nothing_were_kept(kind: str) -> None:
    """An answer that becomes a part of the next prompt is masked there, and was not when it was written."""
    family, settings = KINDS[kind]
    plain, kept, chosen = exact(family), caching(family), config(**settings, guidance=1.5)
    turn = LONG[:19]
    for number in range(3):
        want = plain.generate(turn, chosen)
        same(kept.generate(turn, chosen), want)
        same(kept.generate(turn, replace(chosen, guidance=0.0)), plain.generate(turn, replace(chosen, guidance=0.0)))
        turn = [*turn, *want.sequences[0], *LONG[number : number + 5]]
    if kind != "behind":
        assert kept.submit(LONG, chosen).result().reused == 16  # of the first prompt's two blocks
        assert kept.submit(LONG, chosen).result().reused == 72


@pytest.mark.parametrize("passes", ["stock", "fused"])
@pytest.mark.parametrize("window", ["blockwise", "d2f behind", "bidirectional", "dream dual"])
def test_guided_rows_in_company_are_what_they_are_alone(
    models: dict[str, rcd.Pipeline], window: str, passes: str
) -> None:
    """To the last bit where that is asked for, also in rows that are used again."""
    family, settings = WINDOWS[window]
    pipeline, chosen = models[family], config(**settings, guidance=1.2, passes=passes, batch_invariant=True)
    alone = [pipeline.generate([prompt], chosen).sequences[0] for prompt in PROMPTS]
    served = engine(pipeline, chosen, rows=2, capacity=96)
    answers, failures = ends(served, asked(pipeline, chosen))
    assert not failures and [answers[row] for row in range(len(PROMPTS))] == alone


def test_a_guided_request_needs_the_memory_of_two_caches() -> None:
    pipeline = exact("sdar")
    pipeline.loop.memory = int(2.5 * cache_bytes(pipeline.model, 1, 64))
    assert pipeline.submit(PROMPTS[0], config(max_new_tokens=8)).result().ids
    with pytest.raises(RCDError, match="MiB of cache"):
        pipeline.submit(PROMPTS[0], config(max_new_tokens=60, guidance=1.0))


@pytest.mark.parametrize("value", [-0.5, 101, float("inf"), float("nan"), "much", None, True])
def test_a_scale_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(RCDError, match=r"guidance must be in \[0, 100\]"):
        DecodeConfig(guidance=value)
