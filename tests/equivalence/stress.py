"""Threads on one Pipeline, and requests that are cancelled: every other answer is the one given alone.

    python -m tests.equivalence.stress --threads 8 --calls 200
    python -m tests.equivalence.stress --cancel              # 1,000 requests, of which 200 are cancelled
    python -m tests.equivalence.stress --device cuda         # fp64 on a GPU; alone are the answers of the CPU

Settings are mixed; fp64, and fp32 with `batch_invariant`. What is cancelled is so after a seeded number of events.
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import rcd
from rcd.carry.base import make
from rcd.carry.residual import Residual
from rcd.decode.config import DecodeConfig
from rcd.decode.events import Failed, Step
from rcd.models.toy import toy, toy_tokenizer

KINDS: dict[str, list[dict[str, Any]]] = {
    "sdar": [{}, {"window": "d2f", "block_length": 4}],
    "llada": [{}, {"window": "dual", "block_length": 8}, {"window": "prefix", "carry_scope": "block"}],
}
PATIENCE = 120.0
"""Seconds after which something hangs."""


@dataclass
class Gate:
    """A probe that holds the loop at a request's first step until it is opened."""

    open: threading.Event = field(default_factory=threading.Event)
    at: threading.Event = field(default_factory=threading.Event)

    def __call__(self, _: Any) -> None:
        self.at.set()
        assert self.open.wait(PATIENCE), "nobody opened the gate"

    def reached(self) -> None:
        assert self.at.wait(PATIENCE), "no step came"


@contextmanager
def gated(pipeline: rcd.Pipeline) -> Iterator[Gate]:
    gate = Gate()
    try:
        yield gate
    finally:
        gate.open.set()


def settled(pipeline: rcd.Pipeline) -> None:
    """Everybody is served or gone: no row is held, nobody waits."""
    loop, end = pipeline.loop, time.monotonic() + PATIENCE
    while loop.waiting or loop.serving or any(served.busy for served in loop.engines):
        assert time.monotonic() < end, "a request is left"
        time.sleep(0.001)
    assert all(served.free == served.rows_most for served in loop.engines)
    assert all(not bool(served.rows.active.any()) for served in loop.engines)


def pipelines(exact: bool, device: str = "cpu") -> dict[str, rcd.Pipeline]:
    made = {}
    for family in KINDS:
        pipeline = rcd.Pipeline(toy(family, seed=3, spread=4.0, tokenizer=toy_tokenizer(128)))
        if exact:
            pipeline.model.double()
        pipeline.model.to(device)
        made[family] = pipeline
    return made


def request(draw: random.Random, exact: bool) -> tuple[str, list[int], DecodeConfig]:
    """(family, prompt, settings) of a call: few engines, and every setting of a request."""
    family = draw.choice(list(KINDS))
    carry = draw.choice([make("none"), Residual(), Residual(), Residual(start="self")])
    drawn = draw.random() < 0.5
    chosen = DecodeConfig(
        carry=carry, **{"block_length": 8, **draw.choice(KINDS[family])}, batch_invariant=not exact,
        max_new_tokens=draw.randint(1, 20), threshold=draw.choice([0.3, 0.6, 0.9]), seed=draw.randrange(10**6),
        temperature=draw.choice([0.5, 1.0]) if drawn else 0.0, top_k=draw.choice([0, 10]),
        top_p=draw.choice([1.0, 0.8]), residual_scale=draw.choice([1.0, 1.0, 0.5, 0.0]),
        stop=draw.choice([(), (), ("a", "7", "bird"), ("the",)]), logprobs=draw.choice([None, 2]),
    )  # fmt: skip
    return family, [draw.randrange(100) for _ in range(draw.randint(1, 20))], chosen


def answer(pipeline: rcd.Pipeline, prompt: list[int], chosen: DecodeConfig) -> tuple[Any, ...]:
    """What a call gives, but for its seconds."""
    result = pipeline.generate(prompt, chosen).results[0]
    told = None if result.logprobs is None else [f"{each.token} {each.logprob:.6f}" for each in result.logprobs]
    return result.text, result.ids, result.stop_reason, result.counts, told


def calls(threads: int, each: int, exact: bool, seed: int = 0, device: str = "cpu") -> int:
    """How many answers, given among others, differ from those given alone."""
    draw = random.Random(seed)
    asked = [[request(draw, exact) for _ in range(each)] for _ in range(threads)]
    shared, alone = pipelines(exact, device), pipelines(exact)
    got: list[list[Any]] = [[] for _ in range(threads)]

    def work(number: int) -> None:
        for family, prompt, chosen in asked[number]:
            try:
                got[number].append(answer(shared[family], prompt, chosen))
            except Exception as error:
                got[number].append(repr(error))

    together = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in together:
        thread.start()
    for thread in together:
        thread.join()
    for pipeline in shared.values():
        settled(pipeline)
    wrong = 0
    for number in range(threads):
        for (family, prompt, chosen), found in zip(asked[number], got[number], strict=True):
            want = answer(alone[family], prompt, chosen)
            if found != want:
                wrong += 1
                print(f"{found} instead of {want}", flush=True)
    return wrong


def cancelled(requests: int, share: float, exact: bool = True, seed: int = 0, rounds: int = 1) -> tuple[int, list[int]]:
    """(how many of the other answers differ, the process's memory in KiB after each round). A request is cancelled
    after a number of its events, or before the first."""
    draw = random.Random(seed)
    shared, alone = pipelines(exact), pipelines(exact)
    asked = [request(draw, exact) for _ in range(requests)]
    want = [answer(alone[family], prompt, chosen)[1] for family, prompt, chosen in asked]
    wrong, memory = 0, []
    for _ in range(rounds):
        when = [draw.randint(0, 6) if draw.random() < share else None for _ in asked]
        handles = [
            shared[family].submit(prompt, chosen, watch=True, wait=True, rows=8) for family, prompt, chosen in asked
        ]
        found: list[Any] = [None] * requests

        def follow(number: int, after: int | None, handle: Any, found: list[Any] = found) -> None:
            if after == 0:
                handle.cancel()
            seen = 0
            for event in handle:
                seen += 1
                if isinstance(event, Step):
                    if seen == after:
                        handle.cancel()
                    continue
                found[number] = "cancelled" if isinstance(event, Failed) and event.cancelled else event

        for number, (after, handle) in enumerate(zip(when, handles, strict=True)):
            follow(number, after, handle)
        for pipeline in shared.values():
            settled(pipeline)
        for number, event in enumerate(found):
            gone = event == "cancelled"
            if (gone and when[number] is None) or (not gone and getattr(event, "ids", None) != want[number]):
                wrong += 1
                print(f"request {number}: {event} instead of {want[number]}", flush=True)
        del handles, found, event
        gc.collect()
        memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return wrong, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--calls", type=int, default=200, help="of every thread")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cancel", action="store_true")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.cancel:
        wrong, memory = cancelled(given.requests, 0.2, rounds=given.rounds)
        print(f"{given.requests} requests, a fifth cancelled, {given.rounds} rounds: {wrong} wrong; KiB {memory}")
        raise SystemExit(wrong > 0)
    total = 0
    for exact in (True, False) if given.device == "cpu" else (True,):
        wrong = calls(given.threads, given.calls, exact, device=given.device)
        print(
            f"{given.threads} threads x {given.calls} calls, {'fp64' if exact else 'fp32'}: {wrong} wrong", flush=True
        )
        total += wrong
    raise SystemExit(total > 0)


if __name__ == "__main__":
    main()
