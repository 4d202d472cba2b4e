"""Eq. 1-3, T_res and the starts of Algorithm 2, as the paper states them."""

from __future__ import annotations

import math

import pytest
import torch

from rcd import registry
from rcd.carry.residual import Residual
from rcd.residual import alpha as weights
from rcd.residual.context import interpolate, soft_embedding, top1_embedding
from rcd.residual.distribution import Distribution, align_vocabulary
from rcd.residual.start import Passes, dirichlet

V, D = 50, 8


@pytest.fixture
def p() -> torch.Tensor:
    return torch.randn(2, 3, V, generator=torch.Generator().manual_seed(0)).mul(2).softmax(-1)


@pytest.fixture
def codebook() -> torch.Tensor:
    return torch.randn(V, D, generator=torch.Generator().manual_seed(1))


def test_eq1_delta_is_the_expected_embedding(p: torch.Tensor, codebook: torch.Tensor) -> None:
    by_hand = sum(p[0, 1, j] * codebook[j] for j in range(V))
    torch.testing.assert_close(soft_embedding(p, codebook)[0, 1], by_hand)


def test_eq1_delta_of_a_certain_prediction_is_that_tokens_embedding(codebook: torch.Tensor) -> None:
    certain = torch.nn.functional.one_hot(torch.tensor([[7]]), V).float()
    assert torch.equal(soft_embedding(certain, codebook)[0, 0], codebook[7])


def test_eq2_mixes_masks_and_leaves_tokens_alone(codebook: torch.Tensor) -> None:
    embeds, delta = codebook[None, :2], codebook[None, 2:4]
    masked, alpha = torch.tensor([[True, False]]), torch.tensor([[0.25, 0.25]])
    mixed = interpolate(embeds, masked, alpha, delta)
    torch.testing.assert_close(mixed[0, 0], 0.75 * codebook[0] + 0.25 * codebook[2])
    assert torch.equal(mixed[0, 1], codebook[1])


def test_eq2_with_alpha_zero_is_the_plain_embedding_to_the_last_bit(codebook: torch.Tensor) -> None:
    everywhere = torch.ones(1, V, dtype=torch.bool)
    assert torch.equal(
        interpolate(codebook[None], everywhere, torch.zeros(1, V), codebook.flip(0)[None]), codebook[None]
    )


def test_eq3_alpha_is_one_for_uniform_and_zero_for_one_hot() -> None:
    uniform, certain = torch.full((V,), 1 / V), torch.eye(V)[3]
    assert weights.normalised_entropy(uniform).item() == pytest.approx(1.0, abs=1e-6)
    assert weights.normalised_entropy(certain).item() == 0.0


def test_eq3_alpha_by_hand() -> None:
    p = torch.tensor([0.5, 0.25, 0.25, 0.0])
    expected = (0.5 * math.log(2) + 0.5 * math.log(4)) / math.log(4)
    assert weights.normalised_entropy(p).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", registry.names("alpha"))
def test_an_all_zero_distribution_gives_alpha_zero_under_every_weight(name: str) -> None:
    assert weights.weight(name, torch.zeros(2, 3, V)).abs().max() == 0


@pytest.mark.parametrize("name", registry.names("alpha"))
@pytest.mark.parametrize("scale", [0.0, 0.3, 1.0, 5.0])
def test_every_weight_stays_in_the_unit_interval(name: str, scale: float, p: torch.Tensor) -> None:
    alpha = weights.weight(name, p, scale=scale)
    assert alpha.shape == p.shape[:-1]
    assert ((alpha >= 0) & (alpha <= 1)).all()
    if scale == 0:
        assert (alpha == 0).all()


def test_alpha_most_limits_the_weight_and_leaves_smaller_ones_alone() -> None:
    p = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.9, 0.1, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
    plain = weights.weight("entropy", p)
    limited = weights.weight("entropy", p, most=0.3)
    torch.testing.assert_close(limited, plain.clamp_max(0.3))
    torch.testing.assert_close(weights.weight("entropy", p, scale=2.0, most=0.3), (2 * plain).clamp_max(0.3))


def test_the_eight_weights_are_those_of_the_ablation(p: torch.Tensor) -> None:
    """fig:ablation-on-alpha, (1) to (8)."""
    entropy, top = -(p * p.log()).sum(-1) / math.log(V), p.max(-1).values
    expected = {
        "entropy": entropy,
        "confidence": top,
        "fixed": torch.full_like(top, 0.3),
        "one": torch.ones_like(top),
        "top1": entropy,  # the weight; the residual is the top token's embedding
        "inverse_entropy": 1 - entropy,
        "inverse_confidence": 1 - top,
        "none": torch.zeros_like(top),
    }
    assert set(expected) == set(registry.names("alpha"))
    for name, value in expected.items():
        torch.testing.assert_close(weights.weight(name, p), value)


def test_top1_carries_only_the_most_probable_token(p: torch.Tensor, codebook: torch.Tensor) -> None:
    state = Residual(alpha="top1").residual(Distribution(p.log()), codebook)
    assert torch.equal(state.delta, codebook[p.argmax(-1)])
    assert torch.equal(state.delta, top1_embedding(p, codebook))
    assert (Residual(alpha="top1", top1_alpha="one").residual(Distribution(p.log()), codebook).alpha == 1).all()


def test_t_res_raises_alpha_with_temperature_and_both_readings_agree_at_one(codebook: torch.Tensor) -> None:
    logits = torch.randn(1, 4, V, generator=torch.Generator().manual_seed(2)) * 3
    cold, plain, warm = (Residual(t_res=t).residual(Distribution(logits), codebook) for t in (0.5, 1.0, 2.0))
    assert (cold.alpha < plain.alpha).all() and (plain.alpha < warm.alpha).all()
    both = Residual(t_res_on="both").residual(Distribution(logits), codebook)
    assert torch.equal(plain.alpha, both.alpha) and torch.equal(plain.delta, both.delta)


def test_t_res_on_alpha_leaves_delta_and_on_both_scales_it(codebook: torch.Tensor) -> None:
    """Algorithm 2 against Sec. 3.3."""
    logits = torch.randn(1, 4, V, generator=torch.Generator().manual_seed(2)) * 3
    plain, alpha_only, both = (
        Residual(t_res=t, t_res_on=on).residual(Distribution(logits), codebook)
        for t, on in ((1.0, "alpha"), (2.0, "alpha"), (2.0, "both"))
    )
    assert torch.equal(alpha_only.delta, plain.delta)
    assert torch.equal(alpha_only.alpha, both.alpha)
    torch.testing.assert_close(both.delta, (logits / 2).softmax(-1) @ codebook)


def test_probabilities_and_entropy_are_fp32_whatever_the_models_dtype(codebook: torch.Tensor) -> None:
    logits = (torch.randn(1, 4, V, generator=torch.Generator().manual_seed(3)) * 3).bfloat16()
    half = Residual().residual(Distribution(logits), codebook.bfloat16())
    full = Residual().residual(Distribution(logits.float()), codebook)
    assert half.alpha.dtype == torch.float32
    assert torch.equal(half.alpha, full.alpha)
    assert half.delta.dtype == torch.bfloat16
    torch.testing.assert_close(half.delta.float(), full.delta, atol=0.02, rtol=0.02)


def rows(*seeds: int) -> Passes:
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return Passes((len(seeds), 4, V), torch.device("cpu"), generators)


@pytest.mark.parametrize("start", registry.names("start"))
@pytest.mark.parametrize("at_start", [False, True])
@pytest.mark.parametrize("t_res", [1.0, 0.7])
def test_the_start_is_read_without_t_res_unless_it_is_asked_for(
    start: str, at_start: bool, t_res: float, codebook: torch.Tensor
) -> None:
    """Algorithm 2 computes the first residual without T_res."""
    carry = Residual(start=start, t_res=t_res, t_res_at_start=at_start)
    logits = torch.randn(2, 4, V, generator=torch.Generator().manual_seed(2)) * 3
    given = None if carry.start_pass == "none" else Distribution(logits)
    state = carry.begin(given, rows(3, 4), codebook)
    if start == "zero":
        assert not state.alpha.any()
        return
    p = dirichlet(None, rows(3, 4), 1.0) if start == "dirichlet" else logits.softmax(-1)
    at = (p.log() / t_res).softmax(-1) if at_start else p
    torch.testing.assert_close(state.alpha, weights.normalised_entropy(at))
    torch.testing.assert_close(state.delta, p @ codebook)


def test_with_a_reference_at_every_step_the_start_is_never_asked_for(codebook: torch.Tensor) -> None:
    carry = Residual(source="reference", start="dirichlet")
    assert (carry.start_pass, carry.start_draws, carry.step_pass) == ("none", False, "reference")
    state = carry.begin(None, Passes((2, 4, V), torch.device("cpu")), codebook)
    assert not state.alpha.any()
    logits = torch.randn(2, 4, V, generator=torch.Generator().manual_seed(2))
    read = carry.refresh(state, Distribution(logits), codebook)
    assert carry.update(read, Distribution(logits + 1), codebook[:1], codebook) is read
    assert torch.equal(read.alpha, Residual().residual(Distribution(logits), codebook).alpha)


def test_fp64_is_fp64(codebook: torch.Tensor) -> None:
    """Against a computation by hand: a cast to fp32 inside would show in the 8th digit."""
    logits = torch.randn(1, 4, V, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 3
    wide = codebook.double()
    state = Residual(t_res=0.9).residual(Distribution(logits), wide)
    p, at = logits.softmax(-1), (logits / 0.9).softmax(-1)
    torch.testing.assert_close(state.alpha, -(at * at.log()).sum(-1) / math.log(V), atol=1e-14, rtol=0)
    torch.testing.assert_close(state.delta, p @ wide, atol=1e-14, rtol=0)
    where, embeds = torch.ones(1, 4, dtype=torch.bool), wide[None, :4]
    by_hand = (1 - state.alpha[..., None]) * embeds + state.alpha[..., None] * state.delta
    torch.testing.assert_close(Residual().inject(embeds, where, state), by_hand, atol=1e-14, rtol=0)
    token = logits.argmax(-1)
    log_p = logits.log_softmax(-1).amax(-1)
    torch.testing.assert_close(Distribution(logits).log_p(token), log_p, atol=1e-14, rtol=0)


def test_cold_start_has_alpha_zero(codebook: torch.Tensor) -> None:
    state = Residual(start="zero").begin(None, rows(0, 1), codebook)
    assert not state.alpha.any() and not state.delta.any()
    assert state.delta.shape == (2, 4, D)


def test_dirichlet_start_is_a_distribution_of_each_rows_own_generator(codebook: torch.Tensor) -> None:
    both, second = dirichlet(None, rows(5, 6), 1.0), dirichlet(None, rows(6), 1.0)
    torch.testing.assert_close(both.sum(-1), torch.ones(2, 4))
    assert torch.equal(both[1], second[0])
    assert not torch.equal(both[0], both[1])


def test_a_larger_concentration_brings_the_dirichlet_start_nearer_to_uniform(codebook: torch.Tensor) -> None:
    alpha = [
        Residual(start="dirichlet", concentration=c).begin(None, rows(1), codebook).alpha.mean()
        for c in (0.05, 1.0, 50.0)
    ]
    assert alpha[0] < alpha[1] < alpha[2]
    assert alpha[2] > 0.99


def test_padded_vocabularies_are_cut_or_filled_and_renormalised() -> None:
    logits = torch.randn(1, 2, 10)
    cut = align_vocabulary(logits, 8).softmax(-1)
    torch.testing.assert_close(cut.sum(-1), torch.ones(1, 2))
    torch.testing.assert_close(cut, logits.softmax(-1)[..., :8] / logits.softmax(-1)[..., :8].sum(-1, keepdim=True))
    filled = align_vocabulary(logits, 12).softmax(-1)
    torch.testing.assert_close(filled[..., :10], logits.softmax(-1))
    assert not filled[..., 10:].any()
    assert align_vocabulary(logits, 10) is logits
    assert torch.isfinite(weights.normalised_entropy(filled)).all()
