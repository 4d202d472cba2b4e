"""A `DiffusionLM` for the step function, over slots."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rcd.carry.base import Carry
from rcd.engine.backbone import Backbone, Cache, Slots
from rcd.models.lm import DiffusionLM, Prediction

At = tuple[Tensor, Tensor]


class SlotModel:
    """What is predicted are the first slots, whole, or the `places` that the slots name; the rest is only stored."""

    def __init__(self, model: DiffusionLM, backbone: Backbone, cache: Cache, parts: Any):
        self.model, self.backbone, self.cache, self.parts = model, backbone, cache, parts
        self.settings = model.settings

    @property
    def codebook(self) -> Tensor:
        return self.model.codebook

    def __call__(
        self, ids_NQ: Tensor, slots: Slots, carry: Carry | None = None, state: Any = None, inject: Tensor | None = None
    ) -> Prediction:
        predicted = 0 if inject is None else inject.shape[0]
        at = None if slots.places is None else (_slot(slots.places, len(ids_NQ)), slots.places)
        embeds = self.model.embed(ids_NQ) if inject is None else self.embed(ids_NQ, carry, state, inject, at)
        hidden = self.backbone(embeds, slots, self.cache)
        source = slots.sources or at
        hidden = hidden[:predicted] if source is None else hidden[source]
        head = self.model.head
        logits = self.parts.linear(hidden, head.weight, head.bias) if predicted else hidden
        return Prediction(logits, hidden)

    def embed(self, ids_NQ: Tensor, carry: Carry | None, state: Any, inject: Tensor | None, at: At | None) -> Tensor:
        """The input embeddings [N, Q, D], the carry's part among them (Eq. 2)."""
        assert carry is not None and inject is not None
        embeds = self.model.embed(ids_NQ)
        count = inject.shape[0]
        asked = embeds[:count] if at is None else embeds[at]
        injected = carry.inject(asked, inject, state, self.model.carry_parameters)
        return embeds.slice_scatter(injected, end=count) if at is None else embeds.index_put(at, injected)


def _slot(places: Tensor, slots: int) -> Tensor:
    """[P, 1] the slot of each predicted block."""
    return (torch.arange(len(places), device=places.device) % slots)[:, None]
