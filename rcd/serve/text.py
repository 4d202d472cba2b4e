"""Settled token ids -> the text that may be sent: nothing of it is ever taken back."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

BROKEN = "\ufffd"
"""What a tokenizer writes for a character whose bytes are not all there."""
CONTEXT = 64
"""Tokens that are decoded again with new ones: spaces and characters depend on what is before them."""
CLEANED = 4
"""Characters at the end that `clean_up_tokenization_spaces` may still change: the longest that it looks for."""


def common_start(text: str, stops: Sequence[str]) -> int:
    """The length of the longest end of the text with which a stop string may begin."""
    most = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), most, -1):
            if text.endswith(stop[:length]):
                most = length
                break
    return most


class Words:
    """A tokenizer's facts for texts that grow: its own way of decoding, single tokens as text."""

    def __init__(self, decode: Callable[[Sequence[int]], str], tokenizer: Any | None, lock: Any = None):
        self.decode, self.tokenizer = decode, tokenizer
        self.held = CLEANED if getattr(tokenizer, "clean_up_tokenization_spaces", False) else 0
        self._lock = lock or threading.Lock()
        self._texts: dict[int, str] = {}
        self.bytes = frozenset(self._byte_tokens())
        self._before = self._letter()

    def _byte_tokens(self) -> Iterable[int]:
        """Tokens that are one byte: a run of them is a text only together."""
        if self.tokenizer is None:
            return []
        return [token for text, token in self.tokenizer.get_vocab().items() if re.fullmatch("<0x[0-9A-F]{2}>", text)]

    def _letter(self) -> list[int]:
        """A token with a text of letters, before which another one's text has its space."""
        if self.tokenizer is None:
            return []
        vocabulary = self.tokenizer.get_vocab()
        found = (token for token in sorted(vocabulary.values()) if re.fullmatch("[A-Za-z]+", self.decode([token])))
        return [token for token in [next(found, None)] if token is not None]

    def token(self, token: int) -> str:
        """One token as text: with its space, and a special one by its name."""
        text = self._texts.get(token)
        if text is None:
            if self.tokenizer is None:
                text = str(token)
            else:
                with self._lock:
                    both, before = (
                        str(self.tokenizer.decode(ids, skip_special_tokens=False))
                        for ids in ([*self._before, token], self._before)
                    )
                text = both[len(before) :]
            self._texts[token] = text
        return text


class TextStream:
    """The text of one answer as its tokens settle: whole characters, no special tokens, nothing that may be the
    beginning of a stop string. What `push` and `finish` give is, joined, the answer's text."""

    def __init__(self, words: Words, stops: Sequence[str] = (), ends: Iterable[int] = ()):
        self._words, self._stops, self._ends = words, tuple(stops), frozenset(ends)
        self._ids: list[int] = []
        """The last ones, from which text is decoded."""
        self._read = 0
        """Characters of their text that are known."""
        self._bytes: list[int] = []
        """A run of byte tokens that may go on."""
        self._pending = ""
        """Known, but not sent."""
        self.known = 0
        self.sent = 0
        """Characters so far."""
        self._over = False

    def push(self, ids: Sequence[int]) -> str:
        """The text that may be sent when these tokens are settled as well."""
        self.read(ids)
        return self._flush()

    def read(self, ids: Sequence[int]) -> None:
        if self._over:
            return
        for place, token in enumerate(ids):
            if token in self._ends:
                ids, self._over = ids[:place], True
                break
        ids = [*self._bytes, *ids]
        last = len(ids)
        while last and ids[last - 1] in self._words.bytes:
            last -= 1
        self._bytes, ids = ids[last:], ids[:last]
        if not ids:
            return
        self._ids += ids
        found = self._words.decode(self._ids)
        new = found[self._read :].rstrip(BROKEN)
        if self._words.held:
            new = new[: -self._words.held]
        self._pending += new
        self._read += len(new)
        self.known += len(new)
        if self._read == len(found) and len(self._ids) > 2 * CONTEXT:
            self._ids = self._ids[-CONTEXT:]
            self._read = len(self._words.decode(self._ids))

    def _flush(self) -> str:
        found = [place for stop in self._stops if (place := self._pending.find(stop)) >= 0]
        if found:
            self._over, self._pending = True, self._pending[: min(found)]
        kept = common_start(self._pending, self._stops)
        out = self._pending[: len(self._pending) - kept]
        self._pending = self._pending[len(out) :]
        self.sent += len(out)
        return out

    def finish(self, text: str) -> str:
        """The rest of the whole answer."""
        out = text[self.sent :]
        self.sent = max(self.sent, len(text))
        return out
