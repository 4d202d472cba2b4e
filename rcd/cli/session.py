"""A conversation with a model, as `rcd chat` holds it: its turns, its settings, and the commands that change them."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rcd.errors import RCDError, unknown_name

if TYPE_CHECKING:
    from rcd.api import Pipeline
    from rcd.decode.config import DecodeConfig

COMMANDS = {
    "seqd": ("", "decode without a carry (SeqD)"),
    "rcd": ("", "decode with the carry that the model was trained with, else the paper's"),
    "threshold": ("X", "commit what is surer than X"),
    "steps": ("N", "at most N denoising steps a block; none: as many as it takes"),
    "set": ("NAME=VALUE ...", "any decoding setting (docs/decoding.md); alone: what is set"),
    "system": ("TEXT", "a text that stands before the conversation; alone: none"),
    "clear": ("", "forget the turns so far"),
    "help": ("", "this list"),
    "quit": ("", "leave, as Ctrl-D does"),
}


class Quit(Exception):
    """The person leaves."""


@dataclass
class Session:
    """What is said and how it is answered."""

    pipeline: Pipeline
    asked: DecodeConfig
    """As it was given: what a checkpoint fills in is still None."""
    remembers: bool
    """Whether turns are kept: the tokenizer's chat template tells how several are written."""
    turns: list[dict[str, str]] = field(default_factory=list)
    system: str = ""

    # -- turns ---------------------------------------------------------------------------------------------------

    def prompt(self, text: str) -> list[int]:
        """The conversation with this text, as token ids."""
        if not self.remembers:
            return self.pipeline.encode(text, chat=False)[0]
        before = [{"role": "system", "content": self.system}] if self.system else []
        return self.pipeline.encode([*before, *self.turns, {"role": "user", "content": text}])[0]

    def keep(self, text: str, answer: str) -> None:
        if self.remembers:
            self.turns += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    # -- commands ------------------------------------------------------------------------------------------------

    def command(self, line: str) -> str:
        """Do what a line says that begins with a slash; returns what there is to tell."""
        name, _, rest = line[1:].partition(" ")
        if name not in COMMANDS:
            raise unknown_name("command", f"/{name}", [f"/{each}" for each in COMMANDS])
        rest, wanted = rest.strip(), COMMANDS[name][0]
        if rest and not wanted:
            raise RCDError(f"/{name} stands alone; leave {rest!r} out.")
        action: Callable[[str], str] = getattr(self, f"_{name}")
        return action(rest)

    def _seqd(self, _: str) -> str:
        self.take(carry="none")
        return "SeqD: predictions that are not committed are thrown away."

    def _rcd(self, _: str) -> str:
        own = self.pipeline.checkpoint.rcd.carry
        trained = own is not None and own["name"] != "none"
        self.take(carry=None if trained else "residual")
        note = "" if trained else " This model was not trained for it."
        return f"RCD: predictions that are not committed are carried on.{note}"

    def _threshold(self, text: str) -> str:
        if not text:
            return f"the threshold is {self.asked.threshold:g}."
        return self._pairs([f"threshold={text}"])

    def _steps(self, text: str) -> str:
        return self._pairs([f"num_inference_steps={text or 'none'}"])

    def _set(self, text: str) -> str:
        try:
            pairs = shlex.split(text)
        except ValueError as error:
            raise RCDError(f"a quotation mark in {text!r} is not closed; close it.") from error
        return self._pairs(pairs) if pairs else self._shown()

    def _system(self, text: str) -> str:
        if not self.remembers:
            raise RCDError("this model has no chat template, so that no system text reaches it.")
        self.system = text
        return "the system text is set." if text else "there is no system text."

    def _clear(self, _: str) -> str:
        self.turns.clear()
        return "the conversation begins anew."

    def _help(self, _: str) -> str:
        width = max(len(f"/{name} {wanted}") for name, (wanted, _) in COMMANDS.items())
        return "\n".join(f"{f'/{name} {wanted}':<{width}}  {about}" for name, (wanted, about) in COMMANDS.items())

    def _quit(self, _: str) -> str:
        raise Quit

    def _pairs(self, pairs: list[str]) -> str:
        from rcd.cli.flags import Given

        self.take(**Given(texts=pairs).values)
        return f"{', '.join(pairs)}."

    def take(self, **changes: Any) -> None:
        """Other settings, if the model can be decoded with them."""
        changed = replace(self.asked, **changes)
        if self.pipeline.resolve(changed).travelling.needs_reference:
            raise RCDError("that carry needs a reference model, which a chat has not; choose another.")
        self.asked = changed

    def _shown(self) -> str:
        """The settings that were given."""
        from rcd.decode.config import DecodeConfig
        from rcd.settings import entries

        given = {entry.name: getattr(self.asked, entry.name) for entry in entries(DecodeConfig)}
        plain = DecodeConfig()
        found = [f"{name}={value}" for name, value in given.items() if value != getattr(plain, name)]
        return "\n".join(found) or "every setting is at its default."
