"""The contract of a carry, and the making of one from a name and its settings.

A carry is a frozen object of settings. Whatever others must know of one is declared here, with a default: nothing
outside of this room asks for the class of a carry or of its state, so that a carry may be defined anywhere.
Shapes: B batch, L window, V vocabulary, D embedding.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from rcd import registry
from rcd.errors import RCDError, no_setting, unknown_name
from rcd.residual.distribution import Distribution
from rcd.residual.start import Passes

if TYPE_CHECKING:
    from rcd.carry.residual import Residual


class CarryState:
    """A value: passed in and returned, never kept on an object. A subclass is a frozen dataclass of tensors whose first
    two dimensions are rows and positions, [B, L, ...]."""

    alpha: Tensor | None = None
    """[B, L]: what a step event shows as the weight of the residual, if the carry has one. A state that has one says
    `alpha: Tensor = field()`."""
    delta: Tensor | None = None
    """[B, L, D]: the embedding that alpha weighs, likewise."""

    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in dataclasses.fields(self)]  # type: ignore[arg-type]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Self:
        """The same kind of state of other tensors, in the order of `tensors`."""
        return type(self)(*tensors)

    def rows(self, index: Tensor) -> Self:
        """The state of some rows of the batch."""
        return self.with_tensors([tensor[index] for tensor in self.tensors()])

    def write(self, index: Tensor, other: Self) -> None:
        """Replace some rows by those of another; in place."""
        for old, new in self._pairs(other):
            old[index] = new.to(old.dtype)

    def at(self, index_BW: Tensor) -> Self:
        """The state of some positions, each row's own."""
        rows = torch.arange(len(index_BW), device=index_BW.device).unsqueeze(-1)
        return self.with_tensors([tensor[rows, index_BW] for tensor in self.tensors()])

    def put_at(self, index_BW: Tensor, other: Self, where_BW: Tensor) -> Self:
        """The state with those positions replaced by another's, `where` it says so."""
        row, place = where_BW.nonzero(as_tuple=True)
        to = (row, index_BW[row, place])
        return self.with_tensors(
            [old.index_put(to, new[row, place].to(old.dtype)) for old, new in self._pairs(other)]
        )  # fmt: skip

    def scaled(self, scale_B: Tensor) -> Self:
        """The state weighted by a number of each row: 1 leaves it as it is to the last bit, 0 is SeqD."""
        return self._weighted(scale_B.unsqueeze(-1))

    def kept(self, keep: Tensor) -> Self:
        """The state where `keep` (a boolean each position), nothing elsewhere."""
        return self._weighted(keep)

    def _weighted(self, weight: Tensor) -> Self:
        """alpha times the weight, if there is an alpha; else everything."""
        if self.alpha is not None:
            alpha = self.alpha * weight.to(self.alpha.dtype)
            return dataclasses.replace(self, alpha=alpha)  # type: ignore[type-var]
        out = []
        for tensor in self.tensors():
            by = weight.reshape(*weight.shape, *[1] * (tensor.dim() - weight.dim()))
            out.append(tensor * by.to(tensor.dtype))
        return self.with_tensors(out)

    def _pairs(self, other: Self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.tensors(), other.tensors(), strict=True))


class Carry(ABC):
    """At every step: inject -> [the model] -> update; a fresh block's first state is `begin`'s. What is declared below
    may be overridden by a class variable, a setting or a property."""

    trains: ClassVar[bool] = True
    """Whether a model can be trained for it."""

    @property
    def method(self) -> str:
        """What reports call decoding and training with it."""
        return type(self).__name__

    # ---- what decoding asks

    @property
    def carries(self) -> bool:
        """Whether anything travels between steps at all."""
        return True

    @property
    def everywhere(self) -> bool:
        """Whether the state enters at every position of the window, tokens included, or at masks alone."""
        return False

    @property
    def start_pass(self) -> str:
        """The pass whose prediction `begin` takes: `none`, `own` (of the model itself) or `reference`."""
        return "none"

    @property
    def start_draws(self) -> bool:
        """Whether `begin` draws from the rows' generators."""
        return False

    @property
    def step_pass(self) -> str:
        """The pass whose prediction `refresh` takes before every step: `none` or `reference`."""
        return "none"

    @property
    def needs_reference(self) -> bool:
        """Whether decoding asks for passes of a reference model."""
        return "reference" in (self.start_pass, self.step_pass)

    @property
    def recalls(self) -> bool:
        """Whether `update` reads the state that it is given."""
        return True

    @property
    def expects(self) -> bool:
        """Whether every update reads an expectation over the codebook (Eq. 1), which may then be approximated."""
        return False

    @property
    def entropy_temperature(self) -> float:
        """The temperature at which updates read the entropy."""
        return 1.0

    @property
    def scalable(self) -> bool:
        """Whether the state can be weighted by any number in [0, 1], or only by 0 (off) and 1 (on)."""
        return True

    @property
    def strongest(self) -> float:
        """The largest alpha that it can give."""
        return 1.0

    # ---- what training asks

    @property
    def reads_reference(self) -> bool:
        """Whether the states of training steps that are no trajectories come from a reference's predictions
        (Algorithm 1), and not from passes of the model itself."""
        return False

    @property
    def extra_pass_share(self) -> float:
        """Of the training steps whose state comes from the model itself, and that are no trajectories: the share that
        has a state at all, from a pass without gradient before the step's own. The others begin with nothing."""
        return 1.0

    @property
    def reads_codebook(self) -> bool:
        """Whether the state is made of the codebook, so that the loss may reach the codebook through it."""
        return False

    def for_training(self) -> Carry:
        """The carry whose `update` makes the states of training from predictions of the model itself."""
        return self

    def for_reference(self) -> Carry:
        """The same for predictions of a reference."""
        return self.for_training()

    def for_ablation(self) -> Residual:
        """The residual carry whose settings the paper's ablations vary: the paper's own, unless this is one."""
        carry: Residual = make("residual")  # type: ignore[assignment]
        return carry

    def parameters(self, width: int) -> nn.Module | None:
        """New parameters of its own, if it learns any, as training begins with them. The model holds them
        (`DiffusionLM.carry_parameters`), so that they are trained, sharded, moved and resumed with it; a checkpoint
        keeps them in carry.safetensors. The carry itself stays an object of settings."""
        return None

    # ---- what it does

    @abstractmethod
    def cold(self, shape_BL: tuple[int, int], codebook_VD: Tensor) -> CarryState:
        """The state that is nothing, all zero: with it a step is SeqD's. alpha is fp32, or fp64 as the codebook."""

    def begin(self, predicted: Distribution | None, passes: Passes, codebook_VD: Tensor) -> Any:
        """A fresh block's state. `predicted` is what the pass `start_pass` gave; None for `none`."""
        return self.cold(passes.shape[:2], codebook_VD)

    def refresh(self, state: Any, predicted: Distribution, codebook_VD: Tensor) -> Any:
        """The state that the coming step sees, of what the pass `step_pass` gave; not called where that is `none`."""
        return state

    @abstractmethod
    def inject(self, embeds_BLD: Tensor, where_BL: Tensor, state: Any, learnt: nn.Module | None = None) -> Tensor:
        """The model's input embeddings (Eq. 2), changed only `where` the carry enters (`places`). `learnt` is what the
        model holds of the carry's parameters."""

    @abstractmethod
    def update(self, state: Any, predicted: Distribution, hidden_BLD: Tensor, codebook_VD: Tensor) -> Any:
        """What the finished step hands on. `hidden` is what the head read."""


def learnt_by(carry: Carry | None, width: int) -> nn.Module | None:
    """New parameters of a carry that learns some; None for any other."""
    return None if carry is None else carry.parameters(width)


def places(carry: Carry, masked_BL: Tensor) -> Tensor:
    """Where the carry enters."""
    return torch.ones_like(masked_BL) if carry.everywhere else masked_BL


def is_carry(value: object) -> bool:
    """For checks of a user's value: a carry, and not its class."""
    return isinstance(value, Carry)


def trained_names() -> list[str]:
    """The carries that a model can be trained for, and `none`."""
    return [name for name in registry.names("carry") if registry.get("carry", name).trains]


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
