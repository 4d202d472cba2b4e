"""Weights that change after a call: replaced, edited, cast or loaded, they never give an old answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rcd
from rcd.carry.residual import Residual
from rcd.models.toy import toy
from tests.conftest import exact
from tests.equivalence.setups import PROMPTS, config, looped, same

NAMES = (
    "backbone.embed_tokens.weight", "backbone.layers.0.self_attn.q_proj.weight",
    "backbone.layers.1.self_attn.v_proj.weight", "backbone.layers.0.self_attn.o_proj.weight",
    "backbone.layers.0.self_attn.q_norm.weight", "backbone.layers.1.mlp.up_proj.weight",
    "backbone.layers.0.mlp.down_proj.weight", "backbone.layers.0.input_layernorm.weight",
    "backbone.layers.1.post_attention_layernorm.weight", "backbone.norm.weight", "head.weight",
)  # fmt: skip
CHOSEN = config(carry="residual")


def other(parameter: torch.Tensor) -> torch.Tensor:
    """What it is changed to."""
    noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return (parameter.detach() + noise * parameter.detach().std().clamp_min(0.5)).to(parameter)


def edited(model: Any, name: str) -> None:
    with torch.no_grad():
        parameter = model.get_parameter(name)
        parameter.copy_(other(parameter))


def new_data(model: Any, name: str) -> None:
    parameter = model.get_parameter(name)
    parameter.data = other(parameter)


def replaced(model: Any, name: str) -> None:
    module, _, last = name.rpartition(".")
    parameter = model.get_parameter(name)
    setattr(model.get_submodule(module), last, nn.Parameter(other(parameter), requires_grad=False))


def loaded(model: Any, name: str) -> None:
    model.load_state_dict({**model.state_dict(), name: other(model.get_parameter(name))})


def assigned(model: Any, name: str) -> None:
    model.load_state_dict({**model.state_dict(), name: other(model.get_parameter(name))}, assign=True)


def wanted(name: str) -> rcd.Output:
    """Of a model that was so from the beginning."""
    fresh = exact("sdar")
    edited(fresh.model, name)
    return fresh.generate(PROMPTS, CHOSEN)


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_parameter_is_seen(name: str) -> None:
    want, old = wanted(name), exact("sdar").generate(PROMPTS, CHOSEN)
    assert want.sequences != old.sequences
    for change in (edited, new_data, replaced, loaded, assigned):
        pipeline = exact("sdar")
        same(pipeline.generate(PROMPTS, CHOSEN), old)
        change(pipeline.model, name)
        got = pipeline.generate(PROMPTS, CHOSEN)
        assert got.sequences == want.sequences, change.__name__


def tied(pipeline: rcd.Pipeline) -> rcd.Pipeline:
    pipeline.model.head.weight = pipeline.model.backbone.embed_tokens.weight  # type: ignore[union-attr, assignment]
    return pipeline


@pytest.mark.parametrize("change", [edited, new_data, loaded])
def test_a_tied_head_changes_with_the_embeddings(change: Callable[[Any, str], None]) -> None:
    fresh, pipeline = tied(exact("sdar")), tied(exact("sdar"))
    edited(fresh.model, NAMES[0])
    want = fresh.generate(PROMPTS, CHOSEN).sequences
    assert pipeline.generate(PROMPTS, CHOSEN).sequences != want
    change(pipeline.model, NAMES[0])
    assert pipeline.generate(PROMPTS, CHOSEN).sequences == want


def test_a_model_that_is_cast_is_served_by_a_new_engine() -> None:
    pipeline = rcd.Pipeline(toy("sdar", seed=3, spread=6.0))
    pipeline.generate(PROMPTS, CHOSEN)
    pipeline.model.double()
    same(pipeline.generate(PROMPTS, CHOSEN), exact("sdar").generate(PROMPTS, CHOSEN))
    pipeline.model.to(torch.bfloat16)
    assert all(result.tokens for result in pipeline.generate(PROMPTS, CHOSEN).results)
    assert len(pipeline.loop.engines) <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_short_cut_knows_of_the_codebook_is_made_anew(dtype: torch.dtype) -> None:
    chosen = config(carry="residual", delta="kept", batch_invariant=True)
    pipeline, fresh = (rcd.Pipeline(toy("sdar", seed=3, spread=6.0)) for _ in range(2))
    for each in (pipeline, fresh):
        each.model.to(dtype)
    old = pipeline.generate(PROMPTS, chosen).sequences
    for each in (pipeline, fresh):
        edited(each.model, NAMES[0])
    want = fresh.generate(PROMPTS, chosen).sequences
    assert pipeline.generate(PROMPTS, chosen).sequences == want != old
    mean = pipeline.model.codebook.float().mean(0)
    torch.testing.assert_close(pipeline.model.tail(2).mean.float(), mean.detach(), atol=1e-2, rtol=0)


def test_what_a_carry_has_learnt_may_change() -> None:
    chosen, pipeline, fresh = config(carry="loopholing"), looped("sdar"), looped("sdar")
    old = pipeline.generate(PROMPTS, chosen).sequences
    for each in (pipeline, fresh):
        assert each.model.carry_parameters is not None
        with torch.no_grad():
            for parameter in each.model.carry_parameters.parameters():
                parameter.mul_(-2.0)
    assert pipeline.generate(PROMPTS, chosen).sequences == fresh.generate(PROMPTS, chosen).sequences != old


@pytest.mark.parametrize("change", [edited, new_data, replaced])
@pytest.mark.parametrize("name", NAMES[:2])
def test_a_reference_that_changes_is_seen(change: Callable[[Any, str], None], name: str) -> None:
    chosen, target = config(carry=Residual(source="reference")), exact("sdar")
    reference, fresh = exact("sdar", 8), exact("sdar", 8)
    old = target.generate(PROMPTS, chosen, reference=reference).sequences
    change(reference.model, name)
    edited(fresh.model, name)
    want = exact("sdar").generate(PROMPTS, chosen, reference=fresh).sequences
    assert target.generate(PROMPTS, chosen, reference=reference).sequences == want != old
