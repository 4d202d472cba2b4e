"""The passes of a likelihood: a bidirectional canvas, or noisy blocks beside the clean text.

A block diffusion model reads a noisy block next to the clean blocks before it. The clean text is read once and its keys
and values are kept; a pass then computes all noisy blocks of the continuation at once, each of which sees its own
tokens and the clean ones of earlier blocks (the training layout [x_0 | x_t], with x_0 in a cache):

    clean       prompt | block | block |        (the last block is seen by none)
    noisy                x M x | M x x | x M M

On the absolute grid the block that the prompt's end straddles holds the prompt's tokens as they are, and behind the
continuation's end the last block holds masks, as in decoding.
Shapes: N patterns, Q positions of the window that a pass computes, L of the continuation, C clean ones, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from rcd.models.lm import DiffusionLM, View

PIECE = 512
"""Clean tokens of one pass, about."""


class Lane(Protocol):
    """A text as a model reads it, with its prompt or with masks instead (guidance)."""

    ids: Tensor
    """[Q] clean tokens; masks behind the text and, without its prompt, before it."""
    answer: Tensor
    """[L] where in the window the continuation is."""
    open: Tensor
    """[Q] booleans: where a carry may enter."""
    sizes: list[int]
    """Tokens of the continuation in each block."""
    passes: int
    """Over the clean text."""

    def hidden(self, embeds_NQD: Tensor) -> Tensor:
        """[N, Q, D]: what the head reads for each position."""
        ...


class Canvas:
    """Everything sees everything, so a pass computes the whole text (LLaDA, Dream)."""

    def __init__(self, model: DiffusionLM, prompt: Sequence[int], continuation: Sequence[int], unread: bool = False):
        self.model, device = model, model.device
        seen = [model.settings.mask_token_id] * len(prompt) if unread else prompt
        self.ids = torch.tensor([*seen, *continuation], device=device)
        self.position = torch.arange(len(self.ids), device=device)
        self.open = self.position >= len(prompt)
        self.answer = self.position[len(prompt) :]
        self.sizes, self.passes = [len(continuation)], 0

    def hidden(self, embeds_NQD: Tensor) -> Tensor:
        position = self.position.expand(embeds_NQD.shape[:2])
        return self.model.encode(embeds_NQD, View(position))[
            :, (self.position - self.model.settings.shift).clamp_min(0)
        ]


class Blocks:
    """Noisy blocks beside the clean text (SDAR and other block-causal models)."""

    def __init__(
        self, model: DiffusionLM, prompt: Sequence[int], continuation: Sequence[int], b: int, unread: bool = False
    ):
        self.model, self.b, device = model, b, model.device
        mask, length, total = model.settings.mask_token_id, len(prompt), len(prompt) + len(continuation)
        first, end = length // b * b, -(-total // b) * b
        filler = [mask] * (end - total)
        text = torch.tensor([*([mask] * length if unread else prompt), *continuation, *filler], device=device)
        self.ids, self.position = text[first:], torch.arange(first, end, device=device)
        self.open = torch.ones_like(self.ids, dtype=torch.bool)
        self.answer = torch.arange(length - first, total - first, device=device)
        self.sizes = [min(start + b, total) - max(start, length) for start in range(first, end, b)]
        self.past, self.passes = Past(), 0
        own, clean = self.position // b, text[: end - b]
        hidden = self._read(clean)
        before = torch.arange(len(clean), device=device) // b < own[:, None]
        self.seen = torch.cat((before, own == own[:, None]), 1)[None, None]
        self.left = hidden, (self.position % b == 0) & (self.position > 0)
        """Under a shift: the clean outputs, and the positions which those to the left of their blocks predict."""

    def _read(self, clean_C: Tensor) -> Tensor:
        """Keep the keys and values of the clean text; returns its outputs [C, D]."""
        out, piece = [self.model.codebook.new_zeros(0, self.model.codebook.shape[1])], max(1, PIECE // self.b) * self.b
        for part in clean_C.split(piece) if len(clean_C) else ():
            start = self.passes * piece
            position = torch.arange(start, start + len(part), device=part.device)
            block = torch.arange(start + len(part), device=part.device) // self.b
            seen = (block <= block[start:, None])[None, None]
            out.append(self.model.encode(self.model.embed(part[None]), View(position[None], seen, self.past))[0])
            self.passes += 1
        self.past.grows = False
        return torch.cat(out)

    def hidden(self, embeds_NQD: Tensor) -> Tensor:
        count, shift = len(embeds_NQD), self.model.settings.shift
        seen = self.seen.expand(count, -1, -1, -1)
        hidden = self.model.encode(embeds_NQD, View(self.position.expand(count, -1), seen, self.past))
        if not shift:
            return hidden
        (clean, begins), place = self.left, torch.arange(len(self.ids), device=hidden.device)
        beside = clean[(self.position - shift).clamp(0, max(0, len(clean) - 1))] if len(clean) else hidden[0]
        return torch.where(begins[:, None], beside, hidden[:, (place - shift).clamp_min(0)])


class Past:
    """A cache as transformers' attention layers ask for one: the clean text's keys and values, those of the pass behind
    them, which are kept while it grows."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.grows = True

    def update(self, key_NGQC: Tensor, value_NGQC: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if layer in self.layers:
            old = [each.expand(len(key_NGQC), -1, -1, -1) for each in self.layers[layer]]
            key_NGQC, value_NGQC = torch.cat((old[0], key_NGQC), 2), torch.cat((old[1], value_NGQC), 2)
        if self.grows:
            self.layers[layer] = key_NGQC, value_NGQC
        return key_NGQC, value_NGQC

    def get_seq_length(self, layer: int = 0) -> int:
        return 0
