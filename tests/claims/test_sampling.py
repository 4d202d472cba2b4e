"""Sampling: what is drawn, and what its confidence means."""

from __future__ import annotations

import pytest
import torch

from rcd.diffusion.sampling import SamplingSettings, filter_top_k, filter_top_p, sample
from rcd.residual.distribution import Distribution


def logits(rows: int = 1, length: int = 64, vocabulary: int = 12) -> torch.Tensor:
    return torch.randn(rows, length, vocabulary, generator=torch.Generator().manual_seed(0)) * 2


def seeded(*seeds: int) -> list[torch.Generator | None]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_the_mask_is_never_sampled_and_confidence_stays_unfiltered(temperature: float) -> None:
    z = logits()
    z[..., 3] += 10  # the mask would win everywhere
    token, confidence = sample(Distribution(z), SamplingSettings(temperature, never=(3,)), seeded(0))
    assert not (token == 3).any()
    basis = (z / (temperature or 1.0)).softmax(-1)
    torch.testing.assert_close(confidence, basis.gather(-1, token[..., None])[..., 0])


def test_greedy_takes_the_most_probable_token() -> None:
    z = logits()
    token, confidence = sample(Distribution(z), SamplingSettings(), seeded(0))
    assert torch.equal(token, z.argmax(-1))
    torch.testing.assert_close(confidence, z.softmax(-1).amax(-1))


def test_a_filter_never_raises_the_confidence() -> None:
    """top_k = 1 makes every filtered probability 1; the confidence must not be that one."""
    z = logits()
    token, confidence = sample(Distribution(z), SamplingSettings(1.0, top_k=1), seeded(0))
    assert torch.equal(token, z.argmax(-1))
    torch.testing.assert_close(confidence, z.softmax(-1).amax(-1))


def test_confidence_is_tempered_as_in_sdar_or_untempered_as_in_llada() -> None:
    z = logits()
    token, tempered = sample(Distribution(z), SamplingSettings(0.5), seeded(0))
    same, untempered = sample(Distribution(z), SamplingSettings(0.5, tempered_confidence=False), seeded(0))
    assert torch.equal(token, same)
    torch.testing.assert_close(tempered, (z / 0.5).softmax(-1).gather(-1, token[..., None])[..., 0])
    torch.testing.assert_close(untempered, z.softmax(-1).gather(-1, token[..., None])[..., 0])


def test_draws_follow_the_distribution() -> None:
    z = torch.tensor([0.5, 0.3, 0.2]).log().expand(1, 40_000, 3)
    token, _ = sample(Distribution(z), SamplingSettings(1.0), seeded(7))
    share = torch.bincount(token[0], minlength=3) / token.shape[1]
    torch.testing.assert_close(share, torch.tensor([0.5, 0.3, 0.2]), atol=0.01, rtol=0)


def test_a_rows_draws_do_not_depend_on_its_neighbours() -> None:
    z = logits(rows=2)
    both, _ = sample(Distribution(z), SamplingSettings(1.0), seeded(1, 2))
    alone, _ = sample(Distribution(z[1:]), SamplingSettings(1.0), seeded(2))
    assert torch.equal(both[1], alone[0])


def test_top_k_and_top_p_keep_what_they_promise() -> None:
    z = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    assert filter_top_k(z, 2).isfinite().tolist() == [[True, True, False, False]]
    assert filter_top_p(z, 0.7).isfinite().tolist() == [[True, True, False, False]]
    assert filter_top_p(z, 0.01).isfinite().tolist() == [[True, False, False, False]]
    assert filter_top_k(z, 0) is z and filter_top_p(z, 1.0) is z


def test_last_tokens_have_confidence_zero_and_the_others_are_renormalised() -> None:
    z = torch.tensor([[[2.0, 1.0, 0.0], [0.0, 2.0, 1.0]]])
    token, confidence = sample(Distribution(z), SamplingSettings(last=(0,)), seeded(0))
    assert token.tolist() == [[0, 1]]
    assert confidence[0, 0] == 0
    assert confidence[0, 1].item() == pytest.approx(torch.tensor([2.0, 1.0]).softmax(-1)[0].item())
