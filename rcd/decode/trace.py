"""What a step did, as its events tell it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rcd.decode.rows import Pass, Rows
from rcd.decode.step import Outcome
from rcd.decode.terms import Terms


class Trace(NamedTuple):
    """What a Step event needs of the rows that took the step, of all blocks that are seen: [R + 1, J b] each."""

    took: Tensor
    """[R + 1]"""
    start: Tensor
    """[R + 1] the first position."""
    settled: Tensor
    """[R + 1] where the first block begins that is unfinished after it."""
    draft: Tensor
    committed: Tensor
    revised: Tensor
    masked: Tensor
    confidence: Tensor
    alpha: Tensor
    logprob: Tensor | None = None
    best_ids: Tensor | None = None
    """[R + 1, J b, K]"""
    best: Tensor | None = None

    @classmethod
    def of(cls, rows: Rows, made: Pass, outcome: Outcome, terms: Terms) -> Trace:
        seen, nothing = made.seen, torch.zeros_like(made.seen.masked)
        predicted, token = made.spread(nothing, made.masked), made.spread(seen.ids, outcome.token)
        committed = made.spread(nothing, outcome.committed) & (token != seen.ids)
        after = rows.text[seen.row, seen.position]
        draft = torch.where(predicted, token, after)
        blank = torch.zeros_like(seen.ids, dtype=outcome.confidence.dtype)
        confidence = made.spread(blank, outcome.confidence).masked_fill(~predicted, float("nan"))
        alpha = outcome.alpha
        kept = made.state < rows.nobody * (len(rows.step) // len(rows.active))  # elsewhere nothing is carried
        shown = blank if alpha is None else made.spread(blank, alpha * kept[:, None])
        left = (after == terms.model.mask_token_id) & seen.output
        trace = cls(
            made.took, seen.position[:, 0], rows.start.clone(), draft, committed, committed & ~seen.masked, left,
            confidence, shown,
        )  # fmt: skip
        if outcome.best is None:
            return trace
        best_ids, best, logprob = outcome.best
        wide = (*seen.ids.shape, best_ids.shape[-1])
        return trace._replace(
            logprob=made.spread(blank, logprob), best_ids=made.spread(blank.new_zeros(wide).long(), best_ids),
            best=made.spread(blank.new_zeros(wide), best),
        )  # fmt: skip
