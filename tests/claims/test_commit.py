"""Commit rules: Algorithm 2's top-m, the paper's threshold, Fast-dLLM's factor, SDAR's sequential."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from rcd import registry
from rcd.diffusion.commit import (
    by_factor,
    by_factor_strict,
    by_threshold,
    by_topm,
    entropy_bound,
    joint_threshold,
    klass,
    maskgit_plus,
)
from rcd.diffusion.rule import CommitSettings
from rcd.diffusion.sampling import SamplingSettings, ranked, sample
from rcd.diffusion.schedule import quota, timesteps
from rcd.diffusion.score import Ranking, margin, neg_entropy
from rcd.diffusion.stability import Stability
from rcd.residual.distribution import Distribution

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
        changes=torch.ones_like(confidence, dtype=torch.bool), drift=torch.zeros_like(confidence),
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


def ranking(z: torch.Tensor, **settings: Any) -> Ranking:
    found, how = Distribution(z), SamplingSettings(**settings)
    return Ranking(
        sample(found, how, torch.full(z.shape[:-1], 0.5, dtype=torch.float64))[1], lambda: ranked(found, how)
    )


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_margin_confidence_and_entropy_agree_on_a_vocabulary_of_two(temperature: float) -> None:
    """p1 - p2 = 2 p1 - 1, and the entropy falls as p1 rises: the same order, and a threshold moves along."""
    z = torch.randn(64, 16, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    seen = ranking(z, temperature=temperature, confidence="tempered")
    p, one, even = (
        ranked(Distribution(z), SamplingSettings(temperature)).p.amax(-1),
        torch.ones(64, dtype=torch.long),
        [],
    )
    for score in (margin, neg_entropy):
        assert torch.equal(score.of(seen).argsort(-1), p.argsort(-1))
    torch.testing.assert_close(margin.of(seen), 2 * p - 1)
    for threshold in (0.6, 0.8, 0.9):
        sure = by_threshold(p, one, CommitSettings(threshold=threshold))
        even.append(torch.equal(by_threshold(margin.of(seen), one, CommitSettings(threshold=2 * threshold - 1)), sure))
    assert all(even)


def test_scores_are_of_the_distribution_that_the_confidence_is_of() -> None:
    z = torch.randn(3, 8, 20, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    kept = z.topk(4, dim=-1).values / 0.7
    for confidence, basis in (("untempered", z), ("tempered", z / 0.7), ("filtered", kept)):
        p = basis.softmax(-1).sort(dim=-1, descending=True).values
        seen = ranking(z, temperature=0.7, top_k=4, confidence=confidence)
        torch.testing.assert_close(margin.of(seen), p[..., 0] - p[..., 1])
        torch.testing.assert_close(neg_entropy.of(seen), torch.special.xlogy(p, p).sum(-1))


def test_klass_wants_a_prediction_that_is_sure_and_has_not_moved() -> None:
    """By hand: KL(now || before) of the last two steps, the first of which has nothing before it."""
    memory, z = Stability(), torch.tensor([[[2.0, 0.0], [2.0, 0.0]]], dtype=torch.float64)
    moved = torch.tensor([[[2.0, 0.0], [1.0, 0.0]]], dtype=torch.float64)
    state, drifts = memory.cold((1, 2), 2, 2, z), []
    for now in (moved, z, z, z):
        state, drift = memory.update(state, Distribution(now))
        drifts.append(drift)
    p, q = z.softmax(-1)[0, 1], moved.softmax(-1)[0, 1]
    assert (drifts[0] > 20).all() and (drifts[1] > 20).all()
    torch.testing.assert_close(drifts[2][0], torch.tensor([0.0, float((p * (p / q).log()).sum())], dtype=torch.float64))
    confidence, one = torch.tensor([[0.7, 0.8, 0.95]]), torch.ones(1, dtype=torch.long)
    for kls, chosen in (((0.0, 0.0, 1.0), [1, 1, 0]), ((1.0, 1.0, 1.0), [0, 0, 1]), ((0.01, 0.0, 0.0), [0, 1, 1])):
        seen = CommitSettings(threshold=0.6, drift=torch.tensor([kls]))
        assert klass(confidence, one, seen).long().tolist() == [chosen]


def test_joint_threshold_fills_masks_and_replaces_tokens_that_differ() -> None:
    confidence, one = torch.tensor([[0.9, 0.3, 0.95, 0.6, NO]]), torch.ones(1, dtype=torch.long)
    masked = torch.tensor([[True, True, False, False, False]])
    changes = torch.tensor([[True, True, True, True, True]])

    def chosen(**settings: Any) -> list[int]:
        seen = shown(confidence, masked=masked, **{"changes": changes, "threshold": 0.8, **settings})
        return joint_threshold(confidence, one, seen).long().tolist()[0]

    assert chosen(edit_threshold=0.5) == [1, 0, 1, 1, 0]
    assert chosen(edit_threshold=0.7) == [1, 0, 1, 0, 0]
    assert chosen(edit_threshold=1.0) == [1, 0, 0, 0, 0]
    assert chosen(edit_threshold=0.0, threshold=0.95) == [1, 0, 1, 1, 0], "a sure token does not spare a mask"
    assert chosen(edit_threshold=0.5, changes=torch.tensor([[True, True, False, True, True]])) == [1, 0, 0, 1, 0]
