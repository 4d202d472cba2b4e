"""`rcd serve --ray`: the answers of one process, replicas that die, clients that leave, an end under load.

No clock decides: what may happen in either order is allowed in either order, and `FAILSAFE` only ends what hangs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import rcd
from rcd.cli.options import BUNDLED_THRESHOLD
from rcd.decode.config import DecodeConfig
from rcd.serve.service import LocalService
from rcd.serve.settings import ServeSettings
from tests.processes import FAILSAFE
from tests.serve.conftest import OTHER, QUESTION, Api, chunks, said

pytest.importorskip("ray.serve")
MODELS = ("words-rcd", "words-seqd")
LONG: dict[str, Any] = {"prompt": QUESTION, "max_tokens": 200, "rcd": {"threshold": 1.0}}


def until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + FAILSAFE
    while not true():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.05)


class Served:
    """`rcd serve --ray` in a process of its own, ready."""

    def __init__(self, *more: str, env: dict[str, str] | None = None) -> None:
        self.app = f"test-{secrets.token_hex(6)}"
        models = [part for name in MODELS for part in ("--model", f"bundled:{name}")]
        command = [sys.executable, "-m", "rcd", "serve", "--ray", "--port", "0", "--no-access-log", *models]
        command += ["--ray-app", self.app, "--replica-cpus", "0.2", "--health-period", "1", *more]
        environ = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**environ, **(env or {})}
        )
        assert self.process.stdout is not None
        self.told: list[str] = []
        for line in self.process.stdout:
            self.told.append(line)
            if "ready on " in line:
                self.url = line.split("ready on ")[1].split("/ ")[0]
                break
        else:
            raise AssertionError(f"it ended before it was ready: {self.told}")
        self._reading = threading.Thread(target=lambda: self.told.extend(self.process.stdout or ()), daemon=True)
        self._reading.start()
        self.client = httpx.Client(base_url=self.url, timeout=FAILSAFE)

    def replicas(self) -> list[int]:
        """Their processes, by the name that Ray gives them."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if f"ServeReplica:{self.app}:Models".encode() in path.read_bytes():
                    found.append(int(path.parent.name))
        return found

    def metric(self, name: str, model: str = MODELS[0]) -> float | None:
        text = self.client.get("/metrics").text
        found = re.search(rf'^rcd_{name}{{model="{model}"}} (\S+)$', text, re.MULTILINE)
        return None if found is None else float(found.group(1))

    def idle(self) -> bool:
        return self.metric("serving") == 0 and self.metric("waiting") == 0

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(FAILSAFE)
        self._reading.join(FAILSAFE)
        self.client.close()
        return code


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    found = Served("--replicas", "2", "--max-batch", "2", "--max-n", "64", "--drain", "600")
    yield found
    found.end()


@pytest.fixture(scope="module")
def local() -> Api:
    models = {name: rcd.load(f"bundled:{name}") for name in MODELS}
    return Api(LocalService(models, config=DecodeConfig(threshold=BUNDLED_THRESHOLD)), ServeSettings(max_n=64))


BODIES: list[dict[str, Any]] = [
    {"prompt": QUESTION},
    {"prompt": [QUESTION, OTHER], "n": 2, "model": "words-seqd", "max_tokens": 24},
    {"prompt": OTHER, "temperature": 0.7, "seed": 5, "logprobs": 2},
    {"prompt": QUESTION, "stop": "=", "rcd": {"carry": False}},
    {"messages": [{"role": "user", "content": OTHER}], "max_tokens": 16},
]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_a_replica_answers_as_one_process_does(served: Served, local: Api, body: dict[str, Any]) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    here, there = local.post(path, body), served.client.post(path, json=body)
    assert here.status_code == there.status_code == 200, there.text
    for choice, other in zip(here.json()["choices"], there.json()["choices"], strict=True):
        assert _texts(choice) == _texts(other)
    streamed = served.client.post(path, json={**body, "stream": True})
    events = chunks(streamed.text)
    for index, choice in enumerate(here.json()["choices"]):
        assert said(events, index) == _texts(choice)[0]


def _texts(choice: Any) -> tuple[str, str]:
    return choice["text"] if "text" in choice else choice["message"]["content"], choice["finish_reason"]


def test_drafts_come_from_a_replica_too(served: Served, local: Api) -> None:
    body: dict[str, Any] = {"prompt": QUESTION, "stream": True, "rcd": {"drafts": True, "alternatives": 3}}
    here = local.stream(**body)
    there = chunks(served.client.post("/v1/completions", json=body).text)
    assert drawn(there) == drawn(here) != []
    assert said(there) == said(here) != ""


def drawn(events: list[Any]) -> list[Any]:
    """The last canvas; which steps were merged on the way is chance."""
    canvas: list[Any] = []
    for draft in (event["rcd"] for event in events if event.get("rcd", {}).get("type") == "draft"):
        canvas[draft["offset"] :] = [{**cell, "new": None, "revised": None} for cell in draft["canvas"]]
    return canvas


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": QUESTION, "model": "nobody"},
        {"prompt": ""},
        {"prompt": QUESTION, "max_tokens": 30_000},
        {"prompt": QUESTION, "model": "words-seqd", "rcd": {"t_res": 0.5}},
        {"prompt": QUESTION, "unknown": 1},
    ],
)
def test_what_is_refused_is_refused_in_the_same_words(served: Served, local: Api, body: dict[str, Any]) -> None:
    here, there = local.post("/v1/completions", body), served.client.post("/v1/completions", json=body)
    assert here.status_code == there.status_code >= 400
    assert here.json() == there.json()


def test_the_page_the_models_and_examples_are_there(served: Served, local: Api) -> None:
    assert served.client.get("/").status_code == 200 and "<html" in served.client.get("/").text
    assert served.client.get("/ready").json() == {"status": "ready"}
    assert served.client.get("/v1/models").json() == local.get("/v1/models").json()
    for path in ("/rcd/examples?seed=7", "/rcd/examples?model=nobody"):
        assert served.client.get(path).json() == local.get(path).json()
    stranger = served.client.get("/v1/models", headers={"host": "evil.example"})
    assert stranger.status_code == 403 and stranger.json()["error"]["code"] == "unknown_host"


def test_metrics_are_summed_over_the_replicas(served: Served) -> None:
    for _ in range(4):
        served.client.post("/v1/completions", json={"prompt": QUESTION})
    assert served.metric("replicas") == 2
    assert served.idle() and (served.metric("passes") or 0) > 0
    assert 'rcd_requests_total{model="words-rcd",outcome="done"}' in served.client.get("/metrics").text


def test_a_client_that_leaves_frees_the_rows_of_its_replica(served: Served) -> None:
    """64 answers on 2 rows are far more passes than are made until the replica hears that the client has left."""
    left_after(served.client, LONG, rows=2)
    assert 'outcome="left"' in served.client.get("/metrics").text


def left_after(client: httpx.Client, body: dict[str, Any], rows: int) -> None:
    """Leave a stream of 64 answers at its first text; it took fewer passes than half of what all of them would take."""

    def metric(name: str) -> float:
        found = re.search(rf"^rcd_{name}{{.*}} (\S+)$", client.get("/metrics").text, re.MULTILINE)
        return -1 if found is None else float(found.group(1))

    usage = client.post("/v1/completions", json={**body, "n": 1}).json()["usage"]
    before = metric("passes")  # of the engines there are: it falls where one makes room for another, and never matters
    with client.stream("POST", "/v1/completions", json={**body, "n": 64, "stream": True}) as answer:
        lines = answer.iter_lines()  # kept: an iterator that goes closes the connection
        next(line for line in lines if '"text"' in line)
    until(lambda: metric("serving") == metric("waiting") == 0)
    assert metric("passes") - before < usage["denoising_steps"] * 64 / rows / 2


def test_a_replica_that_is_killed_loses_no_plain_request_and_comes_back(served: Served, local: Api) -> None:
    """Requests go on until the killed replica is replaced: all are answered, and a stream that was cut says so."""
    bodies = [{**LONG, "n": 2}, {**LONG, "n": 2, "stream": True}]
    right = local.complete(**bodies[0])["choices"]
    over, lock = threading.Event(), threading.Lock()
    answers: list[tuple[bool, int, str]] = []

    def ask(body: dict[str, Any]) -> None:
        with httpx.Client(base_url=served.url, timeout=FAILSAFE) as client:
            while not over.is_set():
                answer = client.post("/v1/completions", json=body)
                with lock:
                    answers.append(("stream" in body, answer.status_code, answer.text))

    threads = [threading.Thread(target=ask, args=(bodies[k % 2],)) for k in range(6)]
    for thread in threads:
        thread.start()
    before = served.replicas()
    assert len(before) == 2
    until(lambda: served.metric("serving"))
    os.kill(before[0], signal.SIGKILL)
    until(lambda: len(set(served.replicas()) - {before[0]}) == 2 and served.metric("replicas") == 2)
    over.set()
    for thread in threads:
        thread.join(FAILSAFE)
    cut = 0
    for streamed, status, text in answers:
        assert status == 200, text
        if not streamed:
            continue
        if "[DONE]" in text:
            assert [said(chunks(text), index) for index in range(2)] == [choice["text"] for choice in right]
        else:
            cut += 1
            assert '"code":"replica_lost"' in text.strip().splitlines()[-1]
    for streamed, _, text in answers:
        if not streamed:
            assert [_texts(choice) for choice in json.loads(text)["choices"]] == [_texts(choice) for choice in right]
    print(f"{len(answers)} answers, {cut} streams cut")
    until(served.idle)


def test_with_every_replica_dead_nobody_is_ready_and_requests_wait_for_the_next(served: Served, local: Api) -> None:
    for process in served.replicas():
        os.kill(process, signal.SIGKILL)
    right = local.complete()["choices"][0]["text"]
    answer = served.client.post("/v1/completions", json={"prompt": QUESTION})
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == right
    until(lambda: served.client.get("/ready").status_code == 200 and served.metric("replicas") == 2)


def test_at_sigterm_running_requests_finish_new_ones_are_refused_and_nothing_is_left(served: Served) -> None:
    body = {**LONG, "n": 64, "stream": True}
    with (
        httpx.Client(base_url=served.url, timeout=FAILSAFE) as other,
        served.client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        served.process.send_signal(signal.SIGTERM)
        while (ready := other.get("/ready")).status_code == 200:
            pass
        assert ready.json()["status"] == "draining"
        late = other.post("/v1/completions", json={"prompt": QUESTION})
        assert late.status_code == 503 and late.json()["error"]["code"] == "shutting_down"
        text = "\n".join(lines)
    events = chunks(text)
    assert sum(choice["finish_reason"] is not None for event in events for choice in event["choices"]) == 64
    assert served.process.wait(FAILSAFE) == 0
    until(lambda: not served.replicas())
    served.end()
    others = "".join(line for line in served.told if not line.startswith("rcd: ready on "))
    assert others == ""  # nothing of Ray's own


def test_replicas_follow_the_load() -> None:
    """From one to two while each has more requests than it should, and back when there are none."""
    more = ["--max-replicas", "2", "--target-ongoing", "1", "--upscale-delay", "0", "--downscale-delay", "1"]
    served = Served("--replicas", "auto", *more)
    try:
        assert served.metric("replicas") == 1
        over = threading.Event()

        def ask() -> None:
            with httpx.Client(base_url=served.url, timeout=FAILSAFE) as client:
                while not over.is_set():
                    assert client.post("/v1/completions", json=LONG).status_code == 200

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        until(lambda: served.metric("replicas") == 2)
        over.set()
        for thread in threads:
            thread.join(FAILSAFE)
        until(lambda: served.metric("replicas") == 1)
    finally:
        assert served.end() == 0
