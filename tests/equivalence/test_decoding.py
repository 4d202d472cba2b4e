"""Every variant equals its reference at a degenerate setting, token for token, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import rcd
from rcd.carry.residual import Residual
from rcd.decode import lanes
from rcd.decode.config import DecodeConfig
from rcd.decode.events import Finished, Step
from rcd.decode.step import Rules, denoise
from rcd.decode.stopping import unsettled
from rcd.diffusion.attention import block_causal
from rcd.models.lm import View
from rcd.models.toy import toy
from rcd.residual.distribution import Distribution
from tests.conftest import FAMILIES, exact

PROMPTS = [[5, 9, 13, 2, 40, 41, 7, 8, 1, 3, 77], [4, 4, 6], [11, 30, 31, 32, 9, 8, 7, 6], [60 + k for k in range(21)]]
CARRIES: dict[str, Any] = {
    "seqd": "none",
    "rcd": Residual(),
    "rcd-self": Residual(start="self"),
    "rcd-dirichlet": Residual(start="dirichlet", t_res=0.9),
    "rcd-confidence": Residual(alpha="confidence", alpha_scale=0.5),
}


def config(**settings: Any) -> DecodeConfig:
    return DecodeConfig(**{"max_new_tokens": 21, "block_length": 8, "threshold": 0.5, **settings})


def same(a: rcd.Output, b: rcd.Output) -> None:
    assert a.sequences == b.sequences
    assert [r.counts for r in a.results] == [r.counts for r in b.results]
    assert [r.stop_reason for r in a.results] == [r.stop_reason for r in b.results]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "off", [Residual(alpha="none"), Residual(alpha_scale=0.0), Residual(alpha="one", alpha_scale=0)]
)
def test_rcd_with_alpha_zero_emits_seqds_tokens(models: dict[str, rcd.Pipeline], family: str, off: Residual) -> None:
    same(models[family].generate(PROMPTS, config(carry=off)), models[family].generate(PROMPTS, config(carry="none")))


@pytest.mark.parametrize("family", FAMILIES)
def test_rcd_is_not_seqd(models: dict[str, rcd.Pipeline], family: str) -> None:
    """The check above could fail: with its weight, the residual changes what is decoded."""
    with_residual = models[family].generate(PROMPTS, config(carry=Residual()))
    assert with_residual.sequences != models[family].generate(PROMPTS, config(carry="none")).sequences


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("carry", CARRIES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_ragged_batch_equals_its_rows_one_by_one(
    models: dict[str, rcd.Pipeline], family: str, carry: str, temperature: float
) -> None:
    chosen = config(carry=CARRIES[carry], temperature=temperature, seed=10)
    together = models[family].generate(PROMPTS, chosen)
    for row, prompt in enumerate(PROMPTS):
        alone = models[family].generate(prompt, replace(chosen, seed=10 + row))
        assert together.sequences[row] == alone.sequences[0]
        assert together.results[row].counts == alone.results[0].counts


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_in_fp32_a_rows_predictions_move_by_rounding_alone_in_a_batch(family: str) -> None:
    """Drafts and alphas of the first steps, batch against single; tokens can then differ only at a hairline."""
    pipeline = rcd.Pipeline(toy(family, seed=3))
    chosen = config(carry=Residual(start="self"), threshold=1.0, max_new_tokens=8)
    together = next(e for e in pipeline.stream(PROMPTS, chosen) if isinstance(e, Step))
    for row, prompt in enumerate(PROMPTS):
        alone = next(e for e in pipeline.stream(prompt, chosen) if isinstance(e, Step))
        assert alone.alpha is not None and together.alpha is not None
        torch.testing.assert_close(together.confidence[row], alone.confidence[0], atol=1e-5, rtol=0, equal_nan=True)
        torch.testing.assert_close(together.alpha[row], alone.alpha[0], atol=1e-5, rtol=0)


def uncached(pipeline: rcd.Pipeline, prompt: list[int], chosen: DecodeConfig) -> list[int]:
    """Blockwise decoding without a cache: the whole text is computed anew at every step, under one mask."""
    chosen, model = pipeline.resolve(chosen), pipeline.model
    rules, b, mask = Rules.of(chosen, model.settings), chosen.block_length, model.settings.mask_token_id
    assert b is not None
    text = list(prompt)
    while len(text) < len(prompt) + chosen.new_tokens:
        start = len(text) // b * b
        ids = torch.tensor([text + [mask] * (start + b - len(text))])
        position = torch.arange(ids.shape[1])[None]
        view = View(position, block_causal(position, position, b), None, slice(start, start + b))
        state: Any = rcd.Residual().refresh(None, Zeros(b, model.settings.vocab_size), model.codebook)
        state = state if chosen.carry != rcd.NoCarry() else None
        output = (position[:, start:] >= len(prompt)) & (position[:, start:] < len(prompt) + chosen.new_tokens)
        ends = model.settings.eos_token_ids
        while (wanted := unsettled(ids[:, start:], ids[:, start:] == mask, output, ends, True)).any():
            window, one = ids[:, start:], torch.ones(1, dtype=torch.long)
            outcome = denoise(model, rules, ids, view, state, wanted, one, None, window == mask)
            ids = torch.cat((ids[:, :start], torch.where(outcome.committed, outcome.token, window)), dim=1)
            state = outcome.state
        text = ids[0].tolist()
        if set(text[len(prompt) :]) & set(model.settings.eos_token_ids):
            break
    new = text[len(prompt) : len(prompt) + chosen.new_tokens]
    end = next((k for k, token in enumerate(new) if token in model.settings.eos_token_ids), len(new))
    return new[: end + 1]


class Zeros:
    """The passes of a cold start: a shape and nothing to run."""

    def __init__(self, length: int, vocabulary: int):
        self.shape = (1, length, vocabulary)
        self.device = torch.device("cpu")
        self.generators: list[torch.Generator] = []

    def own(self) -> Distribution:
        raise AssertionError("a cold start runs nothing")

    reference = own


@pytest.mark.parametrize("carry", ["none", "residual"])
@pytest.mark.parametrize("block", [4, 8])
@pytest.mark.parametrize("seed", range(3))
@torch.inference_mode()
def test_cached_blockwise_equals_the_uncached_full_forward(carry: str, block: int, seed: int) -> None:
    pipeline = exact("sdar", seed)
    for prompt in PROMPTS:
        chosen = config(carry=carry, block_length=block)
        assert pipeline.generate(prompt, chosen).sequences[0] == uncached(pipeline, prompt, chosen)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("carry", ["none", "residual"])
def test_threshold_one_is_one_token_a_step(models: dict[str, rcd.Pipeline], family: str, carry: str) -> None:
    pipeline, chosen = models[family], config(carry=carry, threshold=1.0)
    steps = [event for event in pipeline.stream(PROMPTS, chosen) if isinstance(event, Step)]
    assert all((event.committed.sum(-1) == 1).all() for event in steps)
    top1 = pipeline.generate(PROMPTS, config(carry=carry, commit="topm"))
    assert top1.sequences == pipeline.generate(PROMPTS, chosen).sequences


@pytest.mark.parametrize("family", FAMILIES)
def test_both_readings_of_t_res_agree_at_one(models: dict[str, rcd.Pipeline], family: str) -> None:
    alpha, both = (config(carry=Residual(t_res=1.0, t_res_on=on)) for on in ("alpha", "both"))
    same(models[family].generate(PROMPTS, alpha), models[family].generate(PROMPTS, both))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("t_res", [1.0, 0.8])
def test_warm_start_with_the_target_as_reference_equals_the_self_start(
    models: dict[str, rcd.Pipeline], family: str, t_res: float
) -> None:
    pipeline = models[family]
    warm = pipeline.generate(PROMPTS, config(carry=Residual(start="reference", t_res=t_res)), reference=pipeline)
    own = pipeline.generate(PROMPTS, config(carry=Residual(start="self", t_res=t_res)))
    assert warm.sequences == own.sequences
    assert [r.denoising_steps for r in warm.results] == [r.denoising_steps for r in own.results]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_reference_vocabulary_changes_nothing(family: str) -> None:
    """The reference's head is wider than the target's by tokens that nobody can mean."""
    target, narrow, wide = exact(family), exact(family, 4), exact(family, 4, vocab=160)
    mask = target.settings.mask_token_id
    wide.model.settings = replace(wide.model.settings, mask_token_id=mask)
    with torch.no_grad():
        for name, parameter in wide.model.named_parameters():
            source = narrow.model.get_parameter(name)
            parameter[: source.shape[0]].copy_(source)
    for carry in (Residual(start="reference"), Residual(source="reference")):
        outputs = [target.generate(PROMPTS, config(carry=carry), reference=reference) for reference in (narrow, wide)]
        same(*outputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reference_at_every_step_with_alpha_zero_is_seqd(models: dict[str, rcd.Pipeline], family: str) -> None:
    pipeline = models[family]
    reference = exact(family, 8, layers=1)
    off = config(carry=Residual(source="reference", alpha_scale=0.0))
    on = config(carry=Residual(source="reference"))
    seqd = pipeline.generate(PROMPTS, config(carry="none")).sequences
    assert pipeline.generate(PROMPTS, off, reference=reference).sequences == seqd
    assert pipeline.generate(PROMPTS, on, reference=reference).sequences != seqd


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("carry", ["none", "residual"])
def test_early_stop_spends_no_step_on_filler(family: str, carry: str) -> None:
    """At one token a step and without an end token, the steps are exactly the tokens; never more than the length."""
    stops = set()
    for seed in range(12):
        pipeline = exact(family, seed)
        one = config(carry=carry, threshold=1.0)
        early, late = (pipeline.generate(PROMPTS, replace(one, eos_early_stop=early)) for early in (True, False))
        for a, b in zip(early.results, late.results, strict=True):
            assert a.stop_reason == "eos" or a.denoising_steps == a.tokens == 21
            assert a.tokens <= a.denoising_steps <= 21
            assert b.denoising_steps >= b.tokens
            stops.add(a.stop_reason)
    assert stops == {"eos", "length"}


def test_masks_behind_an_end_token_are_closed_at_no_cost() -> None:
    from rcd.decode.stopping import close

    ids, token = torch.tensor([[5, 9, 0, 0, 0], [5, 0, 0, 8, 0]]), torch.tensor([[1, 1, 8, 3, 9], [1, 2, 3, 4, 5]])
    masked, output = ids == 0, torch.tensor([[True] * 4 + [False], [True] * 5])
    closed, left = close(ids, masked, token, output, (9, 8), early=True)
    assert closed.tolist() == [[5, 9, 8, 9, 0], [5, 0, 0, 8, 8]]  # the predicted end, or else the text's own
    assert left.tolist() == [[False] * 4 + [True], [False, True, True, False, False]]
    assert all(
        a is b for a, b in zip(close(ids, masked, token, output, (9, 8), early=False), (ids, masked), strict=True)
    )


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_the_scope_of_a_carry_matters_only_with_several_blocks(models: dict[str, rcd.Pipeline], family: str) -> None:
    pipeline = models[family]

    def scoped(scope: str, block: int) -> rcd.Output:
        return pipeline.generate(PROMPTS, config(carry=Residual(start="self"), carry_scope=scope, block_length=block))

    same(scoped("canvas", 21), scoped("block", 21))
    assert scoped("canvas", 8).sequences != scoped("block", 8).sequences
    for result in scoped("block", 8).results:
        assert 1 <= result.counts.start <= 3  # one start for each block that was entered
    assert all(result.counts.start == 1 for result in scoped("canvas", 8).results)


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_a_batch_with_block_scope_equals_its_rows(models: dict[str, rcd.Pipeline], family: str) -> None:
    chosen = config(carry=Residual(start="dirichlet"), carry_scope="block", block_length=4)
    together = models[family].generate(PROMPTS, chosen)
    for row, prompt in enumerate(PROMPTS):
        alone = models[family].generate(prompt, replace(chosen, seed=row))
        assert together.sequences[row] == alone.sequences[0]
        assert together.results[row].counts == alone.results[0].counts


def test_a_prefill_in_pieces_equals_a_whole_one(
    models: dict[str, rcd.Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = [[k % 97 for k in range(3, 3 + n)] for n in (70, 41, 9)]
    whole = models["sdar"].generate(long, config(carry="residual"))
    monkeypatch.setattr(lanes, "PREFILL_SLOTS", 16)
    pieces = models["sdar"].generate(long, config(carry="residual"))
    assert whole.sequences == pieces.sequences
    assert [r.counts.prefill for r in whole.results] == [1, 1, 1]
    assert [r.counts.prefill for r in pieces.results] == [4, 3, 1]  # 64, 40 and 8 slots in pieces of 16


def test_events_tell_the_whole_story(models: dict[str, rcd.Pipeline]) -> None:
    """Replaying the committed tokens of the step events gives the finished text."""
    for family in FAMILIES:
        text: dict[int, dict[int, int]] = {row: {} for row in range(len(PROMPTS))}
        for event in models[family].stream(PROMPTS, config(carry="residual")):
            if isinstance(event, Finished):
                assert event.ids == [text[event.row][k] for k in range(len(event.ids))]
                continue
            assert event.alpha is not None and event.alpha.shape == event.draft.shape
            assert not (event.committed & event.masked).any()
            for k, row in enumerate(event.rows):
                for j in event.committed[k].nonzero().flatten().tolist():
                    position = event.offsets[k] + j
                    assert position >= 0 and position not in text[row]
                    assert 0 < event.confidence[k, j] <= 1
                    text[row][position] = int(event.draft[k, j])
