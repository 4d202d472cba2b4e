"""What a person sees of decoding: the live view, Ctrl-C, and texts that would steer the terminal."""

from __future__ import annotations

import io
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import rcd
from rcd.cli.live import Canvas, legend
from rcd.decode.events import Step
from rcd.models.toy import WORDS
from rcd.terminal import neutral, neutral_json, show
from tests.batches import save_model
from tests.processes import GatedChild, Screen, finish

STEERING = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z])")
"""What rich writes: colours and movements of the cursor."""
EVIL = "\x1b[31m\x1b]0;title\x07\x9b2J\u202eabc\u2066\r\x00\x7f"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("live") / "model")


def generate(model: str, *more: str) -> list[str]:
    return ["generate", "the old fox", "--model", model, "--device", "cpu", "--raw", "--max-new-tokens", "60", *more]


# -- neutralising ---------------------------------------------------------------------------------------------------


def test_control_characters_are_shown_and_nothing_else_is_changed() -> None:
    assert neutral(EVIL) == "␛[31m␛]0;title␇\\x9b2J\\u202eabc\\u2066␍␀␡"
    plain = "a\tb\nc \u00e9 日本 👩‍👩‍👧 שלום \u200e-\u200f"
    assert neutral(plain) == plain
    assert neutral("a\r\nb") == "a\nb" and neutral("\ud800") == "\ufffd"


def test_json_for_a_terminal_means_the_same() -> None:
    text = json.dumps({"text": EVIL, "more": "日本"}, ensure_ascii=False)
    safe = neutral_json(text)
    assert json.loads(safe) == json.loads(text)
    assert not re.search("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", safe) and "日本" in safe


def test_a_pipe_gets_the_text_as_it_is() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    pipe, terminal = io.StringIO(), Terminal()
    show(EVIL, pipe)
    show(EVIL, terminal)
    assert pipe.getvalue() == f"{EVIL}\n" and terminal.getvalue() == f"{neutral(EVIL)}\n"


def test_no_text_of_a_model_steers_the_terminal(model: str, tmp_path: Path) -> None:
    pipeline = rcd.load(model, device="cpu")
    evil = json.loads(pipeline.tokenizer.backend_tokenizer.to_str())  # type: ignore[union-attr]
    words = {f"\x1b[31m{word}" if word in WORDS else word: token for word, token in evil["model"]["vocab"].items()}
    pipeline.save(tmp_path / "evil")
    evil["model"]["vocab"] = words
    (tmp_path / "evil" / "tokenizer.json").write_text(json.dumps(evil))
    command = generate(str(tmp_path / "evil"))
    piped = finish([sys.executable, "-m", "rcd.cli.main", *command])
    assert "\x1b[31m" in piped.stdout, "a pipe gets what the model wrote"
    screen = Screen()
    with GatedChild(command, "rcd.cli.live:Canvas.see", call=10**6, screen=screen) as child:
        code, seen, _ = child.finish()
    assert code == 0 and "␛[31m" in seen
    assert not re.search(r"\x1b\[31m", seen), "rich names its colours otherwise"
    assert "\x1b" not in STEERING.sub("", seen)


# -- the view -------------------------------------------------------------------------------------------------------


class Letters:
    """A pipeline whose tokens are given texts."""

    tokenizer = object()

    def __init__(self, texts: list[str], settings: Any) -> None:
        self.texts, self.settings = ["x", *texts], settings

    def decode(self, ids: list[int]) -> str:
        return "".join(self.texts[token] for token in ids)


TEXTS = ["The", " fox", "es", " run", ".", " 日本語", " \x1b[2J"]


def canvas(model: str, masks: set[int], alpha: float = 0.5) -> Canvas:
    settings = rcd.load(model, device="cpu").settings
    shown = Canvas(Letters(TEXTS, settings), 1.0)  # type: ignore[arg-type]
    masked = torch.tensor([place in masks for place in range(len(TEXTS))])
    never, tokens = torch.zeros_like(masked), torch.arange(1, len(TEXTS) + 1)
    shown.see(Step(0, 0, 3, 0, tokens, never, never, masked, torch.ones(len(TEXTS)), torch.full((len(TEXTS),), alpha)))
    return shown


def test_masks_stand_apart_from_text(model: str) -> None:
    assert canvas(model, {1, 2}).text().plain == "The ▓▓ run. 日本語 ␛[2J"
    assert canvas(model, {2}).text().plain == "The fox ▓ run. 日本語 ␛[2J"
    assert canvas(model, {3}).text().plain == "The foxes ▓ . 日本語 ␛[2J"
    assert canvas(model, {0}).text().plain == "▓ foxes run. 日本語 ␛[2J"


def test_committed_text_has_gaps_where_masks_were(model: str) -> None:
    assert canvas(model, {1, 2, 6}).committed() == "The … run. 日本語"
    assert canvas(model, {0}).committed() == "… foxes run. 日本語 \x1b[2J", "`show` makes it neutral"
    assert canvas(model, set(range(7))).committed() == ""


@pytest.mark.parametrize(("width", "height"), [(80, 24), (30, 24), (9, 6), (4, 4)])
def test_the_view_fits_any_terminal(model: str, width: int, height: int) -> None:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True)
    lines = console.render_lines(canvas(model, {1, 6}), pad=False)
    assert len(lines) < height
    assert all(sum(part.cell_length for part in line) <= width for line in lines)


def test_the_legend_says_what_is_seen() -> None:
    assert legend(1.0).plain == "· mask  ░▒▓█ mask with its last prediction, by weight  ⏹ end  new in this step"
    assert legend(0.0).plain == "· mask  ⏹ end  new in this step", "without a carry nothing is shaded"


def test_a_long_line_is_one_line_however_narrow_the_terminal(model: str) -> None:
    screen = Screen(columns=20)
    with GatedChild(generate(model), "rcd.cli.live:Canvas.see", call=10**6, screen=screen) as child:
        code, seen, _ = child.finish()
    text = (
        rcd.load(model, device="cpu").generate("the old fox", rcd.DecodeConfig(max_new_tokens=60), chat=False).texts[0]
    )
    assert code == 0 and len(text) > 60
    assert f"{text}\r\n" in seen
    assert "· mask" in seen and "\x1b[?25h" in seen, "a legend; the cursor is there again"


# -- Ctrl-C ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("terminal", [False, True])
def test_ctrl_c_keeps_what_is_committed(model: str, terminal: bool) -> None:
    screen = Screen() if terminal else None
    with GatedChild(generate(model), "rcd.cli.live:Canvas.see", call=12, after=True, screen=screen) as child:
        child.arrive()
        child.send(signal.SIGINT)
        child.open()
        code, shown, heard = child.finish()
    seen = Canvas(pipeline := rcd.load(model, device="cpu"))
    config = rcd.DecodeConfig(max_new_tokens=60)
    steps = [event for event in pipeline.stream("the old fox", config, chat=False) if isinstance(event, Step)]
    for step in steps[:12]:
        seen.see(step)
    told = f"rcd: interrupted; {len(seen.tokens)} tokens committed in 12 denoising steps"
    assert code == 130 and seen.committed()
    assert (shown + heard).count(told) == 1 and "Traceback" not in shown + heard
    if terminal:
        assert shown.endswith(f"{seen.committed()}\r\n\r\x1b[K{told}\r\n") and "\x1b[?25h" in shown
    else:
        assert (shown, heard) == (f"{seen.committed()}\n", f"{told}\n")


def test_given_tokens_are_told_apart_from_masks_and_from_new_ones(model: str) -> None:
    pipeline = rcd.load(model)
    canvas = pipeline.canvas_ids("[MASK:2] sees a [MASK:2]")
    view = Canvas(pipeline, 0.0, canvas)
    told = view.text()
    assert "sees a" in told.plain and told.plain.count("·") == 4
    assert [str(span.style) for span in told.spans].count("cyan") == 1
    assert "given" in legend(0.0, True).plain and "given" not in legend(0.0).plain
