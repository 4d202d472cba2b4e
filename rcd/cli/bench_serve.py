"""`rcd bench serve`: what a server answers under load."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rcd.cli import options as opt
from rcd.cli.bench import Json, Output, check_output, device_name, finish, numbers, torch_version
from rcd.cli.flags import Given
from rcd.cli.serve import Configured, check_extra
from rcd.errors import RCDError, number, one_of, reason, whole
from rcd.jsons import NotJSON, parsed

if TYPE_CHECKING:
    from rcd.bench.client import Server
    from rcd.bench.serve import Load, Round

PROMPTS = 256
"""Problems that are asked in turn."""


def serve(
    model: opt.Model = opt.DEFAULT_MODEL,
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=http://HOST:PORT of a server that runs already, instead of one of our own, and fields of its "
            "requests: NAME=URL,rcd.steps=16; may be repeated."
        ),
    ] = None,
    clients: Annotated[str, typer.Option(help="That ask at once, or several such numbers: 1,4,16.")] = "32",
    seconds: Annotated[float, typer.Option(help="Of every measurement.")] = 10.0,
    rounds: Annotated[int, typer.Option(help="In which every way of asking has its turn.")] = 3,
    requests: Annotated[
        int | None,
        typer.Option(help="Ask so many instead, plain and streamed in turns, and watch the server's memory."),
    ] = None,
    way: Annotated[str, typer.Option(help="plain, streamed, or both.")] = "both",
    chat: Annotated[bool, typer.Option("--chat", help="/v1/chat/completions instead of /v1/completions.")] = False,
    body: Annotated[str, typer.Option(help="A JSON object: further fields of every request.")] = "{}",
    input: Annotated[
        Path | None, typer.Option(help="A file of prompts, one a line; by default problems of the model's task.")
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Rows of the server and of the engine alone.")] = 32,
    carry: opt.CarryOf = opt.TRAINED,
    settings: opt.Settings = None,
    threads: opt.Threads = None,
    as_json: Json = False,
    output: Output = None,
) -> None:
    """Requests a second of a server under a closed loop of clients, beside the engine alone.

    Each client asks, reads the whole answer and asks again. Without --url a server is started in a process of its own,
    and the engine without a server (offline) answers the same prompts with the same settings and threads in the same
    rounds. Ratios are medians over rounds, with quartiles; times are this machine's.
    """
    check_extra()
    number("seconds", seconds, least=0.5)
    whole("rounds", rounds, least=1)
    check_output(output)
    one_of("way", way, ("plain", "streamed", "both"))
    ways = ("plain", "streamed") if way == "both" else (way,)
    plan = Plan(numbers("--clients", clients), ways, seconds, rounds, requests)
    fields, lines = read_fields(body), read_prompts(input)
    others = dict(map(named_url, url or ()))
    if others:
        if requests is not None and len(others) > 1:
            raise RCDError("--requests looks at one server; give one --url.")
        found = plan.of_others(others, lines or problems("words"), chat, fields)
    else:
        found = plan.of_ours(model, Given(texts=settings or ()), carry, max_batch, threads, lines, chat, fields)
    if not as_json:
        print("\n".join(table(found)))
    finish(found, as_json, output)


@dataclass(frozen=True)
class Plan:
    """How long and how often is measured."""

    clients: list[int]
    ways: Sequence[str]
    seconds: float
    rounds: int
    requests: int | None

    def of_others(
        self, servers: dict[str, tuple[str, dict[str, Any]]], prompts: list[str], chat: bool, fields: dict[str, Any]
    ) -> dict[str, Any]:
        from rcd.bench.client import Server
        from rcd.bench.serve import Load

        asked = {}
        for name, (url, own) in servers.items():
            load = Load(prompts, chat, {**fields, **own})
            asked[name] = Server(url, load.path), load
        return self._measured(asked) | {"servers": servers, "chat": chat, "body": fields, "prompts": len(prompts)}

    def of_ours(
        self, model: str, given: Given, carry: str, max_batch: int, threads: int | None, prompts: list[str], chat: bool,
        fields: dict[str, Any],
    ) -> dict[str, Any]:  # fmt: skip
        import torch

        from rcd.api import load as load_model
        from rcd.bench import serve as bench
        from rcd.models.threads import limit_threads
        from rcd.serve.cards import task_of

        config = given.config()
        pipeline = load_model(model)
        limit_threads([pipeline], threads)
        config = Configured(config, given, carry)(pipeline)
        load = bench.Load(prompts or problems(task_of(pipeline) or "words"), chat, fields)
        asked = bench.jobs_of(pipeline, load, config)
        flags = ["--max-batch", str(max_batch), "--carry", carry, *(f"--set={text}" for text in given.texts)]
        flags += [] if threads is None else ["--threads", str(threads)]
        answers = pipeline.generate([job.prompt for job in asked], [job.config for job in asked]).results
        texts = [answer.text for answer in answers]
        with bench.started(model, flags) as url:
            server = {"rcd": (bench.Server(url, load.path), load)}
            found = self._measured(server, bench.Offline(pipeline, asked, max_batch), texts)
        about = {"chat": chat, "body": fields, "prompts": len(load.prompts), "model": model, "carry": carry}
        about |= {"set": list(given.texts), "max_batch": max_batch}
        place = pipeline.model.device
        where = {"threads": torch.get_num_threads(), "torch": torch_version(), "device": device_name(place)}
        return found | about | where

    def _measured(
        self, servers: dict[str, tuple[Server, Load]], alone: Callable[[float], Round] | None = None,
        texts: Sequence[str] = (),
    ) -> dict[str, Any]:  # fmt: skip
        from rcd.bench import serve as bench
        from rcd.bench.soak import soak

        if self.requests is not None:
            ((server, load),) = servers.values()
            found = soak(server, load, self.clients[0], self.requests, texts)
            return {"soak": found.to_json(), "requests": self.requests, "clients": self.clients[0]}
        figures = bench.compare(servers, self.ways, self.clients, self.seconds, self.rounds, alone, texts)
        rows = [figure.to_json() for figure in figures]
        return {"rows": rows, "seconds": self.seconds, "rounds": self.rounds, "base": rows[0]["server"]}


def problems(task: str) -> list[str]:
    from rcd.data.tasks import base

    return [problem.question for problem in base.problems(task, "test", PROMPTS)]


def named_url(text: str) -> tuple[str, tuple[str, dict[str, Any]]]:
    """NAME=URL,FIELD=VALUE,... -> (name, (url, fields)); a dot leads into an object, a value is JSON or a text."""
    address, *more = text.split(",")
    name, equals, url = address.partition("=")
    if not equals or not name or not re.fullmatch(r"http://[^/\s]+/?", url):
        raise RCDError(f"--url {text!r} should be NAME=http://HOST:PORT, or that and ,FIELD=VALUE.")
    fields: dict[str, Any] = {}
    for pair in more:
        path, equals, value = pair.partition("=")
        if not equals or not path:
            raise RCDError(f"--url {text!r}: {pair!r} should be FIELD=VALUE.")
        *outer, last = path.split(".")
        place = fields
        for part in outer:
            place = place.setdefault(part, {})
        with contextlib.suppress(NotJSON):
            value = parsed(value)
        place[last] = value
    return name, (url.rstrip("/"), fields)


def read_fields(text: str) -> dict[str, Any]:
    try:
        found = parsed(text)
    except NotJSON:
        found = None
    if not isinstance(found, dict):
        raise RCDError(f"--body {text!r} should be a JSON object, such as '{{\"max_tokens\": 64}}'.")
    return found


def read_prompts(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise RCDError(f"{path} cannot be read ({reason(error)}); give a file of prompts, one a line.") from error
    if not lines:
        raise RCDError(f"{path} holds no prompt; give one a line.")
    return lines


HEAD = (
    f"{'server':10} {'way':9} {'clients':>7} {'requests/s':>22} {'x first':>20} {'tokens/s':>8} {'CPU ms':>8}"
    + "".join(f" {name:>17}" for name in ("answer, ms", "first text, ms", "between texts, ms"))
)


def table(found: dict[str, Any]) -> list[str]:
    """Medians over rounds with quartiles in brackets; `CPU ms` of a request; other times as p50 / p99."""
    if "soak" in found:
        return soaked(found["soak"])
    lines = [
        "medians over rounds [quartiles]; times in ms: p50 / p99; x first: requests/s over those of the first line",
        HEAD + f" {'answered':>8} {'lost':>5} {'other text':>10}",
    ]
    for row in found["rows"]:
        line = f"{row['server']:10} {row['how']:9} {row['clients'] or '-':>7} "
        line += f"{spread(row['requests_per_second'], 1):>22} "
        line += f"{spread(row.get('over_base'), 3):>20} {row['tokens_per_second'][0]:8.0f} "
        line += f"{row['cpu_ms'][0]:8.1f}" if "cpu_ms" in row else f"{'-':>8}"
        for name in ("latency_ms", "first_text_ms", "between_texts_ms"):
            pair = row[name]
            line += f" {'-' if pair is None else f'{pair[0]:.1f} / {pair[1]:.1f}':>17}"
        lines.append(line + f" {row['answered']:8d} {row['lost']:5d} {row['other_text']:10d}")
        if row["error"]:
            lines.append(f"  one of the lost: {row['error']}")
    return lines


def soaked(soak: dict[str, Any]) -> list[str]:
    left = [f"{name} {before:g} -> {after:g}" for name, (before, after) in soak["left"].items()]
    return [
        f"{soak['answered']} answered, {soak['lost']} lost, {soak['other_text']} with another text than the engine's",
        f"memory {soak['first_mib']} -> {soak['last_mib']} MiB; behind the first fifth "
        f"{soak['bytes_per_request']:,.0f} bytes a request",
        "everything is as idle as before" if not left else f"left behind: {', '.join(left)}",
    ]


def spread(values: list[float] | None, digits: int) -> str:
    if values is None:
        return "-"
    return "{:.{d}f} [{:.{d}f}-{:.{d}f}]".format(*values, d=digits)
