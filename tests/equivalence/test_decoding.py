"""What holds of decoding whoever asks: a batch is its rows, a setting that does nothing does nothing, events tell all.

fp64, on the CPU; that the engine does what the plain reading of Algorithm 2 does is the fuzz's claim."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import rcd
from rcd.carry.base import make
from rcd.carry.residual import Residual
from rcd.decode import flight
from rcd.decode.events import Finished, Step
from rcd.decode.stopping import settle
from rcd.models.toy import toy
from tests.conftest import FAMILIES, exact
from tests.equivalence.setups import CARRIES, NEW, PROMPTS, RESIDUALS, RIVALS, WINDOWS, config, looped, same, steps_of

DRAWN: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0},
    "untempered": {"temperature": 1.0, "confidence": "untempered", "top_p": 0.8},
    "top_k and top_p": {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "confidence": "tempered"},
}


@pytest.fixture(scope="module")
def loops() -> dict[str, rcd.Pipeline]:
    return {family: looped(family) for family in FAMILIES}


# -- a setting that does nothing does nothing ------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_rcd_with_alpha_zero_emits_seqds_tokens(models: dict[str, rcd.Pipeline], family: str) -> None:
    seqd = models[family].generate(PROMPTS, config(carry="none"))
    for off in (Residual(alpha="none"), Residual(alpha_scale=0.0), Residual(alpha="one", alpha_scale=0)):
        same(models[family].generate(PROMPTS, config(carry=off)), seqd)
    assert models[family].generate(PROMPTS, config(carry="residual")).sequences != seqd.sequences  # it could fail


@pytest.mark.parametrize("window", WINDOWS)
def test_a_residual_scale_of_zero_is_seqd_in_the_same_batch(models: dict[str, rcd.Pipeline], window: str) -> None:
    """Rows with and without it, and with half of it, together."""
    family, settings = WINDOWS[window]
    pipeline, chosen = models[family], config(**{**settings, "carry": "residual"})
    scales = (0.0, 1.0, 0.5)
    many = [replace(chosen, residual_scale=scale) for scale in scales for _ in PROMPTS]
    got = pipeline.generate([*PROMPTS] * 3, many, seeds=[0] * 12).sequences
    seqd = pipeline.generate(PROMPTS, replace(chosen, carry="none"), seeds=[0] * 4).sequences
    whole = pipeline.generate(PROMPTS, chosen, seeds=[0] * 4).sequences
    half = pipeline.generate(PROMPTS, replace(chosen, residual_scale=0.5), seeds=[0] * 4).sequences
    assert got == [*seqd, *whole, *half]
    assert seqd != whole != half != seqd


@pytest.mark.parametrize("family", FAMILIES)
def test_both_readings_of_t_res_agree_at_one(models: dict[str, rcd.Pipeline], family: str) -> None:
    alpha, both = (config(carry=Residual(t_res=1.0, t_res_on=on)) for on in ("alpha", "both"))
    same(models[family].generate(PROMPTS, alpha), models[family].generate(PROMPTS, both))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", RIVALS)
def test_the_first_step_of_every_rival_is_seqds_and_later_ones_are_not(
    loops: dict[str, rcd.Pipeline], family: str, name: str
) -> None:
    told = [list(loops[family].stream(PROMPTS, config(carry=carry))) for carry in (RIVALS[name], make("none"))]
    for row in range(len(PROMPTS)):
        one, other = (next(step for step in steps_of(events) if step.row == row) for events in told)
        there = ~other.confidence.isnan()
        assert torch.equal(one.draft[there], other.draft[there])
        torch.testing.assert_close(one.confidence[there], other.confidence[there], atol=1e-12, rtol=0)
    ids = [{event.row: event.ids for event in events if isinstance(event, Finished)} for events in told]
    assert ids[0] != ids[1]


def test_a_looped_model_decoded_without_its_carry_is_the_plain_model(
    loops: dict[str, rcd.Pipeline], models: dict[str, rcd.Pipeline]
) -> None:
    for family in FAMILIES:
        chosen = config(carry="none")
        same(loops[family].generate(PROMPTS, chosen), models[family].generate(PROMPTS, chosen))


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
def test_a_reference_at_every_step_with_alpha_zero_is_seqd(models: dict[str, rcd.Pipeline], family: str) -> None:
    pipeline, reference = models[family], exact(family, 8, layers=1)
    off, on = (config(carry=Residual(source="reference", alpha_scale=scale)) for scale in (0.0, 1.0))
    seqd = pipeline.generate(PROMPTS, config(carry="none")).sequences
    assert pipeline.generate(PROMPTS, off, reference=reference).sequences == seqd
    assert pipeline.generate(PROMPTS, on, reference=reference).sequences != seqd


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_reference_vocabulary_changes_nothing(family: str) -> None:
    """The reference's head is wider than the target's by tokens that nobody can mean."""
    target, narrow, wide = exact(family), exact(family, 4), exact(family, 4, vocab=160)
    wide.model.settings = replace(wide.model.settings, mask_token_id=target.settings.mask_token_id)
    with torch.no_grad():
        for name, parameter in wide.model.named_parameters():
            source = narrow.model.get_parameter(name)
            parameter[: source.shape[0]].copy_(source)
    for carry in (Residual(start="reference"), Residual(source="reference")):
        same(*(target.generate(PROMPTS, config(carry=carry), reference=one) for one in (narrow, wide)))


# -- a batch is its rows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("carry", CARRIES)
def test_a_ragged_batch_equals_its_rows_one_by_one(loops: dict[str, rcd.Pipeline], window: str, carry: str) -> None:
    """Tokens and counts; each row with a way to draw of its own."""
    family, settings = WINDOWS[window]
    free = [{name: value for name, value in each.items() if name != "confidence"} for each in DRAWN.values()]
    chosen = [
        config(**{**settings, "carry": CARRIES[carry], "seed": 10 + row, **each}) for row, each in enumerate(free)
    ]
    together = loops[family].generate(PROMPTS, chosen)
    for row, prompt in enumerate(PROMPTS):
        alone = loops[family].generate(prompt, chosen[row])
        assert together.sequences[row] == alone.sequences[0]
        assert together.results[row].counts == alone.results[0].counts


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("window", WINDOWS)
def test_in_fp32_a_batch_invariant_row_is_the_same_to_the_last_bit(window: str) -> None:
    to_the_last_bit(window, "residual")


@pytest.mark.parametrize("window", ["blockwise", "prefix"])
@pytest.mark.parametrize(
    "carry",
    ["residual,t_res=0.5,t_res_on=both", "iter_smooth", "soft_mask", "token_merge,top_k=3", "latent_refinement"],
)
def test_in_fp32_so_it_is_with_every_embedding_that_is_carried(window: str, carry: str) -> None:
    to_the_last_bit(window, carry)


def to_the_last_bit(window: str, carry: str) -> None:
    family, settings = WINDOWS[window]
    pipeline = rcd.Pipeline(toy(family, seed=3, spread=6.0))
    chosen = config(**{**settings, "carry": carry, "batch_invariant": True, "logprobs": 2})
    chosen = replace(chosen, max_new_tokens=12)
    many = [replace(chosen, temperature=0.8 * (row % 2), max_new_tokens=12 - row) for row in range(len(PROMPTS))]

    def told(prompts: Any, configs: Any) -> dict[int, list[Any]]:
        found: dict[int, list[Any]] = {}
        for event in pipeline.stream(prompts, configs):
            if isinstance(event, Finished):
                found[event.row].append((event.ids, [each.logprob for each in event.logprobs or ()]))
            if isinstance(event, Step):
                there, alpha = ~event.confidence.isnan(), event.alpha
                assert alpha is not None
                found.setdefault(event.row, []).append((event.confidence[there].tolist(), alpha[there].tolist()))
        return found

    together = told(PROMPTS, many)
    for row, prompt in enumerate(PROMPTS):
        assert together[row] == told([prompt], [many[row]])[0]


@pytest.mark.parametrize("how", DRAWN)
@pytest.mark.parametrize("window", WINDOWS)
def test_the_oracle_answers_the_same_by_the_same_call(models: dict[str, rcd.Pipeline], window: str, how: str) -> None:
    family, settings = WINDOWS[window]
    chosen = config(**{**settings, "carry": RESIDUALS["rcd"], "max_new_tokens": 12, **DRAWN[how]})
    want = models[family].generate(PROMPTS[:3], replace(chosen, oracle=True))
    same(models[family].generate(PROMPTS[:3], chosen), want)


def test_a_rows_draws_are_its_seeds_own(models: dict[str, rcd.Pipeline]) -> None:
    """Not its number's, its row's or its neighbours'; and other seeds give other texts."""
    pipeline, chosen, prompt = models["sdar"], config(carry="residual", temperature=1.0), PROMPTS[1]
    alone = [pipeline.generate(prompt, replace(chosen, seed=seed)).sequences[0] for seed in range(6)]
    assert len({tuple(ids) for ids in alone}) == 6
    order = [3, 5, 0, 1, 4, 2]
    ways: list[dict[str, Any]] = [{"seeds": order}, {}]
    for way in ways:
        configs: Any = chosen if way else [replace(chosen, seed=seed) for seed in order]
        assert pipeline.generate([prompt] * 6, configs, **way).sequences == [alone[seed] for seed in order]
    assert pipeline.generate([prompt] * 2, replace(chosen, seed=2)).sequences == alone[2:4]  # row r draws by seed + r
    drawn = [
        pipeline.generate([prompt] * 2, chosen, generator=torch.Generator().manual_seed(7)).sequences for _ in range(2)
    ]
    assert drawn[0] == drawn[1]
    large = pipeline.generate([prompt] * 3, chosen, seeds=[2**63, 5, 2**64 - 1]).sequences
    assert large[1] == alone[5] and len({tuple(ids) for ids in large}) == 3
    last = pipeline.generate([prompt] * 2, replace(chosen, seed=2**64 - 1)).sequences
    assert last == [large[2], alone[0]]  # behind the last seed comes the first
    with pytest.raises(rcd.RCDError, match="2 prompts need 2 seeds"):
        pipeline.generate([prompt] * 2, chosen, seeds=[1])


# -- steps, ends and scopes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("carry", ["none", "residual"])
def test_threshold_one_is_one_token_a_step(models: dict[str, rcd.Pipeline], window: str, carry: str) -> None:
    family, settings = WINDOWS[window]
    strict = {} if settings.get("window") != "d2f" else {"decoded_token_threshold": 1.0}
    chosen = config(**{**settings, **strict, "carry": carry, "threshold": 1.0})
    committed = [int(step.committed.sum()) for step in steps_of(list(models[family].stream(PROMPTS, chosen)))]
    assert set(committed) == {1}
    top = models[family].generate(PROMPTS, replace(chosen, commit="topm"))
    assert strict or top.sequences == models[family].generate(PROMPTS, chosen).sequences


@pytest.mark.parametrize("window", WINDOWS)
def test_events_tell_the_whole_story(models: dict[str, rcd.Pipeline], window: str) -> None:
    """Replaying the committed tokens of the step events gives the finished text, and what is final is never lost."""
    family, settings = WINDOWS[window]
    for carry in ("residual", "none"):
        text: dict[int, dict[int, int]] = {row: {} for row in range(len(PROMPTS))}
        steps, final = dict.fromkeys(text, 0), dict.fromkeys(text, 0)
        for event in models[family].stream(PROMPTS, config(**{**settings, "carry": carry})):
            own = text[event.row]
            if isinstance(event, Finished):
                assert event.ids == [own[k] for k in range(len(event.ids))]
                assert steps[event.row] == event.counts.denoising and final[event.row] == len(event.ids)
                continue
            assert isinstance(event, Step)
            steps[event.row] += 1
            assert event.number == steps[event.row]
            assert (event.alpha is not None) == (carry == "residual")
            assert not (event.committed & event.masked).any() and not event.revised.any()
            for j in event.committed.nonzero().flatten().tolist():
                place = event.offset + j
                assert place >= 0 and place not in own
                assert 0 < event.confidence[j] <= 1
                own[place] = int(event.draft[j])
            assert event.final >= final[event.row] and all(k in own for k in range(event.final))
            final[event.row] = event.final


@pytest.mark.parametrize("family", FAMILIES)
def test_early_stop_spends_no_step_on_filler(family: str) -> None:
    """At one token a step and without an end token, the steps are exactly the tokens; never more than the length."""
    stops = set()
    for seed in range(8 if family == "sdar" else 5):
        pipeline = exact(family, seed)
        one = config(carry="residual" if seed % 2 else "none", threshold=1.0)
        early, late = (pipeline.generate(PROMPTS, replace(one, eos_early_stop=early)) for early in (True, False))
        for a, b in zip(early.results, late.results, strict=True):
            assert a.stop_reason == "eos" or a.denoising_steps == a.tokens == NEW
            assert a.tokens <= a.denoising_steps <= NEW
            assert b.denoising_steps >= b.tokens
            stops.add(a.stop_reason)
    assert stops == {"eos", "length"}


def test_masks_behind_an_end_token_are_closed_at_no_cost() -> None:
    ids, token = torch.tensor([[5, 9, 0, 0, 0], [5, 0, 0, 8, 0]]), torch.tensor([[1, 1, 8, 3, 9], [1, 2, 3, 4, 5]])
    masked, output, own = ids == 0, torch.tensor([[True] * 4 + [False], [True] * 5]), torch.tensor([[9, 8, -1]] * 2)
    closed, left, needed = settle(ids, masked, token, output, output, own, True, 2)
    assert closed.tolist() == [[5, 9, 8, 9, 0], [5, 0, 0, 8, 8]]  # the predicted end, or else the text's own
    assert left.tolist() == [[False] * 4 + [True], [False, True, True, False, False]]
    assert needed.tolist() == [[False] * 5, [False, True, True, False, False]]  # none behind the end, or outside
    assert all(
        a is b
        for a, b in zip(settle(ids, masked, token, output, output, own, False, 2)[:2], (ids, masked), strict=True)
    )


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("suppression", ["logits", "logits_all", "confidence"])
def test_end_tokens_are_held_back_as_asked(window: str, suppression: str) -> None:
    """By a model that says its most frequent tokens are ends."""
    family, settings = WINDOWS[window]
    pipeline, chosen = exact(family), config(**{**settings, "carry": "none"})
    said = [token for ids in pipeline.generate(PROMPTS, chosen).sequences for token in ids]
    often = tuple(sorted(set(said), key=lambda token: (-said.count(token), token))[:2])
    pipeline.model.settings = replace(pipeline.settings, eos_token_ids=often)
    free = pipeline.generate(PROMPTS, chosen)
    held = pipeline.generate(PROMPTS, replace(chosen, eos_suppression=suppression))
    # which comes last hardly matters among the few masks of a sub-block
    assert free.sequences != held.sequences or (suppression, window) == ("confidence", "sub-blocks")
    never = {"logits": often[:1], "logits_all": often, "confidence": ()}[suppression]
    assert not any(set(ids) & set(never) for ids in held.sequences)
    if suppression == "logits_all":
        assert all(result.stop_reason == "length" for result in held.results)


def test_stop_ids_end_the_rows_that_name_them(models: dict[str, rcd.Pipeline]) -> None:
    pipeline, chosen = models["sdar"], config(carry="none")
    plain = pipeline.generate(PROMPTS, chosen, seeds=[0] * 4)
    stop = plain.sequences[0][3]
    configs = [replace(chosen, stop_ids=(stop,)), *[chosen] * 3]
    got = pipeline.generate(PROMPTS, configs, seeds=[0] * 4)
    assert got.sequences[1:] == plain.sequences[1:]
    assert got.results[0].stop_reason == "stop" and got.sequences[0][-1] == stop
    assert stop not in got.sequences[0][:-1]


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_the_scope_of_a_carry_matters_only_with_several_blocks(models: dict[str, rcd.Pipeline], family: str) -> None:
    pipeline = models[family]

    def scoped(scope: str, block: int) -> rcd.Output:
        return pipeline.generate(PROMPTS, config(carry=Residual(start="self"), carry_scope=scope, block_length=block))

    same(scoped("canvas", NEW), scoped("block", NEW))
    assert scoped("canvas", 8).sequences != scoped("block", 8).sequences
    for result in scoped("block", 8).results:
        assert 1 <= result.counts.start <= 3  # one start for each block that was entered
    assert all(result.counts.start == 1 for result in scoped("canvas", 8).results)


def test_a_prefill_in_pieces_equals_a_whole_one(
    models: dict[str, rcd.Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = [[k % 97 for k in range(3, 3 + n)] for n in (70, 41, 9)]
    whole = models["sdar"].generate(long, config(carry="residual"))
    monkeypatch.setattr(flight, "PREFILL_TOKENS", 16)
    pieces = models["sdar"].generate(long, config(carry="residual"))
    assert whole.sequences == pieces.sequences
    assert [r.counts.prefill for r in whole.results] == [1, 1, 1]
    assert [r.counts.prefill for r in pieces.results] == [4, 3, 1]  # 64, 40 and 8 tokens in pieces of 16
