"""Between the thread that decodes and a reader: one wake-up for many events, drafts merged, text kept."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from rcd.api import Pipeline
from rcd.decode.events import Event, Finished
from rcd.serve.bridge import Bridge, Mailbox
from rcd.serve.drafts import Canvas
from rcd.serve.text import Words
from tests.serve.conftest import QUESTION


def events_of(pipeline: Pipeline) -> list[Event]:
    from rcd.decode.config import DecodeConfig

    return list(pipeline.stream(QUESTION, DecodeConfig(threshold=1.0, max_new_tokens=40, logprobs=2)))


def canvas_of(pipeline: Pipeline) -> Canvas:
    model = pipeline.settings
    ends = frozenset(model.eos_token_ids)
    return Canvas(0, Words(pipeline.tokenizer), 40, ends, model.mask_token_id, alternatives=2)


def mailbox(pipeline: Pipeline, kept: int) -> tuple[Mailbox, list[int]]:
    """A mailbox, and how often its event loop was called."""
    calls: list[int] = []

    class Loop:
        def call_soon_threadsafe(self, function: Any) -> None:
            calls.append(1)

    loop: Any = Loop()
    return Mailbox(Bridge(loop), 1, [canvas_of(pipeline)], kept), calls


def drawn(drafts: list[Any]) -> list[list[Any]]:
    """The whole canvas after each draft, as a client keeps it."""
    canvas: list[Any] = []
    found = []
    for draft in drafts:
        canvas[draft.offset :] = draft.canvas
        found.append([{**cell, "new": None, "revised": None} for cell in canvas])
    return json.loads(json.dumps(found))


def test_many_events_are_one_wake_up(pipelines: dict[str, Pipeline]) -> None:
    told = events_of(pipelines["words-rcd"])
    box, calls = mailbox(pipelines["words-rcd"], 8)
    for event in told:
        box.sinks[0].put(event)
    assert len(calls) == 1 and box.told


def test_a_slow_reader_has_every_token_and_the_last_drafts(pipelines: dict[str, Pipeline]) -> None:
    pipeline = pipelines["words-rcd"]
    told = events_of(pipeline)
    quick, _ = mailbox(pipeline, 1000)
    slow, _ = mailbox(pipeline, 3)
    for box in (quick, slow):
        for event in told:
            box.sinks[0].put(event)
    all_of_it, rest = (box.sinks[0].take() for box in (quick, slow))
    finished = told[-1]
    assert isinstance(finished, Finished) and finished == rest.end
    assert rest.ids == all_of_it.ids == finished.ids
    every, last = quick.sinks[0].drafts(all_of_it), slow.sinks[0].drafts(rest)
    assert len(every) == len(told) - 1 and len(last) == 3
    assert drawn(last) == drawn(every)[-3:]
    assert [draft.step for draft in last] == [draft.step for draft in every[-3:]]
    new = sum(cell["new"] for draft in last for cell in draft.canvas)
    assert new == sum(cell["new"] for draft in every for cell in draft.canvas)  # merged ones are still told once


def test_a_reader_that_waits_is_woken_from_another_thread(pipelines: dict[str, Pipeline]) -> None:
    told = events_of(pipelines["words-rcd"])

    async def read() -> list[int]:
        box = Mailbox(Bridge(asyncio.get_running_loop()), 1)

        def tell() -> None:
            for event in told:
                box.sinks[0].put(event)

        asyncio.get_running_loop().run_in_executor(None, tell)
        ids: list[int] = []
        while True:
            await box.wait()
            taken = box.sinks[0].take()
            ids += taken.ids
            if taken.end is not None:
                return ids

    finished = told[-1]
    assert isinstance(finished, Finished) and asyncio.run(read()) == finished.ids


def test_a_reader_that_hears_nothing_is_told_so_in_time() -> None:
    async def wait() -> bool:
        box = Mailbox(Bridge(asyncio.get_running_loop()), 1)
        await box.wait(0.001)
        return box.told

    assert asyncio.run(wait()) is False
