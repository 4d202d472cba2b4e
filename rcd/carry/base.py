"""The contract of a carry, and the making of one from a name and its settings.

Shapes: B batch, L window, V vocabulary, D embedding.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

from rcd import registry
from rcd.errors import RCDError, no_setting, unknown_name
from rcd.residual.distribution import Distribution
from rcd.residual.start import Passes


class CarryState(Protocol):
    """A value: passed in and returned, never kept on an object."""

    @property
    def alpha(self) -> Tensor | None:
        """[B, L]: what a step event shows as the weight of the residual, if the carry has one."""
        ...

    def rows(self, index: Tensor) -> CarryState:
        """The state of some rows of the batch."""
        ...

    def put(self, index: Tensor, other: Any) -> CarryState:
        """The state with some rows replaced by those of another."""
        ...

    def at(self, index_BW: Tensor) -> CarryState:
        """The state of some positions, each row's own."""
        ...

    def put_at(self, index_BW: Tensor, other: Any, where_BW: Tensor) -> CarryState:
        """The state with those positions replaced by another's, `where` it says so."""
        ...


class TensorState:
    """The rows and positions of a state that is a frozen dataclass of tensors, their first two dimensions."""

    def rows(self, index: Tensor) -> Self:
        return type(self)(*(tensor[index] for tensor in self._tensors()))

    def put(self, index: Tensor, other: Self) -> Self:
        pairs = zip(self._tensors(), other._tensors(), strict=True)
        return type(self)(*(tensor.index_copy(0, index, new.to(tensor.dtype)) for tensor, new in pairs))

    def at(self, index_BW: Tensor) -> Self:
        rows = torch.arange(len(index_BW), device=index_BW.device).unsqueeze(-1)
        return type(self)(*(tensor[rows, index_BW] for tensor in self._tensors()))

    def put_at(self, index_BW: Tensor, other: Self, where_BW: Tensor) -> Self:
        row, place = where_BW.nonzero(as_tuple=True)
        to = (row, index_BW[row, place])
        pairs = zip(self._tensors(), other._tensors(), strict=True)
        return type(self)(*(tensor.index_put(to, new[row, place].to(tensor.dtype)) for tensor, new in pairs))

    def _tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in dataclasses.fields(self)]  # type: ignore[arg-type]


class Carry(Protocol):
    """refresh -> inject -> [the model] -> update, at every step."""

    @property
    def needs_reference(self) -> bool:
        """Whether `refresh` will ask for a pass of a reference model."""
        ...

    @property
    def everywhere(self) -> bool:
        """Whether the state enters at every position of the window, tokens included, or at masks alone."""
        ...

    def refresh(self, state: Any | None, passes: Passes, codebook_VD: Tensor) -> CarryState:
        """The state that the coming step sees; `state` is None before the first step of a block."""
        ...

    def inject(self, embeds_BLD: Tensor, where_BL: Tensor, state: Any, learnt: nn.Module | None = None) -> Tensor:
        """The model's input embeddings (Eq. 2), changed only `where` the carry enters (`places`). `learnt` is what the
        model holds of the carry's parameters (`LearntCarry`)."""
        ...

    def update(self, state: Any, predicted: Distribution, hidden_BLD: Tensor, codebook_VD: Tensor) -> CarryState:
        """What the finished step hands on."""
        ...


@runtime_checkable
class LearntCarry(Protocol):
    """A carry with parameters of its own. The model holds them (`DiffusionLM.carry_parameters`), so that they are
    trained, sharded, moved and resumed with it; a checkpoint keeps them in carry.safetensors. The carry itself stays a
    frozen dataclass of settings."""

    def parameters(self, width: int) -> nn.Module:
        """New ones, as training begins with them."""
        ...


def learnt_by(carry: Carry | None, width: int) -> nn.Module | None:
    """New parameters of a carry that learns some; None for any other."""
    return carry.parameters(width) if isinstance(carry, LearntCarry) else None


def places(carry: Carry, masked_BL: Tensor) -> Tensor:
    """Where the carry enters."""
    return torch.ones_like(masked_BL) if carry.everywhere else masked_BL


def make(name: str, settings: dict[str, Any] | None = None) -> Carry:
    """A carry by its name, its settings checked: an unknown one is an error that lists the choices."""
    kind = registry.get("carry", name)
    settings = dict(settings or {})
    fields = [f.name for f in dataclasses.fields(kind)]
    for key in settings:
        if not fields:
            raise RCDError(f"carry {name!r} has no settings, so {key!r} cannot be set.")
        if key not in fields:
            raise no_setting(f"carry {name!r}", key, fields)
    carry: Carry = kind(**settings)
    return carry


def describe(carry: Carry) -> dict[str, Any]:
    """The inverse of `make`: {"name": ..., setting: value, ...}, as rcd.json keeps it."""
    for name in registry.names("carry"):
        if type(carry) is registry.get("carry", name):
            return {"name": name, **dataclasses.asdict(carry)}  # type: ignore[call-overload]
    raise unknown_name("carry", type(carry).__name__, registry.names("carry"))
