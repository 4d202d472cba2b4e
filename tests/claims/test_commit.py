"""Commit rules: Algorithm 2's top-m, the paper's threshold, Fast-dLLM's factor, SDAR's sequential."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from rcd import registry
from rcd.diffusion.commit import by_factor, by_factor_strict, by_threshold, by_topm, entropy_bound, maskgit_plus
from rcd.diffusion.rule import CommitSettings
from rcd.diffusion.schedule import quota, timesteps

NO = float("-inf")


def random_confidences(seed: int = 0, rows: int = 64, length: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    confidence = torch.rand(rows, length, generator=generator)
    return confidence.masked_fill(torch.rand(rows, length, generator=generator) < 0.4, NO)


def shown(confidence: torch.Tensor, **more: Any) -> CommitSettings:
    """Everything that a rule may look at, for masks alone."""
    given: dict[str, Any] = dict(
        masked=torch.ones_like(confidence, dtype=torch.bool), confidence=confidence,
        share=torch.full((len(confidence),), 0.5),
        noise=torch.rand(confidence.shape, generator=torch.Generator().manual_seed(1)),
        changes=torch.ones_like(confidence, dtype=torch.bool),
    )  # fmt: skip
    return CommitSettings(**{**given, **more})


@pytest.mark.parametrize("name", registry.names("commit"))
@pytest.mark.parametrize("least", [1, 3])
def test_every_rule_commits_the_quota_and_only_candidates(name: str, least: int) -> None:
    """But `origin`, whose masks are drawn one by one."""
    confidence = random_confidences()
    chosen = registry.get("commit", name)(confidence, torch.full((64,), least), shown(confidence, threshold=0.9))
    candidates = confidence > NO
    assert not (chosen & ~candidates).any()
    assert name == "origin" or (chosen.sum(-1) >= candidates.sum(-1).clamp_max(least)).all()


@pytest.mark.parametrize("name", registry.names("commit"))
def test_a_row_without_candidates_commits_nothing(name: str) -> None:
    nothing = torch.full((2, 5), NO)
    assert not registry.get("commit", name)(nothing, torch.ones(2, dtype=torch.long), shown(nothing)).any()


@pytest.mark.parametrize("name", registry.names("commit"))
def test_at_a_quota_of_zero_a_rule_may_commit_nothing(name: str) -> None:
    """A block in flight, or a step, that need make no progress: nothing is good enough here, and nothing is due."""
    poor, none = torch.full((2, 5), -9.0), torch.zeros(2, dtype=torch.long)
    settings = shown(poor, share=torch.zeros(2), threshold=1.0, factor=0.0)
    assert not registry.get("commit", name)(poor, none, settings).any()


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
    assert by_factor_strict(confidence, one, CommitSettings(factor=2.0)).tolist() == [[True, False, True, True]]
    assert by_factor(confidence, one, CommitSettings(factor=0.0)).tolist() == [[False, False, False, True]]


def test_the_factor_rule_also_commits_the_last_mask_when_that_alone_fails() -> None:
    """As Fast-dLLM's does; `factor_strict` does not. At quota 0 a mask alone must pass by itself."""
    one, poor = torch.ones(1, dtype=torch.long), torch.tensor([[0.3, NO, NO]])
    for confidence, count in ((torch.tensor([[0.70, 0.60, 0.68]]), 3), (torch.tensor([[0.9, 0.1, NO]]), 2)):
        assert int(by_factor(confidence, one, CommitSettings()).sum()) == count
        assert int(by_factor_strict(confidence, one, CommitSettings()).sum()) == count - 1
    assert by_factor(poor, one, CommitSettings()).any() and not by_factor(poor, one - 1, CommitSettings()).any()
    confidence, least = random_confidences(2), torch.ones(64, dtype=torch.long)
    loose, strict = (rule(confidence, least, CommitSettings()) for rule in (by_factor, by_factor_strict))
    candidates = (confidence > NO).sum(-1)
    assert (loose.sum(-1) == torch.where(strict.sum(-1) == candidates - 1, candidates, strict.sum(-1))).all()


def test_an_entropy_bound_counts_the_entropies_but_the_largest() -> None:
    """Entropies .1 .3 .2 .9: of the k least, .0 .1 .3 .6 without the largest."""
    scores, one = -torch.tensor([[0.1, 0.3, 0.2, 0.9]]), torch.ones(1, dtype=torch.long)
    wanted = {0.0: [1, 0, 0, 0], 0.15: [1, 0, 1, 0], 0.35: [1, 1, 1, 0], 0.61: [1, 1, 1, 1]}
    for bound, chosen in wanted.items():
        assert entropy_bound(scores, one, CommitSettings(entropy_bound=bound)).long().tolist() == [chosen]


def test_alg_temp_draws_without_replacement_from_the_softmax_of_the_scores() -> None:
    """One of three and two of three, against the shares that softmax(score / alg_temp) gives."""
    rows, hot = 40_000, 0.5
    score = torch.tensor([0.9, 0.5, 0.1]).expand(rows, 3)
    noise = torch.rand(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    p = (score[0] / hot).softmax(-1)
    first = maskgit_plus(score, torch.ones(rows, dtype=torch.long), shown(score, alg_temp=hot, noise=noise))
    torch.testing.assert_close(first.float().mean(0), p, atol=0.01, rtol=0)
    both = maskgit_plus(score, torch.full((rows,), 2), shown(score, alg_temp=hot, noise=noise))
    both_of = p[:, None] * p / (1 - p[:, None])  # first the row's, then the column's
    left_out = torch.stack([(both_of + both_of.t())[a, b] for a, b in ((1, 2), (0, 2), (0, 1))])
    torch.testing.assert_close(1 - both.float().mean(0), left_out, atol=0.01, rtol=0)


@pytest.mark.parametrize("name", ["maskgit_plus", "entropy", "topk_margin"])
def test_an_alg_temp_near_zero_takes_the_best(name: str) -> None:
    confidence, two = random_confidences(4), torch.full((64,), 2)
    cold, drawn = (registry.get("commit", name)(confidence, two, shown(confidence, alg_temp=t)) for t in (0.0, 1e-9))
    assert torch.equal(cold, drawn) and torch.equal(cold, by_topm(confidence, two, CommitSettings()))


@pytest.mark.parametrize(("total", "steps"), [(32, 32), (32, 5), (8, 4), (7, 3), (3, 8)])
def test_the_schedule_splits_the_block_with_the_remainder_first(total: int, steps: int) -> None:
    shares = [int(quota(torch.tensor(total), steps, torch.tensor(step))) for step in range(steps)]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == max(total, steps)
    assert min(shares) >= 1


@pytest.mark.parametrize("steps", [1, 2, 7, 8, 32, 129])
@pytest.mark.parametrize("masks", [1, 8, 32, 77])
def test_the_timesteps_are_those_of_dreams_own_loop(steps: int, masks: int) -> None:
    """int(masks left (1 - s / t)) over torch.linspace(1, 1e-3, steps + 1), and all at the last step; some are none."""
    t, left, seen = torch.linspace(1, 1e-3, steps + 1), masks, []
    for step in range(steps):
        want = left if step == steps - 1 else int(torch.tensor(left) / 1 * (1 - t[step + 1] / t[step]))
        at = (torch.tensor([masks]), torch.tensor([steps]), torch.tensor([step]), lambda now=left: torch.tensor([now]))
        assert int(timesteps.quota(*at)) == want
        share = 1.0 if step == steps - 1 else float(1 - t[step + 1] / t[step])
        assert float(timesteps.share(*at)) == share
        seen.append(want)
        left -= want
    assert left == 0 and (steps <= masks or 0 in seen)
