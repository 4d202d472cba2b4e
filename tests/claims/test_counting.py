"""Counting: every figure states its denominator, and the numbers are exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import rcd
from rcd.carry.residual import Residual
from rcd.decode.config import DecodeConfig
from rcd.decode.events import Counts, Step
from rcd.decode.probe import Look
from rcd.models.toy import toy


@pytest.fixture(scope="module")
def sdar() -> rcd.Pipeline:
    """Never ends its text: the end tokens' rows of the head are silenced."""
    checkpoint = toy("sdar", seed=1, spread=6.0)
    with torch.no_grad():
        checkpoint.model.head.weight[list(checkpoint.model.settings.eos_token_ids)] *= 0.01
    return rcd.Pipeline(checkpoint)


def one_a_step(carry: Residual | str) -> DecodeConfig:
    return DecodeConfig(max_new_tokens=16, block_length=8, threshold=1.0, carry=carry)


def test_denoising_steps_are_the_forwards_that_could_commit(sdar: rcd.Pipeline) -> None:
    """8 prompt tokens = one prefilled block; two blocks of 8 new tokens; the last block is not stored."""
    result = sdar.generate(list(range(8)), one_a_step("none")).results[0]
    assert result.counts == Counts(denoising=16, prefill=1, store=1)
    finished = sdar.submit(list(range(8)), one_a_step("none")).result()  # it tells the same figures
    for answer in (result, finished):
        assert (answer.tokens, answer.denoising_steps, answer.forwards, answer.tokens_per_step) == (16, 16, 18, 1.0)
    assert result.tokens_per_forward == pytest.approx(16 / 18)


def test_a_short_prompt_needs_no_prefill(sdar: rcd.Pipeline) -> None:
    """3 prompt tokens + 16 = 19: blocks of 5, 8 and (within the length) 3 new tokens."""
    result = sdar.generate([1, 2, 3], one_a_step("none")).results[0]
    assert result.counts == Counts(denoising=16, store=2)
    assert result.tokens == 16


def test_start_passes_are_forwards_but_no_denoising_steps(sdar: rcd.Pipeline) -> None:
    result = sdar.generate(list(range(8)), one_a_step(Residual(start="self"))).results[0]
    assert result.counts == Counts(denoising=16, prefill=1, store=1, start=2)


def test_a_reference_lane_counts_its_prefill_its_residuals_and_its_stores(sdar: rcd.Pipeline) -> None:
    reference = rcd.Pipeline(toy("sdar", seed=2))
    warm = sdar.generate(list(range(8)), one_a_step(Residual(start="reference")), reference=reference).results[0]
    assert warm.counts == Counts(denoising=16, prefill=1, store=1, reference=1 + 2 + 1)
    always = sdar.generate(list(range(8)), one_a_step(Residual(source="reference")), reference=reference).results[0]
    assert always.counts == Counts(denoising=16, prefill=1, store=1, reference=1 + 16 + 1)


def test_a_reference_that_the_carry_does_not_need_is_not_run(sdar: rcd.Pipeline) -> None:
    result = sdar.generate(list(range(8)), one_a_step("residual"), reference=sdar).results[0]
    assert result.counts.reference == 0


def test_tokens_count_up_to_and_including_the_end_token() -> None:
    """The end token wins everywhere: one token, one step, though the block holds eight."""
    checkpoint = toy("sdar", seed=1)
    end = checkpoint.model.settings.eos_token_ids[0]
    with torch.no_grad():
        checkpoint.model.head.weight.mul_(0.0)
        checkpoint.model.head.bias = torch.nn.Parameter(torch.eye(128)[end] * 30, requires_grad=False)
    pipeline = rcd.Pipeline(checkpoint)
    result = pipeline.generate([1, 2, 3], DecodeConfig(max_new_tokens=50, carry="none")).results[0]
    assert (result.ids, result.stop_reason, result.denoising_steps) == ([end], "eos", 1)


def test_max_new_tokens_is_exact_and_filler_behind_it_costs_no_step(sdar: rcd.Pipeline) -> None:
    chosen = DecodeConfig(max_new_tokens=5, block_length=8, commit="sequential", carry="none")
    result = sdar.generate(list(range(8)), chosen).results[0]
    assert (result.tokens, result.denoising_steps, result.stop_reason) == (5, 5, "length")


def test_num_inference_steps_bounds_the_steps_of_a_block(sdar: rcd.Pipeline) -> None:
    chosen = DecodeConfig(max_new_tokens=16, block_length=8, threshold=1.0, num_inference_steps=3, carry="none")
    steps = [e for e in sdar.stream(list(range(8)), chosen) if isinstance(e, Step)]
    assert [int(step.committed.sum()) for step in steps] == [3, 3, 2, 3, 3, 2]


def test_a_bidirectional_canvas_has_only_denoising_forwards() -> None:
    llada = rcd.Pipeline(toy("llada", seed=1, spread=6.0))
    chosen = DecodeConfig(max_new_tokens=12, block_length=4, threshold=1.0, carry="none", eos_early_stop=False)
    assert llada.generate([1, 2, 3], chosen).results[0].counts == Counts(denoising=12)


@pytest.mark.parametrize("window", ["prefix", "dual"])
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_a_pass_over_the_whole_canvas_also_decodes(family: str, window: str) -> None:
    """Reading the canvas at a block's start is the block's first denoising step, not a pass of its own."""
    pipeline = rcd.Pipeline(toy(family, seed=1, spread=6.0))
    chosen = DecodeConfig(
        max_new_tokens=12, block_length=4, threshold=1.0, carry="none", eos_early_stop=False, window=window
    )
    looks: list[Look] = []
    assert pipeline.generate([1, 2, 3], chosen, probe=looks.append).results[0].counts == Counts(denoising=12)
    carried = pipeline.generate([1, 2, 3], replace(chosen, carry="residual"), probe=looks.append).results[0]
    assert carried.counts == Counts(denoising=12)
    widths = [len(look.places) for look in looks]
    wide = {"dual": [12, 4, 4, 4] * 3, "prefix": [12, 12, 12, 12, 12, 8, 8, 8, 12, 4, 4, 4]}[window]
    assert widths == [4] * 12 + wide  # without a carry, only the block is predicted


def test_blocks_in_flight_are_stored_at_no_cost(sdar: rcd.Pipeline) -> None:
    """As above without the store; a reference reads a finished block together with the next."""
    chosen = replace(one_a_step("none"), window="d2f", block_add_threshold=1.0, decoded_token_threshold=1.0)
    assert sdar.generate(list(range(8)), chosen).results[0].counts == Counts(denoising=16, prefill=1)
    own = replace(chosen, carry=Residual(start="self"))
    assert sdar.generate(list(range(8)), own).results[0].counts == Counts(denoising=16, prefill=1, start=2)
    reference = rcd.Pipeline(toy("sdar", seed=2))
    warm = replace(chosen, carry=Residual(start="reference"))
    always = replace(chosen, carry=Residual(source="reference"))
    counts = [sdar.generate(list(range(8)), each, reference=reference).results[0].counts for each in (warm, always)]
    assert counts == [Counts(denoising=16, prefill=1, reference=1 + asked) for asked in (2, 16)]


def test_json_has_the_documented_keys(sdar: rcd.Pipeline) -> None:
    assert list(sdar.generate([1, 2, 3], one_a_step("residual")).results[0].to_dict()) == [
        "text", "ids", "tokens", "denoising_steps", "tokens_per_step", "forwards", "tokens_per_forward", "counts",
        "seconds", "stop_reason",
    ]  # fmt: skip
