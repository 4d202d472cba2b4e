"""Commit rules: which of a step's predictions become tokens (Algorithm 2, lines 15-20).

A rule takes scores [B, L] (-inf where nothing may be committed; a rule's own score is the confidence unless it declares
another) and the quota [B] (the least that a step commits), and returns the positions to commit as booleans. It commits
the quota in each row that has so many candidates (`origin` alone leaves that to chance), and never a position that is
none. The quota is 1 or more where a step must make progress; at 0 (a block that is in flight behind unfinished ones, or
a step that its schedule leaves out) a rule commits what is good enough by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rcd.diffusion.rule import CommitSettings, rule, top
from rcd.diffusion.stability import Stability

NONE = float("-inf")
LLADA = "LLaDA, github.com/ML-GSAI/LLaDA"
FAST_DLLM = "Fast-dLLM, arXiv 2505.22618, github.com/NVlabs/Fast-dLLM"
D2F = "D2F, arXiv 2508.09192, github.com/zhijie-group/Discrete-Diffusion-Forcing"
DREAM = "Dream, arXiv 2508.15487, github.com/DreamLM/Dream"
DREAM_SETTING = "steps = new tokens = 512, temperature 0.2, top_p 0.95, alg_temp 0"


@rule(
    source="RCD, Sec. 4.1; SDAR's low_confidence_dynamic, github.com/JetAstra/SDAR",
    published="threshold 0.85 (RCD), 0.95 (SDAR's evaluation)",
)
def by_threshold(scores_BL: Tensor, quota_B: Tensor, settings: CommitSettings) -> Tensor:
    """All above the threshold; the most confident `quota` instead where fewer than `quota` are above.

    The paper's rule has quota 1: "at least one a step". SDAR's dynamic rule has the schedule's quota. The comparison
    is strict, so that threshold 1 commits one token a step.
    """
    return _above(scores_BL, scores_BL, quota_B, settings.threshold)


def _above(confidence_BL: Tensor, scores_BL: Tensor, quota_B: Tensor, threshold: float | Tensor) -> Tensor:
    """All whose confidence is above the threshold; the best by score instead where these are fewer than the quota."""
    above = confidence_BL > threshold
    enough = above.sum(-1) >= quota_B
    return torch.where(enough.unsqueeze(-1), above, top(scores_BL, quota_B))


@rule(reads=(), source="RCD, Algorithm 2; LLaDA's low_confidence, SDAR's low_confidence_static", published="m 1")
def by_topm(scores_BL: Tensor, quota_B: Tensor, settings: CommitSettings) -> Tensor:
    """The `quota` most confident: Algorithm 2's top-m, m from the step schedule."""
    return top(scores_BL, quota_B)


@rule(reads=("factor",), source=FAST_DLLM, published="factor 1")
def by_factor(scores_BL: Tensor, quota_B: Tensor, settings: CommitSettings) -> Tensor:
    """By falling confidence, rank r = 1, 2, ...: commit while it is >= 1 - factor / (r + 1), and the quota; the last
    mask also where it alone fails.

    factor 1, confidences  .70 .68 .60   needed  - .67 .75   two pass, and the third is the last mask: all three
    """
    count = _passing(scores_BL, settings)[0].sum(-1).maximum(quota_B.clamp_max(1))
    candidates = (scores_BL > NONE).sum(-1)
    count = torch.where((count > 0) & (count == candidates - 1), candidates, count)
    return top(scores_BL, count.maximum(quota_B))


@rule(reads=("factor",), source=FAST_DLLM + ", without its exception for the last mask", published="factor 1")
def by_factor_strict(scores_BL: Tensor, quota_B: Tensor, settings: CommitSettings) -> Tensor:
    """By falling confidence, rank r = 1, 2, ...: commit while it is >= 1 - factor / (r + 1), and the quota."""
    kept, order = _passing(scores_BL, settings)
    return torch.zeros_like(kept).scatter_(-1, order, kept) | top(scores_BL, quota_B)


def _passing(scores_BL: Tensor, settings: CommitSettings) -> tuple[Tensor, Tensor]:
    """(those up to the first that fails, by falling scores [B, L]; where each of them stands)."""
    ranked, order = scores_BL.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(1, ranked.shape[-1] + 1, device=ranked.device, dtype=ranked.dtype)
    passes = ranked >= 1.0 - settings.factor / (rank + 1)
    return passes.long().cumprod(-1).bool() & (ranked > NONE), order


@rule(reads=(), source="SDAR's sequential, github.com/JetAstra/SDAR", published="one a step")
def sequential(scores_BL: Tensor, quota_B: Tensor, settings: CommitSettings) -> Tensor:
    """The leftmost `quota`, whatever their confidence: left to right."""
    candidate = scores_BL > NONE
    return candidate & (candidate.long().cumsum(-1) <= quota_B.unsqueeze(-1))


@rule(score="random", reads=(), source=LLADA + "; SDAR's evaluation", published="steps = new tokens")
def at_random(scores_BL: Tensor, quota_B: Tensor, settings: CommitSettings) -> Tensor:
    """`quota` masks drawn evenly, whatever their confidence: random remasking."""
    return top(scores_BL, quota_B)


@rule(score="margin", source="Kim et al. 2025, arXiv 2502.06768 (top probability margin)", published="one a step")
def by_margin(scores_BL: Tensor, quota_B: Tensor, settings: CommitSettings) -> Tensor:
    """All whose largest probability leads the second by more than the threshold, and at least the quota."""
    return _above(scores_BL, scores_BL, quota_B, settings.threshold)


@rule(score="neg_entropy", confidence="filtered", source=D2F, published="skip_threshold 0.9")
def by_neg_entropy(scores_BL: Tensor, quota_B: Tensor, settings: CommitSettings) -> Tensor:
    """All whose probability is above the threshold; the `quota` of least entropy where these are fewer."""
    return _above(_confidence(settings), scores_BL, quota_B, settings.threshold)


@rule(score="margin", confidence="filtered", source=D2F, published="skip_threshold 0.9")
def by_margin_confidence(scores_BL: Tensor, quota_B: Tensor, settings: CommitSettings) -> Tensor:
    """All whose probability is above the threshold; the `quota` of largest margin where these are fewer."""
    return _above(_confidence(settings), scores_BL, quota_B, settings.threshold)


def _confidence(settings: CommitSettings) -> Tensor:
    assert settings.confidence is not None
    return settings.confidence


@rule(
    reads=(), schedule="timesteps", confidence="filtered", draws=True, takes_share=True, source=DREAM,
    published="steps = new tokens",
)  # fmt: skip
def origin(scores_BL: Tensor, quota_B: Tensor, settings: CommitSettings) -> Tensor:
    """Each mask with the probability that is the step's share of what is left; all at the last step."""
    assert settings.noise is not None and settings.share is not None
    return (scores_BL > NONE) & (settings.noise < settings.share.unsqueeze(-1))


def _drawn_top(scores_BL: Tensor, quota_B: Tensor, settings: CommitSettings) -> Tensor:
    """The `quota` best; with alg_temp above 0, as many drawn without replacement from softmax(score / alg_temp), which
    are the largest of score / alg_temp + Gumbel noise."""
    assert settings.noise is not None
    hot = torch.as_tensor(settings.alg_temp, device=scores_BL.device)
    gumbel = -(-settings.noise.clamp_min(2**-54).log()).log()
    drawn = scores_BL / torch.where(hot > 0, hot, 1.0) + gumbel
    return top(torch.where(hot > 0, drawn, scores_BL), quota_B)


_DREAM = dict(
    reads=("alg_temp",), schedule="timesteps", confidence="filtered", draws=True, source=DREAM, published=DREAM_SETTING
)


@rule(**_DREAM)
def maskgit_plus(scores_BL: Tensor, quota_B: Tensor, settings: CommitSettings) -> Tensor:
    """The step's share of what is left, by confidence; drawn where alg_temp is above 0."""
    return _drawn_top(scores_BL, quota_B, settings)


@rule(score="neg_entropy", **_DREAM)
def entropy(scores_BL: Tensor, quota_B: Tensor, settings: CommitSettings) -> Tensor:
    """The step's share of what is left, by least entropy; drawn where alg_temp is above 0."""
    return _drawn_top(scores_BL, quota_B, settings)


@rule(score="margin", **_DREAM)
def topk_margin(scores_BL: Tensor, quota_B: Tensor, settings: CommitSettings) -> Tensor:
    """The step's share of what is left, by the margin between the two best tokens; drawn where alg_temp is above 0."""
    return _drawn_top(scores_BL, quota_B, settings)


@rule(
    score="neg_entropy", reads=("entropy_bound",), published="entropy_bound 0.1",
    source="EB-Sampler, arXiv 2505.24857; EntropyBound of transformers and diffusers",
)  # fmt: skip
def entropy_bound(scores_BL: Tensor, quota_B: Tensor, settings: CommitSettings) -> Tensor:
    """By rising entropy, while the sum of entropies less the largest stays within the bound; and at least the quota.

    bound .5, entropies  .1 .3 .2 .9   sums less the largest  0 .1 .3 .6   the first three
    """
    ranked, order = scores_BL.sort(dim=-1, descending=True, stable=True)
    there = ranked > NONE
    entropies = torch.where(there, -ranked, 0.0)
    within = there & (entropies.cumsum(-1) - entropies <= settings.entropy_bound)
    # at quota 0 nothing must be committed, and the first of all costs nothing: it waits
    within = within & (quota_B > 0).unsqueeze(-1)
    return torch.zeros_like(within).scatter_(-1, order, within) | top(scores_BL, quota_B)


@rule(
    reads=("threshold", "kl_threshold"), confidence="untempered", remembers=Stability(),
    source="KLASS, arXiv 2511.05664, github.com/shkim0116/KLASS",
    published="LLaDA threshold 0.6-0.9, kl_threshold 0.01-0.015; Dream 0.8-0.9, 0.001-0.005; klass_history 2",
)  # fmt: skip
def klass(scores_BL: Tensor, quota_B: Tensor, settings: CommitSettings) -> Tensor:
    """All above the threshold whose distribution has been stable, with a KL divergence to the step before under
    `kl_threshold` for the last `klass_history` steps; the most confident `quota` where these are fewer."""
    assert settings.drift is not None
    stable = scores_BL.masked_fill(settings.drift >= settings.kl_threshold, NONE)
    return _above(stable, scores_BL, quota_B, settings.threshold)


@rule(
    reads=("threshold", "edit_threshold"), revises=True, post_edits=True,
    source="LLaDA2.1, arXiv 2602.08676; JointThreshold of SGLang",
    published="threshold 0.7, edit_threshold 0.5 (quality) or 0.5, 0 (speed); max_post_steps 16",
)  # fmt: skip
def joint_threshold(scores_BL: Tensor, quota_B: Tensor, settings: CommitSettings) -> Tensor:
    """For models trained to edit (LLaDA2.1): of the masks all above the threshold, and at least the quota; and tokens
    of the unfinished block are replaced by other predictions that are surer than `edit_threshold`, also when no mask is
    left."""
    assert settings.masked is not None and settings.changes is not None
    masks = scores_BL.masked_fill(~settings.masked, NONE)
    edits = ~settings.masked & settings.changes & (_confidence(settings) > settings.edit_threshold)
    return _above(masks, masks, quota_B, settings.threshold) | edits
