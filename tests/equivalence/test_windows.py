"""The windows that compute less: each equals a plainer one at a degenerate setting, token for token, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import rcd
from rcd.carry.base import Carry
from rcd.carry.loopholing import HiddenState
from rcd.carry.residual import Residual
from rcd.decode.cache import KVCache
from rcd.decode.config import DecodeConfig, fitting
from rcd.decode.events import Finished, Step
from rcd.decode.layout import Span
from rcd.models.lm import View
from tests.conftest import exact
from tests.equivalence.test_decoding import CARRIES, PROMPTS, config, same
from tests.equivalence.test_rivals import STRONG, looped

ALL: dict[str, Any] = {**CARRIES, **STRONG}
RULES: dict[str, dict[str, Any]] = {
    "threshold": {},
    "topm": {"commit": "topm"},
    "factor": {"commit": "factor"},
    "sequential": {"commit": "sequential", "num_inference_steps": 3},
    "drawn": {"temperature": 0.8},
    "filler": {"eos_early_stop": False},
}
# every carry with the paper's rule, two of them (one enters at masks, one everywhere) with every other rule
CASES = [(carry, "threshold") for carry in ALL]
CASES += [(carry, rule) for carry in ("rcd", "loopholing") for rule in list(RULES)[1:]]
CANVAS = ("llada", "dream")
STRICT: dict[str, Any] = {"window": "d2f", "block_add_threshold": 1.0, "decoded_token_threshold": 1.0}
LOOSE: dict[str, Any] = {
    "window": "d2f", "block_add_threshold": 0.3, "decoded_token_threshold": 0.6, "threshold": 0.4,
}  # fmt: skip
SLOW: dict[str, Any] = {
    "window": "d2f", "block_add_threshold": 0.75, "decoded_token_threshold": 0.25, "commit": "topm",
}  # fmt: skip


@pytest.fixture(scope="module")
def loops() -> dict[str, rcd.Pipeline]:
    return {family: looped(family) for family in (*CANVAS, "sdar")}


@pytest.fixture(scope="module")
def shallow() -> dict[str, rcd.Pipeline]:
    """Models of one layer: a token's keys and values depend on that token alone, so that kept ones are never old."""
    return {family: looped(family, layers=1) for family in CANVAS}


def one_by_one(pipeline: rcd.Pipeline, chosen: DecodeConfig, **others: Any) -> None:
    """A ragged batch equals its rows, tokens and counts."""
    together = pipeline.generate(PROMPTS, chosen, **others)
    for row, prompt in enumerate(PROMPTS):
        alone = pipeline.generate(prompt, replace(chosen, seed=chosen.seed + row), **others)
        assert together.sequences[row] == alone.sequences[0]
        assert together.results[row].counts == alone.results[0].counts


# prefix and dual


@pytest.mark.parametrize("family", CANVAS)
@pytest.mark.parametrize("window", ["prefix", "dual"])
@pytest.mark.parametrize(("carry", "rule"), CASES)
def test_with_a_refresh_at_every_step_a_cached_canvas_is_the_whole_one(
    loops: dict[str, rcd.Pipeline], family: str, window: str, carry: str, rule: str
) -> None:
    for scope in ("canvas", "block"):
        plain = config(carry=ALL[carry], carry_scope=scope, **RULES[rule])
        cached = replace(plain, window=window, refresh_every=1)
        same(loops[family].generate(PROMPTS, cached), loops[family].generate(PROMPTS, plain))


@pytest.mark.parametrize("family", CANVAS)
@pytest.mark.parametrize("window", ["prefix", "dual"])
@pytest.mark.parametrize(("carry", "rule"), CASES)
def test_where_nothing_kept_can_be_old_a_cached_canvas_is_the_whole_one(
    shallow: dict[str, rcd.Pipeline], family: str, window: str, carry: str, rule: str
) -> None:
    """One layer, a carry in the current block alone, and no end token, behind which later blocks would be closed: the
    cached steps themselves are exact."""
    plain = config(carry=ALL[carry], carry_scope="block", eos_suppression="logits", **RULES[rule])
    same(shallow[family].generate(PROMPTS, replace(plain, window=window)), shallow[family].generate(PROMPTS, plain))


@pytest.mark.parametrize("family", CANVAS)
@pytest.mark.parametrize("carry", [name for name in ALL if name != "loopholing"])
def test_the_prefix_window_carries_behind_the_block_too(
    shallow: dict[str, rcd.Pipeline], family: str, carry: str
) -> None:
    """With one layer it is exact on the whole canvas, where later blocks have a residual (`dual` has an older one).
    Loopholing enters at decided tokens as well, which stay as they were when the canvas was last read."""
    plain = config(carry=ALL[carry], block_length=4)
    same(shallow[family].generate(PROMPTS, replace(plain, window="prefix")), shallow[family].generate(PROMPTS, plain))


@pytest.mark.parametrize("family", CANVAS)
def test_a_cached_canvas_is_an_approximation(models: dict[str, rcd.Pipeline], family: str) -> None:
    """The checks above could fail: with two layers, what is kept grows old, in each window in its own way."""
    outputs = [
        models[family].generate(PROMPTS, config(carry="residual", window=window)).sequences
        for window in ("bidirectional", "prefix", "dual")
    ]
    assert outputs[0] != outputs[1] != outputs[2] != outputs[0]
    twice = models[family].generate(PROMPTS, config(carry="residual", window="dual", refresh_every=2)).sequences
    assert twice not in outputs


@pytest.mark.parametrize("family", CANVAS)
@pytest.mark.parametrize("window", ["prefix", "dual"])
@pytest.mark.parametrize("carry", ALL)
def test_a_batch_on_a_cached_canvas_equals_its_rows(
    loops: dict[str, rcd.Pipeline], family: str, window: str, carry: str
) -> None:
    greedy = config(carry=ALL[carry], window=window, seed=10)
    one_by_one(loops[family], greedy)
    one_by_one(loops[family], replace(greedy, temperature=0.8, carry_scope="block", refresh_every=2))


@pytest.mark.parametrize("family", CANVAS)
@pytest.mark.parametrize("window", ["prefix", "dual"])
@pytest.mark.parametrize("block", [3, 21, 64])
def test_any_block_length_works_on_a_cached_canvas(
    models: dict[str, rcd.Pipeline], family: str, window: str, block: int
) -> None:
    one_by_one(models[family], config(carry="residual", window=window, block_length=block))


@pytest.mark.parametrize("family", CANVAS)
@pytest.mark.parametrize("window", ["prefix", "dual"])
@torch.inference_mode()
def test_a_cached_step_predicts_what_a_whole_one_would_in_a_shallow_model(
    shallow: dict[str, rcd.Pipeline], family: str, window: str
) -> None:
    """Every position of every step, Dream's first of a block among them, against a plain pass over the text."""
    pipeline, prompt = shallow[family], PROMPTS[0]
    mask = pipeline.settings.mask_token_id
    text, seen = torch.tensor([prompt + [mask] * 21]), set()
    for event in pipeline.stream(prompt, config(carry="none", window=window, commit="topm")):
        if isinstance(event, Finished):
            break
        view = View(torch.arange(text.shape[1])[None], None, None, slice(len(prompt), None))
        p = pipeline.model(text, view).logits.float().softmax(-1)[0]
        told = ~event.confidence[0].isnan()
        at = torch.arange(event.draft.shape[1])[told] + event.offsets[0]
        expected = p[at].gather(-1, event.draft[0, told][:, None])[:, 0]
        torch.testing.assert_close(event.confidence[0, told], expected, atol=1e-5, rtol=0)
        write(text, len(prompt), event)
        seen.add((event.offsets[0], event.draft.shape[1]))
    narrow = {(0, 8), (8, 8), (13, 8)} if window == "dual" else {(0, 21), (8, 13), (16, 5)}
    assert seen == {(0, 21)} | narrow


def write(text: Tensor, start: int, event: Step) -> None:
    """Commit what an event of a single row says."""
    for j in event.committed[0].nonzero().flatten().tolist():
        assert text[0, start + event.offsets[0] + j] != event.draft[0, j]
        text[0, start + event.offsets[0] + j] = event.draft[0, j]


# d2f


@pytest.mark.parametrize(("carry", "rule"), CASES)
def test_d2f_at_its_strictest_emits_the_tokens_of_blockwise(
    loops: dict[str, rcd.Pipeline], carry: str, rule: str
) -> None:
    plain = config(carry=ALL[carry], **RULES[rule])
    one = loops["sdar"].generate(PROMPTS, plain)
    piped = loops["sdar"].generate(PROMPTS, replace(plain, **STRICT))
    assert piped.sequences == one.sequences
    assert [r.counts for r in piped.results] == [replace(r.counts, store=0) for r in one.results]
    assert sum(r.counts.store for r in one.results) > 0


@pytest.mark.parametrize("seed", range(4))
def test_one_block_in_flight_is_blockwise_without_stores(seed: int) -> None:
    """However early a block might be added: the bound holds it back. Also where end tokens come."""
    pipeline = exact("sdar", seed)
    early = config(carry="residual", window="d2f", block_add_threshold=0.1, blocks_in_flight=1)
    piped, one = pipeline.generate(PROMPTS, early), pipeline.generate(PROMPTS, config(carry="residual"))
    assert piped.sequences == one.sequences
    assert [r.counts for r in piped.results] == [replace(r.counts, store=0) for r in one.results]


@pytest.mark.parametrize("family", ["sdar", "llada"])
@pytest.mark.parametrize("carry", ALL)
def test_a_batch_in_flight_equals_its_rows(loops: dict[str, rcd.Pipeline], family: str, carry: str) -> None:
    greedy = config(carry=ALL[carry], seed=10, **{"block_length": 4, **LOOSE})
    one_by_one(loops[family], greedy)
    one_by_one(loops[family], replace(greedy, temperature=0.8, block_length=8, **STRICT))


@pytest.mark.parametrize("carry", ALL)
def test_llada_in_flight_is_a_block_causal_model_behind_its_prompt(loops: dict[str, rcd.Pipeline], carry: str) -> None:
    """A prompt of exactly one block makes both grids the same: the same weights, decoded as SDAR's are."""
    causal = looped("llada")
    causal.model.settings = replace(causal.settings, attention="block_causal", block_length=8)
    prompts = [PROMPTS[0][:8], PROMPTS[2]]
    strict = config(carry=ALL[carry], **STRICT)
    one = causal.generate(prompts, config(carry=ALL[carry], window="blockwise"))
    assert loops["llada"].generate(prompts, strict).sequences == one.sequences


@pytest.mark.parametrize("family", ["sdar", "llada"])
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
@pytest.mark.parametrize("rule", ["threshold", "topm", "factor", "filler"])
@torch.inference_mode()
def test_every_step_in_flight_is_a_plain_pass_under_the_block_causal_mask(
    models: dict[str, rcd.Pipeline], family: str, prompt: list[int], rule: str
) -> None:
    """Without a cache, the whole text anew: every confidence that an event tells. And D2F's rules are kept."""
    pipeline = models[family]
    chosen = config(**{"carry": "none", "block_length": 4, "blocks_in_flight": 3, **LOOSE, **RULES[rule]})
    mask, edge = pipeline.settings.mask_token_id, 0 if family == "sdar" else len(prompt)
    slots = -(-(len(prompt) + 21 - edge) // 4) * 4 + edge
    text = torch.tensor([prompt + [mask] * (slots - len(prompt))])
    block = torch.clamp((torch.arange(slots) - edge).div(4, rounding_mode="floor"), min=-1)
    view = View(torch.arange(slots)[None], (block[:, None] >= block[None])[None, None])
    matters = torch.arange(slots) >= len(prompt)
    matters &= torch.arange(slots) < (slots if rule == "filler" else len(prompt) + 21)
    last, most = (len(prompt) - edge) // 4 - 1, 0
    for event in pipeline.stream(prompt, chosen):
        if isinstance(event, Finished):
            assert event.ids == text[0, len(prompt) : len(prompt) + len(event.ids)].tolist()
            assert mask not in event.ids
            break
        told = ~event.confidence[0].isnan()
        at = torch.arange(event.draft.shape[1])[told] + event.offsets[0] + len(prompt)
        p = pipeline.model(text, view).logits.float().softmax(-1)[0, at]
        expected = p.gather(-1, event.draft[0, told][:, None])[:, 0]
        torch.testing.assert_close(event.confidence[0, told], expected, atol=1e-5, rtol=0)

        share = {int(k): 1 - float((text[0, matters & (block == k)] == mask).float().mean()) for k in block[matters]}
        if int(block[at].max()) > last:
            assert int(block[at].max()) == last + 1 and share.get(last, 1.0) >= 0.3
            last += 1
        opened = [k for k in share if share[k] < 1 and k <= last]
        most = max(most, len(opened))
        assert last - min(opened) < 3
        for k in opened:
            mine = event.committed[0, told] & (block[at] == k)
            if share.get(k - 1, 1.0) >= 0.6:
                assert mine.any()
            else:
                assert rule == "factor" or (event.confidence[0, told][mine] > (0.4 if rule != "topm" else 1)).all()
        write(text, len(prompt), event)
        for j, left in enumerate(event.masked[0].tolist()):  # masks behind an end token are closed
            place = len(prompt) + event.offsets[0] + j
            if not left and text[0, place] == mask:
                text[0, place] = pipeline.settings.eos_token_ids[0]
    assert most > 1, "several blocks were in flight"


@pytest.mark.parametrize("family", ["sdar", "llada"])
@pytest.mark.parametrize("seed", range(6))
def test_a_text_in_flight_is_complete_and_its_events_tell_it(family: str, seed: int) -> None:
    pipeline = exact(family, seed)
    text: dict[int, dict[int, int]] = {row: {} for row in range(len(PROMPTS))}
    for event in pipeline.stream(PROMPTS, config(carry="residual", **LOOSE)):
        if isinstance(event, Finished):
            assert event.ids == [text[event.row][k] for k in range(len(event.ids))]
            assert len(event.ids) == 21 or event.ids[-1] in pipeline.settings.eos_token_ids
            continue
        assert not (event.committed & event.masked).any() and event.committed.any(-1).all()
        for k, row in enumerate(event.rows):
            for j in event.committed[k].nonzero().flatten().tolist():
                position = event.offsets[k] + j
                assert position >= 0 and position not in text[row]
                text[row][position] = int(event.draft[k, j])


def test_blocks_in_flight_save_steps(models: dict[str, rcd.Pipeline]) -> None:
    def steps(**settings: Any) -> int:
        output = models["sdar"].generate(PROMPTS, config(carry="residual", commit="topm", **settings))
        return sum(result.denoising_steps for result in output.results)

    assert steps(**{**LOOSE, "block_length": 4}) < steps(block_length=4)


# all of them


def test_a_place_in_a_cache_is_replaced_and_nothing_else() -> None:
    cache = KVCache(12)
    first = torch.randn(3, 2, 10, 4)
    everything = torch.arange(10).expand(3, -1)
    seen, _ = cache.place(everything, everything >= 0, 10).update(first, -first, 0)
    assert torch.equal(seen, first)

    slots, written = torch.tensor([[1, 2, 3], [7, 8, 9]]), torch.tensor([[False, True, True], [True, True, False]])
    new = torch.randn(2, 2, 3, 4)
    place = cache.place(slots, written, 10, torch.tensor([2, 0]))
    keys, values = place.update(new, -new, 0)
    expected = first[[2, 0]]
    expected[0, :, 2:4], expected[1, :, 7:9] = new[0, :, 1:], new[1, :, :2]
    assert torch.equal(keys, expected) and torch.equal(values, -expected)
    assert torch.equal(cache.keys[0][1, :, :10], first[1])
    assert torch.equal(place.of(torch.tensor([1])).update(new[1:], -new[1:], 0)[0], expected[1:])


def test_a_span_keeps_what_is_not_its_own() -> None:
    span = Span.of(torch.tensor([0, 4]), torch.tensor([2, 6]), total=6, width=3)
    assert span.slots.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert span.own.tolist() == [[True, True, False], [False, True, True]]
    values, new = torch.zeros(2, 6), torch.ones(2, 3)
    assert span.put(values, new).tolist() == [[1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1]]
    state = span.put_state(HiddenState(values.unsqueeze(-1)), HiddenState(new.unsqueeze(-1)))
    assert isinstance(state, HiddenState) and torch.equal(state.hidden[..., 0], span.put(values, new))
    assert span.moved(10, left=1).slots.tolist() == [[9, 10, 11, 12], [12, 13, 14, 15]]


@pytest.mark.parametrize(
    ("family", "settings"),
    [("sdar", STRICT), ("sdar", LOOSE), ("sdar", SLOW), ("llada", SLOW)]
    + [(family, {"window": window}) for family in CANVAS for window in ("prefix", "dual")],
)
@pytest.mark.parametrize("scope", ["canvas", "block"])
def test_a_reference_in_every_window(
    models: dict[str, rcd.Pipeline], family: str, settings: dict[str, Any], scope: str
) -> None:
    """A warm start with the target as reference is the self start; a reference of every step with alpha 0 is SeqD; and
    one that is asked more seldom than the target runs has a cache that keeps up, batch or single."""
    pipeline, reference = models[family], exact(family, 8)
    base = config(carry_scope=scope, block_length=4, **settings)

    def with_carry(carry: Carry | str) -> DecodeConfig:
        return replace(base, carry=carry)

    warm, own = with_carry(Residual(start="reference")), with_carry(Residual(start="self"))
    assert pipeline.generate(PROMPTS, warm, reference=pipeline).sequences == pipeline.generate(PROMPTS, own).sequences
    off = with_carry(Residual(source="reference", alpha_scale=0.0))
    seqd = pipeline.generate(PROMPTS, with_carry("none")).sequences
    assert pipeline.generate(PROMPTS, off, reference=reference).sequences == seqd
    for carry in (Residual(source="reference"), Residual(start="reference")):
        one_by_one(pipeline, with_carry(carry), reference=reference)


def test_windows_that_fit(models: dict[str, rcd.Pipeline]) -> None:
    assert fitting(models["sdar"].settings) == ["blockwise", "d2f"]
    assert fitting(models["llada"].settings) == ["bidirectional", "prefix", "dual", "d2f"]
    assert fitting(models["dream"].settings) == ["bidirectional", "prefix", "dual"]
    for family, window, match in (
        ("sdar", "dual", r"'dual' does not fit .* block_causal; take 'blockwise' or 'd2f'\."),
        ("llada", "blockwise", r"bidirectional; take 'bidirectional' or 'prefix' or 'dual' or 'd2f'\."),
        ("dream", "d2f", r"outputs that predict the next position; take 'bidirectional' or 'prefix' or 'dual'\."),
    ):
        with pytest.raises(rcd.RCDError, match=match):
            models[family].resolve(DecodeConfig(window=window))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"refresh_every": 0}, "refresh_every must be a whole number of 1 or more"),
        ({"refresh_every": 2}, "refresh_every is a setting of the windows prefix and dual"),
        ({"block_add_threshold": 1.5}, r"block_add_threshold must be in \[0, 1\]"),
        ({"decoded_token_threshold": -1}, r"decoded_token_threshold must be in \[0, 1\]"),
        ({"blocks_in_flight": 0}, "blocks_in_flight must be a whole number of 1 or more"),
    ],
)
def test_bad_settings_of_a_window(models: dict[str, rcd.Pipeline], settings: dict[str, Any], match: str) -> None:
    with pytest.raises(rcd.RCDError, match=match):
        models["llada"].resolve(DecodeConfig(**settings))


@pytest.mark.parametrize("family", ["sdar", "llada"])
def test_blocks_in_flight_stay_within_the_context(family: str) -> None:
    from rcd.models.toy import toy

    pipeline = rcd.Pipeline(toy(family, context=64))
    flying = DecodeConfig(window="d2f", eos_suppression="logits", block_length=8, carry="none")
    assert [r.tokens for r in pipeline.generate([[3] * 40, [3] * 5], flying).results] == [24, 24]
    with pytest.raises(rcd.RCDError, match="needs"):
        pipeline.generate([3] * 41, replace(flying, max_new_tokens=24))
