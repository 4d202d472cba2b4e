"""`rcd bench serve`: its clients count what they should, and it says what went wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rcd
from rcd.bench.client import Answer, Server, closed_loop
from rcd.bench.serve import Figure, Load, Round, gauges
from rcd.bench.soak import slope, soak
from rcd.cli.main import app
from rcd.errors import RCDError
from rcd.serve.service import LocalService
from rcd.serve.settings import ServeSettings
from tests.cli.test_bench import refused
from tests.serve.conftest import OTHER, QUESTION, Running

PROMPTS = [QUESTION, OTHER]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    settings = ServeSettings(port=0)
    one = Running(LocalService({"words-rcd": rcd.load("bundled:words-rcd")}, settings), settings)
    yield one
    one.end()


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_clients_read_every_answer_to_its_end(running: Running, streamed: bool, chat: bool) -> None:
    load = Load(PROMPTS, chat)
    want = [one.text for one in rcd.load("bundled:words-rcd").generate(PROMPTS).results]
    answers = asyncio.run(closed_loop(Server(running.url, load.path), load.bodies(streamed), 3, requests=10))
    assert sorted(one.request for one in answers) == list(range(10))
    assert all(one.error is None and one.status == 200 for one in answers)
    assert all(one.text == want[one.request % 2] and one.tokens for one in answers)
    assert all((one.first is not None) == streamed for one in answers)


def test_a_refusal_and_a_server_that_is_not_there_are_counted_as_lost(running: Running) -> None:
    bad = Load(PROMPTS, more={"max_tokens": -1})
    asked = asyncio.run(closed_loop(Server(running.url, bad.path), bad.bodies(False), 2, requests=4))
    gone = asyncio.run(closed_loop(Server("http://127.0.0.1:1", bad.path), bad.bodies(False), 2, requests=4))
    for answers, what in ((asked, "max_tokens"), (gone, "Connect")):
        found = Figure("a", "plain", 2, [Round(1.0, answers)]).to_json()
        assert found["lost"] == 4 and found["answered"] == 0 and what in found["error"]


def test_a_stream_that_breaks_off_is_lost() -> None:
    async def run() -> Answer:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            event = b'data: {"choices": [{"text": "half"}]}\r\n\r\n'
            head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            writer.write(head + f"{len(event):x}\r\n".encode() + event + b"\r\n0\r\n\r\n")
            await writer.drain()
            writer.close()

        made = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with made:
            url = f"http://127.0.0.1:{made.sockets[0].getsockname()[1]}"
            return (await closed_loop(Server(url), [b"{}"], 1, requests=1))[0]

    answer = asyncio.run(run())
    assert answer.text == "half" and answer.error == "the stream ended without [DONE]"


def test_a_soak_finds_a_server_as_idle_as_before(running: Running) -> None:
    want = [one.text for one in rcd.load("bundled:words-rcd").generate(PROMPTS).results]
    found = soak(Server(running.url), Load(PROMPTS), 4, 120, want)
    assert (found.answered, found.lost, found.other_text) == (120, 0, 0)
    assert not {name for name in found.left if name.startswith("rcd_")}


def test_ratios_are_those_of_a_round() -> None:
    answers = [[Answer(0, 200, 0.1, text="a", tokens=3, ended=1.0)] * count for count in (10, 20, 40, 10)]
    rounds = [Round(1.0, some) for some in answers]
    found = Figure("a", "plain", 2, [rounds[0], rounds[1]], [rounds[1], rounds[2]], ["a"]).to_json()
    assert found["over_base"] == [0.5, 0.5, 0.5] and found["requests_per_second"][0] == 15
    assert found["tokens_per_second"][0] == 45 and found["other_text"] == 0
    assert Figure("a", "plain", 2, [rounds[0]], texts=["b"]).to_json()["other_text"] == 10


def test_memory_grows_by_the_slope_of_its_points() -> None:
    assert slope([(0, 5.0), (1, 7.0), (2, 9.0)]) == pytest.approx(2.0)
    assert gauges('# HELP a b\na{model="x"} 1\na{model="y"} 2.5\nb 3\n') == {"a": 3.5, "b": 3.0}


def test_it_starts_a_server_of_its_own_and_writes_what_it_prints(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    args = f"bench serve --seconds 0.5 --rounds 1 --clients 2 --max-batch 2 --set threshold=0.8 --output {path} --json"
    done = CliRunner().invoke(app, args.split())
    assert done.exit_code == 0, done.exception
    found: Any = json.loads(done.stdout)
    assert found == json.loads(path.read_text()) and found["set"] == ["threshold=0.8"]
    assert [row["how"] for row in found["rows"]] == ["offline", "plain", "streamed"]
    assert all(row["lost"] == 0 for row in found["rows"])


def test_two_servers_are_asked_in_turns_each_with_fields_of_its_own(running: Running, tmp_path: Path) -> None:
    urls = [f"--url={name}={running.url},rcd.threshold={threshold}" for name, threshold in (("a", 0.5), ("b", 1.0))]
    args = [
        "bench",
        "serve",
        *urls,
        "--seconds",
        "0.5",
        "--rounds",
        "1",
        "--clients",
        "1,2",
        "--way",
        "plain",
        "--json",
    ]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.exception
    found = json.loads(done.stdout)
    assert [(row["server"], row["clients"]) for row in found["rows"]] == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert found["servers"]["a"] == [running.url, {"rcd": {"threshold": 0.5}}] and found["base"] == "a"
    assert all(row["lost"] == 0 and row["cpu_ms"][0] > 0 for row in found["rows"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--url nothing", "NAME=http://HOST:PORT"),
        ("--url a=ftp://b:1", "NAME=http://HOST:PORT"),
        ("--url a=http://127.0.0.1:1,steps", "FIELD=VALUE"),
        ("--way sideways", "plain"),
        ("--url a=http://127.0.0.1:1 --url b=http://127.0.0.1:2 --requests 200", "one --url"),
        ("--url a=http://127.0.0.1:1 --requests 200", "does not answer"),
        ("--body []", "JSON object"),
        ("--input nowhere.txt", "it is not there"),
        ("--clients 0", "1 or more"),
        ("--seconds 0", "0.5 or more"),
        ("--model bundled:nothing", "nothing"),
        ("--set nothing=1", "nothing"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(flags: str, words: str) -> None:
    assert words in refused("bench", "serve", *flags.split())


def test_an_address_is_checked() -> None:
    with pytest.raises(RCDError, match="no address"):
        _ = Server("file:///x").address
