"""Filling in: what a canvas gives stands in the answer, and what it leaves open is decoded as ever."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import rcd
from rcd.decode.config import DecodeConfig
from rcd.decode.events import Counts, Finished, Step
from rcd.decode.filling import Filling, Segment
from rcd.errors import RCDError
from tests.conftest import exact
from tests.equivalence.setups import CARRIES, NEW, PROMPTS, WINDOWS, config, looped, same, steps_of
from tests.revising import registered

M = -1
"""A mask, in the canvases below."""
SPARSE = [M, 7, M, M, 9, M, M, M, 3, 3, 3, 3, 3, 3, 3, 3, M, M, 5, M, M]
"""Given tokens inside of blocks and, for some prompts, a whole block of 8."""


def filled(pipeline: rcd.Pipeline, canvas: list[int]) -> list[int]:
    return [pipeline.settings.mask_token_id if token == M else token for token in canvas]


def kept(canvas: list[int], ids: list[int]) -> bool:
    return len(ids) == len(canvas) and all(given in (M, token) for given, token in zip(canvas, ids, strict=True))


def pipeline_of(family: str, carry: str) -> rcd.Pipeline:
    return looped(family) if carry == "loopholing" else exact(family)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("carry", CARRIES)
def test_a_canvas_of_masks_is_none(window: str, carry: str) -> None:
    family, settings = WINDOWS[window]
    pipeline, chosen = pipeline_of(family, carry), config(carry=CARRIES[carry], **settings)
    canvas = [pipeline.settings.mask_token_id] * 9
    same(pipeline.generate(PROMPTS, chosen, canvas=canvas), pipeline.generate(PROMPTS, chosen))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("carry", CARRIES)
def test_given_tokens_stand_in_the_answer_and_are_never_committed(window: str, carry: str) -> None:
    family, settings = WINDOWS[window]
    pipeline, chosen = pipeline_of(family, carry), config(carry=CARRIES[carry], **settings)
    canvas = filled(pipeline, SPARSE)
    events = list(pipeline.stream(PROMPTS, chosen, canvas=canvas))
    for event in events:
        if isinstance(event, Step):
            places = [event.offset + j for j in event.committed.nonzero().flatten().tolist()]
            assert all(place >= len(SPARSE) or SPARSE[place] == M for place in places)
    ends = [event for event in events if isinstance(event, Finished)]
    assert len(ends) == len(PROMPTS)
    assert all(kept(SPARSE, one.ids) for one in ends if one.stop_reason == "length")
    assert all(kept(SPARSE[: len(one.ids)], one.ids) and len(one.ids) > 18 for one in ends)  # all that is given
    assert all(one.tokens == len(one.ids) - 11 for one in ends)
    same(pipeline.generate(PROMPTS, replace(chosen, oracle=True), canvas=canvas),
         pipeline.generate(PROMPTS, chosen, canvas=canvas))  # fmt: skip


@pytest.mark.parametrize("commit", ["threshold", "topm", "factor", "sequential"])
@pytest.mark.parametrize("window", WINDOWS)
def test_every_rule_fills_in(window: str, commit: str) -> None:
    family, settings = WINDOWS[window]
    pipeline, chosen = exact(family), config(commit=commit, **settings)
    for early in (True, False):
        found = pipeline.generate(PROMPTS, replace(chosen, eos_early_stop=early), canvas=filled(pipeline, SPARSE))
        assert all(kept(SPARSE[: len(ids)], ids) and len(ids) > 18 for ids in found.sequences)


@pytest.mark.parametrize(
    "window", [name for name, (_, settings) in WINDOWS.items() if "sub_block_length" not in settings]
)
def test_a_rule_that_revises_leaves_given_tokens_alone(window: str) -> None:
    family, settings = WINDOWS[window]
    pipeline, revised = exact(family), 0
    with registered() as rule:
        chosen = config(commit=rule, **{**settings, "threshold": 0.97, "temperature": 1.0})
        canvas = filled(pipeline, SPARSE)
        told = list(pipeline.stream(PROMPTS, chosen, canvas=canvas))
        plain = list(pipeline.stream(PROMPTS, replace(chosen, oracle=True), canvas=canvas))
    for event in told:
        if isinstance(event, Step):
            revised += int(event.revised.sum())
            places = [event.offset + j for j in event.revised.nonzero().flatten().tolist()]
            assert all(place >= len(SPARSE) or SPARSE[place] == M for place in places)
    assert revised
    for row in range(len(PROMPTS)):
        mine, theirs = ([event for event in events if event.row == row] for events in (told, plain))
        assert [step.final for step in steps_of(mine)] == [step.final for step in steps_of(theirs)]
        assert mine[-1].ids == theirs[-1].ids  # type: ignore[union-attr]


def test_requests_with_and_without_a_canvas_share_a_batch() -> None:
    for family in ("sdar", "llada", "dream"):
        pipeline, chosen = exact(family), config(batch_invariant=True)
        canvases = [None, filled(pipeline, SPARSE), filled(pipeline, [M, 4]), None]
        both = pipeline.generate(PROMPTS, chosen, canvas=canvases)
        for prompt, canvas, together in zip(PROMPTS, canvases, both.results, strict=True):
            (alone,) = pipeline.generate([prompt], chosen, canvas=canvas).results
            assert (alone.ids, alone.counts) == (together.ids, together.counts)


def test_both_sides_of_a_mask_are_seen_where_attention_is_bidirectional() -> None:
    """The prediction of the first mask depends on what is given far behind it."""
    for family in ("llada", "dream"):
        for window in ("bidirectional", "prefix", "dual"):
            pipeline, seen = exact(family), set()
            for last in (5, 50, 70):
                found = pipeline.generate(PROMPTS[0], canvas=filled(pipeline, [M] * 6 + [last]), window=window,
                                          threshold=1.0, block_length=2)  # fmt: skip
                seen.add(tuple(found.sequences[0][:6]))
            assert len(seen) > 1, (family, window)


def test_a_later_block_changes_no_earlier_one_where_attention_is_block_causal() -> None:
    for settings in ({}, {"window": "d2f"}):
        pipeline, seen, within = exact("sdar"), set(), set()
        for last in (5, 50, 70):
            chosen: Any = dict(block_length=4, threshold=1.0, logprobs=0, **settings)
            far = pipeline.generate(PROMPTS[2], canvas=filled(pipeline, [M] * 8 + [last, M]), **chosen).results[0]
            near = pipeline.generate(PROMPTS[2], canvas=filled(pipeline, [M] * 3 + [last]), **chosen).results[0]
            assert far.logprobs is not None and near.logprobs is not None
            seen.add(tuple(round(one.logprob, 9) for one in far.logprobs[:8]))
            within.add(tuple(round(one.logprob, 9) for one in near.logprobs[:3]))
        assert len(seen) == 1  # what stands in the third block
        assert len(within) == 3  # what stands in the same


def test_blocks_that_are_given_whole_are_read_and_not_decoded() -> None:
    """b = 4, a prompt of 8: one block of masks, two that are given, one of masks. Each is stored for what follows, and
    the given ones are one pass, as a prompt's."""
    pipeline = exact("sdar")
    canvas = [M, M, M, M, 1, 2, 3, 4, 5, 6, 7, 8, M, M, M, M]
    found = pipeline.generate(
        list(range(8)), canvas=filled(pipeline, canvas), block_length=4, threshold=1.0, eos_suppression="logits_all"
    ).results[0]
    assert found.counts == Counts(denoising=8, prefill=2, store=1)
    assert (found.tokens, found.given, found.tokens_per_step) == (8, 8, 1.0)


def test_a_canvas_that_begins_with_tokens_equals_a_longer_prompt() -> None:
    """In the windows whose blocks do not begin at the prompt's end."""
    pipeline, chosen = exact("sdar"), config(block_length=4)
    canvas = filled(pipeline, [7, 8, 9, 10, 11, 12] + [M] * 10)
    given = pipeline.generate([1, 2, 3], replace(chosen, max_new_tokens=16), canvas=canvas).results[0]
    longer = pipeline.generate([1, 2, 3, 7, 8, 9, 10, 11, 12], replace(chosen, max_new_tokens=10)).results[0]
    assert given.ids[6:] == longer.ids and given.counts == longer.counts and given.tokens == longer.tokens


def test_an_end_token_before_the_last_given_one_ends_nothing() -> None:
    """A model that says nothing but ends fills the gap with them, and the given tokens still stand."""
    for window, (family, settings) in WINDOWS.items():
        pipeline = exact(family)
        end = pipeline.settings.eos_token_ids[0]
        canvas = filled(pipeline, [M, end, M, 5, M, M])
        for early in (True, False):
            chosen = config(eos_early_stop=early, **{**settings, "max_new_tokens": 6})
            found = pipeline.generate(PROMPTS[1], chosen, canvas=canvas).results[0]
            assert found.ids[1] == end and found.ids[3] == 5, window
            assert found.stop_reason == "length" or found.ids[-1] in pipeline.settings.eos_token_ids
            assert len(found.ids) > 4


def test_nothing_is_decoded_behind_an_end_token_that_is_given_last() -> None:
    for window, (family, settings) in WINDOWS.items():
        pipeline = exact(family)
        end = pipeline.settings.eos_token_ids[0]
        chosen = config(**{**settings, "threshold": 1.0})
        found = pipeline.generate(PROMPTS[1], chosen, canvas=filled(pipeline, [M, M, 5, end, M, M])).results[0]
        assert found.ids[2:] == [5, end] and found.stop_reason == "eos", window
        assert (found.tokens, found.denoising_steps) == (2, 2)


def test_a_stop_string_counts_behind_the_last_given_token_alone() -> None:
    from tests.equivalence.cases import words

    class Lettered(rcd.Pipeline):
        def decode(self, ids: Any) -> str:
            return words(ids)

    pipeline = Lettered(exact("llada").checkpoint)
    plain = pipeline.generate(PROMPTS[1], config(block_length=4, eos_suppression="logits_all")).results[0]
    stop = words(plain.ids[10:12])
    chosen = pipeline.resolve(config(block_length=4, eos_suppression="logits_all"), 3)
    chosen = replace(chosen, stop=(stop,))
    free = pipeline.submit(PROMPTS[1], replace(chosen, stop=())).result()
    given = [free.ids[k] if k in (10, 11, 14) else pipeline.settings.mask_token_id for k in range(NEW)]
    engine = list(pipeline._events([PROMPTS[1]], [given], replace(chosen, stop=()), None, None, None))[-1]
    assert isinstance(engine, Finished) and words(engine.ids)[10:12] == stop
    from rcd.decode import simple

    told = list(simple.decode(pipeline.model, PROMPTS[1], chosen, text=words, canvas=given))[-1]
    assert isinstance(told, Finished) and told.text is not None
    assert len(told.text) >= 15 and told.text.startswith(words(told.ids[:15]))


def test_a_canvas_breaks_no_reuse_of_what_was_read() -> None:
    """Two texts that begin alike, given or not: the second copies the first one's blocks."""
    from rcd.decode.loop import DecodeLoop

    pipeline, plain = exact("sdar"), exact("sdar")
    pipeline.loop = DecodeLoop(prefix_bytes=2**24)
    canvas = filled(pipeline, [M, M, M, 6, *range(8), M, M, M, M])
    chosen = config(block_length=4, max_new_tokens=16, batch_invariant=False)
    first = pipeline.submit(list(range(8)), chosen, canvas=canvas).result()
    again = pipeline.submit(list(range(8)), chosen, canvas=canvas).result()
    longer = pipeline.submit([*range(8), *first.ids[:12]], chosen).result()
    assert again.ids == first.ids and again.counts == first.counts and again.reused == 8
    assert longer.reused == 20
    assert plain.submit([*range(8), *first.ids[:12]], chosen).result().ids == longer.ids


def test_quotas_split_the_masks_that_are_there() -> None:
    """Four masks of a block of eight over two steps, on a canvas; SDAR splits the length of the block."""
    canvas = [1, M, 2, M, 3, M, 4, M]
    settings: Any = dict(block_length=8, commit="topm", num_inference_steps=2, eos_suppression="logits_all")
    for family, most in (("llada", [2, 2]), ("sdar", [4])):
        pipeline = exact(family)
        events = pipeline.stream(list(range(8)), canvas=filled(pipeline, canvas), **settings)
        assert [int(step.committed.sum()) for step in steps_of(list(events))] == most


def test_the_answer_goes_on_behind_its_canvas_up_to_max_new_tokens() -> None:
    pipeline = exact("llada")
    canvas = filled(pipeline, [M, 5, M])
    assert len(pipeline.generate(PROMPTS[1], canvas=canvas, eos_suppression="logits_all").sequences[0]) == 3
    longer = pipeline.generate(PROMPTS[1], canvas=canvas, max_new_tokens=8, eos_suppression="logits_all").results[0]
    assert len(longer.ids) == 8 and longer.ids[1] == 5 and longer.tokens == 7
    with pytest.raises(RCDError, match="the canvas has 3 tokens and max_new_tokens is 2"):
        pipeline.generate(PROMPTS[1], canvas=canvas, max_new_tokens=2)


def test_a_prompt_with_masks_is_a_prompt_and_a_canvas() -> None:
    pipeline = exact("llada")
    mask = pipeline.settings.mask_token_id
    both = pipeline.generate([4, 4, 6, mask, 7, mask], threshold=1.0)
    same(both, pipeline.generate([4, 4, 6], canvas=[mask, 7, mask], threshold=1.0))
    with pytest.raises(RCDError, match="contains the mask token"):
        pipeline.generate([4, mask, 6], canvas=[mask, 7, mask])
    with pytest.raises(RCDError, match="is empty"):
        pipeline.generate([mask, 7])


def test_blocks_with_masks_are_the_segments() -> None:
    filling = Filling.of([M, M, 5, 6, M, 9], 8, M, [1], early=True)
    assert list(filling.segments(2, 2, 2, 8)) == [Segment(0, 2, 4), Segment(4, 6, 10)]
    ended = Filling.of([M, M, 5, 1, M, M], 8, M, [1], early=False)
    assert list(ended.segments(2, 2, 2, 8)) == [Segment(0, 2, 4)]
    assert Filling.of([M, 1, M], 4, M, [1], early=True).ids == (M, 1, 1, 1)
    assert not Filling.of([M, M], 4, M, [1], early=True)


def test_a_reference_must_know_what_a_canvas_gives() -> None:
    from rcd.carry.residual import Residual

    pipeline, reference = exact("llada"), exact("llada", seed=4)
    mask = pipeline.settings.mask_token_id
    chosen = DecodeConfig(carry=Residual(start="reference"), threshold=0.5)
    found = pipeline.generate([1, 2], chosen, canvas=[mask, 5, mask], reference=reference)
    oracle = pipeline.generate([1, 2], replace(chosen, oracle=True), canvas=[mask, 5, mask], reference=reference)
    same(found, oracle)
