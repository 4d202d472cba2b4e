"""Likelihoods: the bound equals its expectation, estimates are unbiased and know their error, LLaDA's code agrees."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import rcd
from rcd.carry.residual import Residual
from rcd.decode.config import DecodeConfig
from rcd.diffusion.attention import block_causal
from rcd.diffusion.noise import key_of
from rcd.errors import RCDError
from rcd.likelihood.estimate import _lanes, _log_p, estimate, resolved
from rcd.likelihood.patterns import Patterns, drawn, every, patterns
from rcd.likelihood.settings import ScoreConfig
from rcd.models.lm import DiffusionLM, View
from rcd.models.toy import toy, toy_tokenizer
from rcd.scoring import pair, ranked, windows
from tests.conftest import exact

FIXTURES = Path(__file__).parent.parent / "fixtures" / "parity"
FAMILIES = ("llada", "dream", "sdar", "fast_dllm_qwen")
BLOCK = 4
PAIRS: list[tuple[list[int], list[int]]] = [
    ([5, 9, 13, 2, 40], [7, 8, 1, 3, 77]), ([], [3, 4, 5]), ([4] * 8, [1, 2, 3, 9, 9, 6]), ([1, 2, 3], [7]),
    ([11, 30], [8, 9, 10, 11, 12, 13, 14]),
]  # fmt: skip
"""Blocks of 4 that the prompt's end straddles, begins or leaves out."""


def model_of(family: str, block: int = BLOCK) -> DiffusionLM:
    return exact(family, 2, **({} if family in ("llada", "dream") else {"block_length": block})).model


def block_of(model: DiffusionLM) -> int | None:
    return model.settings.block_length if model.settings.attention == "block_causal" else None


def config(model: DiffusionLM, **settings: Any) -> ScoreConfig:
    return resolved(ScoreConfig(**settings), model.settings, None)


@torch.inference_mode()
def log_p(model: DiffusionLM, text: Sequence[int], masked: set[int], end: int, prompt: int, scale: float) -> Any:
    """[end, V] by plain passes over `end` positions, with masks at `masked` and behind the text, and under guidance
    instead of the prompt."""
    mask, b = model.settings.mask_token_id, block_of(model)
    rows = [[mask if k in masked or k >= len(text) else text[k] for k in range(end)]]
    rows += [[mask if k < prompt else token for k, token in enumerate(rows[0])]] if scale else []
    position = torch.arange(end).expand(len(rows), -1)
    logits = model(
        torch.tensor(rows), View(position, None if b is None else block_causal(position, position, b))
    ).logits
    found = logits[0] if not scale else logits[1] + (scale + 1) * (logits[0] - logits[1])
    return found.log_softmax(-1)


def expected(model: DiffusionLM, prompt: list[int], continuation: list[int], scale: float = 0.0) -> float:
    """Over all sets of every size, block by block; each in a pass of its own over all text before, without a cache."""
    text, total = [*prompt, *continuation], 0.0
    b = block_of(model) or len(text)
    for start in range(len(prompt) // b * b, len(text), b):
        end = start + b if block_of(model) else len(text)
        own = [k for k in range(start, min(start + b, len(text))) if k >= len(prompt)]
        for count in range(1, len(own) + 1):
            for chosen in itertools.combinations(own, count):
                found = log_p(model, text, {*chosen}, end, len(prompt), scale)
                likely = 1 / len(own) / math.comb(len(own), count)
                total += likely * len(own) / count * sum(float(found[k, text[k]]) for k in chosen)
    return total


@pytest.mark.parametrize("family", [*FAMILIES, "sdar_moe", "llada2_moe"])
@pytest.mark.parametrize("scale", [0.0, 1.5])
def test_the_bound_of_a_short_text_is_the_expectation_over_all_sets_of_masks(family: str, scale: float) -> None:
    model = model_of(family)
    for prompt, continuation in PAIRS:
        found = estimate(model, prompt, continuation, config(model, guidance=scale))
        assert found.enumerated and found.standard_error == 0
        assert found.log_likelihood == pytest.approx(expected(model, prompt, continuation, scale), abs=1e-9)
        assert sum(found.tokens) == pytest.approx(found.log_likelihood) and len(found.tokens) == len(continuation)


def test_the_bounds_of_all_continuations_are_no_more_than_one_together() -> None:
    """Each is at most the log of the mean probability over the orders in which it can be filled in."""
    pipeline = exact("llada", 4, vocab=16)
    asked = config(pipeline.model)
    allowed = [token for token in range(16) if token != pipeline.settings.mask_token_id]
    found = [
        estimate(pipeline.model, [3, 1], pick, asked).log_likelihood for pick in itertools.product(allowed, repeat=2)
    ]
    assert 0.05 < sum(map(math.exp, found)) <= 1


def test_blocks_of_one_token_have_the_likelihood_of_a_model_from_left_to_right() -> None:
    """There is one order, so the bound is the likelihood itself; each token is read off a mask behind clean text."""
    model = model_of("sdar", 1)
    prompt, continuation = PAIRS[0]
    text = [*prompt, *continuation]
    own = sum(float(log_p(model, text, {k}, k + 1, 0, 0.0)[k, text[k]]) for k in range(len(prompt), len(text)))
    found = estimate(model, prompt, continuation, config(model, draws=1))
    assert found.enumerated and found.log_likelihood == pytest.approx(own) and found.forwards == 1 + 1


# -- estimates ---------------------------------------------------------------------------------------------------------


class Table:
    """log p of every set of masks of one text, so that an estimate of it costs no pass."""

    def __init__(self, model: DiffusionLM, prompt: list[int], continuation: list[int]):
        asked = config(model, batch_size=64)
        with torch.inference_mode():
            self.lanes = _lanes(model, prompt, continuation, asked)
            self.sizes = self.lanes[0].sizes
            all_sets = every(self.sizes)
            found = torch.cat([_log_p(model, self.lanes, some, asked) for some in all_sets.masked.split(64)])
        self.exact = float((found * all_sets.weight * all_sets.masked).sum())
        self.blocks = [part.contiguous() for part in found.split(self.sizes, 1)]

    def estimates(self, draws: int, seeds: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(estimates, standard errors), one for every seed."""
        means = [self.means(drawn(self.sizes, draws, key_of("test", seed))) for seed in range(seeds)]
        errors = torch.stack([each.sum(1).std() / len(each) ** 0.5 for each in means])
        return torch.stack([each.sum(1).mean() for each in means]), errors

    def means(self, found: Patterns) -> torch.Tensor:
        out, parts = [], found.masked.split(self.sizes, 1)
        for masked, block, weight in zip(parts, self.blocks, found.weight.split(self.sizes, 1), strict=True):
            number = (masked.long() << torch.arange(masked.shape[1])).sum(1) - 1
            out.append(block[number] * weight * masked)
        return found.means(torch.cat(out, 1))


@pytest.fixture(scope="module")
def tables() -> dict[str, Table]:
    texts = {"llada": PAIRS[4], "dream": PAIRS[0], "sdar": PAIRS[2], "fast_dllm_qwen": PAIRS[4]}
    return {family: Table(model_of(family), *pair) for family, pair in texts.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_mean_of_estimates_is_the_exact_bound(tables: dict[str, Table], family: str) -> None:
    """Within three standard errors over 2,000 seeds; and the error that each tells is the one that they have."""
    table = tables[family]
    values, errors = table.estimates(32, 2000)
    spread = float(values.std())
    assert abs(float(values.mean()) - table.exact) < 3 * spread / 2000**0.5
    assert float(errors.square().mean().sqrt()) == pytest.approx(spread, rel=0.08)


def test_more_draws_have_a_smaller_error(tables: dict[str, Table]) -> None:
    for table in tables.values():
        off = [float((table.estimates(draws, 300)[0] - table.exact).square().mean().sqrt()) for draws in (16, 64, 256)]
        assert off[0] > 1.5 * off[1] > 1.5 * 1.5 * off[2]


@pytest.mark.parametrize("n", [2, 3, 7, 20])
@pytest.mark.parametrize("draws", [1, 5, 8, 37])
def test_every_number_of_masks_and_every_set_of_it_is_as_likely(n: int, draws: int) -> None:
    """LLaDA's rounding makes some up to half again as frequent; over 3,000 keys the shares here are equal."""
    sizes, picks = torch.zeros(n), torch.zeros(n)
    for seed in range(3000 // draws):
        masked = drawn([n], draws, key_of(seed)).masked
        sizes += torch.bincount(masked.sum(1) - 1, minlength=n)
        picks += masked.sum(0)
    total = 3000 // draws * draws
    off = 5 * (total / n) ** 0.5
    assert bool((sizes - total / n).abs().max() < off)
    assert bool((picks - total * (n + 1) / 2 / n).abs().max() < 5 * total**0.5)


def test_all_sets_are_computed_where_they_are_no_more_than_the_draws() -> None:
    assert len(patterns([4, 4, 1], 15, 0).masked) == 15 and patterns([4, 4, 1], 15, 0).groups is None
    assert patterns([4, 4, 1], 14, 0).groups is not None and len(patterns([4, 4, 1], 14, 0).masked) == 14
    assert patterns([10_000], 128, 0).groups is not None
    found = every([2, 1])
    assert found.masked.tolist() == [[True, False, True], [False, True, False], [True, True, False]]
    assert (found.weight * found.masked).tolist() == [[0.5, 0, 1], [0, 0.5, 0], [0.5, 0.5, 0]]


def test_an_estimate_depends_on_its_seed_and_text_and_not_on_how_it_is_computed() -> None:
    model = model_of("sdar", 16)
    prompt, continuation = [3, 4, 5], list(range(20, 50))
    asked = config(model, draws=40)
    found = estimate(model, prompt, continuation, asked)
    assert not found.enumerated and found.patterns == 40 and found.forwards == 41 and (found.standard_error or 0) > 0
    again = estimate(model, prompt, continuation, replace(asked, batch_size=7))
    assert again.tokens == pytest.approx(found.tokens, rel=1e-12)
    assert estimate(model, prompt, continuation, replace(asked, seed=1)).tokens != pytest.approx(found.tokens, rel=1e-3)
    assert estimate(model, prompt, continuation, replace(asked, draws=15)).standard_error is None


def test_the_clean_text_may_be_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in ("sdar", "fast_dllm_qwen"):
        model = model_of(family)
        prompt, continuation = list(range(30)), list(range(50, 63))
        whole = estimate(model, prompt, continuation, config(model))
        monkeypatch.setattr("rcd.likelihood.reading.PIECE", 8)
        pieces = estimate(model, prompt, continuation, config(model))
        monkeypatch.undo()
        assert pieces.tokens == pytest.approx(whole.tokens) and (whole.forwards, pieces.forwards) == (16, 20)


# -- the originals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", json.loads((FIXTURES / "llada" / "likelihood.json").read_text()))
def test_lladas_own_code_gives_the_same_on_the_same_masks(case: dict[str, Any]) -> None:
    """`get_log_likelihood` of ML-GSAI/LLaDA, whose draws the fixture holds."""
    model = rcd.load(FIXTURES / "llada" / "model", device="cpu").model.double()
    masked = torch.tensor([[place == "x" for place in row] for row in case["masks"]])
    asked = config(model, guidance=case["cfg_scale"])
    with torch.inference_mode():
        found = _log_p(model, _lanes(model, case["prompt"], case["continuation"], asked), masked, asked)
    weighted = found.sum(1) * masked.shape[1] / masked.sum(1)
    assert float(weighted.mean()) == pytest.approx(case["log_likelihood"], rel=1e-6)


# -- the carry ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recursion_hands_the_residual_on_to_a_second_pass(family: str) -> None:
    """One token: one pattern. By hand: read, inject alpha and delta at the masks (Eq. 1-3), read again."""
    model, carry = model_of(family), Residual(alpha="fixed", alpha_value=0.4)
    prompt, token, mask = [5, 9, 13], 7, model.settings.mask_token_id
    b, shift = block_of(model), model.settings.shift
    ids = torch.tensor([[*prompt, mask]])
    position = torch.arange(4)[None]
    view = View(position, None if b is None else block_causal(position, position, b))
    with torch.inference_mode():
        source = 3 - shift
        p = model.head(model.encode(model.embed(ids), view)[0, source]).softmax(-1)
        embeds = model.embed(ids)
        embeds[0, 3] = 0.6 * embeds[0, 3] + 0.4 * p @ model.codebook
        want = model.head(model.encode(embeds, view)[0, source]).log_softmax(-1)[token]
    found = estimate(model, prompt, [token], config(model, carry=carry, recursions=1))
    assert found.log_likelihood == pytest.approx(float(want)) and found.forwards == 2
    cold = estimate(model, prompt, [token], config(model, carry=carry))
    assert cold.log_likelihood != pytest.approx(float(want), rel=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_residual_without_weight_is_none_however_often_it_is_handed_on(family: str) -> None:
    model = model_of(family)
    want = estimate(model, *PAIRS[0], config(model))
    found = estimate(model, *PAIRS[0], config(model, carry=Residual(alpha_scale=0.0), recursions=2, guidance=0.0))
    assert found.tokens == pytest.approx(want.tokens) and found.patterns == want.patterns
    assert found.forwards - want.forwards == 2 * want.patterns


@pytest.mark.parametrize("carry", ["loopholing", "soft_mask", "token_merge", "latent_refinement", "iter_smooth"])
@pytest.mark.parametrize("family", ["llada", "sdar"])
def test_every_carry_can_be_handed_on(carry: str, family: str) -> None:
    model = model_of(family)
    model.hold(config(model, carry=carry).carry)  # type: ignore[arg-type]
    found = [estimate(model, *PAIRS[0], config(model, carry=carry, recursions=k, guidance=0.5)) for k in (0, 1, 2)]
    assert len({round(each.log_likelihood, 6) for each in found}) == 3


# -- pipelines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_what_greedy_decoding_gives_is_greedy_and_nothing_else_is(family: str, scale: float) -> None:
    pipeline = rcd.Pipeline(exact(family, 2, block_length=None if family in ("llada", "dream") else BLOCK).checkpoint)
    prompt, new = [5, 9, 13, 2, 40], 7
    chosen = DecodeConfig(max_new_tokens=new, threshold=1.0, guidance=scale, carry="none", eos_suppression="logits")
    if family in ("llada", "dream"):
        chosen = replace(chosen, block_length=new, eos_early_stop=False)
    with torch.no_grad():  # no end tokens, which close a text
        pipeline.model.head.weight[list(pipeline.settings.eos_token_ids)] *= 0.01
    (ids,) = pipeline.generate(prompt, chosen).sequences
    asked = ScoreConfig(greedy=True, guidance=scale)
    assert pipeline.score(prompt, ids, asked).greedy is True
    for place in (0, new - 1):
        other = [token if k != place else (token + 1) % 90 for k, token in enumerate(ids)]
        assert pipeline.score(prompt, other, asked).greedy is False
    assert pipeline.score(prompt, ids).greedy is None


def test_a_continuation_that_goes_on_behind_an_end_token_is_not_greedy() -> None:
    """Decoding block by block ends there."""
    pipeline = exact("sdar", 2, block_length=BLOCK)
    end, prompt = pipeline.settings.eos_token_ids[0], [5, 9, 13, 2]
    with torch.no_grad():
        pipeline.model.head.weight[end] = 20 * pipeline.model.head.weight[end].abs()
    (ids,) = pipeline.generate(prompt, DecodeConfig(threshold=1.0, max_new_tokens=9)).sequences
    assert ids[-1] == end and len(ids) < 9
    asked = ScoreConfig(greedy=True)
    assert pipeline.score(prompt, ids, asked).greedy
    assert not pipeline.score(prompt, [*ids, end], asked).greedy
    assert not pipeline.score(prompt, [*ids, 3], asked).greedy


def test_the_greedy_check_is_lladas() -> None:
    """`suffix_greedy_prediction` written out: fill in the surest mask of the whole canvas until none is left."""
    pipeline = exact("llada", 5)
    model, mask, agreed = pipeline.model, pipeline.settings.mask_token_id, 0
    with torch.no_grad():
        model.head.weight[mask].zero_()
    for prompt in ([3, 1, 4], [60, 2], [9, 9, 8, 7, 7]):
        text = [*prompt, *[mask] * 6]
        while mask in text:
            with torch.inference_mode():
                p = model(torch.tensor([text]), View(torch.arange(len(text))[None])).logits[0].softmax(-1)
            sure, token = p.max(-1)
            place = max((k for k, each in enumerate(text) if each == mask), key=lambda k: float(sure[k]))
            text[place] = int(token[place])
        agreed += pipeline.score(prompt, text[len(prompt) :], ScoreConfig(greedy=True)).greedy is True
    assert agreed == 3


@pytest.fixture(scope="module")
def worded() -> rcd.Pipeline:
    return rcd.Pipeline(toy("sdar", seed=1, tokenizer=toy_tokenizer(128), block_length=4))


def test_two_texts_are_read_as_one(worded: rcd.Pipeline) -> None:
    whole = worded.encode("the old fox runs")[0]
    for prompt, continuation in (("the old", " fox runs"), ("the old ", "fox runs"), ("", "the old fox runs")):
        start, end = pair(worded, prompt, continuation)
        assert [*start, *end] == whole and len(start) == (2 if prompt else 0)
    assert pair(worded, worded.encode("the old")[0], "fox")[1] == pair(worded, "the old", worded.encode("fox")[0])[1]
    found = worded.score("the old", " fox runs")
    assert found == worded.score(whole[:2], whole[2:]) == worded.score(torch.tensor(whole[:2]), torch.tensor(whole[2:]))
    assert json.loads(json.dumps(found.to_dict()))["token_log_likelihoods"] == pytest.approx(found.tokens, abs=1e-6)


def test_continuations_are_ranked_by_the_sum_or_by_the_mean_of_their_tokens(worded: rcd.Pipeline) -> None:
    scores = [worded.score("the old", text) for text in (" fox", " fox runs far", " dog runs")]
    sums, means = [each.log_likelihood for each in scores], [each.per_token for each in scores]
    assert [sums[k] for k in ranked(scores)] == sorted(sums, reverse=True)
    assert [means[k] for k in ranked(scores, per_token=True)] == sorted(means, reverse=True)


def test_a_text_longer_than_the_model_reads_is_scored_in_parts() -> None:
    pipeline = exact("sdar", 2, context=18, block_length=4)
    ids = [k % 50 for k in range(39)]
    parts = windows(pipeline, ids, ScoreConfig())
    assert [token for _, own in parts for token in own] == ids
    assert [(len(before), len(own)) for before, own in parts] == [(0, 16), (8, 8), (8, 8), (9, 7)]
    for before, own in parts:
        place = len(ids) - len(own) if own == ids[-len(own) :] else ids.index(own[0])
        assert len(before) + len(own) <= 16 and (not before or ids[place - len(before) : place] == before)
    assert windows(pipeline, [], ScoreConfig()) == [] and windows(pipeline, ids[:16], ScoreConfig())[0] == (
        [],
        ids[:16],
    )


@pytest.mark.parametrize(
    ("prompt", "continuation", "settings", "said"),
    [
        ([1], [], {}, "the continuation is empty"), ([1], [125], {}, "the continuation contains the mask"),
        ([125], [1], {}, "the prompt contains the mask"), ([1], [128], {}, "outside the vocabulary"),
        ([1] * 60, [2] * 5, {}, "more than the 64"), ([], [1], {"greedy": True}, "begins with a prompt"),
        ([1], [2], {"block_length": 4}, "bidirectional"), ([1], [True], {}, "whole numbers"),
        ([1], ["a"], {}, "score each by itself"), ([1], 7, {}, "not int"), (None, [1], {}, "not NoneType"),
        ([1], [2], {"carry": Residual(start="reference"), "recursions": 1}, "without a reference"),
        ([1], "text", {}, "no tokenizer"), ([1], [2], {"carry": "loopholing", "recursions": 1}, "oopholing"),
        ([1], [2], {"carry": "none", "recursions": 1}, "there is none here"),
        ([1], [2], {"recursions": 1}, "there is none here"),
    ],
)  # fmt: skip
def test_bad_input_is_told_in_a_sentence(prompt: Any, continuation: Any, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(RCDError, match=said):
        exact("llada", 2, context=64).score(prompt, continuation, ScoreConfig(**settings))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("draws", 0), ("draws", 1.5), ("draws", "many"), ("seed", -1), ("guidance", float("nan")), ("recursions", 17),
        ("carry", 3), ("carry", "no such"), ("batch_size", 0), ("greedy", "perhaps"), ("block_length", 0),
    ],
)  # fmt: skip
def test_a_setting_of_a_wrong_kind_is_refused(name: str, value: Any) -> None:
    with pytest.raises(RCDError, match=f"{name}|carry"):
        ScoreConfig(**{name: value})
    with pytest.raises(RCDError, match="ScoreConfig"):
        exact("llada").score([1], [2], {"draws": 1})


def test_logits_that_are_no_numbers_are_told() -> None:
    pipeline = exact("llada", 2)
    with torch.no_grad():
        pipeline.model.head.weight[3] = float("nan")
    with pytest.raises(RCDError, match="NaN or inf"):
        pipeline.score([1, 2], [3, 4])
