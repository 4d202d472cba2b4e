"""The live view: tokens appear as they are committed, masks are shaded by the weight of their residual."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from contextlib import nullcontext
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from rcd.errors import RCDError
from rcd.evaluate.wording import counted

if TYPE_CHECKING:
    from rcd.api import Generation, Pipeline
    from rcd.decode.events import Event, Finished, Step

STOPS = {
    "eos": "the model ended its text",
    "stop": "a stop string or stop token ended it",
    "length": "the length was reached",
}
SHADES = "·░▒▓█"
"""A mask by its alpha: none yet, then in quarters of the largest that the carry gives."""


def shade(alpha: float, most: float = 1.0) -> tuple[str, str]:
    """(character, style) of a mask that carries a residual of that weight, where `most` is the largest."""
    if alpha <= 0 or most <= 0:
        return SHADES[0], "dim"
    warmth = min(1.0, alpha / most)
    level = min(len(SHADES) - 1, 1 + int(warmth * (len(SHADES) - 1)))
    return SHADES[level], f"rgb({int(90 + 150 * warmth)},{int(150 + 20 * warmth)},{int(220 - 130 * warmth)})"


class Canvas:
    """The text so far, as a renderable: committed runs as text, masks as shades, no taller than the terminal."""

    def __init__(self, pipeline: Pipeline, most: float = 1.0):
        """`most` is the alpha of the darkest shade, the carry's `strongest`."""
        self.pipeline, self.most = pipeline, most
        self.tokens: dict[int, int] = {}
        self.new: set[int] = set()
        self.masks: dict[int, float] = {}
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
            return Text(self.cut)
        out, ends = Text(), set(self.pipeline.settings.eos_token_ids)
        length = max([*self.tokens, *self.masks], default=-1) + 1
        for kind, run in groupby(range(length), key=lambda position: self._kind(position, ends)):
            positions = list(run)
            if kind == "mask":
                out.append(" " if out.plain and not out.plain.endswith((" ", "\n")) else "")
                for position in positions:
                    out.append(*self.shade(position))
            elif kind == "end":
                out.append("⏹" * (len(positions) if self.masks else 0), style="dim")
            else:
                words = self._words([self.tokens[position] for position in positions])
                out.append(words if out.plain else words.lstrip(" "), style="bold green" if kind == "new" else "")
        return out

    def _kind(self, position: int, ends: set[int]) -> str:
        if position not in self.tokens:
            return "mask"
        if self.tokens[position] in ends:
            return "end"
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
        lines = self.text().wrap(console, options.max_width)
        yield from list(lines)[-max(3, (options.height or console.height) - 4) :]
        yield Text(f"step {self.steps}" if self.steps else "reading the prompt ...", style="dim")


def follow(pipeline: Pipeline, events: Iterable[Event], console: Console | None = None, most: float = 1.0) -> Finished:
    """Show the events of one prompt as they come (nothing where the output is no terminal); returns the last.

    The moving part is taken away at the end and the whole text printed, however long it is. `most` is the alpha of the
    darkest shade.
    """
    from rcd.decode.events import Finished, Step

    console = console or Console()
    canvas, done = Canvas(pipeline, most), None
    moving = console.is_terminal and not console.is_dumb_terminal and sys.stdout.isatty()
    # no refreshing thread: it would still run while the interpreter ends
    with Live(canvas, console=console, auto_refresh=False, transient=True) if moving else nullcontext() as live:
        drawn = 0.0
        for event in events:
            if isinstance(event, Step):
                canvas.see(event)
            elif isinstance(event, Finished):
                done = event
            else:
                raise RCDError(event.message)
            if live is not None and time.monotonic() - drawn > 0.04:
                live.refresh()
                drawn = time.monotonic()
    assert done is not None
    if sys.stdout.isatty():
        canvas.finish(done)
        console.print(canvas.text(), highlight=False)
    return done


def summary(result: Generation) -> str:
    """One line of figures."""
    tokens, steps = counted(result.tokens, "token"), counted(result.denoising_steps, "denoising step")
    why = STOPS[result.stop_reason]
    return (
        f"{tokens} in {steps} ({result.tokens_per_step:.2f} a step), "
        f"{counted(result.forwards, 'forward')}, {result.seconds:.2f} s; {why}."
    )
