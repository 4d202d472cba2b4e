"""What a carry declares agrees with what its methods do, for every registered one and for one from outside."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rcd import registry
from rcd.carry.base import Carry, CarryState, learnt_by, make, places, trained_names
from rcd.carry.residual import Residual
from rcd.residual.distribution import Distribution
from rcd.residual.start import Passes
from rcd.settings import entries
from tests.outside import Gated, Memory

B, L, V, D = 3, 5, 40, 8
CASES: list[Carry] = [
    *(make(name) for name in registry.names("carry")),
    *(Residual(start=start, source=source) for start in registry.names("start") for source in ("self", "reference")),
    *(Residual(alpha=name, alpha_scale=1.7, alpha_most=0.8) for name in registry.names("alpha")),
    Residual(start="self", t_res=0.8, t_res_at_start=True), Residual(t_res=0.8, t_res_on="both"),
    make("token_merge", {"top_k": 3, "weight": 0.6}), make("iter_smooth", {"most": 0.2}), Memory(), Gated(),
]  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def predicted(seed: int, dtype: torch.dtype) -> Distribution:
    return Distribution(normal(B, L, V, seed=seed, dtype=dtype) * 3)


class Watched(Passes):
    """Passes that remember whether a generator was asked for."""

    def __getattribute__(self, name: str) -> Any:
        if name == "generators":
            object.__setattr__(self, "drawn", True)
        return object.__getattribute__(self, name)


def begun(carry: Carry, dtype: torch.dtype = torch.float32, seed: int = 0) -> CarryState:
    given = None if carry.start_pass == "none" else predicted(seed + 11, dtype)
    generators = [torch.Generator().manual_seed(seed + row) for row in range(B)] if carry.start_draws else []
    state: CarryState = carry.begin(given, Passes((B, L, V), torch.device("cpu"), generators), codebook(dtype))
    return state


def codebook(dtype: torch.dtype) -> torch.Tensor:
    return normal(V, D, seed=1, dtype=dtype)


def learnt_of(carry: Carry, dtype: torch.dtype) -> nn.Module | None:
    learnt = learnt_by(carry, D)
    if learnt is None:
        return None
    for k, parameter in enumerate(learnt.parameters()):
        parameter.data = normal(*parameter.shape, seed=20 + k)
    return learnt.to(dtype).requires_grad_(False)


def after(carry: Carry, steps: int = 2, dtype: torch.dtype = torch.float32, seed: int = 0) -> CarryState:
    state = begun(carry, dtype, seed)
    for step in range(steps):
        if carry.step_pass != "none":
            state = carry.refresh(state, predicted(seed + 50 + step, dtype), codebook(dtype))
        hidden = normal(B, L, D, seed=seed + 30 + step, dtype=dtype)
        state = carry.update(state, predicted(seed + 70 + step, dtype), hidden, codebook(dtype))
    return state


def injected(carry: Carry, state: CarryState, where: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return carry.inject(normal(B, L, D, seed=9, dtype=dtype), where, state, learnt_of(carry, dtype))


EVERYWHERE = torch.ones(B, L, dtype=torch.bool)
MASKED = torch.arange(B * L).view(B, L) % 2 == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("carry", CASES, ids=repr)
def test_the_declarations_are_those_of_the_methods(carry: Carry, dtype: torch.dtype) -> None:
    plain = normal(B, L, D, seed=9, dtype=dtype)
    cold = carry.cold((B, L), codebook(dtype))
    assert torch.equal(injected(carry, cold, EVERYWHERE, dtype), plain)  # nothing is nothing, to the last bit
    assert all(not tensor.any() for tensor in cold.tensors())
    state = after(carry, dtype=dtype)
    assert [(t.shape, t.dtype) for t in cold.tensors()] == [(t.shape, t.dtype) for t in state.tensors()]
    assert all(tensor.shape[:2] == (B, L) for tensor in state.tensors())
    assert (cold.alpha is None) == (state.alpha is None)
    assert (state.alpha is None) == (state.delta is None)
    if state.alpha is not None:
        assert state.alpha.shape == (B, L) and state.alpha.dtype == torch.promote_types(dtype, torch.float32)
        assert float(state.alpha.max()) <= carry.strongest + 1e-6
    assert carry.carries == bool(state.tensors())
    if carry.step_pass == "none" and "alpha='none'" not in repr(carry):
        assert carry.carries == (not torch.equal(injected(carry, state, EVERYWHERE, dtype), plain))
    changed = (injected(carry, state, MASKED, dtype) != plain).any(-1)
    assert not (changed & ~MASKED).any()  # never outside of where it may enter
    assert torch.equal(places(carry, MASKED), EVERYWHERE if carry.everywhere else MASKED)


@pytest.mark.parametrize("carry", CASES, ids=repr)
def test_a_start_reads_what_it_declares(carry: Carry) -> None:
    assert carry.start_pass in ("none", "own", "reference") and carry.step_pass in ("none", "reference")
    assert carry.needs_reference == ("reference" in (carry.start_pass, carry.step_pass))
    watched = Watched((B, L, V), torch.device("cpu"), [torch.Generator().manual_seed(row) for row in range(B)])
    given = None if carry.start_pass == "none" else predicted(3, torch.float32)
    state = carry.begin(given, watched, codebook(torch.float32))
    assert bool(watched.__dict__.get("drawn")) == carry.start_draws
    cold = carry.cold((B, L), codebook(torch.float32))
    same = all(torch.equal(one, two) for one, two in zip(state.tensors(), cold.tensors(), strict=True))
    asks = carry.start_pass != "none" or carry.start_draws
    assert same == (not asks)


@pytest.mark.parametrize("carry", CASES, ids=repr)
def test_an_expectation_and_the_temperature_of_the_entropy_are_declared(carry: Carry) -> None:
    class Seen(Distribution):
        expected, temperatures = 0, set()

        def expectation(self, codebook_VD: torch.Tensor) -> torch.Tensor:
            type(self).expected += 1
            return super().expectation(codebook_VD)

        def entropy_at(self, temperature: float) -> torch.Tensor:
            self.temperatures.add(temperature)
            return super().entropy_at(temperature)

    carry.update(begun(carry), Seen(normal(B, L, V, seed=2)), normal(B, L, D, seed=3), codebook(torch.float32))
    assert carry.expects == bool(Seen.expected)
    assert Seen.temperatures <= {carry.entropy_temperature}


@pytest.mark.parametrize("carry", CASES, ids=repr)
def test_rows_and_positions_of_a_state_can_be_taken_and_put(carry: Carry) -> None:
    one, two = after(carry), after(carry, seed=100)
    index = torch.tensor([2, 0])
    put = one.with_tensors([each.clone() for each in one.tensors()])
    put.write(index, two.rows(index))
    for old, other, new in zip(one.tensors(), two.tensors(), put.tensors(), strict=True):
        assert torch.equal(new[1], old[1]) and torch.equal(new[index], other[index])
    places_BW = torch.tensor([[1, 3], [0, 4], [2, 1]])
    where = torch.tensor([[True, False], [True, True], [False, True]])
    put = one.put_at(places_BW, two.at(places_BW), where)
    for old, other, new in zip(one.tensors(), two.tensors(), put.tensors(), strict=True):
        taken = torch.zeros(B, L, dtype=torch.bool)
        taken[0, 1] = taken[1, 0] = taken[1, 4] = taken[2, 1] = True
        assert torch.equal(new[taken], other[taken]) and torch.equal(new[~taken], old[~taken])
    again = one.with_tensors(one.tensors())
    assert type(again) is type(one) and all(x is y for x, y in zip(again.tensors(), one.tensors(), strict=True))


@pytest.mark.parametrize("carry", CASES, ids=repr)
def test_a_state_can_be_weighted_by_row_and_kept_by_position(carry: Carry) -> None:
    state, plain = after(carry), normal(B, L, D, seed=9)
    full = injected(carry, state, EVERYWHERE)
    scaled = injected(carry, state.scaled(torch.tensor([0.0, 1.0, 0.5])), EVERYWHERE)
    assert torch.equal(scaled[0], plain[0]) and torch.equal(scaled[1], full[1])
    if carry.scalable and not torch.equal(full[2], plain[2]):
        assert not torch.equal(scaled[2], full[2]) and not torch.equal(scaled[2], plain[2])
        assert (scaled[2] - plain[2]).norm() < (full[2] - plain[2]).norm()
    kept = injected(carry, state.kept(MASKED), EVERYWHERE)
    assert torch.equal(kept[~MASKED], plain[~MASKED]) and torch.equal(kept[MASKED], full[MASKED])


@pytest.mark.parametrize("carry", CASES, ids=repr)
def test_what_training_asks_for_is_answered(carry: Carry) -> None:
    for reader in (carry.for_training(), carry.for_reference()):
        assert reader.step_pass == "none"
        one = reader.update(
            begun(reader), predicted(1, torch.float32), normal(B, L, D, seed=1), codebook(torch.float32)
        )
        two = reader.update(
            begun(reader), predicted(2, torch.float32), normal(B, L, D, seed=2), codebook(torch.float32)
        )
        assert carry.carries == any(not torch.equal(x, y) for x, y in zip(one.tensors(), two.tensors(), strict=True))
    assert carry.for_reference().entropy_temperature == 1.0
    assert 0 <= carry.extra_pass_share <= 1
    if carry.reads_codebook:
        book = codebook(torch.float32).requires_grad_(True)
        state = carry.for_training().update(
            begun(carry.for_training()), predicted(1, torch.float32), normal(B, L, D, seed=1), book
        )
        assert any(tensor.requires_grad for tensor in state.tensors())


def test_the_carries_that_can_be_trained() -> None:
    assert sorted(trained_names()) == ["loopholing", "none", "residual"]


@pytest.mark.parametrize("name", registry.names("carry"))
def test_every_setting_has_a_default_and_a_help_text(name: str) -> None:
    kind = registry.get("carry", name)
    assert [entry.name for entry in entries(kind)] == [field.name for field in fields(kind)]
    assert all(entry.help for entry in entries(kind))
    assert make(name) == kind()


class Dtypes(TorchDispatchMode):
    """The dtypes of all that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen |= {one.dtype for one in (out if isinstance(out, tuple | list) else (out,)) if torch.is_tensor(one)}
        return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("carry", [one for one in CASES if not one.start_draws], ids=repr)
def test_fp64_is_computed_in_fp64_and_nothing_else_is(carry: Carry, dtype: torch.dtype) -> None:
    """A Dirichlet draw is fp32 everywhere, so that its numbers are the same."""
    book, learnt = codebook(dtype), learnt_of(carry, dtype)
    inputs = [predicted(seed, dtype).logits for seed in (1, 2)]
    embeds = normal(B, L, D, seed=9, dtype=dtype)
    with Dtypes() as dtypes:
        given = None if carry.start_pass == "none" else Distribution(inputs[0])
        state = carry.begin(given, Passes((B, L, V), torch.device("cpu")), book)
        if carry.step_pass != "none":
            state = carry.refresh(state, Distribution(inputs[1]), book)
        carry.inject(embeds, EVERYWHERE, state, learnt)
        state = carry.update(state, Distribution(inputs[0]), embeds, book)
        carry.inject(embeds, EVERYWHERE, state, learnt)
    others = {torch.float32, torch.bfloat16} if dtype == torch.float64 else {torch.float64}
    assert not dtypes.seen & others
