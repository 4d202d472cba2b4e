"""Commit rules: Algorithm 2's top-m, the paper's threshold, Fast-dLLM's factor, SDAR's sequential."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from rcd import registry
from rcd.diffusion.commit import CommitSettings, by_factor, by_threshold, by_topm, quota

NO = float("-inf")


def random_confidences(seed: int = 0, rows: int = 64, length: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    confidence = torch.rand(rows, length, generator=generator)
    return confidence.masked_fill(torch.rand(rows, length, generator=generator) < 0.4, NO)


@pytest.mark.parametrize("name", registry.names("commit"))
@pytest.mark.parametrize("least", [1, 3])
def test_every_rule_commits_the_quota_and_only_candidates(name: str, least: int) -> None:
    confidence = random_confidences()
    chosen = registry.get("commit", name)(confidence, torch.full((64,), least), CommitSettings(threshold=0.9))
    candidates = confidence > NO
    assert not (chosen & ~candidates).any()
    assert (chosen.sum(-1) >= candidates.sum(-1).clamp_max(least)).all()


@pytest.mark.parametrize("name", registry.names("commit"))
def test_a_row_without_candidates_commits_nothing(name: str) -> None:
    chosen = registry.get("commit", name)(torch.full((2, 5), NO), torch.ones(2, dtype=torch.long), CommitSettings())
    assert not chosen.any()


def test_threshold_commits_all_above_it_strictly() -> None:
    confidence = torch.tensor([[0.9, 0.85, 0.86, NO, 0.2]])
    chosen = by_threshold(confidence, torch.ones(1, dtype=torch.long), CommitSettings(threshold=0.85))
    assert chosen.tolist() == [[True, False, True, False, False]]


def test_threshold_one_commits_one_even_where_the_model_is_certain() -> None:
    chosen = by_threshold(torch.ones(1, 6), torch.ones(1, dtype=torch.long), CommitSettings(threshold=1.0))
    assert chosen.tolist() == [[True, False, False, False, False, False]]


def test_a_higher_threshold_never_commits_more_in_a_step() -> None:
    confidence, least = random_confidences(1), torch.ones(64, dtype=torch.long)
    counts = [by_threshold(confidence, least, CommitSettings(threshold=t / 20)).sum(-1) for t in range(21)]
    for lower, higher in pairwise(counts):
        assert (higher <= lower).all()
    assert (counts[-1] == (confidence > NO).any(-1)).all()


def test_topm_takes_the_most_confident() -> None:
    confidence = torch.tensor([[0.1, 0.5, NO, 0.4, 0.3]])
    assert by_topm(confidence, torch.tensor([2]), CommitSettings()).tolist() == [[False, True, False, True, False]]


def test_factor_rule_by_hand() -> None:
    """Ranks 1, 2, 3 need nothing, 1 - 1/3, 1 - 1/4 at factor 1; the first failure ends it."""
    confidence = torch.tensor([[0.70, 0.20, 0.60, 0.76]])
    one = torch.ones(1, dtype=torch.long)
    assert by_factor(confidence, one, CommitSettings(factor=1.0)).tolist() == [[True, False, False, True]]
    assert by_factor(confidence, one, CommitSettings(factor=2.0)).tolist() == [[True, False, True, True]]
    assert by_factor(confidence, one, CommitSettings(factor=0.0)).tolist() == [[False, False, False, True]]


@pytest.mark.parametrize(("total", "steps"), [(32, 32), (32, 5), (8, 4), (7, 3), (3, 8)])
def test_the_schedule_splits_the_block_with_the_remainder_first(total: int, steps: int) -> None:
    shares = [int(quota(torch.tensor(total), steps, torch.tensor(step))) for step in range(steps)]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == max(total, steps)
    assert min(shares) >= 1
