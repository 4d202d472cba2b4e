"""Training layouts: one forward pass that trains every block of a sequence as decoding will see it.

A block diffusion model reads a noisy block next to the *clean* blocks before it. So the clean text and a noisy copy
stand in one sequence, the copy at the same positions, and attention keeps them apart:

    a clean position sees the clean positions of its own and of earlier blocks
    a noisy position sees the noisy positions of its own block and the clean ones of earlier blocks

`full` copies every block ([x_t | x_0], SDAR's layout); `answer` only blocks that hold a token of the answer
([prompt | x_0 | x_t]: the prompt stands once), which gives the same loss, since nothing looks at a copied prompt. On
the absolute grid the block that the prompt's end straddles is copied whole, its prompt tokens unmasked, as in decoding.
Bidirectional models need no copy. Several documents may share a row (packing); none sees another.

Shapes: B rows, L slots of the text, S slots of the layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rcd.models.family import BIDIRECTIONAL

PADDING = -1


@dataclass(frozen=True)
class Batch:
    """A batch of texts and their noise."""

    ids: Tensor
    """[B, L] the clean tokens x_0."""
    position: Tensor
    """[B, L] counted within each document."""
    document: Tensor
    """[B, L] the document's number in its row; -1: padding."""
    answer: Tensor
    """[B, L] booleans: positions that may be masked and are counted by the loss."""
    masked: Tensor
    """[B, L] booleans: x_t is [M] here."""
    weight: Tensor
    """[B, L] the position's share of the loss: normaliser / p_mask."""
    normaliser: Tensor
    """[B, L] 1 over what the loss is divided by (`rcd.train.batches`)."""
    luck: Tensor
    """[B, L] a draw in [0, 1) of each document (residual dropout)."""
    extra: Tensor
    """[B, L] a draw in [0, 1) of each position (residuals from a noisier state)."""
    names: tuple[str, ...] = ()
    """The examples' ids, for messages."""

    def silent(self) -> Batch:
        """The same shape without anything to learn: what a process computes when the others still have rows."""
        nothing = torch.zeros_like(self.masked)
        zero = torch.zeros_like(self.weight)
        return replace(self, answer=nothing, masked=nothing, weight=zero, normaliser=zero, names=())

    def to(self, device: torch.device) -> Batch:
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return Batch(**moved, names=self.names)


@dataclass(frozen=True)
class Layout:
    """The sequence that is computed, and where in it the noisy text stands."""

    ids: Tensor
    """[B, S] clean tokens, with x_t's tokens in the noisy part."""
    position: Tensor
    attention: Any
    """A boolean mask [B, 1, S, S], a flex BlockMask, or None."""
    noisy: Tensor
    """[M, 2] (row, slot) of every masked position in the layout."""
    source: Tensor
    """[M, 2] (row, slot) of the same positions in the text."""


def lay_out(
    batch: Batch,
    noisy_ids: Tensor,
    masked: Tensor,
    *,
    attention: str,
    block_length: int,
    copy: str = "answer",
    flex: bool = False,
) -> Layout:
    """The layout of a batch in the state `noisy_ids`, whose positions `masked` are predicted."""
    if attention == BIDIRECTIONAL:
        where = masked.nonzero()
        packed = bool((batch.document != 0).any())
        seen = _attention(batch.document, None, None, flex) if packed else None
        return Layout(noisy_ids, batch.position, seen, where, where)
    index = _copied(batch, block_length, copy)
    row = torch.arange(len(index), device=index.device)[:, None]
    real = index != PADDING
    slot = index.clamp_min(0)
    document = torch.cat((batch.document, batch.document[row, slot].masked_fill(~real, PADDING)), dim=1)
    position = torch.cat((batch.position, batch.position[row, slot]), dim=1)
    copied = torch.zeros_like(document, dtype=torch.bool)
    copied[:, batch.ids.shape[1] :] = True
    ids = torch.cat((batch.ids, noisy_ids[row, slot]), dim=1)
    predicted = masked[row, slot] & real
    where = predicted.nonzero()
    source = torch.stack((where[:, 0], index[where[:, 0], where[:, 1]]), dim=1)
    where = where + torch.tensor([0, batch.ids.shape[1]], device=where.device)
    seen = _attention(document, position // block_length, copied, flex)
    return Layout(ids, position, seen, where, source)


def _copied(batch: Batch, block_length: int, copy: str) -> Tensor:
    """[B, N] the slots that get a noisy copy, filled up with -1."""
    length = batch.ids.shape[1]
    if copy == "full":
        return torch.arange(length, device=batch.ids.device).expand_as(batch.ids)
    blocks = batch.answer.view(len(batch.answer), length // block_length, block_length).any(-1)
    wanted = blocks.repeat_interleave(block_length, dim=1)
    most = int(wanted.sum(-1).max())
    order = torch.where(wanted, torch.arange(length, device=wanted.device), length).sort(dim=1).values[:, :most]
    return order.masked_fill(order == length, PADDING)


def _attention(document: Tensor, block: Tensor | None, copied: Tensor | None, flex: bool) -> Any:
    """The rule above as a dense mask, or for flex attention; padding sees itself, to keep its softmax defined."""

    def allowed(row: Any, query: Any, key: Any) -> Any:
        same = document[row, query] == document[row, key]
        if block is None or copied is None:
            return same
        earlier, own = block[row, key] < block[row, query], block[row, key] == block[row, query]
        clean = ~copied[row, key] & (earlier | (own & ~copied[row, query]))
        return same & (clean | (copied[row, key] & copied[row, query] & own))

    rows, slots = document.shape
    if flex:
        from torch.nn.attention.flex_attention import create_block_mask

        def rule(row: Any, head: Any, query: Any, key: Any) -> Any:
            return allowed(row, query, key)

        return create_block_mask(rule, rows, None, slots, slots, device=str(document.device))
    index = torch.arange(slots, device=document.device)
    row = torch.arange(rows, device=document.device)[:, None, None]
    itself = torch.eye(slots, dtype=torch.bool, device=document.device)
    return (allowed(row, index[None, :, None], index[None, None, :]) | itself).unsqueeze(1)
