"""The answer of one request as it grows: its settled beginning, stop strings, log probabilities, and its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from rcd.decode.events import Counts, Finished, Logprobs, TokenLogprob
from rcd.decode.filling import Filling
from rcd.decode.request_settings import RequestSettings
from rcd.decode.stopping import cut

OVERLAP = 320
"""Tokens before those that are new in which a stop string may begin: more than its longest has characters."""
NOTHING = Filling()
Text = Callable[[Sequence[int]], str]


def found_stop(text: str, stops: tuple[str, ...], begin: int = 0) -> int | None:
    """Where the first stop string begins, from `begin` on."""
    return min((at for stop in stops if (at := text.find(stop, begin)) >= 0), default=None)


class Answer:
    """`text` makes token ids a text; None: the answer has none, and no stop string is looked for."""

    def __init__(
        self, row: int, settings: RequestSettings, eos: Sequence[int], text: Text | None, filling: Filling = NOTHING
    ):
        self.row, self.settings, self.eos, self.text, self.filling = row, settings, tuple(eos), text, filling
        self.ends = {*eos, *settings.stop_ids}
        self.reused = 0
        """Prompt tokens that did not have to be read."""
        self.ids: list[int] = []
        """Up to the first mask."""
        self.end: int | None = None
        """The place of the end token, as the last step's window has it; masks may stand before it."""
        self.filling.settled(self.ids)
        self._logprobs: dict[int, TokenLogprob] = {}
        self._searched = self._told = 0

    def grow(self, offset: int, draft: Tensor, masked: Tensor, committed: Tensor, told: Logprobs | None) -> int:
        """Bring the beginning of the answer and the tokens' log probabilities up to date, by a step's window. Returns
        how many tokens are settled: those up to the first mask or the end token."""
        ids, open_ = draft.tolist(), masked.tolist()
        places = range(max(0, self.filling.last - offset, -offset), len(ids))
        self.end = next((offset + j for j in places if not open_[j] and ids[j] in self.ends), None)
        first = open_.index(True) if True in open_ else len(open_)
        if offset <= len(self.ids):
            self.ids[max(0, offset) :] = ids[max(0, -offset) : first]
            self.filling.settled(self.ids)
        if told is not None:
            for j in committed.nonzero().flatten().tolist():
                if offset + j >= 0:
                    best = tuple(zip(told.best_ids[j].tolist(), told.best[j].tolist(), strict=True))
                    self._logprobs[offset + j] = TokenLogprob(ids[j], float(told.token[j]), best)
        behind = enumerate(self.ids[self.filling.last :], self.filling.last)
        settled = next((k + 1 for k, token in behind if token in self.ends), len(self.ids))
        return min(settled, self.settings.new_tokens)

    def tell(self, final: int) -> tuple[int, ...]:
        """The tokens up to there that were not told before."""
        told, self._told = tuple(self.ids[self._told : final]), max(self._told, final)
        return told

    @property
    def stopped(self) -> bool:
        """Whether the text up to the first mask holds a stop string; one behind an end token is none, nor one that
        begins before the last given token."""
        ids, first = self.ids[: self.settings.new_tokens], self.filling.last
        if self.text is None or not self.settings.stop or len(ids) <= self._searched or self.ends & set(ids[first:]):
            return False
        recent = self.text(ids[max(first + bool(self.filling), self._searched - OVERLAP) :])
        self._searched = len(ids)
        return found_stop(recent, self.settings.stop) is not None

    def ended(self, new_ids: list[int], counts: Counts) -> Finished:
        """When no mask that matters is left of the new tokens."""
        ids, reason = cut(new_ids, self.eos, self.settings.stop_ids, self.settings.new_tokens, self.filling.last)
        return self._finished(ids, reason, counts)

    def cut(self, counts: Counts) -> Finished:
        """When a stop string was found before that."""
        return self._finished(self.ids[: self.settings.new_tokens], "stop", counts)

    def _finished(self, ids: list[int], reason: str, counts: Counts) -> Finished:
        """The answer; its text is cut where a stop string begins."""
        text, logprobs = None, None
        if self.text is not None:
            text = self.text(ids[:-1] if ids and ids[-1] in self.ends else ids)
            told = len(self.text(ids[: self.filling.last + 1])) if self.filling and self.settings.stop else 0
            at = found_stop(text, self.settings.stop, told)
            if at is not None:
                text, reason = text[:at], "stop"
        if self.settings.logprobs is not None:
            nothing = float("nan")
            logprobs = tuple(self._logprobs.get(k, TokenLogprob(token, nothing)) for k, token in enumerate(ids))
        given = self.filling.given(len(ids))
        return Finished(self.row, ids, reason, counts, text, logprobs, time.perf_counter(), self.reused, given)
