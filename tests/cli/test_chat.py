"""`rcd chat`: turns, commands, pipes, Ctrl-C."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rcd
from rcd.cli.live import Canvas
from rcd.cli.main import app
from rcd.cli.session import COMMANDS, Session
from rcd.decode.events import Step
from rcd.errors import RCDError
from rcd.models.toy import toy, toy_tokenizer
from tests.batches import save_model
from tests.processes import GatedChild, Screen

SETTINGS = ["--max-new-tokens", "8", "--device", "cpu"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("chat") / "model")


def talk(model: str, *lines: str, more: tuple[str, ...] = ()) -> tuple[list[str], list[str]]:
    """What goes to stdout and to stderr."""
    result = CliRunner().invoke(app, ["chat", "--model", model, *SETTINGS, *more], input="\n".join(lines))
    assert result.exit_code == 0, result.exception
    return result.stdout.splitlines(), result.stderr.splitlines()


def answer(model: str, messages: list[dict[str, str]], **settings: object) -> str:
    config = rcd.DecodeConfig(**{"max_new_tokens": 8, **settings})  # type: ignore[arg-type]
    return rcd.load(model, device="cpu").generate([messages], config).texts[0]


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_a_turn_knows_the_turns_before_it(model: str) -> None:
    first = answer(model, [said("user", "the old fox")])
    second = answer(model, [said("user", "the old fox"), said("assistant", first), said("user", "a red river")])
    alone = answer(model, [said("user", "a red river")])
    shown, heard = talk(model, "the old fox", "", "a red river", "/clear", "a red river")
    assert shown == [first, second, alone] and second != alone
    assert heard == ["the conversation begins anew."]


def test_without_a_template_each_turn_stands_alone_and_that_is_said_once(tmp_path: Path) -> None:
    plain = str(tmp_path / "plain")
    rcd.Pipeline(toy("sdar", seed=2, spread=6.0, tokenizer=toy_tokenizer(128))).save(plain)
    shown, heard = talk(plain, "the old fox", "the old fox", "/system be old")
    assert len(shown) == 2 and shown[0] == shown[1]
    assert heard == [
        f"rcd: note: {plain} has no chat template: each turn stands alone",
        "rcd: this model has no chat template, so that no system text reaches it.",
    ]


def test_commands_change_what_comes_after_them(model: str) -> None:
    turn = [said("user", "the old fox")]
    shown, _ = talk(model, "/rcd", "/threshold 0.3", "the old fox", "/clear", "/seqd", "the old fox", "/clear",
                    "/set max_new_tokens=3 temperature=0.7 seed=4", "the old fox")  # fmt: skip
    assert shown == [
        answer(model, turn, carry="residual", threshold=0.3),
        answer(model, turn, carry="none", threshold=0.3),
        answer(model, turn, carry="none", threshold=0.3, max_new_tokens=3, temperature=0.7, seed=4),
    ]
    shown, heard = talk(model, "/system be old", "the old fox", "/quit", "the old fox")
    assert shown == [answer(model, [said("system", "be old"), *turn])] and heard == ["the system text is set."]
    assert talk(model, "the old fox", more=("--system", "be old"))[0] == shown


def test_a_bad_command_is_one_sentence_and_the_session_goes_on(model: str) -> None:
    lines = {
        "/threshld 1": "rcd: unknown command '/threshld' (did you mean '/threshold'?); choose from: /clear, ",
        "/threshold 7": "rcd: threshold must be in [0, 1], not 7",
        "/threshold x": "rcd: threshold must be in [0, 1], not 'x'",
        "/steps 0": "rcd: num_inference_steps must be a whole number of 1 or more, not 0.",
        "/set treshold=1": "rcd: unknown decoding setting 'treshold' (did you mean 'threshold'?)",
        "/set window=bidirectional": "rcd: the window 'bidirectional' does not fit this checkpoint",
        "/set 'a": 'rcd: a quotation mark in "\'a" is not closed; close it.',
        "/quit now": "rcd: /quit stands alone; leave 'now' out.",
        "/set max_new_tokens=100000": "max_new_tokens=100000.",
        "the fox": "rcd: the prompt has ",
        "/": "rcd: unknown command '/'",
    }
    shown, heard = talk(model, *lines, "/set max_new_tokens=8", "the old fox")
    assert len(heard) == len(lines) + 1
    for line, expected in zip(heard, lines.values(), strict=False):
        assert line.startswith(expected)
    assert shown == [answer(model, [said("user", "the old fox")])]


def test_help_names_every_command_and_each_has_a_method(model: str) -> None:
    session = Session(rcd.load(model, device="cpu"), rcd.DecodeConfig(), remembers=True)
    told = session.command("/help")
    assert [line.split()[0] for line in told.splitlines()] == [f"/{name}" for name in COMMANDS]
    assert session.command("/set") == "every setting is at its default."
    session.command("/steps 3")
    assert session.command("/set") == "num_inference_steps=3"
    session.command("/steps")
    assert session.asked == rcd.DecodeConfig() and session.command("/threshold") == "the threshold is 0.85."


def test_a_conversation_that_is_too_long_says_how_to_go_on(model: str) -> None:
    long = "fox " * (rcd.load(model, device="cpu").settings.context_length * 3 // 5)
    shown, heard = talk(model, long, long, "/clear", long)
    assert len(shown) == 2 and len(heard) == 2
    assert heard[0].startswith("rcd: the prompt has ") and heard[0].endswith("Or forget the turns so far: /clear.")


def test_a_model_that_knows_no_text_is_refused(tmp_path: Path) -> None:
    rcd.Pipeline(toy("sdar")).save(tmp_path / "ids")
    error = CliRunner().invoke(app, ["chat", "--model", str(tmp_path / "ids"), *SETTINGS]).exception
    assert isinstance(error, RCDError) and "this checkpoint has no tokenizer" in str(error)


def test_ctrl_c_stops_an_answer_and_keeps_the_session(model: str) -> None:
    """The first answer is cut after two steps; the second turn is told what was kept of it."""
    seen = Canvas(pipeline := rcd.load(model, device="cpu"))
    turn = [said("user", "the old fox")]
    config = rcd.DecodeConfig(max_new_tokens=8, threshold=1.0)
    steps = [event for event in pipeline.stream([turn], config) if isinstance(event, Step)]
    for step in steps[:4]:
        seen.see(step)
    kept = seen.committed()
    after = [*turn, said("assistant", kept), said("user", "a red river")]
    screen = Screen()
    command = ["chat", "--model", model, *SETTINGS, "--threshold", "1"]
    with GatedChild(command, "rcd.cli.live:Canvas.see", call=4, after=True, screen=screen) as child:
        screen.wait("> ")
        screen.type("the old fox\n")
        child.arrive()
        child.send(signal.SIGINT)
        child.open()
        screen.wait("> ", 2)
        screen.type("a red river\n")
        screen.wait("> ", 3)
        screen.type("\x04")
        code, shown, _ = child.finish()
    assert code == 0 and "Traceback" not in shown
    assert f"{kept}\r\nstopped; {len(seen.tokens)} tokens committed in 4 denoising steps\r\n" in shown
    assert f"{answer(model, after, threshold=1.0)}\r\n" in shown


@pytest.mark.parametrize("place", ["Session.prompt", "Session.keep", "Session.command"])
def test_ctrl_c_beside_the_decoding_keeps_the_session_as_well(model: str, place: str) -> None:
    screen = Screen()
    command = ["chat", "--model", model, *SETTINGS]
    with GatedChild(command, f"rcd.cli.session:{place}", screen=screen) as child:
        screen.wait("> ")
        screen.type("/threshold 1\n" if place == "Session.command" else "the old fox\n")
        child.arrive()
        child.send(signal.SIGINT)
        child.open()
        screen.wait("> ", 2)
        screen.type("a red river\n")  # nothing of the turn that was stopped is kept
        screen.wait("> ", 3)
        screen.type("\x04")
        code, shown, _ = child.finish()
    assert code == 0 and "stopped\r\n" in shown and "Traceback" not in shown
    assert f"{answer(model, [said('user', 'a red river')])}\r\n" in shown
