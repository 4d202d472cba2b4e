"""Streamers as transformers has them: `put` hears the prompt and then settled tokens, `put_draft`, where there is one,
what stands behind them after every step, and `end` comes last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rcd.decode.events import Event, Failed, Finished, Step
from rcd.errors import RCDError


def check_streamer(streamer: Any, prompts: int) -> None:
    if not (callable(getattr(streamer, "put", None)) and callable(getattr(streamer, "end", None))):
        raise RCDError(
            f"a streamer has the methods put and end, as transformers' TextStreamer, and {type(streamer).__name__} has "
            "not."
        )
    if prompts != 1:
        raise RCDError(f"a streamer is for one prompt, not for {prompts}; `stream` tells the steps of several.")


def streamed(events: Iterator[Event], prompt: Sequence[int], streamer: Any) -> Iterator[Event]:
    """The same events, of one prompt, told to a streamer as well. Whatever happens, it is told the end."""
    drafts = callable(getattr(streamer, "put_draft", None))
    told = 0
    try:
        streamer.put(torch.tensor([prompt]))
        for event in events:
            ids: Sequence[int] = ()
            if isinstance(event, Step):
                ids = event.settled
            elif isinstance(event, Finished):
                ids = event.ids[told:]
            if ids:
                streamer.put(torch.tensor(list(ids)))
                told += len(ids)
            if drafts and isinstance(event, Step):
                streamer.put_draft(event.draft[max(0, told - event.offset) :])
            yield event
            if isinstance(event, Failed):
                return
    finally:
        streamer.end()
