"""The engine emits the plain windows' tokens, whoever else is in the batch, and outlives what goes wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import rcd
from rcd import kernels
from rcd.carry.base import make
from rcd.carry.loopholing import Loopholing
from rcd.carry.residual import Residual
from rcd.decode.config import DecodeConfig
from rcd.decode.events import Failed, Finished, Step
from rcd.engine.engine import Engine, Request
from rcd.models.toy import toy
from rcd.residual.summary import Summariser, Tail
from tests.conftest import exact

NEW = 19
PROMPTS = [[5, 9, 13, 2, 40, 41, 7, 8, 1, 3, 77], [4, 4, 6], [60 + k for k in range(21)], [9] * 8]
CARRIES: dict[str, Any] = {
    **{name: make(name) for name in ("none", "residual", "iter_smooth", "token_merge", "soft_mask")},
    "latent_refinement": make("latent_refinement"),
    "loopholing": Loopholing(),
    "top1": Residual(alpha="top1"),
    "t_res": Residual(t_res=0.8, t_res_on="both", alpha="confidence"),
}
RULES: dict[str, dict[str, Any]] = {
    "threshold": {},
    "dynamic": {"num_inference_steps": 3},
    "topm": {"commit": "topm", "num_inference_steps": 3},
    "factor": {"commit": "factor"},
    "sequential": {"commit": "sequential", "num_inference_steps": 4},
    "one a step": {"threshold": 1.0},
}


def config(**settings: Any) -> DecodeConfig:
    return DecodeConfig(**{"max_new_tokens": NEW, "block_length": 8, "threshold": 0.55, **settings})


def canvas(**settings: Any) -> DecodeConfig:
    return config(window="dual", carry_scope="block", **settings)


def flying(**settings: Any) -> DecodeConfig:
    return config(window="d2f", block_add_threshold=0.3, decoded_token_threshold=0.6, block_length=4, **settings)


def suffix(**settings: Any) -> DecodeConfig:
    return config(window="prefix", **settings)


DRAWN: dict[str, dict[str, Any]] = {
    "1": {"temperature": 1.0},
    "1, untempered": {"temperature": 1.0, "confidence": "untempered", "top_p": 0.8},
    "0.7, top_k": {"temperature": 0.7, "top_k": 20},
    "0.7, top_k and top_p": {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "confidence": "tempered"},
}


EVERY: dict[str, tuple[str, Any]] = {
    "blockwise": ("sdar", config),
    "d2f": ("sdar", flying),
    "d2f behind": ("llada", flying),
    "dual": ("llada", canvas),
    "prefix": ("llada", suffix),
    "dream prefix": ("dream", suffix),
}


def asked(prompts: Sequence[Sequence[int]] = PROMPTS, new: int = NEW) -> list[Request]:
    return [Request(number, prompt, new) for number, prompt in enumerate(prompts)]


def engine(pipeline: rcd.Pipeline, chosen: DecodeConfig, rows: int = 2, capacity: int = 48, **more: Any) -> Engine:
    if isinstance(chosen.carry, Loopholing):
        pipeline.model.hold(chosen.carry)
    return Engine(pipeline.model, pipeline.resolve(chosen), rows=rows, capacity=capacity, **more)


def outcomes(served: Engine, requests: Iterable[Request]) -> tuple[dict[int, list[int]], dict[int, str]]:
    """(the answers, the failures), by the requests' numbers."""
    ends = [event for event in served.run(requests) if not isinstance(event, Step)]
    answers = {event.row: event.ids for event in ends if isinstance(event, Finished)}
    failures = {event.row: event.message for event in ends if isinstance(event, Failed)}
    assert len(answers) + len(failures) == len(ends)  # every request ends once
    return answers, failures


def agree(pipeline: rcd.Pipeline, chosen: DecodeConfig, rows: Iterable[int] = (1, 2, 4)) -> None:
    """Tokens, stop reasons and denoising steps of the plain window; few rows: requests enter as others leave."""
    if isinstance(chosen.carry, Loopholing):
        pipeline.model.hold(chosen.carry)
    want = pipeline.generate(PROMPTS, chosen).results
    for count in rows:
        served = engine(pipeline, chosen, count)
        got = served.generate(asked())
        assert [one.ids for one in got] == [one.ids for one in want]
        assert [one.stop_reason for one in got] == [one.stop_reason for one in want]
        assert [one.counts.denoising for one in got] == [one.counts.denoising for one in want]
        assert [one.counts.prefill for one in got] == [one.counts.prefill for one in want]
        assert served.stats.idle <= len(PROMPTS)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("carry", CARRIES)
def test_the_engine_emits_blockwises_tokens(models: dict[str, rcd.Pipeline], carry: str, early: bool) -> None:
    agree(models["sdar"], config(carry=CARRIES[carry], eos_early_stop=early))


@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("carry", ["none", "residual"])
def test_of_every_block_length(models: dict[str, rcd.Pipeline], carry: str, block: int) -> None:
    agree(models["sdar"], config(carry=carry, block_length=block), rows=(2,))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("carry", ["none", "residual"])
def test_under_every_commit_rule(models: dict[str, rcd.Pipeline], carry: str, rule: str) -> None:
    agree(models["sdar"], config(carry=carry, **RULES[rule]), rows=(2, 4))


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("carry", CARRIES)
def test_the_engine_emits_duals_tokens(models: dict[str, rcd.Pipeline], carry: str, early: bool) -> None:
    agree(models["llada"], canvas(carry=CARRIES[carry], eos_early_stop=early), rows=(1, 2))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("block", [4, 16])
def test_on_a_canvas_under_every_commit_rule(models: dict[str, rcd.Pipeline], rule: str, block: int) -> None:
    agree(models["llada"], canvas(carry="residual", block_length=block, **RULES[rule]), rows=(2, 4))


@pytest.mark.parametrize("how", DRAWN)
@pytest.mark.parametrize("carry", ["none", "residual"])
@pytest.mark.parametrize("window", EVERY)
def test_drawn_tokens_are_the_plain_windows(models: dict[str, rcd.Pipeline], window: str, carry: str, how: str) -> None:
    family, made = EVERY[window]
    agree(models[family], made(carry=carry, seed=5, **DRAWN[how]), rows=(1, 3))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("window", EVERY)
def test_drawn_under_every_commit_rule(models: dict[str, rcd.Pipeline], window: str, rule: str) -> None:
    family, made = EVERY[window]
    agree(models[family], made(carry="residual", temperature=0.8, **RULES[rule]), rows=(2,))


@pytest.mark.parametrize("delta", ["exact", "kept"])
@pytest.mark.parametrize("window", EVERY)
def test_drawn_with_either_delta(models: dict[str, rcd.Pipeline], window: str, delta: str) -> None:
    family, made = EVERY[window]
    chosen = made(carry="residual", delta=delta, delta_tokens=8, delta_rank=4, temperature=0.8)
    agree(models[family], chosen, rows=(2,))


@pytest.mark.parametrize(
    "more", [{}, {"temperature": 0.8, "delta": "kept", "delta_tokens": 8, "delta_rank": 4}], ids=["greedy", "drawn"]
)
@pytest.mark.parametrize("carry", ["none", "residual"])
@pytest.mark.parametrize("suppression", ["logits", "confidence"])
def test_end_tokens_are_suppressed_as_in_the_plain_windows(suppression: str, carry: str, more: dict[str, Any]) -> None:
    for family, window in EVERY.values():
        pipeline = keen(family)
        chosen = window(carry=carry, eos_suppression=suppression, **more)
        agree(pipeline, chosen, rows=(2,))
        free, held = (pipeline.generate(PROMPTS, one) for one in (replace(chosen, eos_suppression="none"), chosen))
        assert free.sequences != held.sequences  # the check above could fail
        ends = [set(ids) & set(pipeline.settings.eos_token_ids) for ids in held.sequences]
        assert suppression == "confidence" or not any(ends)


def keen(family: str) -> rcd.Pipeline:
    """A model that says its most frequent tokens are ends."""
    pipeline = exact(family)
    said = [token for ids in pipeline.generate(PROMPTS, config()).sequences for token in ids]
    often = sorted(set(said), key=said.count)[-2:]
    pipeline.model.settings = replace(pipeline.settings, eos_token_ids=tuple(often))
    return pipeline


def test_a_requests_draws_are_its_seeds_own(models: dict[str, rcd.Pipeline]) -> None:
    """Not its number's, its row's or its neighbours'; and other seeds give other texts."""
    chosen = config(carry="residual", temperature=1.0)
    served, prompt = engine(models["sdar"], chosen, rows=3), PROMPTS[1]
    want = [models["sdar"].generate(prompt, config(carry="residual", temperature=1.0, seed=seed)) for seed in range(6)]
    requests = [Request(10 + seed, prompt, NEW, seed=seed) for seed in (3, 5, 0, 1, 4, 2)]
    got = {one.row - 10: one.ids for one in served.generate(requests)}
    assert got == {seed: one.sequences[0] for seed, one in enumerate(want)}
    assert len({tuple(ids) for ids in got.values()}) == 6
    (alone,) = served.generate([Request(0, prompt, NEW, seed=4)])
    assert alone.ids == got[4]


@pytest.mark.parametrize("settings", [{"temperature": 0.8, "top_k": 30}], ids=["drawn"])
def test_the_compiled_bookkeeping_emits_the_same_tokens(
    models: dict[str, rcd.Pipeline], settings: dict[str, Any]
) -> None:
    """Traced as on a GPU, run by torch itself: the compiler's own kernels take minutes on a CPU."""
    chosen = config(carry="residual", **settings)
    served = engine(models["sdar"], chosen)
    served.steps.compile(backend="eager")
    want = models["sdar"].generate(PROMPTS, chosen).sequences
    assert [one.ids for one in served.generate(asked())] == want


STARTS: dict[str, Residual] = {
    "plain": Residual(start="self"),
    "t_res": Residual(start="self", t_res=0.8, t_res_at_start=True),
    "both": Residual(start="self", t_res=0.8, t_res_at_start=True, t_res_on="both", alpha="confidence"),
    "top1": Residual(start="self", alpha="top1"),
    "fixed": Residual(start="self", alpha="fixed"),
}


BEGUN = [*EVERY, "dream dual", "dual on the canvas", "prefix in the block"]
DRAWN_KEPT = {"temperature": 0.8, "delta": "kept", "delta_tokens": 8, "delta_rank": 4}


@pytest.mark.parametrize(
    ("window", "start", "more"),
    [
        *((window, "plain", {}) for window in BEGUN),
        *((window, "both", DRAWN_KEPT) for window in BEGUN),
        ("blockwise", "t_res", {"eos_early_stop": False}),
        ("dual", "top1", {"commit": "topm"}),
        ("d2f", "fixed", {"eos_early_stop": False}),
    ],
    ids=str,
)
def test_a_start_of_the_targets_own_is_one_more_pass(
    models: dict[str, rcd.Pipeline], window: str, start: str, more: dict[str, Any]
) -> None:
    """Of every block, or of the whole canvas once. It commits nothing, is no denoising step, and draws nothing."""
    others: dict[str, tuple[str, Any]] = {
        "dream dual": ("dream", partial(canvas, refresh_every=2)),
        "dual on the canvas": ("llada", partial(config, window="dual", refresh_every=3)),
        "prefix in the block": ("llada", partial(suffix, carry_scope="block")),
    }
    family, made = {**EVERY, **others}[window]
    chosen = made(carry=STARTS[start], **more)
    agree(models[family], chosen)
    want, got = models[family].generate(PROMPTS, chosen).results, engine(models[family], chosen).generate(asked())
    assert [one.counts.start for one in got] == [one.counts.start for one in want]
    assert min(one.counts.start for one in got) > 0


def test_such_a_start_waits_for_its_slot_and_keeps_what_is_asked(models: dict[str, rcd.Pipeline]) -> None:
    kept = {"delta": "kept", "delta_tokens": 8, "delta_rank": 4}
    chosen = config(carry=Residual(start="self"), block_length=4, **kept)
    want = models["sdar"].generate(PROMPTS, chosen)
    for slots in (4, 8):
        served = engine(models["sdar"], chosen, rows=4)
        served._size = lambda rows, slots=slots: (4, slots)  # type: ignore[method-assign,misc]
        got = served.generate(asked())
        assert [one.ids for one in got] == want.sequences
        assert [one.counts.start for one in got] == [one.counts.start for one in want.results]
        assert any(one.counts.store for one in got) == (slots == 4)


@pytest.mark.parametrize(
    ("family", "chosen", "most"),
    [
        ("sdar", config(carry="residual"), 10),
        ("llada", flying(carry="residual"), 10),
        ("llada", canvas(carry="residual"), 12),
    ],
)
def test_the_bookkeeping_is_compiled_once_for_all_sizes(family: str, chosen: DecodeConfig, most: int) -> None:
    """Four functions, each for a row alone, with one slot or two, and for any other size; of a canvas, whole, a block
    and several. 64 is also the width of the embeddings: a row that happens to be as long compiles nothing anew."""
    torch._dynamo.reset()
    pipeline, made = exact(family), []

    def counting(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return graph.forward

    many = [[5 + k % 7] * (3 + 5 * (k % 4)) for k in range(9)]
    want, counts, sizes = pipeline.generate(many, chosen).sequences, [], set()
    for rows, capacity in ((1, 48), (3, 48), (5, 56), (8, 64), (9, 64)):
        served = engine(pipeline, chosen, rows, capacity)
        served.steps.compile(backend=counting)
        assert [one.ids for one in served.generate(asked(many))] == want
        counts.append(len(made))
        sizes |= {(capacity, rows, *size) for size in served.steps._units}
    assert counts[1:] == [counts[1]] * 4
    assert counts[-1] <= most < len(sizes)


@pytest.mark.parametrize(
    ("family", "chosen"),
    [
        ("sdar", config(carry="none")),
        ("sdar", config(carry="residual")),
        ("sdar", config(carry="residual", delta="kept", delta_tokens=8, delta_rank=4)),
        ("sdar", config(carry="residual", temperature=0.8)),
        ("sdar", flying(carry="residual")),
        ("llada", flying(carry="residual")),
        ("llada", flying(carry="residual", temperature=0.8)),
        ("llada", canvas(carry="residual")),
        ("llada", canvas(carry="residual", temperature=0.8, top_p=0.9)),
        ("llada", suffix(carry="residual")),
        ("dream", suffix(carry="residual", refresh_every=3)),
    ],
)
def test_in_fp32_a_request_is_the_same_to_the_last_bit_whoever_else_is_there(family: str, chosen: DecodeConfig) -> None:
    pipeline = rcd.Pipeline(toy(family, seed=3, spread=6.0))

    def traced(requests: list[Request], rows: int) -> dict[int, list[Any]]:
        """Everything that was told of each request."""
        told: dict[int, list[Any]] = {}
        for event in engine(pipeline, chosen, rows, watch=True).run(requests):
            assert not isinstance(event, Failed)
            if isinstance(event, Finished):
                told[event.row].append(event.ids)
                continue
            for k, row in enumerate(event.rows):
                there = ~event.confidence[k].isnan()
                alpha = None if event.alpha is None else event.alpha[k, there].tolist()
                confidence = event.confidence[k, there].tolist()
                told.setdefault(row, []).append((event.number[k], event.offsets[k], confidence, alpha))
        return told

    together = [traced(asked(), rows) for rows in (2, 3, 4)]
    for request in asked():
        alone = traced([request], 1)[request.number]
        assert all(told[request.number] == alone for told in together)


@pytest.mark.parametrize(
    ("family", "chosen"),
    [("sdar", config(carry="residual")), ("sdar", config(carry="none")), ("llada", canvas(carry="residual"))],
)
def test_step_events_replay_to_the_text(models: dict[str, rcd.Pipeline], family: str, chosen: DecodeConfig) -> None:
    served = engine(models[family], chosen, watch=True)
    text: dict[int, dict[int, int]] = {row: {} for row in range(len(PROMPTS))}
    steps, done = dict.fromkeys(text, 0), 0
    for event in served.run(asked()):
        assert not isinstance(event, Failed)
        if isinstance(event, Finished):
            written = [text[event.row][place] for place in range(len(event.ids))]
            assert (written, steps[event.row]) == (event.ids, event.counts.denoising)
            done += 1
            continue
        for k, row in enumerate(event.rows):
            steps[row] += 1
            assert event.number[k] == steps[row]
            for place in event.committed[k].nonzero().flatten().tolist():
                text[row][event.offsets[k] + place] = int(event.draft[k, place])
        assert (event.alpha is not None) == (chosen.carry == "residual")
        assert not (event.committed & event.masked).any()
        assert event.confidence[event.committed].isfinite().all()
    assert done == len(PROMPTS)


def test_with_a_slot_for_every_block_nothing_waits(models: dict[str, rcd.Pipeline]) -> None:
    """Finished blocks are stored beside the next one's first step: no pass is spent on them."""
    served = engine(models["sdar"], config(carry="residual", block_length=4), rows=4)
    served._size = lambda rows: (4, 8)  # type: ignore[method-assign]
    for one in served.generate(asked()):
        assert one.counts.store == 0
        assert one.counts.forwards == one.counts.denoising + one.counts.prefill


@pytest.mark.parametrize("rows", [1, 4])
def test_at_a_steady_pace_the_engine_foresees_the_slots(models: dict[str, rcd.Pipeline], rows: int) -> None:
    served = engine(models["sdar"], config(carry="residual", threshold=1.0, block_length=4), rows)
    assert [one.counts.store for one in served.generate(asked())] == [0] * len(PROMPTS)
    slots = served.stats.slots - served.stats.passes * rows
    assert 0 < slots < served.stats.passes * rows  # and has none where no block ends


def test_a_pass_only_stores_for_want_of_a_slot(models: dict[str, rcd.Pipeline]) -> None:
    served = engine(models["sdar"], config(carry="residual", block_length=4), rows=4)
    served._size = lambda rows: (4, 4)  # type: ignore[method-assign]
    got, want = served.generate(asked()), models["sdar"].generate(PROMPTS, config(carry="residual", block_length=4))
    assert [one.ids for one in got] == want.sequences
    assert [one.counts.store for one in got] == [one.counts.store for one in want.results]


def test_idle_steps_are_counted_one_by_one(models: dict[str, rcd.Pipeline]) -> None:
    """One row: the host has launched exactly one pass too many for every request."""
    served = engine(models["sdar"], config(carry="none", threshold=1.0), rows=1)
    got = served.generate(asked())
    assert served.stats.idle == len(PROMPTS)
    assert served.stats.passes == served.stats.idle + sum(one.counts.denoising + one.counts.store for one in got)


def test_engines_share_the_models_weights_and_leave_it_as_it_was(tmp_path: Path) -> None:
    pipeline = exact("sdar")
    before = {name: value.clone() for name, value in pipeline.model.state_dict().items()}
    first, second = (engine(pipeline, config(carry="none")) for _ in range(2))
    packed = [[layer.qkv.data_ptr() for layer in each.slotted.backbone.layers] for each in (first, second)]
    assert packed[0] == packed[1]
    assert all(torch.equal(value, before[name]) for name, value in pipeline.model.state_dict().items())
    pipeline.save(tmp_path / "model")
    again = rcd.load(tmp_path / "model", dtype=torch.float64).model.state_dict()
    assert all(torch.equal(value, before[name]) for name, value in again.items())


# -- delta -----------------------------------------------------------------------------------------------------------


def kept(codebook: torch.Tensor, tokens: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(delta of so many tokens and directions, the exact one) of some distributions."""
    logits = 3 * torch.randn(2, 3, len(codebook), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts = kernels.parts_for(torch.device("cpu"))
    read = Summariser(parts, never=0, keep=tokens, tail=Tail.of(codebook, rank))(logits)
    return read.expectation(codebook), logits.softmax(-1) @ codebook


def test_delta_with_every_token_kept_is_exact(models: dict[str, rcd.Pipeline]) -> None:
    codebook = models["sdar"].model.codebook
    torch.testing.assert_close(*kept(codebook, len(codebook), 1), atol=1e-12, rtol=0)
    want = models["sdar"].generate(PROMPTS, config(carry="residual", delta="exact")).sequences
    chosen = config(carry="residual", delta="kept", delta_tokens=len(codebook), delta_rank=1)
    assert [one.ids for one in engine(models["sdar"], chosen).generate(asked())] == want


def test_delta_with_every_direction_kept_is_exact(models: dict[str, rcd.Pipeline]) -> None:
    codebook = models["sdar"].model.codebook
    torch.testing.assert_close(*kept(codebook, 8, codebook.shape[1]), atol=1e-4, rtol=0)
    want = models["sdar"].generate(PROMPTS, config(carry="residual", delta="exact")).sequences
    chosen = config(carry="residual", delta="kept", delta_tokens=8, delta_rank=codebook.shape[1])
    assert [one.ids for one in engine(models["sdar"], chosen).generate(asked())] == want


def test_kept_delta_is_an_approximation_where_it_leaves_something_out(models: dict[str, rcd.Pipeline]) -> None:
    """The checks above could fail."""
    rough, exact_one = kept(models["sdar"].model.codebook, 1, 1)
    assert (rough - exact_one).abs().max() > 1e-3


def test_the_tail_is_the_same_for_the_same_codebook(models: dict[str, rcd.Pipeline]) -> None:
    codebook = models["sdar"].model.codebook
    torch.manual_seed(1)
    one = Tail.of(codebook, 6)
    torch.manual_seed(2)
    other = Tail.of(codebook, 6)
    assert all(torch.equal(a, b) for a, b in zip(vars(one).values(), vars(other).values(), strict=True))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"delta": "rough"}, "delta"),
        ({"delta_tokens": 48}, "power of two"),
        ({"delta_tokens": 0}, "delta_tokens"),
        ({"delta_rank": 0}, "delta_rank"),
    ],
)
def test_settings_of_delta_are_checked(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(rcd.RCDError, match=words):
        DecodeConfig(**settings)


def test_large_vocabularies_keep_by_default() -> None:
    assert [DecodeConfig().keeps(size) for size in (128, 16384, 16385)] == [False, False, True]
    assert not DecodeConfig(delta="exact").keeps(151936)
    assert DecodeConfig(delta="kept").keeps(128)
