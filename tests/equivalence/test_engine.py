"""The engine itself: how many slots it computes, what it has compiled, and what it does when a step goes wrong."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rcd
from rcd import kernels
from rcd.carry.residual import Residual
from rcd.decode.blocks import Blocks
from rcd.decode.engine import Engine
from rcd.decode.events import Finished
from rcd.decode.requests import Request
from rcd.decode.slots import CACHE_SHARE, check_room
from rcd.decode.units import Units
from rcd.kernels import plain
from rcd.models.toy import toy
from tests.conftest import exact
from tests.equivalence.setups import FLYING, PROMPTS, WINDOWS, asked, config, ends, engine

# -- how many slots --------------------------------------------------------------------------------------------------


def test_where_the_host_knows_all_no_slot_is_computed_in_vain(models: dict[str, rcd.Pipeline]) -> None:
    """Finished blocks are stored beside the next one's first step: no pass is spent on them."""
    chosen = config(carry="residual", block_length=4)
    served = engine(models["sdar"], chosen, rows=1)
    got = [event for event in served.run(asked(models["sdar"], chosen)) if isinstance(event, Finished)]
    steps, stores = sum(one.counts.denoising for one in got), sum(one.counts.store for one in got)
    assert (served.stats.passes, served.stats.slots, served.stats.idle) == (steps, steps + stores, 0)
    assert stores > len(PROMPTS)


def test_a_host_that_lags_launches_one_pass_too_many_for_a_row_that_ends(models: dict[str, rcd.Pipeline]) -> None:
    chosen = config(carry="none", threshold=1.0)
    served = engine(models["sdar"], chosen, rows=1)
    served.lag = 1
    got = [event for event in served.run(asked(models["sdar"], chosen)) if isinstance(event, Finished)]
    assert served.stats.idle == len(PROMPTS)
    assert served.stats.passes == served.stats.idle + sum(one.counts.denoising for one in got)


@pytest.mark.parametrize("rows", [1, 4])
def test_at_a_steady_pace_a_host_that_lags_foresees_the_slots(models: dict[str, rcd.Pipeline], rows: int) -> None:
    """One token a step: a slot beside the rows' own ones is there where a block ends, and not everywhere."""
    chosen = config(carry="residual", threshold=1.0, block_length=4)
    served = engine(models["sdar"], chosen, rows)
    served.lag = 1
    answers, failures = ends(served, asked(models["sdar"], chosen))
    assert not failures and list(answers.values()) != []
    beside = served.stats.slots - served.stats.passes * rows
    assert 0 < beside < served.stats.passes * rows


@pytest.mark.parametrize("family", ["sdar", "llada"])
@pytest.mark.parametrize("size", [(4, 4), (4, 6), (16, 16), (16, 32)])
def test_in_slots_of_any_number(
    models: dict[str, rcd.Pipeline], family: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows wait where their blocks find no slots, and store alone where the finished ones find none; tokens and counts
    stay the same."""
    pipeline, chosen = models[family], config(**{**FLYING, "carry": "residual"})
    want = pipeline.generate(PROMPTS, chosen, seeds=[0] * 4).results
    served = engine(pipeline, chosen, rows=4)
    served.lag = 1
    monkeypatch.setattr(Blocks, "size", lambda *_: size)
    got = {event.row: event for event in served.run(asked(pipeline, chosen)) if isinstance(event, Finished)}
    for row, one in enumerate(want):
        assert (got[row].ids, got[row].counts) == (one.ids, one.counts)


# -- what is compiled ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", ["dream prefix", "shifted d2f", "shifted sub-blocks"])
def test_a_steps_bookkeeping_asks_nothing_of_the_host(models: dict[str, rcd.Pipeline], window: str) -> None:
    """It is traced as one graph, in which no value is known; and emits the same tokens, drawn ones too. The test below
    has the other windows."""
    family, settings = WINDOWS[window]
    chosen = config(**{**settings, "carry": "residual", "temperature": 0.8, "top_k": 30})
    served = engine(models[family], chosen)
    served.units.sparse = False  # as on a GPU
    served.units.compile(backend="eager")
    want = models[family].generate(PROMPTS, chosen, seeds=[0] * 4).sequences
    assert ends(served, asked(models[family], chosen)) == (dict(enumerate(want)), {})


@pytest.mark.parametrize(("window", "most"), [("d2f behind", 10), ("dual", 18)])
def test_the_bookkeeping_is_compiled_once_for_all_sizes(
    window: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four functions, each for a row alone, with one slot or two, and for any other size; of a canvas, whole, a block
    and several. 64 is also the width of the embeddings: a row that happens to be as long compiles nothing anew."""
    torch._dynamo.reset()
    family, settings = WINDOWS[window]
    pipeline, made = exact(family), []
    chosen = config(**{**settings, "carry": "residual", "carry_scope": "block"})
    if settings.get("window") == "dual":
        chosen = replace(chosen, refresh_every=None)

    def counting(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return graph.forward

    def seen(replay: Any, at: tuple[int, ...]) -> Any:
        def told(name: Any, function: Any) -> Any:
            sizes.add((*at, *name[1]))
            return replay(name, function)

        return told

    many = [[5 + k % 7] * (3 + 5 * (k % 4)) for k in range(9)]
    want, counts, sizes = pipeline.generate(many, chosen, seeds=[0] * 9).sequences, [], set[Any]()
    for rows, capacity in ((1, 48), (3, 48), (5, 56), (8, 64), (9, 64)):
        served = engine(pipeline, chosen, rows, capacity)
        served.lag = 1
        served.units.sparse = False
        served.units.compile(backend=counting)
        monkeypatch.setattr(served.units, "replay", seen(served.units.replay, (rows, capacity)))
        assert ends(served, asked(pipeline, chosen, many)) == (dict(enumerate(want)), {})
        counts.append(len(made))
    settled = (
        3 if window == "dual" else 1
    )  # the blocks of a canvas are so many as a row has, until they are unknown too
    assert counts[settled:] == [counts[-1]] * (5 - settled)
    assert counts[-1] <= most < len(sizes)


@pytest.mark.parametrize("window", ["blockwise", "dual"])
def test_an_engine_of_fused_kernels_emits_the_same_tokens(window: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, so few tokens."""
    pytest.importorskip("triton")
    family, settings = WINDOWS[window]
    pipeline, texts = rcd.Pipeline(toy(family, seed=3, spread=6.0)), []
    chosen = config(**{**settings, "max_new_tokens": 4, "block_length": 4, "carry": "residual"})
    for kind in ("plain", "fused"):
        monkeypatch.setenv("RCD_KERNELS", kind)
        served = engine(pipeline, chosen, capacity=32)
        texts.append(ends(served, asked(pipeline, chosen, [[5, 6, 7], [9, 8, 7, 6, 5]])))
    assert texts[0] == texts[1] and not texts[0][1]


def test_engines_share_the_models_weights_and_leave_it_as_it_was(tmp_path: Any) -> None:
    pipeline = exact("sdar")
    before = {name: value.clone() for name, value in pipeline.model.state_dict().items()}
    first, second = (engine(pipeline, config(carry="none")) for _ in range(2))
    packed: Any = [[layer.qkv.data_ptr() for layer in each.target.backbone.layers] for each in (first, second)]  # type: ignore[attr-defined]
    assert packed[0] == packed[1]
    assert all(torch.equal(value, before[name]) for name, value in pipeline.model.state_dict().items())
    pipeline.save(tmp_path / "model")
    again = rcd.load(tmp_path / "model", dtype=torch.float64).model.state_dict()
    assert all(torch.equal(value, before[name]) for name, value in again.items())


# -- what it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "capacity", "words"),
    [(0, 48, "rows"), (1, 0, "capacity"), (1, True, "capacity"), (10**9, 48, "would fit|no cache fits")],
)
def test_sizes_are_checked(models: dict[str, rcd.Pipeline], rows: int, capacity: int, words: str) -> None:
    with pytest.raises(rcd.RCDError, match=words):
        engine(models["sdar"], config(), rows, capacity)


def test_an_engine_says_what_it_is_made_of(models: dict[str, rcd.Pipeline]) -> None:
    pipeline = models["sdar"]
    with pytest.raises(rcd.RCDError, match=r"such as pipeline\.model"):
        Engine(pipeline, pipeline.resolve(config()), rows=1, capacity=48)  # type: ignore[arg-type]
    with pytest.raises(rcd.RCDError, match=r"pipeline\.resolve"):
        Engine(pipeline.model, config(), rows=1, capacity=48)
    with pytest.raises(rcd.RCDError, match="needs a reference model"):
        engine(pipeline, config(carry=Residual(start="reference")))


@pytest.mark.parametrize("window", ["blockwise", "d2f behind", "bidirectional", "prefix"])
def test_a_bad_request_fails_alone_and_costs_no_work(models: dict[str, rcd.Pipeline], window: str) -> None:
    family, settings = WINDOWS[window]
    pipeline, chosen = models[family], config(**{**settings, "carry": "residual"})
    want = pipeline.generate(PROMPTS, chosen, seeds=[0] * 4).sequences
    own = pipeline.resolve(chosen).request
    bad: list[Any] = [
        [7] * 60, [], [1, 10**6], [1, pipeline.settings.mask_token_id], [5, None], [1.5, 2], "text", None, [[1, 2]]
    ]  # fmt: skip
    words = ["positions", "empty", "outside the vocab", "the mask token", *["token ids"] * 5]
    spoilt = [Request(prompt, own, 90 + k) for k, prompt in enumerate(bad)]
    served = engine(pipeline, chosen)
    _, failures = ends(served, spoilt)
    assert (served.stats.passes, served.free) == (0, 2)
    assert all(word in failures[90 + k] for k, word in enumerate(words))
    good = asked(pipeline, chosen)
    answers, again = ends(served, [good[0], *spoilt[:4], good[1], *spoilt[4:], *good[2:]])
    assert answers == dict(enumerate(want)) and again == failures


def test_a_request_without_a_free_row_is_told(models: dict[str, rcd.Pipeline]) -> None:
    chosen = config()
    served, requests = engine(models["sdar"], chosen, rows=1), asked(models["sdar"], chosen)
    assert served.admit(requests[0]) is None
    failed = served.admit(requests[1])
    assert failed is not None and "all 1 rows are taken" in failed.message


def test_no_requests_are_no_work(models: dict[str, rcd.Pipeline]) -> None:
    served = engine(models["sdar"], config())
    assert list(served.run([])) == [] and served.stats.passes == 0


# -- what goes wrong -------------------------------------------------------------------------------------------------


def poisoned(embed: Any, poison: int) -> Any:
    def spoil(ids: torch.Tensor) -> torch.Tensor:
        return torch.where((ids == poison).unsqueeze(-1), float("nan"), embed(ids))

    return spoil


@pytest.mark.parametrize("carry", ["none", Residual(), Residual(start="self"), Residual(source="reference")], ids=str)
@pytest.mark.parametrize("window", WINDOWS)
def test_logits_that_are_no_numbers_stop_their_row_alone(window: str, carry: Any) -> None:
    """Another request's in the same batch, and the next one's in the same row, stay what they are."""
    family, settings = WINDOWS[window]
    pipeline, chosen = exact(family), config(**{**settings, "carry": carry})
    other = exact(family, 5)
    want = pipeline.generate(PROMPTS[:3], chosen, reference=other, seeds=[0] * 3).sequences
    poison = next(token for token in range(100) if token not in {t for row in [*want, *PROMPTS] for t in row})
    served = engine(pipeline, chosen, rows=3, reference=other.model)
    pipeline.model.embed = poisoned(pipeline.model.embed, poison)  # type: ignore[method-assign]
    good = asked(pipeline, chosen, PROMPTS[:3])
    bad = Request([3, poison, *[5] * 9], good[0].settings, 7)
    answers, failures = ends(served, [*good[:2], bad, good[2], *(one.numbered(10 + one.row) for one in good)])
    assert list(failures) == [7] and "NaN or inf at denoising step 1" in failures[7]
    assert answers == {**dict(enumerate(want)), **{10 + row: ids for row, ids in enumerate(want)}}


def once(work: Any, when: int) -> Any:
    """`work`, but for the call of that number, which runs out of memory."""
    calls = [0]

    def failing(*given: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == when:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return work(*given, **named)

    return failing


@pytest.mark.parametrize(("part", "at"), [("step", 1), ("settled", 6)])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_step_that_runs_out_of_memory_drops_the_rows_in_flight(
    models: dict[str, rcd.Pipeline], window: str, part: str, at: int
) -> None:
    """Also behind the commit, when the rows are half updated."""
    family, settings = WINDOWS[window]
    pipeline, chosen = models[family], config(**{**settings, "carry": "residual"})
    want = dict(enumerate(pipeline.generate(PROMPTS, chosen, seeds=[0] * 4).sequences))
    served = engine(pipeline, chosen)
    setattr(served.units, part, once(getattr(served.units, part), at))
    answers, failures = ends(served, asked(pipeline, chosen))
    assert 1 <= len(failures) <= 2
    assert all("serve fewer rows" in message for message in failures.values())
    assert answers == {row: ids for row, ids in want.items() if row not in failures}
    assert ends(served, asked(pipeline, chosen)) == (want, {})


@pytest.mark.parametrize("window", ["blockwise", "d2f behind"])
@pytest.mark.parametrize("at", [1, 2])
def test_a_prefill_that_runs_out_of_memory_loses_no_request(
    models: dict[str, rcd.Pipeline], window: str, at: int
) -> None:
    """Each is answered or told, and the engine serves on."""
    family, settings = WINDOWS[window]
    pipeline, chosen = models[family], config(**{**settings, "carry": "residual"})
    want = dict(enumerate(pipeline.generate(PROMPTS, chosen, seeds=[0] * 4).sequences))
    served = engine(pipeline, chosen)
    served.target.plain = once(served.target.plain, at)  # type: ignore[method-assign]
    answers, failures = ends(served, asked(pipeline, chosen))
    assert failures and all("memory" in message for message in failures.values())
    assert answers == {row: ids for row, ids in want.items() if row not in failures}
    assert ends(served, asked(pipeline, chosen)) == (want, {})


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("no graphs here\nat all")]
)
def test_a_capture_that_fails_is_told_once_and_steps_run_without(
    models: dict[str, rcd.Pipeline], monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    def no_graph() -> None:
        raise error

    chosen = config(carry="residual")
    want = dict(enumerate(models["sdar"].generate(PROMPTS, chosen, seeds=[0] * 4).sequences))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", no_graph)
    served = engine(models["sdar"], chosen)
    served.units.replay.graphs = True
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            assert ends(served, asked(models["sdar"], chosen)) == (want, {})
    assert [str(one.message).split(" (")[0] for one in told] == ["rcd: steps are not replayed as CUDA graphs here"]


def test_a_run_that_is_left_can_be_forgotten(models: dict[str, rcd.Pipeline]) -> None:
    chosen = config(carry="residual")
    want = dict(enumerate(models["sdar"].generate(PROMPTS, chosen, seeds=[0] * 4).sequences))
    served, requests = engine(models["sdar"], chosen), asked(models["sdar"], chosen)
    events: Any = served.run(requests)
    assert isinstance(next(events), Finished)
    events.close()
    served.drop_all()

    def broken() -> Iterator[Request]:
        yield from requests[:3]
        raise KeyError("a caller's own mistake")

    with pytest.raises(KeyError):
        list(served.run(broken()))
    served.drop_all()
    assert not served.busy and served.free == 2
    assert ends(served, requests) == (want, {})


def test_an_interrupt_in_a_step_leaves_the_engine_usable(
    models: dict[str, rcd.Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = config(carry="residual")
    want = dict(enumerate(models["sdar"].generate(PROMPTS, chosen, seeds=[0] * 4).sequences))
    served, calls, step = engine(models["sdar"], chosen), [0], Units.step

    def interrupted(*given: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        return step(*given)

    monkeypatch.setattr(Units, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(served.run(asked(models["sdar"], chosen)))
    served.drop_all()
    assert ends(served, asked(models["sdar"], chosen)) == (want, {})


# -- memory and kernels ----------------------------------------------------------------------------------------------


def fake(pipeline: rcd.Pipeline, free: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model as if on a GPU with so many bytes free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    model = pipeline.model
    device = torch.device("cuda")
    return SimpleNamespace(backbone=model.backbone, codebook=model.codebook, settings=model.settings, device=device)


def test_a_cache_that_does_not_fit_says_what_would(
    models: dict[str, rcd.Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    each = 2 * 2 * 2 * 16 * 8  # bytes of a position: keys and values, layers, heads, head dimension, fp64
    model = fake(models["sdar"], int(9 * 512 * each / CACHE_SHARE) + 100, monkeypatch)
    check_room(model, 8, 512)
    with pytest.raises(
        rcd.RCDError, match=r"16 rows of 512 positions .* 8 rows of that length or 16 rows of 256 would"
    ):
        check_room(model, 16, 512)
    model = fake(models["sdar"], 1000, monkeypatch)
    with pytest.raises(rcd.RCDError, match="no cache fits"):
        check_room(model, 16, 512)


def test_a_cache_that_cannot_be_made_is_one_sentence(
    models: dict[str, rcd.Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("rcd.decode.slots.Cache", full)
    with pytest.raises(rcd.RCDError, match="fewer or shorter rows"):
        engine(models["sdar"], config())


def test_a_gpu_without_triton_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real = kernels.import_module

    def without(name: str) -> Any:
        if name.endswith("fused"):
            raise ImportError("No module named 'triton'")
        return real(name)

    monkeypatch.setattr(kernels, "import_module", without)
    monkeypatch.delenv("RCD_KERNELS", raising=False)
    kernels._say.cache_clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        parts = [kernels.parts_for(torch.device("cuda"), torch.bfloat16) for _ in range(3)]
    assert [str(one.message).split(" (")[0] for one in told] == ["rcd: no Triton on this machine"]
    assert all(part.__name__ == "rcd.kernels.plain" for part in parts)


def test_fp64_runs_through_the_plain_parts_on_a_gpu_too() -> None:
    """The kernels add up in fp32, and would not compile for it."""
    assert kernels.parts_for(torch.device("cuda"), torch.float64).__name__ == "rcd.kernels.plain"
    assert kernels.parts_for(torch.device("cuda"), torch.float64, apart=True) is plain.APART
