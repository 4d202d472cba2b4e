"""The live view: tokens appear as they are committed, masks are shaded by the weight of their residual."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from rcd.errors import RCDError
from rcd.evaluate.wording import counted
from rcd.terminal import neutral, show

if TYPE_CHECKING:
    from rcd.api import Generation, Pipeline
    from rcd.decode.events import Event, Finished, Step

STOPS = {
    "eos": "the model ended its text",
    "stop": "a stop string or stop token ended it",
    "length": "the length was reached",
}
SHADES, END = "·░▒▓█", "⏹"
"""A mask by its alpha: none yet, then in quarters of the largest that the carry gives; a place behind the end."""
NEW, GIVEN = "bold green", "cyan"
"""The style of what was committed in the last step, and of what a canvas gives."""
GAP = "…"
"""Masks in a text that was cut short."""


class Stopped(KeyboardInterrupt):
    """Ctrl-C while an answer was decoded; what was committed by then has been printed."""

    def __init__(self, text: str, told: str) -> None:
        super().__init__(told)
        self.text, self.told = text, told


def shade(alpha: float, most: float = 1.0) -> tuple[str, str]:
    """(character, style) of a mask that carries a residual of that weight, where `most` is the largest."""
    if alpha <= 0 or most <= 0:
        return SHADES[0], "dim"
    warmth = min(1.0, alpha / most)
    level = min(len(SHADES) - 1, 1 + int(warmth * (len(SHADES) - 1)))
    return SHADES[level], f"rgb({int(90 + 150 * warmth)},{int(150 + 20 * warmth)},{int(220 - 130 * warmth)})"


def legend(most: float, given: bool = False) -> Text:
    """What a reader of the live view sees; `most` is the alpha of the darkest shade, 0 without a carry; `given`:
    whether a canvas gives tokens."""
    out = Text(f"{SHADES[0]} mask", style="dim")
    if most > 0:
        out.append("  ")
        for level, character in enumerate(SHADES[1:], 1):
            out.append(character, style=shade(most * (level - 0.5) / (len(SHADES) - 1), most)[1])
        out.append(" mask with its last prediction, by weight")
    out.append(f"  {END} end  ")
    if given:
        out.append("given", style=f"not dim {GIVEN}").append("  ")
    out.append("new", style=f"not dim {NEW}")
    return out.append(" in this step")


class Canvas:
    """The text so far, as a renderable: committed runs as text, masks as shades, no taller than the terminal."""

    def __init__(self, pipeline: Pipeline, most: float = 1.0, canvas: Sequence[int] = ()):
        """`most` is the alpha of the darkest shade, the carry's `strongest`; `canvas` gives some of the tokens."""
        self.pipeline, self.most = pipeline, most
        mask = pipeline.settings.mask_token_id
        self.tokens = {place: token for place, token in enumerate(canvas) if token != mask}
        self.given = frozenset(self.tokens)
        self.new: set[int] = set()
        self.masks = {place: 0.0 for place, token in enumerate(canvas) if token == mask}
        self.steps = 0
        self.cut: str | None = None
        """The answer before a stop string."""

    def see(self, event: Step) -> None:
        self.steps, self.new = event.number, set()
        alpha = None if event.alpha is None else event.alpha.tolist()
        committed, masked, draft = event.committed.tolist(), event.masked.tolist(), event.draft.tolist()
        for j in range(len(draft)):
            position = event.offset + j
            if position < 0:
                continue
            if masked[j]:
                self.masks[position] = 0.0 if alpha is None else alpha[j]
            else:
                self.masks.pop(position, None)
                self.tokens[position] = draft[j]
                if committed[j]:
                    self.new.add(position)

    def finish(self, done: Finished) -> None:
        self.tokens, self.new, self.masks, self.cut = dict(enumerate(done.ids)), set(), {}, done.text

    def shade(self, position: int) -> tuple[str, str]:
        return shade(self.masks.get(position, 0.0), self.most)

    def text(self) -> Text:
        if self.cut is not None:
            return Text(neutral(self.cut))
        out = Text()
        for kind, positions in self._runs():
            if kind == "mask":
                out.append("" if not out.plain or out.plain[-1].isspace() else " ")
                for position in positions:
                    out.append(*self.shade(position))
            elif kind == "end":
                out.append(_apart(out.plain, END * (len(positions) if self.masks else 0)), style="dim")
            else:
                words = neutral(self._words([self.tokens[position] for position in positions]))
                out.append(_apart(out.plain, words), style={"new": NEW, "given": GIVEN}.get(kind, ""))
        return out

    def committed(self) -> str:
        """What is text by now, up to the first end token; masks in the midst of it are a gap."""
        if self.cut is not None:
            return self.cut
        out = ""
        for kind, positions in self._runs():
            if kind == "end":
                break
            if kind == "mask":
                out += f" {GAP}" if out and not out[-1].isspace() else GAP
            else:
                out += _apart(out if out.endswith(GAP) else "", self._words([self.tokens[p] for p in positions]))
        return out.removesuffix(GAP).strip(" ")

    def _runs(self) -> Iterator[tuple[str, list[int]]]:
        """Positions of one kind that stand together."""
        ends = set(self.pipeline.settings.eos_token_ids)
        length = max([*self.tokens, *self.masks], default=-1) + 1
        for kind, run in groupby(range(length), key=lambda position: self._kind(position, ends)):
            yield kind, list(run)

    def _kind(self, position: int, ends: set[int]) -> str:
        if position not in self.tokens:
            return "mask"
        if self.tokens[position] in ends:
            return "end"
        if position in self.given:
            return "given"
        return "new" if position in self.new else "old"

    def _words(self, ids: list[int]) -> str:
        """A run of tokens as text, with the space that stands before it in the middle of a sentence."""
        if self.pipeline.tokenizer is None:
            return "".join(f" {token}" for token in ids)
        return self.pipeline.decode([*self._anchor, *ids])[len(self.pipeline.decode(self._anchor)) :]

    @cached_property
    def _anchor(self) -> list[int]:
        """Some ordinary word: decoding behind it keeps the leading space that a tokenizer drops at a text's start."""
        tokens = range(self.pipeline.settings.vocab_size)
        return [next((token for token in tokens if self.pipeline.decode([token]).strip().isalnum()), 0)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = options.height or console.height
        lines = list(self.text().wrap(console, options.max_width))
        below = list(legend(self.most, bool(self.given)).wrap(console, options.max_width))
        below = below if len(below) <= height // 4 else []  # a small terminal shows the text
        yield from lines[-max(1, height - len(below) - 3) :]
        told = f"step {self.steps}" if self.steps else "reading the prompt ..."
        yield Text(told, style="dim", no_wrap=True, overflow="crop")
        yield from below


def _apart(before: str, text: str) -> str:
    """The text with a space before it where it would run together with masks or with the end's marks."""
    marks = bool(before) and before[-1] in f"{SHADES}{END}{GAP}"
    if not before:
        return text.lstrip(" ")
    return f" {text}" if marks and text and not text[0].isspace() else text


def follow(
    pipeline: Pipeline, events: Iterator[Event], console: Console | None = None, most: float = 1.0,
    canvas: Sequence[int] = (), before: Sequence[int] = (),
) -> Finished:  # fmt: skip
    """Show the events of one prompt as they come (nothing where the output is no terminal), and print its text; returns
    the last. `most` is the alpha of the darkest shade; `canvas` is what the answer's tokens are given by; `before` is
    printed before the answer.

    The moving part is taken away at the end and the whole text printed, however long it is: one line of the text is one
    line, whatever the terminal's width. Ctrl-C prints what is committed and raises `Stopped`.
    """
    view = Canvas(pipeline, most, canvas)
    try:
        with closing(events):  # type: ignore[type-var]
            done = _watch(view, events, console or Console())
    except KeyboardInterrupt as error:
        text = view.committed()
        if text:
            show(text)
        steps, tokens = counted(view.steps, "denoising step"), len(view.tokens) - len(view.given)
        raise Stopped(text, f"{counted(tokens, 'token')} committed in {steps}" if text else "") from error
    show(_joined(pipeline, before, done))
    return done


def _joined(pipeline: Pipeline, before: Sequence[int], done: Finished) -> str:
    """The answer behind some tokens, with the space that stands between them."""
    answer = pipeline.generation(done, 0.0).text
    first = pipeline.decode(before)
    behind = pipeline.decode([*before, *done.ids])[len(first) :]
    space = " " if before and behind.startswith(" ") else ""
    return f"{first}{space}{answer.removeprefix(space)}"


def _watch(canvas: Canvas, events: Iterator[Event], console: Console) -> Finished:
    from rcd.decode.events import Finished, Step

    moving = console.is_terminal and not console.is_dumb_terminal and sys.stdout.isatty()
    # no refreshing thread: it would still run while the interpreter ends
    with Live(canvas, console=console, auto_refresh=False, transient=True) if moving else nullcontext() as live:
        drawn = 0.0
        for event in events:
            if isinstance(event, Finished):
                return event
            if not isinstance(event, Step):
                raise RCDError(event.message)
            canvas.see(event)
            if live is not None and time.monotonic() - drawn > 0.04:
                live.refresh()
                drawn = time.monotonic()
    raise RCDError("decoding ended without an answer; try it again.")


def summary(result: Generation) -> str:
    """One line of figures."""
    tokens, steps = counted(result.tokens, "token"), counted(result.denoising_steps, "denoising step")
    why = STOPS[result.stop_reason]
    return (
        f"{tokens} in {steps} ({result.tokens_per_step:.2f} a step), "
        f"{counted(result.forwards, 'forward')}, {result.seconds:.2f} s; {why}."
    )
