"""A `DiffusionLM` for the step function, over slots."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from rcd.carry.base import Carry
from rcd.decode.fused import FusedBackbone, misfit, plain
from rcd.decode.shared import SharedBackbone
from rcd.decode.slots import Cache, Slots, check_room, made_cache
from rcd.decode.step import Places
from rcd.decode.stock import StockBackbone
from rcd.kernels import parts_for
from rcd.models.lm import DiffusionLM, Prediction
from rcd.models.threads import SMALL
from rcd.residual.product import by, product_by

At = tuple[Tensor, Tensor]


@contextmanager
def before_norm(model: DiffusionLM) -> Iterator[list[Tensor]]:
    """What enters the stock backbone's final norm while this is open: [N, Q, D] of every pass of this thread. Another
    loop, of a target that this model is the reference of, may run passes of the same model meanwhile."""
    found: list[Tensor] = []
    own = threading.get_ident()

    def note(_: Any, given: tuple[Tensor, ...]) -> None:
        if threading.get_ident() == own:
            found.append(given[0])

    hook = model.backbone.norm.register_forward_pre_hook(note)  # type: ignore[union-attr]
    try:
        yield found
    finally:
        hook.remove()


class Backbone(Protocol):
    def __call__(self, embeds_NQD: Tensor, slots: Slots, cache: Cache) -> Tensor: ...


class SlotModel:
    """A model, its cache and the parts of its passes. What is predicted are the first slots, whole, or the `places`
    that the slots name; the rest is only stored. `mask`: the mask of the texts, which a reference may call by another
    id."""

    reads_prompts: ClassVar[bool] = True

    def __init__(
        self, model: DiffusionLM, rows: int, capacity: int, *, shared: bool = False, passes: str | None = None,
        apart: bool = False, mask: int | None = None,
    ):  # fmt: skip
        stock = passes == "stock" or (passes is None and misfit(model) is not None)
        self.model, self.settings = model, model.settings
        self.parts = parts_for(model.device, model.codebook.dtype, apart)
        self.mask, self.apart = mask, apart
        self.backbone: Backbone
        if stock:
            self.backbone = StockBackbone(model, apart)
        else:
            check_room(model, rows, capacity, shared)
            small = apart and model.size <= SMALL
            self.backbone = (SharedBackbone if small else FusedBackbone)(model, self.parts)
            self.backbone.turns(capacity)
        self.cache = made_cache(model, rows, capacity, shared, own=stock)
        self.replayable = not stock and self.parts.__name__.endswith(".fused")
        """Whether its passes ask the host nothing, so that a graph may hold them."""

    @property
    def codebook(self) -> Tensor:
        return self.model.codebook

    def __call__(
        self, ids_NQ: Tensor, slots: Slots, carry: Carry, state: Any, inject: Tensor, places: Places, raw: bool = False
    ) -> Prediction:
        """A step's pass. `raw`: also tell the hidden states before the final norm."""
        hidden, before = self.hidden(ids_NQ, slots, carry, state, inject, places, raw)
        return Prediction(self.head(hidden, places.counts), hidden, before)

    def hidden(
        self, ids_NQ: Tensor, slots: Slots, carry: Carry, state: Any, inject: Tensor, places: Places, raw: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(what the head reads of a step's pass, the same before the final norm if it is asked for)."""
        embeds = self.embed(self._own(ids_NQ, slots), carry, state, inject, slots.places)
        with before_norm(self.model) if raw else nullcontext() as found:
            hidden = self.backbone(embeds, slots, self.cache)
        chosen: Any = slots.sources or slots.places or slice(inject.shape[0])
        hidden = places.take(hidden[chosen])
        before = None
        if found:
            before = torch.cat(found)
            if len(found) > 1:  # slot by slot, in an order of their own
                assert isinstance(self.backbone, StockBackbone)
                before = torch.empty_like(before).index_copy(0, torch.tensor(self.backbone.order), before)
            before = places.take(before[chosen])
        return hidden, before

    def plain(self, ids_NQ: Tensor, slots: Slots, predicted: int = 0) -> Tensor | None:
        """A pass with nothing injected: logits of so many slots (or all places), None for 0, where it only stores."""
        hidden = self.plain_hidden(ids_NQ, slots, predicted)
        return self.head(hidden, None) if predicted else None

    def plain_hidden(self, ids_NQ: Tensor, slots: Slots, predicted: int) -> Tensor:
        """What the head reads of such a pass."""
        hidden = self.backbone(self.model.embed(self._own(ids_NQ, slots)), slots, self.cache)
        chosen: Any = slots.sources or slots.places or slice(predicted)
        return hidden[chosen]

    def head(self, hidden: Tensor, counts: list[int] | None) -> Tensor:
        """Logits; where `counts` says how many each row has, one row after another."""
        head: Any = self.model.head
        if not plain(head):  # its own product
            return by(counts or [1] * len(hidden) if self.apart else counts, hidden, head)
        if counts is None:
            return self.parts.linear(hidden, head.weight, head.bias)
        return product_by(counts, hidden, head.weight, head.bias)

    def embed(self, ids_NQ: Tensor, carry: Carry, state: Any, inject: Tensor, at: At | None) -> Tensor:
        """The input embeddings [N, Q, D], the carry's part among them (Eq. 2)."""
        embeds = self.model.embed(ids_NQ)
        count = inject.shape[0]
        chosen = embeds[:count] if at is None else embeds[at]
        injected = carry.inject(chosen, inject, state, self.model.carry_parameters)
        return embeds.slice_scatter(injected, end=count) if at is None else embeds.index_put(at, injected)

    @property
    def lanes(self) -> tuple[SlotModel, ...]:
        """The models whose passes make one of this (`rcd.decode.guidance`)."""
        return (self,)

    def _own(self, ids: Tensor, slots: Slots) -> Tensor:
        """The same by this model's ids: its own mask, and an id of the other's padding, which is no token, as its last
        one."""
        if self.mask is None:
            return ids
        ids = torch.where(ids == self.mask, self.settings.mask_token_id, ids)
        return ids.clamp_max(self.settings.vocab_size - 1)


class Raw:
    """A model whose passes also tell the hidden states before the final norm."""

    def __init__(self, model: Any):
        self.model, self.codebook = model, model.codebook

    def __call__(
        self, ids: Tensor, view: Any, carry: Carry, state: Any, inject: Tensor, places: Places, /
    ) -> Prediction:
        return self.model(ids, view, carry, state, inject, places, raw=True)
