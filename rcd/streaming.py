"""Streamers as transformers has them: `put` hears the prompt and then settled tokens, `put_draft`, where there is one,
what stands behind them after every step, and `end` comes last."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rcd.decode.answers import Text, found_stop
from rcd.decode.events import Event, Failed, Finished, Step
from rcd.errors import RCDError

CONTEXT = 64
"""Tokens that are decoded again with new ones: spaces and characters depend on what is before them."""


def common_start(text: str, stops: Sequence[str]) -> int:
    """The length of the longest end of the text with which a stop string may begin."""
    most = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), most, -1):
            if text.endswith(stop[:length]):
                most = length
                break
    return most


@dataclass(frozen=True)
class Ends:
    """What ends the answer of a request, and is no part of it."""

    text: Text
    stops: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    given: int = 0
    """So many tokens, the last of which a canvas gives; before it nothing ends the text."""

    def free(self, ids: Sequence[int], told: int) -> int:
        """How many of the settled tokens may be told, of which `told` were: all before what may become a stop."""
        places = range(max(told, self.given - 1), len(ids))
        end = next((place for place in places if ids[place] in self.stop_ids), len(ids))
        told = max(told, min(self.given, end))
        if not self.stops or told == end:
            return end
        begin = max(0, told - CONTEXT)
        known, text = len(self.text(ids[begin:told])), self.text(ids[begin:end])
        at = found_stop(text, self.stops, known)
        limit = len(text) - common_start(text[known:], self.stops) if at is None else at
        return self._within(ids, told, end, limit, begin)

    def answered(self, done: Finished, told: int) -> int:
        """The same when the answer is known."""
        if done.stop_reason != "stop" or done.text is None:
            return len(done.ids)
        end = len(done.ids) - (done.ids[-1] in self.stop_ids)
        return self._within(done.ids, told, end, len(done.text), 0)

    def _within(self, ids: Sequence[int], told: int, end: int, limit: int, begin: int) -> int:
        while end > told and len(self.text(ids[begin:end])) > limit:
            end -= 1
        return end


def check_streamer(streamer: Any, prompts: int) -> None:
    if not (callable(getattr(streamer, "put", None)) and callable(getattr(streamer, "end", None))):
        raise RCDError(
            f"a streamer has the methods put and end, as transformers' TextStreamer, and {type(streamer).__name__} has "
            "not."
        )
    if prompts != 1:
        raise RCDError(f"a streamer is for one prompt, not for {prompts}; `stream` tells the steps of several.")


def streamed(events: Iterator[Event], prompt: Sequence[int], streamer: Any, ends: Ends) -> Iterator[Event]:
    """The same events, of one prompt, told to a streamer as well: `put` hears tokens whose text is the answer's, and
    end tokens, but nothing of a stop. Whatever happens, it is told the end."""
    drafts = callable(getattr(streamer, "put_draft", None))
    ids, told = list[int](), 0
    try:
        streamer.put(torch.tensor([prompt]))
        for event in events:
            until = told
            if isinstance(event, Step):
                ids += event.settled
                until = ends.free(ids, told)
            elif isinstance(event, Finished):
                ids = event.ids
                until = ends.answered(event, told)
            if until > told:
                streamer.put(torch.tensor(ids[told:until]))
                told = until
            if drafts and isinstance(event, Step):
                streamer.put_draft(event.draft[: event.shown][max(0, told - event.offset) :])
            yield event
            if isinstance(event, Failed):
                break
    except BaseException:
        with contextlib.suppress(Exception):  # what went wrong first is what the caller hears
            streamer.end()
        raise
    streamer.end()
