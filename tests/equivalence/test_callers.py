"""Many callers of one Pipeline: queues, cancelling, failures that are one's own and failures that are everyone's."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import rcd
from rcd.decode.config import DecodeConfig
from rcd.decode.events import Failed, Finished, Step
from rcd.decode.loop import DecodeLoop
from rcd.decode.model import before_norm
from rcd.decode.request_settings import LONGEST_STOP, MOST_STOPS
from rcd.decode.rows import Rows
from rcd.decode.units import Units
from rcd.models.toy import toy, toy_tokenizer
from tests.conftest import exact
from tests.equivalence.setups import PROMPTS, config, same
from tests.equivalence.stress import gated, settled


@pytest.fixture
def pipeline() -> rcd.Pipeline:
    return exact("sdar")


CHOSEN = config(carry="residual", threshold=1.0)


# -- queues and cancelling -------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_serves_on(pipeline: rcd.Pipeline) -> None:
    pipeline.loop = DecodeLoop(most_waiting=2)
    want = pipeline.generate(PROMPTS[0], CHOSEN).sequences[0]
    with gated(pipeline) as gate:
        first = pipeline.submit(PROMPTS[0], replace(CHOSEN), probe=gate)
        gate.reached()
        waiting = [pipeline.submit(PROMPTS[0], CHOSEN) for _ in range(2)]
        with pytest.raises(rcd.RCDError, match="the queue is full: 2 requests wait already; try again"):
            pipeline.submit(PROMPTS[0], CHOSEN)
        late: list[Any] = []
        patient = threading.Thread(target=lambda: late.append(pipeline.submit(PROMPTS[0], CHOSEN, wait=True)))
        patient.start()
    patient.join(20)
    assert [handle.result().ids for handle in (first, *waiting, *late)] == [want] * 4
    settled(pipeline)


@pytest.mark.parametrize("when", ["waiting", "decoding", "done"])
def test_a_request_is_cancelled_at_any_time(pipeline: rcd.Pipeline, when: str) -> None:
    want = pipeline.generate(PROMPTS, CHOSEN)
    if when == "done":
        handle = pipeline.submit(PROMPTS[0], CHOSEN)
        assert handle.result().ids == want.sequences[0]
        handle.cancel()
    else:
        with gated(pipeline) as gate:
            holding = pipeline.submit(PROMPTS[1], CHOSEN, probe=gate)
            gate.reached()
            handle = pipeline.submit(PROMPTS[0], CHOSEN) if when == "waiting" else holding
            handle.cancel()
            handle.cancel()
        told = [event for event in handle if not isinstance(event, Step)]
        assert [(type(event), getattr(event, "cancelled", None)) for event in told] == [(Failed, True)]
        if when == "waiting":
            assert holding.result().ids == want.sequences[1]
        again = pipeline.submit(PROMPTS[0], CHOSEN)
        again.cancel()
        with pytest.raises(rcd.RCDError, match="cancelled"):
            again.result()
    same(pipeline.generate(PROMPTS, CHOSEN), want)
    settled(pipeline)


def test_closing_a_stream_frees_its_rows_at_the_next_step(pipeline: rcd.Pipeline) -> None:
    want = pipeline.generate(PROMPTS, CHOSEN)
    events: Any = pipeline.stream(PROMPTS, CHOSEN)
    assert isinstance(next(events), Step)
    (served,) = pipeline.loop.engines
    events.close()
    settled(pipeline)
    assert served.stats.passes < 2 * sum(result.counts.denoising for result in want.results)
    same(pipeline.generate(PROMPTS, CHOSEN), want)
    handle = pipeline.submit(PROMPTS[0], CHOSEN, watch=True)
    for event in handle:
        assert isinstance(event, Step)
        break  # leaving the iteration cancels
    settled(pipeline)


# -- failures that are one's own -------------------------------------------------------------------------------------


def test_a_request_that_fails_fails_alone(pipeline: rcd.Pipeline) -> None:
    """Before anything is done for it."""
    want = pipeline.generate(PROMPTS, CHOSEN)
    with pytest.raises(rcd.RCDError, match="outside the vocabulary"):
        pipeline.generate([*PROMPTS, [10**6]], CHOSEN)
    with pytest.raises(rcd.RCDError, match="positions"):
        pipeline.submit([3] * 5000, CHOSEN)
    same(pipeline.generate(PROMPTS, CHOSEN), want)
    settled(pipeline)


def test_a_request_that_cannot_be_written_into_its_row_fails_alone(
    pipeline: rcd.Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Rows.enter

    def enter(self: Rows, row: int, *given: Any, **values: Any) -> None:
        real(self, row, *given, **values)
        if values["seed"] == 7:
            raise OverflowError("int too big to convert")

    monkeypatch.setattr(Rows, "enter", enter)
    want = pipeline.generate(PROMPTS, CHOSEN)
    handles = [pipeline.submit(prompt, replace(CHOSEN, seed=seed)) for prompt in PROMPTS for seed in (0, 7)]
    for number, handle in enumerate(handles):
        if number % 2:
            with pytest.raises(rcd.RCDError, match="could not be written into its row"):
                handle.result()
        else:
            assert handle.result().ids == want.results[number // 2].ids
    settled(pipeline)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"threshold": 1.5}, "threshold must be"), ({"factor": -1.0}, "factor must be"),
        ({"temperature": -0.1}, "temperature must be"), ({"top_k": -1}, "top_k must be"),
        ({"top_p": 0.0}, "top_p must be"), ({"seed": -1}, "seed must be"), ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"residual_scale": 2.0}, "residual_scale must be"), ({"logprobs": 21}, "logprobs must be"),
        ({"num_inference_steps": 0}, "num_inference_steps must"), ({"temperature": float("nan")}, "temperature must"),
        ({"stop": ("",)}, "a stop string is empty"), ({"stop": ("x" * (LONGEST_STOP + 1),)}, "has 257 characters"),
        ({"stop": tuple(map(str, range(MOST_STOPS + 1)))}, "16 stop strings at most"),
        ({"stop_ids": tuple(range(9))}, "8 stop_ids at most"), ({"stop_ids": (-1,)}, "stop_ids"),
    ],
    ids=str,
)  # fmt: skip
def test_numbers_out_of_range_name_their_field(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(rcd.RCDError, match=words) as caught:
        DecodeConfig(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"window": "dual"}, "the window 'dual' does not fit"), ({"window": "sliding"}, "sliding"),
        ({"carry": "loopholing"}, "loopholing|carry"), ({"carry": "nothing"}, "nothing"),
        ({"carry": rcd.Residual(start="reference")}, "needs a reference"), ({"commit": "all"}, "all"),
        ({"stop": ("a",)}, "no tokenizer"),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_model_cannot_do_is_refused_with_the_reason(
    pipeline: rcd.Pipeline, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(rcd.RCDError, match=words):
        pipeline.generate(PROMPTS, DecodeConfig(**settings))
    assert pipeline.loop.engines == []


@pytest.mark.parametrize(
    "prompt", [5, None, 1.5, [1.5], ["a", 1], [[1], None], [True, "x"], {"a": 1}, [[1.0]]], ids=str
)
def test_prompts_of_other_kinds_are_refused(pipeline: rcd.Pipeline, prompt: Any) -> None:
    with pytest.raises(rcd.RCDError):
        pipeline.generate(prompt, CHOSEN)
    assert pipeline.encode(prompt for prompt in PROMPTS) == PROMPTS  # type: ignore[arg-type]
    assert pipeline.encode(iter(PROMPTS[0])) == [PROMPTS[0]]  # type: ignore[arg-type]


def test_stop_strings_end_the_rows_that_name_them() -> None:
    pipeline = rcd.Pipeline(toy("sdar", seed=3, spread=6.0, tokenizer=toy_tokenizer(128)))
    pipeline.model.double()
    chosen = config(carry="residual")
    plain = pipeline.generate(PROMPTS, chosen, seeds=[0] * 4)
    words = plain.results[0].text.split()
    stop = " ".join(words[2:4])
    got = pipeline.generate(PROMPTS, [replace(chosen, stop=(stop, "never")), *[chosen] * 3], seeds=[0] * 4)
    assert got.sequences[1:] == plain.sequences[1:]
    assert got.results[0].stop_reason == "stop"
    assert got.results[0].text == plain.results[0].text[: plain.results[0].text.index(stop)]
    oracle = pipeline.generate(PROMPTS[0], replace(chosen, stop=(stop, "never"), oracle=True))
    assert oracle.results[0].text == got.results[0].text and oracle.sequences[0] == got.sequences[0]


# -- failures that are everyone's ------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("a fault of ours"), MemoryError(), KeyboardInterrupt()], ids=str)
def test_a_failure_of_the_loop_reaches_everyone_and_the_next_call_works(
    pipeline: rcd.Pipeline, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = pipeline.generate(PROMPTS, CHOSEN)
    launch, calls = Units.launch, [0]

    def failing(*given: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise error
        return launch(*given)

    with gated(pipeline) as gate:
        holding = pipeline.submit(PROMPTS[0], CHOSEN, probe=gate)
        gate.reached()
        monkeypatch.setattr(Units, "launch", failing)
        handles = [holding, *(pipeline.submit(prompt, CHOSEN) for prompt in [*PROMPTS] * 3)]  # some wait for a row
    for handle in handles:
        with pytest.raises(rcd.RCDError, match=r"decoding stopped \(.*try it again"):
            handle.result()
    same(pipeline.generate(PROMPTS, CHOSEN), want)
    settled(pipeline)


def test_an_interrupt_of_a_caller_leaves_the_engine_usable(pipeline: rcd.Pipeline) -> None:
    want = pipeline.generate(PROMPTS, CHOSEN)

    def interrupted() -> None:
        for number, _ in enumerate(pipeline.stream(PROMPTS, CHOSEN)):
            if number == 5:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    same(pipeline.generate(PROMPTS, CHOSEN), want)
    settled(pipeline)


def test_a_probe_that_raises_is_told_to_its_caller(pipeline: rcd.Pipeline) -> None:
    want = pipeline.generate(PROMPTS, CHOSEN)

    def broken(_: Any) -> None:
        raise ValueError("a caller's own mistake")

    with pytest.raises(rcd.RCDError, match="a caller's own mistake"):
        pipeline.generate(PROMPTS[0], CHOSEN, probe=broken)
    same(pipeline.generate(PROMPTS, CHOSEN), want)


# -- the thread ------------------------------------------------------------------------------------------------------


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    """What another thread does soon; the wait decides nothing but how long a failure takes."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.001)


def test_the_thread_ends_when_there_is_nothing_to_do_and_starts_again(pipeline: rcd.Pipeline) -> None:
    pipeline.loop = DecodeLoop(linger=0.0)
    want = pipeline.generate(PROMPTS, CHOSEN)
    for _ in range(3):
        until(lambda: pipeline.loop._thread is None)
        same(pipeline.generate(PROMPTS, CHOSEN), want)


def test_a_closed_loop_says_so(pipeline: rcd.Pipeline) -> None:
    pipeline.generate(PROMPTS, CHOSEN)
    pipeline.loop.close()
    with pytest.raises(rcd.RCDError, match="closed; load the model again"):
        pipeline.generate(PROMPTS, CHOSEN)


def test_closing_tells_those_who_wait(pipeline: rcd.Pipeline) -> None:
    with gated(pipeline) as gate:
        handle = pipeline.submit(PROMPTS[0], CHOSEN, probe=gate)
        gate.reached()
        closing = threading.Thread(target=pipeline.loop.close)
        closing.start()
        until(lambda: pipeline.loop.closed)
    closing.join(20)
    with pytest.raises(rcd.RCDError, match="closed"):
        handle.result()


def test_a_pipeline_that_nobody_has_goes_away() -> None:
    own, loop = exact("sdar", 4), DecodeLoop(linger=0.0)
    own.loop = loop
    own.generate(PROMPTS, CHOSEN)
    model = weakref.ref(own.model)
    end = time.monotonic() + 60.0  # only ends a hang
    while loop._thread is not None:
        assert time.monotonic() < end, "the thread does not end"
        time.sleep(0.001)
    del own, loop
    gc.collect()
    assert model() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_process_decodes_by_a_thread_of_its_own(pipeline: rcd.Pipeline) -> None:
    want = pipeline.generate(PROMPTS[1], CHOSEN).sequences[0]
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            got = pipeline.submit(PROMPTS[1], CHOSEN).result().ids
            os.write(write, b"same" if got == want else b"other")
        finally:
            os._exit(0)
    os.close(write)
    said = os.read(read, 10)
    os.waitpid(child, 0)
    assert said == b"same"


def test_events_come_in_order_whoever_asks(pipeline: rcd.Pipeline) -> None:
    told = list(pipeline.stream(PROMPTS, CHOSEN))
    for row in range(len(PROMPTS)):
        mine = [event for event in told if event.row == row]
        steps = [event.number for event in mine if isinstance(event, Step)]
        assert steps == list(range(1, len(steps) + 1)) and isinstance(mine[-1], Finished)
    assert len({event.row for event in told[:8]}) > 1  # together


def soon(ask: Callable[[], Any], seconds: float = 20.0) -> Any:
    """What `ask` returns or raises, which must not take for ever."""
    told: list[Any] = []

    def work() -> None:
        try:
            told.append(ask())
        except Exception as error:
            told.append(error)

    asking = threading.Thread(target=work, daemon=True)
    asking.start()
    asking.join(seconds)
    assert told, "it hangs"
    return told[0]


def test_an_answer_is_told_as_often_as_it_is_asked_for(pipeline: rcd.Pipeline) -> None:
    handle = pipeline.submit(PROMPTS[0], CHOSEN, watch=True)
    last = list(handle)[-1]
    assert soon(handle.result) == last == soon(handle.result) and soon(lambda: list(handle)) == [last]
    gone = pipeline.submit(PROMPTS[0], CHOSEN)
    gone.cancel()
    for _ in range(2):
        assert "cancelled" in str(soon(gone.result))


def test_a_probe_hears_its_own_pipeline_alone_where_two_share_a_model() -> None:
    mine = exact("sdar")
    other, stock = rcd.Pipeline(mine.checkpoint), replace(CHOSEN, passes="stock")
    heard: list[int] = []
    with before_norm(mine.model) as found:  # as a probed step of another loop has it open
        other.generate(PROMPTS, stock, probe=lambda look: heard.append(look.raw.shape[0]))
    assert found == [] and set(heard) == {CHOSEN.block_length}


def test_a_probe_that_raises_disturbs_nobody_else(pipeline: rcd.Pipeline) -> None:
    want = pipeline.generate(PROMPTS, CHOSEN)
    mistake = ValueError("a caller's own mistake")

    def broken(_: Any) -> None:
        raise mistake

    with gated(pipeline) as gate:
        holding = pipeline.submit(PROMPTS[0], CHOSEN, probe=gate)
        gate.reached()
        failing = pipeline.submit(PROMPTS[1], CHOSEN, probe=broken)
        others = [pipeline.submit(prompt, CHOSEN) for prompt in PROMPTS[2:]]
    with pytest.raises(rcd.RCDError, match=r"the probe raised ValueError .a caller's own mistake.; mend it") as caught:
        failing.result()
    assert caught.value.__cause__ is mistake
    assert [handle.result().ids for handle in (holding, *others)] == [want.sequences[k] for k in (0, 2, 3)]
    settled(pipeline)


@pytest.mark.parametrize("block_length", [4, 8])
def test_a_probe_that_decodes_is_told_that_it_cannot(pipeline: rcd.Pipeline, block_length: int) -> None:
    """With the engine that it watches, and with another that would have to be made."""
    want = pipeline.generate(PROMPTS, CHOSEN)

    def again(_: Any) -> None:
        pipeline.generate(PROMPTS[0], replace(CHOSEN, block_length=block_length))

    error = soon(lambda: pipeline.generate(PROMPTS[0], CHOSEN, probe=again))
    assert isinstance(error, rcd.RCDError) and "a probe cannot decode with the pipeline that it watches" in str(error)
    same(pipeline.generate(PROMPTS, CHOSEN), want)
    settled(pipeline)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_process_forked_in_the_middle_of_a_step_can_decode(pipeline: rcd.Pipeline) -> None:
    """The thread that holds the locks is not in it."""
    want = pipeline.generate(PROMPTS[1], CHOSEN).sequences[0]
    read, write = os.pipe()
    with gated(pipeline) as gate:
        pipeline.submit(PROMPTS[0], CHOSEN, probe=gate)
        gate.reached()
        child = os.fork()
        if not child:
            try:
                torch.set_num_threads(1)  # a pool of threads does not survive
                got = soon(lambda: pipeline.generate(PROMPTS[1], CHOSEN).sequences[0])
                os.write(write, b"same" if got == want else b"other")
            finally:
                os._exit(0)
        os.close(write)
        said = os.read(read, 10)
        os.waitpid(child, 0)
    assert said == b"same"
