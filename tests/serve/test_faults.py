"""Clients that leave, dawdle or send rubbish, queues that are full, deadlines, and an end under load."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from rcd.decode.config import DecodeConfig
from rcd.decode.engine import Engine
from rcd.errors import RCDError
from rcd.models import room
from rcd.serve.loading import Models
from rcd.serve.server import listen, run
from rcd.serve.service import LocalService
from rcd.serve.settings import ServeSettings
from tests.processes import FAILSAFE, GatedChild
from tests.serve.conftest import QUESTION, Api, Running, chunks, said

LONG: dict[str, Any] = {"prompt": QUESTION, "max_tokens": 200, "rcd": {"threshold": 1.0}}


def until(true: Callable[[], Any]) -> None:
    """Wait for what happens in another thread; only a hang ends it otherwise."""
    end = time.monotonic() + FAILSAFE
    while not true():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


class Gate:
    """Turns of all engines wait for it: what happens while requests are decoded happens at a known place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.open, self.reached = threading.Event(), threading.Event()
        self._turn = Engine.turn

        def turn(engine: Engine) -> Any:
            self.reached.set()
            assert self.open.wait(FAILSAFE)
            return self._turn(engine)

        monkeypatch.setattr(Engine, "turn", turn)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Gate(monkeypatch)
    yield made
    made.open.set()


def idle(running: Running) -> bool:
    loops = [served.pipeline.loop for served in running.service.models.values()]
    rows = sum(len(engine.serving) for loop in loops for engine in loop.engines)
    return not rows and all(not loop.waiting and not loop.serving for loop in loops) and not running.service._open


def sent(running: Running, body: Any, path: str = "/v1/completions") -> socket.socket:
    """A request on a socket of its own, whose answer is not read."""
    content = json.dumps(body).encode()
    made = socket.create_connection(("127.0.0.1", running.port), timeout=FAILSAFE)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    made.sendall(f"{head}\r\n\r\n".encode() + content)
    return made


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_rows(running: Running, gate: Gate, stream: bool) -> None:
    clients = [sent(running, {**LONG, "stream": stream, "n": 2}) for _ in range(3)]
    until(lambda: len(running.service._open) == 3 and gate.reached.is_set())
    for client in clients:
        client.close()
    until(lambda: not running.service._open)
    gate.open.set()
    until(lambda: idle(running))
    assert running.server._state.running == 0


def test_a_client_that_leaves_in_the_midst_of_its_stream_frees_its_row(running: Running, gate: Gate) -> None:
    client = sent(running, {**LONG, "stream": True})
    until(gate.reached.is_set)
    gate.open.set()
    received = b""
    while b'"text":' not in received:
        received += client.recv(4096)
    client.close()
    until(lambda: idle(running))


def test_a_slow_reader_stalls_nobody_and_misses_no_text(running: Running) -> None:
    body = {
        "prompt": QUESTION,
        "max_tokens": 128,
        "stream": True,
        "rcd": {"threshold": 1.0, "drafts": True, "alternatives": 20},
    }
    plain = httpx.post(
        f"{running.url}/v1/completions", json={**body, "stream": False, "rcd": {"threshold": 1.0}}, timeout=FAILSAFE
    )
    slow = [sent(running, body) for _ in range(4)]
    for _ in range(3):
        quick = httpx.post(f"{running.url}/v1/completions", json={"prompt": QUESTION}, timeout=FAILSAFE)
        assert quick.status_code == 200
    for client in slow:
        text = b""
        while b"[DONE]" not in text:
            text += client.recv(1 << 16)
        client.close()
        lines = [line for line in text.decode().split("\n") if line.startswith("data: ")]
        events = chunks("\n".join(lines))
        assert said(events) == plain.json()["choices"][0]["text"]
    until(lambda: idle(running))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b"[" * 200_000,
        b'{"prompt": ' + b"9" * 100_000 + b"}",
        b"\x00" * 64,
    ],
)
def test_rubbish_is_a_400_and_the_server_goes_on(running: Running, content: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = httpx.post(
            running.url + path, content=content, headers={"content-type": "application/json"}, timeout=FAILSAFE
        )
        assert answer.status_code == 400 and answer.json()["error"]["message"]
    assert httpx.get(f"{running.url}/health", timeout=FAILSAFE).status_code == 200


def test_ten_megabytes_are_refused_before_they_are_read(running: Running) -> None:
    with socket.create_connection(("127.0.0.1", running.port), timeout=FAILSAFE) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 10000000\r\n\r\n{"
        )
        assert client.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_body_that_never_comes_is_given_up(run_server: Any) -> None:
    running = run_server("words-rcd", body_timeout=0.05)
    with socket.create_connection(("127.0.0.1", running.port), timeout=FAILSAFE) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 9\r\n\r\n{"
        )
        assert client.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_a_full_queue_refuses_and_says_when_to_come_again(make_api: Any, gate: Gate) -> None:
    api: Api = make_api("words-rcd", max_queue=2, max_batch=1)

    async def ask(client: httpx.AsyncClient) -> Any:
        waiting = [asyncio.ensure_future(client.post("/v1/completions", json={"prompt": QUESTION}))]
        await asyncio.to_thread(gate.reached.wait, FAILSAFE)
        for place in range(2, 40):  # the engine's rows are filled when it turns; what is more waits
            waiting.append(asyncio.ensure_future(client.post("/v1/completions", json={"prompt": QUESTION})))
            while len(api.service._open) < place and not waiting[-1].done():
                await asyncio.sleep(0)
            if waiting[-1].done():
                break
        refused = await waiting.pop()
        many = await client.post("/v1/completions", json={"prompt": QUESTION, "n": 16})
        gate.open.set()
        return refused, many, await asyncio.gather(*waiting)

    refused, many, answers = api.run(ask)
    assert refused.status_code == many.status_code == 429
    assert int(refused.headers["retry-after"]) > 0 and refused.json()["error"]["code"] == "queue_full"
    assert {answer.status_code for answer in answers} == {200} and len(answers) >= 2
    assert not api.service._open


def test_a_deadline_ends_a_request(make_api: Any, gate: Gate) -> None:
    api: Api = make_api("words-rcd", timeout=0.05)
    answer = api.post("/v1/completions", LONG)
    assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
    streamed = api.post("/v1/completions", {**LONG, "stream": True})
    assert streamed.status_code == 200 and '"code":"timeout"' in streamed.text and "[DONE]" not in streamed.text


def test_a_request_that_waits_too_long_for_a_row_is_given_up(make_api: Any, gate: Gate) -> None:
    api: Api = make_api("words-rcd", max_batch=1)

    async def ask(client: httpx.AsyncClient) -> Any:
        first = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": QUESTION}))
        await asyncio.to_thread(gate.reached.wait, FAILSAFE)  # it has the only row, and holds it
        api.service.settings = replace(api.service.settings, max_wait=0.05)
        second = await client.post("/v1/completions", json={"prompt": QUESTION})
        gate.open.set()
        return await first, second

    first, second = api.run(ask)
    assert first.status_code == 200 and second.status_code == 504
    assert second.json()["error"]["code"] == "queue_timeout"


def test_a_request_too_long_for_the_cache_is_refused_alone(make_api: Any, gate: Gate) -> None:
    """It stands in no line: those behind it that fit are answered."""
    api: Api = make_api("words-rcd", cache_memory=1_000_000)

    async def ask(client: httpx.AsyncClient) -> Any:
        bodies = [{"prompt": QUESTION, "max_tokens": 200}, {"prompt": "Leo", "max_tokens": 2}] * 3
        answers = [asyncio.ensure_future(client.post("/v1/completions", json=body)) for body in bodies]
        await asyncio.to_thread(gate.reached.wait, FAILSAFE)
        gate.open.set()
        return await asyncio.gather(*answers)

    long, short = (answers := api.run(ask))[::2], answers[1::2]
    assert [answer.status_code for answer in short] == [200] * 3
    assert {answer.status_code for answer in long} == {400} and "MiB of cache" in long[0].text


def test_many_requests_at_once_are_all_answered_and_none_is_mixed_up(running: Running) -> None:
    from rcd.data.tasks.base import problems

    asked = [problem.question for problem in problems("words", "test", 60, seed=9)]
    model = running.service.models["words-rcd"].pipeline
    right = [result.text for result in model.generate(asked, chat=False).results]

    async def all_of_them() -> list[str]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=running.url, timeout=FAILSAFE, limits=limits) as client:

            async def one(number: int) -> str:
                body = {"prompt": asked[number % 60], "stream": number % 2 == 1, "model": "words-rcd"}
                answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == 200
                return said(chunks(answer.text)) if body["stream"] else answer.json()["choices"][0]["text"]

            return await asyncio.gather(*(one(number) for number in range(200)))

    found = asyncio.run(all_of_them())
    assert found == [right[number % 60] for number in range(200)]
    until(lambda: idle(running))


def test_an_answer_is_the_same_alone_and_among_others(make_api: Any) -> None:
    from rcd.decode.config import DecodeConfig

    api: Api = make_api("words-rcd", "words-seqd", config=DecodeConfig(batch_invariant=True))
    alone = [api.complete(model=model)["choices"][0] for model in ("words-rcd", "words-seqd")]

    async def ask(client: httpx.AsyncClient) -> Any:
        others = [
            {"prompt": QUESTION[k % 9 :], "temperature": 0.1 * k, "seed": k, "max_tokens": 8 + k,
             "rcd": {"threshold": 0.5 + k / 80, "carry": k % 2 == 0} if k % 4 < 2 else {}, "model": model}
            for k in range(32) for model in ("words-rcd",)
        ]  # fmt: skip
        mine = [{"prompt": QUESTION, "model": model} for model in ("words-rcd", "words-seqd")]
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in [*others, *mine]))
        assert all(answer.status_code == 200 for answer in answers)
        return [answer.json()["choices"][0] for answer in answers[-2:]]

    assert api.run(ask) == alone


def _serve(*more: str) -> tuple[subprocess.Popen[str], str]:
    """`rcd serve` as its own process, ready."""
    command = [sys.executable, "-m", "rcd", "serve", "--port", "0", "--model", "bundled:words-rcd", *more]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stderr is not None
    for line in process.stderr:
        if "ready on " in line:
            return process, line.split("ready on ")[1].split("/ ")[0]
    raise AssertionError("it ended before it was ready")


def test_at_sigterm_running_requests_finish_and_new_ones_are_refused() -> None:
    process, url = _serve("--drain", "600", "--max-batch", "1", "--no-access-log")
    body = {**LONG, "n": 8, "stream": True}
    with (
        httpx.Client(base_url=url, timeout=FAILSAFE) as client,
        httpx.Client(base_url=url, timeout=FAILSAFE) as other,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        while (ready := other.get("/ready")).status_code == 200:
            pass
        assert ready.status_code == 503 and ready.json()["status"] == "draining"
        late = other.post("/v1/completions", json={"prompt": QUESTION})
        assert late.status_code == 503 and late.headers["retry-after"]
        assert late.json()["error"]["code"] == "shutting_down"
        text = "\n".join(lines)
    events = chunks(text)
    assert sum(choice["finish_reason"] is not None for event in events for choice in event["choices"]) == 8
    assert process.wait(FAILSAFE) == 0


@pytest.mark.parametrize(("drain", "signals"), [(0.0, 1), (FAILSAFE, 2), (FAILSAFE, 5)])
def test_at_the_end_of_the_limit_or_at_a_second_signal_the_others_are_told(
    run_server: Any, gate: Gate, drain: float, signals: int
) -> None:
    running: Running = run_server("words-rcd", drain=drain)
    clients = [sent(running, {**LONG, "stream": stream}) for stream in (True, False)]
    until(lambda: len(running.service._open) == 2 and gate.reached.is_set())
    assert running.server.loop is not None
    for _ in range(signals):
        running.server.loop.call_soon_threadsafe(running.server.end)
    told = []
    for client in clients:
        text = b""
        while part := client.recv(4096):
            text += part
        told.append(text)
    assert told[0].startswith(b"HTTP/1.1 200 ") and b'"code":"shutting_down"' in told[0] and b"[DONE]" not in told[0]
    assert told[1].startswith(b"HTTP/1.1 503 ") and b'"code":"shutting_down"' in told[1]
    gate.open.set()


def test_a_signal_while_models_are_loaded_ends_the_process_at_once() -> None:
    """The thread that loads stands in the midst of it, and will for ever."""
    with GatedChild(
        ["serve", "--port", "0", "--model", "bundled:words-rcd"], "rcd.models.checkpoint:check_room"
    ) as child:
        child.arrive()
        child.send(signal.SIGTERM)
        code, _, heard = child.finish()
    assert code == 0 and not heard


def test_without_a_model_that_fits_the_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    models = Models({"words-rcd": "bundled:words-rcd"}, lambda pipeline: DecodeConfig())
    monkeypatch.setattr(room, "free_memory", lambda device: 1_000_000)
    with pytest.raises(RCDError, match=r"the weights of .*words-rcd take \d+\.\d MB .* 1\.0 MB are free on cpu; take"):
        models.load_into(LocalService())


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_sentence() -> None:
    def load() -> None:
        raise RCDError("there is no such model; name another.")

    with pytest.raises(RCDError, match="no such model"):
        run(LocalService(), ServeSettings(port=0, access_log=False), load=load)


def test_a_port_that_is_taken_is_named(running: Running) -> None:
    with pytest.raises(RCDError, match=f"cannot listen on 127.0.0.1 port {running.port}"):
        listen(ServeSettings(port=running.port))


def test_while_models_load_the_server_says_so(make_api: Any) -> None:
    api: Api = make_api("words-rcd")
    api.app.state.rcd.ready = False
    assert api.get("/health").status_code == 200 and api.get("/ready").json() == {"status": "loading"}
    answer = api.post("/v1/completions", {"prompt": QUESTION})
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "loading"


def test_health_is_asked_by_anything_that_speaks_http(running: Running) -> None:
    with urllib.request.urlopen(f"{running.url}/health", timeout=FAILSAFE) as answer:
        assert answer.status == 200 and json.load(answer) == {"status": "ok"}
