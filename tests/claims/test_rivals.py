"""Each rival's rule against its formula, on tensors small enough to do by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from rcd.carry.base import Carry, make
from rcd.carry.iter_smooth import IterSmooth
from rcd.carry.latent_refinement import LatentRefinement
from rcd.carry.loopholing import HiddenState, Loopholing
from rcd.carry.residual import ResidualState
from rcd.carry.soft_mask import SoftMask
from rcd.carry.token_merge import TokenMerge
from rcd.errors import RCDError
from rcd.residual.distribution import Distribution
from rcd.residual.start import Passes

V, D = 6, 4
P = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.04, 0.01])
E = torch.randn(V, D, generator=torch.Generator().manual_seed(0))
MASK = torch.randn(D, generator=torch.Generator().manual_seed(1))


START = Passes((1, 2, V), torch.device("cpu"))


def embeds() -> torch.Tensor:
    """A mask and a token."""
    return torch.stack((MASK, E[3]))[None]


def after(carry: Carry, steps: int = 1, logits: torch.Tensor | None = None) -> torch.Tensor:
    """The next input embeddings [2, D] after so many equal predictions; the first position is the mask."""
    state: Any = carry.begin(None, START, E)
    first = carry.inject(embeds(), torch.tensor([[True, False]]), state)
    assert torch.equal(first, embeds())  # the first step is SeqD's
    predicted = Distribution(P.log().expand(1, 2, V) if logits is None else logits)
    for _ in range(steps):
        state = carry.update(state, predicted, torch.zeros(1, 2, D), E)
    out = carry.inject(embeds(), torch.tensor([[True, False]]), state)
    assert torch.equal(out[0, 1], E[3])  # tokens stay as they are
    return out[0, 0]


@pytest.mark.parametrize(("steps", "weight"), [(1, 0.15), (2, 0.17), (5, 0.23), (8, 0.29), (9, 0.3), (20, 0.3)])
def test_iter_smooth_adds_the_expectation_with_a_growing_weight(steps: int, weight: float) -> None:
    torch.testing.assert_close(after(IterSmooth(), steps), MASK + weight * (P @ E))


@pytest.mark.parametrize("k", [1, 3])
def test_token_merge_gives_the_mask_what_the_top_k_leave(k: int) -> None:
    plain = P[:k] @ E[:k] + (1 - P[:k].sum()) * MASK
    torch.testing.assert_close(after(TokenMerge(top_k=k, renormalise=False)), plain)
    norm = P[:k] @ E[:k].norm(dim=-1) + (1 - P[:k].sum()) * MASK.norm()
    torch.testing.assert_close(after(TokenMerge(top_k=k)), plain / plain.norm() * norm)


def test_soft_mask_falls_with_the_entropy() -> None:
    entropy = -(P * P.log()).sum()
    weight = 0.4 * torch.sigmoid(2.0 * (-entropy + 1.5))
    soft = P[:3] / P[:3].sum() @ E[:3]
    carry = SoftMask(scale=0.4, steepness=2.0, centre=-1.5)
    torch.testing.assert_close(after(carry), (1 - weight) * MASK + weight * soft)
    before = ResidualState(torch.zeros(1, 1), torch.zeros(1, 1, E.shape[1]))
    ends = (torch.eye(V)[0], torch.full((V,), 1 / V))
    sure, unsure = (carry.feedback(before, Distribution(p.log()[None, None]), E).alpha.item() for p in ends)
    assert sure > weight > unsure


def test_latent_refinement_mixes_in_the_nucleus_by_its_certainty() -> None:
    """0.5, 0.2 and 0.15 reach 0.8 together; 0.1 is outside."""
    alpha = 0.2 * (1 + (P * P.log()).sum() / math.log(V))
    nucleus = P[:3] / P[:3].sum() @ E[:3]
    torch.testing.assert_close(after(LatentRefinement(weight=0.2, top_p=0.8)), (1 - alpha) * MASK + alpha * nucleus)
    whole = P @ E
    torch.testing.assert_close(after(LatentRefinement(weight=0.2, top_p=1.0)), (1 - alpha) * MASK + alpha * whole)


@pytest.mark.parametrize(
    "off", [IterSmooth(most=0.0), TokenMerge(weight=0.0), SoftMask(scale=0.0), LatentRefinement(weight=0.0)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_weight_zero_every_rule_leaves_the_mask_to_the_last_bit(off: Carry, dtype: torch.dtype) -> None:
    state: Any = off.begin(None, START, E.to(dtype))
    state = off.update(state, Distribution(P.log().expand(1, 2, V)), torch.zeros(1, 2, D), E.to(dtype))
    plain = embeds().to(dtype)
    assert torch.equal(off.inject(plain, torch.ones(1, 2, dtype=torch.bool), state), plain)


def norm(width: int = D) -> nn.LayerNorm:
    built = nn.LayerNorm(width)
    nn.init.normal_(built.weight, generator=torch.Generator().manual_seed(2))
    nn.init.normal_(built.bias, generator=torch.Generator().manual_seed(3))
    return built


def test_loopholing_adds_the_normalised_hidden_state_to_masks_and_tokens() -> None:
    carry, learnt = Loopholing(), norm()
    hidden = torch.randn(1, 2, D, generator=torch.Generator().manual_seed(4))
    state = carry.update(HiddenState(torch.zeros(1, 2, D)), Distribution(P.log().expand(1, 2, V)), hidden, E)
    out = carry.inject(embeds(), torch.ones(1, 2, dtype=torch.bool), state, learnt)
    centred = hidden - hidden.mean(-1, keepdim=True)
    by_hand = centred / (hidden.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt() * learnt.weight + learnt.bias
    torch.testing.assert_close(out, embeds() + by_hand)
    only = carry.inject(embeds(), torch.tensor([[True, False]]), state, learnt)
    assert torch.equal(only[0, 1], embeds()[0, 1])  # outside of its scope


def test_loopholing_with_a_zero_hidden_state_adds_nothing_not_even_the_bias() -> None:
    carry = Loopholing()
    state = carry.begin(None, START, E)
    assert torch.equal(carry.inject(embeds(), torch.ones(1, 2, dtype=torch.bool), state, norm()), embeds())
    kept = HiddenState(torch.ones(2, D)).kept(torch.tensor([True, False]))
    assert kept.hidden.tolist() == [[1.0] * D, [0.0] * D]


def test_loopholings_norm_begins_as_the_setting_says() -> None:
    for init in (0.0, 1.0):
        begun = Loopholing(init=init).parameters(D).state_dict()
        assert begun["weight"].tolist() == [init] * D and begun["bias"].tolist() == [0.0] * D


@pytest.mark.parametrize(
    ("name", "settings", "match"),
    [
        ("iter_smooth", {"most": -1}, "most must be"),
        ("token_merge", {"top_k": 0}, "top_k must be a whole number of 1 or more"),
        ("token_merge", {"weight": 2}, r"weight must be in \[0, 1\]"),
        ("soft_mask", {"scale": 1.5}, r"scale must be in \[0, 1\]"),
        ("latent_refinement", {"top_p": 0}, "top_p must be"),
        ("loopholing", {"two_passes": 1.5}, r"two_passes must be in \[0, 1\]"),
        ("loopholing", {"alpha": 1}, "carry 'loopholing' has no setting 'alpha'"),
    ],
)
def test_a_bad_setting_of_a_rival_gets_one_sentence(name: str, settings: dict[str, Any], match: str) -> None:
    with pytest.raises(RCDError, match=match):
        make(name, settings)
