"""One choice's events as pieces: text that may be sent, drafts, and its end."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

from rcd.decode.answers import found_stop
from rcd.decode.events import Failed, Finished, TokenLogprob
from rcd.decode.handle import Handle, lost
from rcd.errors import RCDError
from rcd.serve.bridge import Sink
from rcd.serve.pieces import Done, Piece, Refused, Text, TokenText
from rcd.serve.schema import Ask
from rcd.serve.text import TextStream, Words


class Reader:
    """On the event loop, beside the sink of its choice."""

    def __init__(
        self, sink: Sink, words: Words, stops: tuple[str, ...], began: float, ask: Ask, most: int | None = None
    ):
        """`most`: so many tokens of the answer are its text; what is given stands behind them."""
        self._sink, self._words, self._stops, self._began, self._ask = sink, words, stops, began, ask
        self._most = most
        self._waiting: list[TokenText] = []
        """Tokens whose text is not sent yet."""
        self._settled = self._told = 0
        self.ended = False

    def begin(self, handle: Handle, ends: Iterable[int], given: int = 0) -> None:
        """`ends`: the tokens that end the answer; before the last of the first `given`, nothing does."""
        self._handle = handle
        self._ends, self._given = frozenset(ends), given
        if self._most is not None:  # a gap, in which an end token ends nothing
            self._ends, self._given = frozenset(), 0
        self._stream = TextStream(self._words, self._stops, self._ends, self._given)

    def read(self) -> list[Piece]:
        """What is new."""
        if self.ended or not self._sink.told:
            return []
        taken = self._sink.take()
        found: list[Piece] = []
        if taken.ids and self._ask.stream:
            found += self._text(taken.ids)
        found += self._sink.drafts(taken)
        if taken.end is not None:
            self.ended = True
            found += self._end(taken.end)
        return found

    def _text(self, ids: list[int]) -> list[Piece]:
        ids = ids if self._most is None else ids[: max(0, self._most - self._settled)]
        places = range(self._settled, self._settled + len(ids))
        self._settled += len(ids)
        if self._ask.logprobs is None:
            text = self._stream.push(ids)
            return [Text(self._sink.index, text)] if text else []
        text = ""
        for one in self._sink.logprobs(places, ids):
            if one.token not in self._ends:
                self._waiting.append(self._shown(one, self._stream.known))
            text += self._stream.push([one.token])
        if not text:
            return []
        told = tuple(itertools.takewhile(lambda one: one.offset < self._stream.sent, self._waiting))
        del self._waiting[: len(told)]
        self._told += len(told)
        return [Text(self._sink.index, text, told)]

    def _end(self, event: Any) -> list[Piece]:
        if isinstance(event, Failed):
            return [Refused(500, event.message, None, "decoding_failed")]
        if isinstance(event, RCDError):
            return [Refused(400, str(event))]
        if isinstance(event, BaseException):
            return [Refused(500, str(lost(event)), None, "decoding_failed")]
        assert isinstance(event, Finished)
        found = list[Piece]()
        text, reason = (event.text or "", event.stop_reason) if self._most is None else self._gap(event)
        logprobs = self._logprobs(event, text)
        if self._ask.stream:
            more, last = self._stream.finish(text), (logprobs or ())[self._told :]
            if more or last:
                found.append(Text(self._sink.index, more, last))
        counts, admitted = event.counts, self._handle.admitted
        found.append(
            Done(
                self._sink.index, reason, text, event.ids, counts.denoising, counts.forwards,
                event.reused, round(event.at - self._began, 6), round((admitted or event.at) - self._began, 6),
                logprobs, event.given,
            )
        )  # fmt: skip
        return found

    def _gap(self, event: Finished) -> tuple[str, str]:
        """(the text of what was filled in before a suffix, why it ends)."""
        text = self._words.decode(event.ids[: self._most])
        at = found_stop(text, self._stops)
        return (text, "length") if at is None else (text[:at], "stop")

    def _logprobs(self, event: Finished, text: str) -> tuple[TokenText, ...] | None:
        """Of the tokens that have a part in the text."""
        if self._ask.logprobs is None or event.logprobs is None:
            return None
        stream = TextStream(self._words, (), self._ends)
        told = []
        for place, one in enumerate(event.logprobs[: self._most]):
            if one.token in self._ends and place + 1 < self._given:
                continue
            if one.token in self._ends or stream.known >= len(text):
                break
            told.append(self._shown(one, stream.known))
            stream.read([one.token])
        return tuple(told)

    def _shown(self, one: TokenLogprob, offset: int) -> TokenText:
        logprob = None if math.isnan(one.logprob) else one.logprob
        text, raw = self._words.token, self._words.token_bytes
        best = tuple((text(token), raw(token), value) for token, value in one.best[: self._ask.logprobs])
        return TokenText(text(one.token), raw(one.token), offset, logprob, best)
