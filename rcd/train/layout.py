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
    window: tuple[Tensor, Tensor]
    """Two of [W, 2]: (row, slot) in the layout, and in the text, of every position that decoding computes anew at each
    step, masked or not: the noisy copies, or the answer on a bidirectional canvas."""
    left: Tensor
    """[B, S] as in a frame."""
    real: Tensor
    """[B, S] booleans: no padding."""

    def outputs(self, encoded_BSD: Tensor, where: Tensor, shift: int) -> Tensor:
        """[N, D] the outputs that predict the positions (row, slot) `where` [N, 2]."""
        rows, slots = where.unbind(1)
        return encoded_BSD[rows, self.left[rows, slots] if shift else slots]


@dataclass(frozen=True)
class Frame:
    """What the layout of a batch is in every state of it: positions, attention, and which slots have a noisy copy."""

    batch: Batch
    position: Tensor
    """[B, S]"""
    attention: Any
    """A boolean mask [B, 1, S, S], a flex BlockMask, or None."""
    index: Tensor | None
    """[B, N] the text slots of the noisy copies, -1 where there is none; None: the text itself is the noisy one."""
    window: tuple[Tensor, Tensor]
    """As in a layout."""
    left: Tensor
    """[B, S] where the token left of each stands, whose output predicts it under a shift. That of a block's first copy
    is the clean one that ends the block before, which decoding has in its cache; a document's first one is its own."""
    real: Tensor

    def lay_out(self, noisy_ids: Tensor, masked: Tensor) -> Layout:
        """The layout in the state `noisy_ids`, whose positions `masked` are predicted."""
        if self.index is None:
            where = masked.nonzero()
            return Layout(noisy_ids, self.position, self.attention, where, where, self.window, self.left, self.real)
        row = torch.arange(len(self.index), device=self.index.device)[:, None]
        slot = self.index.clamp_min(0)
        ids = torch.cat((self.batch.ids, noisy_ids[row, slot]), dim=1)
        where, source = _places(masked[row, slot] & (self.index != PADDING), self.index, self.batch.ids.shape[1])
        return Layout(ids, self.position, self.attention, where, source, self.window, self.left, self.real)


def frame_of(batch: Batch, *, attention: str, block_length: int, copy: str = "answer", flex: bool = False) -> Frame:
    if attention == BIDIRECTIONAL:
        packed = bool((batch.document != 0).any())
        seen = _attention(batch.document, None, None, flex) if packed else None
        answer = batch.answer.nonzero()
        left = _left(batch.position, None, block_length)
        return Frame(batch, batch.position, seen, None, (answer, answer), left, batch.document != PADDING)
    index = _copied(batch, block_length, copy)
    row = torch.arange(len(index), device=index.device)[:, None]
    slot = index.clamp_min(0)
    document = torch.cat((batch.document, batch.document[row, slot].masked_fill(index == PADDING, PADDING)), dim=1)
    position = torch.cat((batch.position, batch.position[row, slot]), dim=1)
    copied = torch.zeros_like(document, dtype=torch.bool)
    copied[:, batch.ids.shape[1] :] = True
    window = _places(index != PADDING, index, batch.ids.shape[1])
    attended = _attention(document, position // block_length, copied, flex)
    return Frame(batch, position, attended, index, window, _left(position, slot, block_length), document != PADDING)


def _left(position: Tensor, copied: Tensor | None, block_length: int) -> Tensor:
    """[B, S] as in a frame, of text slots and then of copies of the slots `copied` [B, N].

    blocks of 2, positions  0 1 2 3 | 2 3  (a copy of the second block)     left  0 0 1 2 | 1 4
    """
    here = torch.arange(position.shape[1], device=position.device).expand_as(position)
    before = here - 1
    if copied is not None:
        text = position.shape[1] - copied.shape[1]
        own = torch.where(position[:, text:] % block_length == 0, copied - 1, before[:, text:])
        before = torch.cat((before[:, :text], own), dim=1)
    return torch.where(position > 0, before, here)


def _places(chosen: Tensor, index: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """(row, slot) of the chosen copies [B, N], in the layout and in the text."""
    where = chosen.nonzero()
    source = torch.stack((where[:, 0], index[where[:, 0], where[:, 1]]), dim=1)
    return where + torch.tensor([0, length], device=where.device), source


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


def _sees(query: tuple[Any, Any, Any], key: tuple[Any, Any, Any]) -> Any:
    """The rule above, on (document, block, copied) of a query and of a key."""
    (document_q, block_q, copied_q), (document_k, block_k, copied_k) = query, key
    earlier, own = block_k < block_q, block_k == block_q
    clean = ~copied_k & (earlier | (own & ~copied_q))
    return (document_q == document_k) & (clean | (copied_k & copied_q & own))


def _attention(document: Tensor, block: Tensor | None, copied: Tensor | None, flex: bool) -> Any:
    """The rule as a dense mask, or for flex attention; padding sees itself, to keep its softmax defined."""
    rows, slots = document.shape
    if block is None or copied is None:  # one block, nothing copied: a document sees itself
        block, copied = torch.zeros_like(document), torch.zeros_like(document, dtype=torch.bool)
    facts = (document, block, copied)
    if flex:
        from torch.nn.attention.flex_attention import create_block_mask

        def rule(row: Any, head: Any, query: Any, key: Any) -> Any:
            return _sees(*(tuple(fact[row, at] for fact in facts) for at in (query, key)))  # type: ignore[arg-type]

        return create_block_mask(rule, rows, None, slots, slots, device=str(document.device))
    itself = torch.eye(slots, dtype=torch.bool, device=document.device)
    return (_sees(_unsqueezed(facts, 2), _unsqueezed(facts, 1)) | itself).unsqueeze(1)


def _unsqueezed(facts: tuple[Tensor, Tensor, Tensor], dim: int) -> tuple[Tensor, Tensor, Tensor]:
    document, block, copied = (fact.unsqueeze(dim) for fact in facts)
    return document, block, copied
