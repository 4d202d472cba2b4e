"""DiffusionLM: a stock transformers backbone and its head, with the injection of a carry inside the forward pass.

Shapes: B batch, L window, P predicted positions, V vocabulary, D embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rcd.carry.base import learnt_by, places
from rcd.models.family import FamilySpec
from rcd.models.lowbit import LowBitLinear
from rcd.residual.shortcut import Regression, stride
from rcd.residual.summary import Tail

if TYPE_CHECKING:
    from rcd.carry.base import Carry


@dataclass(frozen=True)
class ModelSettings:
    """What decoding must know of a checkpoint; read from its files, each value open to an override at load."""

    family: str
    attention: str
    vocab_size: int
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    block_length: int | None
    context_length: int
    shift: int = 0
    tempered_confidence: bool = True
    max_new_tokens: int | None = None
    """How long an answer may be where nothing else is said; a bidirectional model knows only canvases like those it was
    trained on."""

    @property
    def window(self) -> str:
        return "blockwise" if self.attention == "block_causal" else "bidirectional"


@dataclass(frozen=True)
class View:
    """Where the window's tokens stand and what they see."""

    position_ids: Tensor
    """[B, L]"""
    attention: Any | None = None
    """Boolean [B, 1, L, keys], or a flex BlockMask, or None: every key is visible."""
    cache: Any | None = None
    """Keys and values of earlier tokens (`rcd.decode.cache.KVCache`), or None."""
    predict: slice = field(default_factory=lambda: slice(None))
    """The positions whose predictions are wanted, which are also those where a carry may inject."""

    def rows(self, index: Tensor) -> View:
        """The view of some rows; of a cache, it must be a place (`KVCache.place`)."""
        seen = None if self.attention is None else self.attention[index]
        cache = None if self.cache is None else self.cache.of(index)
        return View(self.position_ids[index], seen, cache, self.predict)


@dataclass(frozen=True)
class Prediction:
    logits: Tensor
    """[B, P, V]"""
    hidden: Tensor
    """[B, P, D], after the final norm: what the head reads."""
    raw: Tensor | None = None
    """[B, P, D], before the final norm, where someone asked for it."""


class WideNorm(nn.Module):
    """The stock RMS norm, computed in fp32 or, where the model is wider, in its own dtype: fp64 is then fp64."""

    def __init__(self, stock: Any):
        super().__init__()
        self.weight: nn.Parameter = stock.weight
        self.variance_epsilon = float(stock.variance_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * normed.to(x.dtype)

    @classmethod
    def replace_all(cls, backbone: nn.Module) -> None:
        """In the place of every norm of the backbone that is one, under its name."""
        for parent in list(backbone.modules()):
            for name, child in parent.named_children():
                if type(child).__name__.endswith("RMSNorm") and hasattr(child, "variance_epsilon"):
                    setattr(parent, name, cls(child))


class DiffusionLM(nn.Module):
    def __init__(self, spec: FamilySpec, settings: ModelSettings, backbone: nn.Module, head: nn.Linear):
        super().__init__()
        self.spec = spec
        self.settings = settings
        self.backbone = backbone
        self.head = head
        """Quantised, it is a layer of another class that is called like one (`rcd.models.lowbit`)."""
        self.carry_parameters: nn.Module | None = None
        """What the carry has learnt (`rcd.carry.base.Carry.parameters`)."""
        self.quantised: str | None = None
        """How weights are kept that are no floats; such a model is neither trained, cast nor written."""
        self.spread = False
        """Whether layers stand on several devices, or on disk (`rcd.models.placing`)."""

    @property
    def codebook(self) -> Tensor:
        """E, the input embeddings [V, D] (Eq. 1)."""
        weight: Tensor = self.backbone.get_input_embeddings().weight  # type: ignore[operator]
        return weight

    @property
    def device(self) -> torch.device:
        return self.codebook.device

    @property
    def weights_version(self) -> tuple[Any, ...]:
        """Another one after any weight has been moved, cast or replaced, or codebook or head edited: what is
        computed from weights ahead of time (packed matrices, the codebook's directions) is then made anew."""
        edited = (self.codebook, *kept(self.head))
        edits = sum(0 if one.is_inference() else one._version for one in edited)
        addresses = hash(tuple(each.data_ptr() for each in kept(self)))
        return self.codebook.dtype, self.device, edits, addresses

    @property
    def size(self) -> int:
        """How many weights it has, quantised or not; a tied head counts once."""
        low = sum(each.weights for each in self.modules() if isinstance(each, LowBitLinear))
        return low + sum(parameter.numel() for parameter in self.parameters())

    @property
    def bytes(self) -> int:
        """What they take: storages that tensors share count once."""
        storages = [(tensor.untyped_storage(), tensor) for tensor in kept(self)]
        return sum({each.data_ptr() or id(tensor): each.nbytes() for each, tensor in storages}.values())

    def tail(self, rank: int) -> Tail:
        """The codebook's mean and strongest directions, computed once for every version of the weights."""
        held, version = self.__dict__.setdefault("_tails", {}), self.weights_version
        if rank not in held or held[rank][0] != version:
            held[rank] = version, Tail.of(self.codebook.detach(), rank)
        one: Tail = held[rank][1]
        return one

    def regression(self) -> Regression:
        """What the short cut to delta knows of the codebook and the head, computed once for every version of both."""
        version = self.weights_version
        held = self.__dict__.get("_regression")
        if held is None or held[0] != version:
            head: Any = self.head
            every = stride(self.settings.vocab_size)
            rows = head.floats(every) if isinstance(head, LowBitLinear) else head.weight.detach()[::every]
            held = self.__dict__["_regression"] = version, Regression.sampled(self.codebook.detach(), every, rows)
        one: Regression = held[1]
        return one

    def hold(self, carry: Carry | None) -> None:
        """Hold parameters of a carry that learns some: those that are there, else new ones; and none for any other."""
        learnt = learnt_by(carry, self.codebook.shape[1])
        if learnt is None or not self.holds(carry):
            self.carry_parameters = None if learnt is None else learnt.to(self.device, self.codebook.dtype)

    def holds(self, carry: Carry | None) -> bool:
        """Whether everything that the carry learns is here."""
        learnt, held = learnt_by(carry, self.codebook.shape[1]), self.carry_parameters
        return learnt is None or (held is not None and _shapes(held) == _shapes(learnt))

    def forward(
        self,
        ids_BL: Tensor,
        view: View,
        carry: Carry | None = None,
        state: Any = None,
        inject_BP: Tensor | None = None,
    ) -> Prediction:
        """Embed, inject (Eq. 2), run the backbone, predict.

        The injection is in here so that it always uses this model's own codebook, gathered if it is sharded. It is
        at those predicted positions that `inject_BP` marks; by default at masks, or wherever the carry enters.
        """
        embeds = self.embed(ids_BL)
        if carry is not None:
            if inject_BP is None:
                inject_BP = places(carry, ids_BL[:, view.predict] == self.settings.mask_token_id)
            injected = carry.inject(embeds[:, view.predict], inject_BP, state, self.carry_parameters)
            start, stop, _ = view.predict.indices(ids_BL.shape[1])
            embeds = torch.cat((embeds[:, :start], injected, embeds[:, stop:]), dim=1)
        hidden = self._predictors(self.encode(embeds, view), view.predict)
        return Prediction(self.head(hidden), hidden)

    def embed(self, ids_BL: Tensor) -> Tensor:
        return nn.functional.embedding(ids_BL, self.codebook)

    def encode(self, embeds_BLD: Tensor, view: View) -> Tensor:
        """The backbone's output [B, L, D], after the final norm."""
        hidden: Tensor = self.backbone(
            inputs_embeds=embeds_BLD,
            attention_mask=view.attention,
            position_ids=view.position_ids,
            past_key_values=view.cache,
            use_cache=view.cache is not None,
        ).last_hidden_state
        return hidden

    def _predictors(self, hidden_BLD: Tensor, predict: slice) -> Tensor:
        """The outputs that predict the wanted positions; under Dream's shift, those one to the left (the first
        position of the window is predicted by itself)."""
        if not self.settings.shift:
            return hidden_BLD[:, predict]
        index = torch.arange(hidden_BLD.shape[1], device=hidden_BLD.device)[predict]
        return hidden_BLD[:, (index - self.settings.shift).clamp_min(0)]


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in module.state_dict().items()}


def kept(module: nn.Module) -> Iterator[Tensor]:
    """The plain tensors that a module's numbers are in; those of a quantised weight are inside of it."""
    for tensor in (*module.parameters(), *module.buffers()):
        if type(tensor) in (Tensor, nn.Parameter) or not hasattr(tensor, "__tensor_flatten__"):
            yield tensor
        else:
            yield from (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
