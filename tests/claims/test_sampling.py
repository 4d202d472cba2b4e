"""Sampling: what is drawn, and what its confidence means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rcd.diffusion.noise import signed, uniform_of
from rcd.diffusion.sampling import CHUNK, SamplingSettings, drawn, filter_top_k, filter_top_p, sample
from rcd.residual.distribution import Distribution


def logits(rows: int = 1, length: int = 64, vocabulary: int = 12) -> torch.Tensor:
    return torch.randn(rows, length, vocabulary, generator=torch.Generator().manual_seed(0)) * 2


def seeded(*seeds: int, length: int = 64) -> torch.Tensor:
    """The noise of some rows' first step."""
    return uniform_of(torch.tensor(seeds)[:, None], torch.tensor(0), torch.arange(length))


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
    token, confidence = sample(Distribution(z), SamplingSettings())
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
    same, untempered = sample(Distribution(z), SamplingSettings(0.5, confidence="untempered"), seeded(0))
    assert torch.equal(token, same)
    torch.testing.assert_close(tempered, (z / 0.5).softmax(-1).gather(-1, token[..., None])[..., 0])
    torch.testing.assert_close(untempered, z.softmax(-1).gather(-1, token[..., None])[..., 0])


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_a_filtered_confidence_is_that_of_what_the_filters_leave(temperature: float) -> None:
    """At temperature 0 too, as in Dream's code; without filters it is the tempered one, to the last bit."""
    z = logits().double()
    seen = z / (temperature or 1.0)
    by_p = filter_top_p(seen, 0.7)
    for filters, kept in (
        ({"top_k": 3}, filter_top_k(seen, 3)),
        ({"top_p": 0.7}, by_p),
        ({"top_k": 1}, filter_top_k(seen, 1)),
    ):
        token, confidence = sample(
            Distribution(z), SamplingSettings(temperature, confidence="filtered", **filters), seeded(0)
        )
        torch.testing.assert_close(confidence, kept.softmax(-1).gather(-1, token[..., None])[..., 0])
    plain, same = (
        sample(Distribution(z), SamplingSettings(temperature, confidence=how), seeded(0))
        for how in ("tempered", "filtered")
    )
    assert torch.equal(plain[0], same[0]) and torch.equal(plain[1], same[1])


def test_a_token_that_the_masks_exclusion_let_in_counts_among_the_kept() -> None:
    """The mask is the most probable of all and the only one of top_k 1: p(token) / (p(token) + p(mask))."""
    z = torch.tensor([[[3.0, 2.0, 1.0, 0.0]]])
    token, confidence = sample(
        Distribution(z), SamplingSettings(1.0, top_k=1, confidence="filtered", never=(0,)), seeded(0, length=1)
    )
    assert int(token) == 1 and float(confidence) == pytest.approx(float(z[0, 0, :2].softmax(-1)[1]))


def test_draws_follow_the_distribution() -> None:
    z = torch.tensor([0.5, 0.3, 0.2]).log().expand(1, 40_000, 3)
    token, _ = sample(Distribution(z), SamplingSettings(1.0), seeded(7, length=40_000))
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


@pytest.mark.parametrize("p", [0.01, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("k", [1, 5, 40, 500])
def test_top_p_behind_top_k_needs_no_whole_sorting(p: float, k: int) -> None:
    z = filter_top_k(logits(2, 30, 300).round(decimals=1), k)  # with ties
    assert torch.equal(filter_top_p(z, p, k), filter_top_p(z, p))


def test_ties_stay_whatever_the_order_of_sorting() -> None:
    z = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    assert filter_top_p(z, 0.5).isfinite().tolist() == [True, True, True, True, False]
    assert filter_top_p(z, 0.4).isfinite().tolist() == [True, False, False, False, False]


def test_last_tokens_have_confidence_zero_and_the_others_are_renormalised() -> None:
    z = torch.tensor([[[2.0, 1.0, 0.0], [0.0, 2.0, 1.0]]])
    token, confidence = sample(Distribution(z), SamplingSettings(last=(0,)))
    assert token.tolist() == [[0, 1]]
    assert confidence[0, 0] == 0
    assert confidence[0, 1].item() == pytest.approx(torch.tensor([2.0, 1.0]).softmax(-1)[0].item())


def by_hand(logits_LV: torch.Tensor, noise_L: torch.Tensor) -> torch.Tensor:
    edge = logits_LV.float().double().softmax(-1).cumsum(-1)
    return torch.searchsorted(edge / edge[:, -1:], noise_L[:, None], right=True).squeeze(-1)


@pytest.mark.parametrize("vocabulary", [1, 3, CHUNK, CHUNK + 1, 5 * CHUNK - 7])
def test_a_draw_inverts_the_cumulated_distribution(vocabulary: int) -> None:
    z = logits(2, 400, vocabulary) * 2
    got = drawn(z, SamplingSettings(1.0), seeded(1, 2, length=400))
    for row in range(2):
        assert torch.equal(got[row], by_hand(z[row], seeded(row + 1, length=400)[0]))


@pytest.mark.parametrize("settings", [{}, {"top_k": 40}, {"top_p": 0.7}, {"top_k": 200, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_frequencies_are_those_of_the_filtered_distribution(temperature: float, settings: dict[str, float]) -> None:
    """Chi-square over ids, those that are expected less than 20 times together."""
    draws, z = 20_000, logits(1, 1, CHUNK + 100)[0, 0] / 2
    how = SamplingSettings(temperature, never=(5,), **settings)  # type: ignore[arg-type]
    token = drawn(z.expand(1, draws, -1), how, seeded(3, length=draws))[0]
    out = z.masked_fill(torch.arange(len(z)) == 5, float("-inf")) / temperature
    expected = filter_top_p(filter_top_k(out, how.top_k), how.top_p).double().softmax(-1) * draws
    found = torch.bincount(token, minlength=len(z)).double()
    assert not found[expected == 0].any()
    often = expected >= 20
    pairs = [*zip(found[often], expected[often], strict=True), (found[~often].sum(), expected[~often].sum())]
    chi = sum(float((a - b) ** 2 / b) for a, b in pairs if b > 0)
    freedom = len(pairs) - 1
    assert freedom > 10
    assert abs(chi - freedom) < 4 * (2 * freedom) ** 0.5


def test_what_has_no_mass_is_never_drawn_even_at_the_ends() -> None:
    z = torch.full((1, 3, 2 * CHUNK), float("-inf"))
    z[..., 7], z[..., CHUNK + 9] = 0.0, 0.0
    ends = torch.tensor([[0.0, 0.5, 1 - 2**-53]], dtype=torch.float64)
    assert drawn(z, SamplingSettings(1.0), ends).tolist() == [[7, CHUNK + 9, CHUNK + 9]]
    assert drawn(z, SamplingSettings(1.0, never=(7,)), ends).tolist() == [[CHUNK + 9] * 3]
    z[..., 7] = 1000.0  # what may not be drawn does not drown the others either
    assert drawn(z, SamplingSettings(1.0, never=(7,)), ends).tolist() == [[CHUNK + 9] * 3]


def test_the_logits_stay_as_they_were() -> None:
    z = logits()
    before = z.clone()
    sample(Distribution(z), SamplingSettings(0.7, top_k=3, never=(1,)), seeded(0))
    assert torch.equal(z, before)


def test_noise_is_even_and_neighbours_know_nothing_of_each_other() -> None:
    """Over seeds, steps and positions, each next to the other as they are in use."""
    seed, step, position = torch.arange(40)[:, None, None], torch.arange(50)[:, None], torch.arange(60)
    u = uniform_of(seed, step, position)
    assert u.shape == (40, 50, 60) and u.dtype == torch.float64
    assert u.min() >= 0 and u.max() < 1 and len(u.unique()) == u.numel()
    cells = torch.bincount((u * 100).long().flatten(), minlength=100).double()
    even = u.numel() / 100
    assert abs(((cells - even) ** 2 / even).sum() - 99) < 4 * (2 * 99) ** 0.5
    for one, other in (
        (u[1:], u[:-1]),
        (u[:, 1:], u[:, :-1]),
        (u[..., 1:], u[..., :-1]),
        (u[:, 1:, 1:], u[:, :-1, :-1]),
    ):
        a, b = one.flatten(), other.flatten()
        assert abs(torch.corrcoef(torch.stack((a, b)))[0, 1]) < 4 / a.numel() ** 0.5
        joint = torch.bincount((a * 16).long() * 16 + (b * 16).long(), minlength=256).double()
        even = a.numel() / 256
        assert abs(((joint - even) ** 2 / even).sum() - 255) < 4.5 * (2 * 255) ** 0.5


def test_noise_is_splitmix64_of_seed_step_and_position() -> None:
    """In whole numbers of any size: nothing here hangs on how a device multiplies."""

    def mixed(bits: int) -> int:
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
        return bits ^ bits >> 31

    for given in ((0, 0, 0), (1, 2, 3), (2**63, 5, 7), (2**64 - 1, 2**20, 2**30)):
        bits = 0
        for counter in given:
            bits = mixed((bits + (counter + 1) * 0x9E3779B97F4A7C15) % 2**64)
        assert uniform_of(*(torch.tensor(signed(value)) for value in given)).item() == (bits >> 11) * 2.0**-53


@pytest.mark.parametrize("seed", [0, 7, -7, 2**62, 2**63, 2**63 + 5, 2**64 - 1])
def test_seeds_keep_their_bits(seed: int) -> None:
    assert torch.tensor(signed(seed)).item() % 2**64 == seed % 2**64
    assert signed(torch.Generator().manual_seed(seed).initial_seed()) == signed(seed)


def test_a_draw_of_fp64_logits_is_computed_in_fp64() -> None:
    """Two ids that fp32 cannot tell apart: in fp64 the noise falls where their masses say."""
    z = torch.tensor([[[0.0, 1e-9]]], dtype=torch.float64)
    share = 1 / (1 + torch.tensor(1e-9, dtype=torch.float64).exp())
    below, above = share - 1e-12, share + 1e-12
    got = [drawn(z, SamplingSettings(1.0), noise.view(1, 1)).item() for noise in (below, above)]
    assert got == [0, 1]


def test_a_draw_needs_no_fp64_where_the_device_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPS."""

    class Narrow(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            assert not (isinstance(out, torch.Tensor) and out.dtype == torch.float64), func
            return out

    z, noise = logits(), seeded(0).float()
    for settings in (SamplingSettings(0.7), SamplingSettings(1.3, top_k=4, top_p=0.8, never=(3,))):
        wanted = sample(Distribution(z), settings, noise.double())
        with monkeypatch.context() as patched, Narrow():
            patched.setattr("rcd.diffusion.sampling.finest", lambda device: torch.float32)
            narrow = sample(Distribution(z), settings, noise)
        assert torch.equal(narrow[0], wanted[0]) and torch.equal(narrow[1], wanted[1])
