"""Prompts that begin alike: what is copied instead of read changes no answer, and nothing stale is ever copied."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import rcd
from rcd.carry.residual import Residual
from rcd.decode.loop import MOST_ENGINES, DecodeLoop
from rcd.decode.prefixes import Prefixes
from rcd.decode.slots import cache_bytes
from tests.conftest import exact
from tests.equivalence.setups import FLYING, PROMPTS, config, same
from tests.equivalence.stress import gated, settled

LONG = [(7 * k + 5) % 101 + 3 for k in range(75)]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "blockwise": ("sdar", {"carry": "residual"}),
    "seqd": ("sdar", {}),
    "stock": ("sdar", {"carry": "residual", "passes": "stock"}),
    "warm": ("sdar", {"carry": Residual(start="self", t_res=0.9)}),
    "d2f": ("sdar", {**FLYING, "carry": "residual"}),
    "sub-blocks": ("fast_dllm_qwen", {"carry": "residual", "window": "sub_blocks", "sub_block_length": 4}),
    "shifted": ("fast_dllm_qwen", {"carry": "residual"}),
    "behind": ("llada", {**FLYING, "carry": "residual"}),
}


def caching(family: str, most: int = 2**24) -> rcd.Pipeline:
    pipeline = exact(family)
    pipeline.loop = DecodeLoop(prefix_bytes=most)
    return pipeline


def prefixes(pipeline: rcd.Pipeline) -> Prefixes:
    assert pipeline.loop.prefixes is not None
    return pipeline.loop.prefixes


@pytest.mark.parametrize("kind", KINDS)
def test_the_turns_of_a_chat_are_answered_as_if_nothing_were_kept(kind: str) -> None:
    family, settings = KINDS[kind]
    plain, kept, chosen = exact(family), caching(family), config(**settings)
    turn = LONG[:19]
    for number in range(4):
        want = plain.generate(turn, chosen)
        same(kept.generate(turn, chosen), want)
        turn = [*turn, *want.sequences[0], *LONG[number : number + 5]]
    # of turns 2 to 4 at least the prompt before is there; what D2F's LLaDA reads is one block, and never begins alike
    assert (prefixes(kept).found > 60) == (kind != "behind")


@pytest.mark.parametrize("kind", KINDS)
def test_many_answers_to_one_prompt_read_it_once(kind: str) -> None:
    family, settings = KINDS[kind]
    plain, kept = exact(family), caching(family)
    asked = [config(**settings, temperature=1.0, seed=seed) for seed in range(5)]
    want = plain.generate([LONG] * 5, asked)
    kept.generate(LONG, asked[0])
    (served,) = kept.loop.engines
    read = served.stats.prefills
    same(kept.generate([LONG] * 5, asked), want)
    assert read > 0 and sum(engine.stats.prefills for engine in kept.loop.engines) == read


def test_an_answer_says_how_much_was_there() -> None:
    pipeline, chosen = caching("sdar"), config(block_length=8)
    assert [pipeline.submit(LONG, chosen).result().reused for _ in range(2)] == [0, 72]
    assert pipeline.submit([*LONG[:40], *LONG], chosen).result().reused == 40
    assert (prefixes(pipeline).asked, prefixes(pipeline).found) == (72 + 72 + 112, 72 + 40)


def test_random_chats_at_once_with_little_room() -> None:
    """Blocks come and go, requests are cancelled, lengths of blocks differ: every answer is the one given alone."""
    plain, kept, draw = exact("sdar"), caching("sdar", 60_000), random.Random(3)
    for _ in range(12):
        stem = LONG[: draw.randrange(5, 60)]
        prompts = [[*stem, *draw.choices(range(3, 100), k=draw.randrange(1, 12))] for _ in range(4)]
        chosen = [
            config(block_length=draw.choice([4, 8]), carry=draw.choice(["none", "residual"]), threshold=0.6)
            for _ in prompts
        ]
        handles = [kept.submit(prompt, one) for prompt, one in zip(prompts, chosen, strict=True)]
        handles[draw.randrange(4)].cancel()
        same(kept.generate(prompts, chosen), plain.generate(prompts, chosen))
        assert prefixes(kept).bytes <= 60_000
    assert prefixes(kept).found > 100
    settled(kept)


def test_weights_that_have_changed_share_nothing() -> None:
    kept, chosen = caching("sdar"), config(carry="residual")
    kept.generate(LONG, chosen)
    with torch.no_grad():
        kept.model.codebook.add_(0.05)
    plain = exact("sdar")
    plain.model.load_state_dict(kept.model.state_dict())
    same(kept.generate(LONG, chosen), plain.generate(LONG, chosen))
    assert prefixes(kept).found == 0


def test_what_is_no_number_is_not_kept() -> None:
    kept, chosen = caching("sdar"), config()
    with torch.no_grad():
        kept.model.codebook[LONG[0]] = float("nan")
    with pytest.raises(rcd.RCDError, match="NaN"):
        kept.generate(LONG, chosen)
    assert prefixes(kept).bytes == 0


def test_batch_invariant_answers_depend_on_nothing_read_before() -> None:
    kept = caching("sdar")
    for _ in range(2):
        kept.generate(LONG, config(batch_invariant=True))
    assert (prefixes(kept).asked, prefixes(kept).bytes) == (0, 0)


# -- room for engines ------------------------------------------------------------------------------------------------


def sized(pipeline: rcd.Pipeline, rows: int, capacity: int) -> int:
    return cache_bytes(pipeline.model, rows, capacity)


def test_an_engine_has_as_many_rows_as_memory_allows(models: dict[str, rcd.Pipeline]) -> None:
    pipeline = exact("sdar")
    pipeline.loop = DecodeLoop(memory=sized(pipeline, 3, 64))
    same(pipeline.generate(PROMPTS, config()), exact("sdar").generate(PROMPTS, config()))
    assert [engine.rows_most for engine in pipeline.loop.engines] == [3]
    pipeline.generate(PROMPTS, config())
    assert pipeline.loop.made == 1
    with pytest.raises(rcd.RCDError, match=r"needs .* MiB of cache and .* may be used; shorten it"):
        pipeline.generate([3] * 300, config())
    same(pipeline.generate(PROMPTS, config()), exact("sdar").generate(PROMPTS, config()))
    settled(pipeline)


def test_an_engine_waits_until_another_is_empty_and_nobody_passes_it() -> None:
    """Two kinds of request and room for one engine: they are answered in the order in which they came."""
    pipeline, want = exact("sdar"), exact("sdar").generate(PROMPTS[0], config()).sequences[0]
    pipeline.loop = DecodeLoop(memory=sized(pipeline, 8, 64))
    other, order = config(block_length=4), list[str]()

    class Told:
        def __init__(self, name: str):
            self.name = name

        def put(self, item: Any) -> None:
            order.append(self.name)

    with gated(pipeline) as gate:
        first = pipeline.submit(PROMPTS[0], config(), probe=gate)
        gate.reached()
        pipeline.submit(PROMPTS[0], other, events=Told("other"))
        last = pipeline.submit(PROMPTS[0], config(max_new_tokens=2))
        pipeline.submit(PROMPTS[0], config(max_new_tokens=2), events=Told("late"))
        assert len(pipeline.loop.engines) == 1
    assert first.result().ids == want
    last.result()
    settled(pipeline)
    assert order == ["other", "late"]


def test_texts_that_grow_need_few_engines() -> None:
    pipeline = exact("sdar")
    for length in range(1, 400, 9):
        pipeline.generate([5] * length, config(max_new_tokens=4))
    assert pipeline.loop.made <= 4


def test_as_many_kinds_of_request_as_you_like_share_a_few_engines() -> None:
    pipeline = exact("sdar")
    chosen = [config(carry=Residual(t_res=0.5 + k / 50)) for k in range(20)]
    want = [exact("sdar").generate(PROMPTS[1], one).sequences[0] for one in chosen[:3]]
    with gated(pipeline) as gate:
        held = pipeline.submit(PROMPTS[0], replace(chosen[0]), probe=gate)
        gate.reached()
        handles = [pipeline.submit(PROMPTS[1], one) for one in chosen]
    assert [handle.result().ids for handle in handles][:3] == want and held.result()
    settled(pipeline)
    assert pipeline.loop.made == 20 and len(pipeline.loop.engines) <= MOST_ENGINES
