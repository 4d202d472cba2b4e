"""Settled token ids -> the text that may be sent: nothing of it is ever taken back."""

from __future__ import annotations

import copy
import itertools
import re
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from rcd import blanks
from rcd.data.examples import prompt_ids
from rcd.errors import RCDError
from rcd.streaming import CONTEXT, common_start

BROKEN = "\ufffd"
"""What a tokenizer writes for a character whose bytes are not all there."""
CLEANED = 4
"""Characters at the end that `clean_up_tokenization_spaces` may still change: the longest that it looks for."""
BYTE, LETTERS = re.compile("<0x[0-9A-F]{2}>"), re.compile("[ \u2581\u0120]?[A-Za-z]+")
PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_OF = {chr(one): one for one in PRINTED}
BYTE_OF |= {chr(256 + place): one for place, one in enumerate(sorted({*range(256)} - {*PRINTED}))}
"""The letters that byte-level tokenizers write for bytes."""


class Words:
    """A model's tokenizer for the event loop: copies of its own, so that no thread waits for another one's texts."""

    def __init__(self, tokenizer: Any | None):
        self._tokenizer, self._original = copy.deepcopy(tokenizer), tokenizer
        self.chat = bool(getattr(tokenizer, "chat_template", None))
        self.held = CLEANED if getattr(tokenizer, "clean_up_tokenization_spaces", False) else 0
        vocabulary: dict[str, int] = {} if tokenizer is None else tokenizer.get_vocab()
        self.bytes = {token: int(text[3:5], 16) for text, token in vocabulary.items() if BYTE.fullmatch(text)}
        self.open = {*self.bytes, *getattr(tokenizer, "all_special_ids", ())} if self.bytes else set[int]()
        """Tokens that are one byte, and those that no text shows: a run of them is a text only together."""
        letters = (token for text, token in sorted(vocabulary.items()) if LETTERS.fullmatch(text))
        self._before = list(itertools.islice(letters, 1))
        """A token of letters, before which another one's text has its space."""
        self._texts: dict[int, str] = {}
        self._apart, self._another = threading.Lock(), None

    def decode(self, ids: Sequence[int]) -> str:
        """As the pipeline does."""
        if self._tokenizer is None:
            return " ".join(map(str, ids))
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def encode(self, prompts: Sequence[Any], tokenizer: Any | None = None) -> list[list[int]]:
        """Texts as they are, and chats in the template, as token ids."""
        if self._tokenizer is None:
            raise RCDError("this model has no tokenizer; give the prompt as token ids.")
        return prompt_ids(prompts, tokenizer or self._tokenizer, False)

    def encode_apart(self, prompts: Sequence[Any]) -> list[list[int]]:
        """The same from another thread."""
        with self._apart:
            return self.encode(prompts, self._copy())

    def canvas(self, text: str, mask: int, most: int, tokenizer: Any | None = None) -> list[int]:
        """A text with masks as token ids."""
        if self._tokenizer is None:
            raise RCDError("this model has no tokenizer; give the canvas as token ids.")
        return blanks.read(text, blanks.Spelling(tokenizer or self._tokenizer), mask, most)

    def canvas_apart(self, text: str, mask: int, most: int) -> list[int]:
        """The same from another thread."""
        with self._apart:
            return self.canvas(text, mask, most, self._copy())

    def behind_apart(self, text: str) -> list[int]:
        """A text behind masks, from another thread."""
        with self._apart:
            return blanks.Spelling(self._copy())(text, True)

    def _copy(self) -> Any:
        """A tokenizer for other threads, one at a time."""
        if self._another is None:
            self._another = copy.deepcopy(self._original)
        return self._another

    def token(self, token: int) -> str:
        """One token as text: with its space, and a special one by its name."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._named(token)
        return text

    def _named(self, token: int) -> str:
        if self._tokenizer is None:
            return str(token)
        both, before = (
            str(self._tokenizer.decode(ids, skip_special_tokens=False))
            for ids in ([*self._before, token], self._before)
        )
        return both[len(before) :]

    def token_bytes(self, token: int) -> bytes | None:
        """What a token writes, also where that is no whole character; None where nobody knows."""
        text = self.token(token)
        if token in self.bytes:
            return bytes([self.bytes[token]])
        if BROKEN not in text:
            return text.encode()
        assert self._tokenizer is not None, "numbers are whole characters"
        letters = [BYTE_OF.get(letter, -1) for letter in str(self._tokenizer.convert_ids_to_tokens(token))]
        return None if -1 in letters else bytes(letters)


class TextStream:
    """The text of one answer as its tokens settle: whole characters, no special tokens, nothing that may be the
    beginning of a stop string. What `push` and `finish` give is, joined, the answer's text."""

    def __init__(self, words: Words, stops: Sequence[str] = (), ends: Iterable[int] = (), given: int = 0):
        """`given`: so many tokens, the last of which a canvas gives; before it nothing ends the text."""
        self._words, self._stops, self._ends = words, tuple(stops), frozenset(ends)
        self._given = given
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
        first, ids = ids[: self._given], ids[self._given :]
        told = ""
        if first:
            self.read(first)
            told = self._sent(len(self._pending))
        if not ids:
            return told
        self.read(ids)
        return told + self._flush()

    def read(self, ids: Sequence[int]) -> None:
        if self._over:
            return
        first = max(0, self._given - 1)
        self._given = max(0, self._given - len(ids))
        for place, token in enumerate(ids):
            if place >= first and token in self._ends:
                ids, self._over = ids[:place], True
                break
        ids = [*self._bytes, *ids]
        last = len(ids)
        while last and ids[last - 1] in self._words.open:
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
        unread = len(found) - self._read
        if unread < CONTEXT < len(self._ids) // 2:
            self._ids = self._ids[-CONTEXT:]
            self._read = len(self._words.decode(self._ids)) - unread

    def _flush(self) -> str:
        found = [place for stop in self._stops if (place := self._pending.find(stop)) >= 0]
        if found:
            self._over, self._pending = True, self._pending[: min(found)]
        kept = common_start(self._pending, self._stops)
        return self._sent(len(self._pending) - kept)

    def _sent(self, count: int) -> str:
        out = self._pending[:count]
        self._pending = self._pending[count:]
        self.sent += count
        return out

    def finish(self, text: str) -> str:
        """The rest of the whole answer."""
        out = text[self.sent :]
        self.sent = max(self.sent, len(text))
        return out
