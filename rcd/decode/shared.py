"""A pass of one-by-one rows, shared out to threads of one core each.

Two cores that share every product of a small model wait for one another more than they compute. Where each row is
computed alone (`rcd.kernels.plain.APART`), they take a row each instead. A row is always computed by one core, also
when it is the only one, so that no bit depends on the others.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from threading import Barrier

import torch
from torch import Tensor

from rcd.decode.fused import FusedBackbone
from rcd.decode.slots import Cache, Slots

MOST = 4
"""Threads at most: of a small model's step a good part is Python, which one thread at a time runs."""


@cache
def crew(size: int, process: int) -> ThreadPoolExecutor:
    """So many threads of one core each; a process that was forked has none of its parent's, and makes its own."""
    threads, begun = torch.get_num_threads(), Barrier(size)
    made = ThreadPoolExecutor(size, "rcd rows", torch.set_num_threads, (1,))
    list(made.map(lambda _: begun.wait(), range(size)))
    torch.set_num_threads(threads)  # what was set in these also holds for threads still to come
    return made


class SharedBackbone(FusedBackbone):
    """`FusedBackbone`, its rows shared out."""

    def __call__(self, embeds_NQD: Tensor, slots: Slots, cache: Cache) -> Tensor:
        size, rows, whole = min(torch.get_num_threads(), MOST), slots.row.tolist(), super().__call__
        if size == 1:
            return whole(embeds_NQD, slots, cache)
        self.turns(cache.capacity)
        out, turn = torch.empty_like(embeds_NQD), {row: rank % size for rank, row in enumerate(sorted({*rows}))}

        @torch.inference_mode()
        def share(number: int) -> None:
            own = torch.tensor([n for n, row in enumerate(rows) if turn[row] == number])
            some = replace(slots, row=slots.row[own], start=slots.start[own], end=slots.end[own])
            out[own] = whole(embeds_NQD[own], some, cache)

        list(crew(size, os.getpid()).map(share, range(min(size, len(turn)))))
        return out
