"""Loopholing and the soft-feedback rivals in decoding: SeqD at their neutral settings, a batch equals its rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import rcd
from rcd import registry
from rcd.carry.base import Carry, make
from rcd.carry.iter_smooth import IterSmooth
from rcd.carry.latent_refinement import LatentRefinement
from rcd.carry.loopholing import HiddenState, Loopholing
from rcd.carry.soft_mask import SoftMask
from rcd.carry.token_merge import TokenMerge
from rcd.decode.events import Step
from rcd.decode.step import Rules, denoise
from rcd.decode.stopping import unsettled
from rcd.diffusion.attention import block_causal
from rcd.models.lm import View
from tests.conftest import FAMILIES, exact
from tests.equivalence.test_decoding import PROMPTS, config, same

RIVALS = [name for name in registry.names("carry") if name not in ("none", "residual")]
STRONG: dict[str, Carry] = {
    "loopholing": Loopholing(),
    "iter_smooth": IterSmooth(start=0.5, growth=0.1, most=1.0),
    "token_merge": TokenMerge(top_k=2),
    "soft_mask": SoftMask(scale=1.0, centre=-3.0),
    "latent_refinement": LatentRefinement(weight=0.9),
}
NEUTRAL = [IterSmooth(most=0.0), TokenMerge(weight=0.0), SoftMask(scale=0.0), LatentRefinement(weight=0.0)]


def looped(family: str, seed: int = 3, **shape: Any) -> rcd.Pipeline:
    """A model that has learnt something for Loopholing, if nothing sensible."""
    pipeline = exact(family, seed, **shape)
    pipeline.model.hold(Loopholing())
    assert pipeline.model.carry_parameters is not None
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in pipeline.model.carry_parameters.parameters():
            parameter.normal_(generator=generator)
    return pipeline


@pytest.fixture(scope="module")
def loops() -> dict[str, rcd.Pipeline]:
    return {family: looped(family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("off", NEUTRAL, ids=lambda carry: type(carry).__name__)
def test_a_rival_at_weight_zero_emits_seqds_tokens(models: dict[str, rcd.Pipeline], family: str, off: Carry) -> None:
    same(models[family].generate(PROMPTS, config(carry=off)), models[family].generate(PROMPTS, config(carry="none")))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", RIVALS)
def test_every_rival_is_not_seqd(loops: dict[str, rcd.Pipeline], family: str, name: str) -> None:
    """The checks here could fail: with its weight, each rule changes what is decoded."""
    plain = loops[family].generate(PROMPTS, config(carry="none")).sequences
    assert loops[family].generate(PROMPTS, config(carry=STRONG[name])).sequences != plain


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_ragged_batch_equals_its_rows_one_by_one(
    loops: dict[str, rcd.Pipeline], family: str, name: str, temperature: float
) -> None:
    chosen = config(carry=STRONG[name], temperature=temperature, seed=10)
    together = loops[family].generate(PROMPTS, chosen)
    for row, prompt in enumerate(PROMPTS):
        alone = loops[family].generate(prompt, replace(chosen, seed=10 + row))
        assert together.sequences[row] == alone.sequences[0]
        assert together.results[row].counts == alone.results[0].counts


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("name", RIVALS)
def test_a_batch_with_block_scope_equals_its_rows(loops: dict[str, rcd.Pipeline], family: str, name: str) -> None:
    chosen = config(carry=STRONG[name], carry_scope="block", block_length=4)
    together = loops[family].generate(PROMPTS, chosen)
    assert together.sequences == [loops[family].generate(prompt, chosen).sequences[0] for prompt in PROMPTS]
    canvas = loops[family].generate(PROMPTS, replace(chosen, carry_scope="canvas"))
    assert together.sequences != canvas.sequences


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", RIVALS)
@torch.inference_mode()
def test_the_first_step_of_every_rival_is_seqds(loops: dict[str, rcd.Pipeline], family: str, name: str) -> None:
    first = [
        next(event for event in loops[family].stream(PROMPTS, config(carry=carry)) if isinstance(event, Step))
        for carry in (STRONG[name], make("none"))
    ]
    assert torch.equal(first[0].draft, first[1].draft)
    assert torch.equal(first[0].confidence.nan_to_num(), first[1].confidence.nan_to_num())


def test_a_looped_model_decoded_without_its_carry_is_the_plain_model(
    loops: dict[str, rcd.Pipeline], models: dict[str, rcd.Pipeline]
) -> None:
    for family in FAMILIES:
        chosen = config(carry="none")
        same(loops[family].generate(PROMPTS, chosen), models[family].generate(PROMPTS, chosen))


def uncached(pipeline: rcd.Pipeline, prompt: list[int]) -> list[int]:
    """Blockwise Loopholing without a cache: the whole text anew at every step, h at every position of the block."""
    chosen, model = pipeline.resolve(config(carry="loopholing")), pipeline.model
    rules, b, mask = Rules.of(chosen, model.settings), chosen.block_length, model.settings.mask_token_id
    ends = model.settings.eos_token_ids
    assert b is not None
    text = list(prompt)
    while len(text) < len(prompt) + chosen.new_tokens:
        start = len(text) // b * b
        ids = torch.tensor([text + [mask] * (start + b - len(text))])
        position = torch.arange(ids.shape[1])[None]
        view = View(position, block_causal(position, position, b), None, slice(start, start + b))
        state: Any = HiddenState(torch.zeros(1, b, model.codebook.shape[1], dtype=torch.float64))
        output = (position[:, start:] >= len(prompt)) & (position[:, start:] < len(prompt) + chosen.new_tokens)
        while (wanted := unsettled(ids[:, start:], ids[:, start:] == mask, output, ends, True)).any():
            outcome = denoise(model, rules, ids, view, state, wanted, torch.ones(1, dtype=torch.long), None)
            window = torch.where(outcome.committed, outcome.token, ids[:, start:])
            ids, state = torch.cat((ids[:, :start], window), dim=1), outcome.state
        text = ids[0].tolist()
        if set(text[len(prompt) :]) & set(ends):
            break
    new = text[len(prompt) : len(prompt) + chosen.new_tokens]
    end = next((k for k, token in enumerate(new) if token in ends), len(new))
    return new[: end + 1]


@pytest.mark.parametrize("seed", range(3))
@torch.inference_mode()
def test_cached_loopholing_equals_the_uncached_full_forward(seed: int) -> None:
    pipeline = looped("sdar", seed)
    for prompt in PROMPTS:
        assert pipeline.generate(prompt, config(carry="loopholing")).sequences[0] == uncached(pipeline, prompt)
