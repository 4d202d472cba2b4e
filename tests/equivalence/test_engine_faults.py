"""What the engine refuses, and what it does when a request or a step goes wrong."""

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
from rcd.decode.config import DecodeConfig
from rcd.decode.events import Finished, Step
from rcd.engine.backbone import CACHE_SHARE, check_room
from rcd.engine.engine import Engine, Request
from rcd.models.toy import toy
from tests.conftest import exact
from tests.equivalence.test_engine import NEW, PROMPTS, asked, canvas, config, engine, flying, outcomes, suffix

# -- what the engine cannot do ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("llada", {"window": "bidirectional"}, "window"),
        ("dream", {"window": "bidirectional"}, "window"),
        ("sdar", {"carry": Residual(start="self", t_res=0.8)}, "starts or lives"),
        ("sdar", {"carry": Residual(start="dirichlet")}, "starts or lives"),
        ("sdar", {"carry": Residual(start="reference")}, "starts or lives"),
        ("sdar", {"carry": Residual(source="reference")}, "starts or lives"),
    ],
)
def test_what_falls_to_the_plain_windows_is_refused_with_the_reason(
    models: dict[str, rcd.Pipeline], family: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(rcd.RCDError, match=words):
        engine(models[family], config(**settings))


@pytest.mark.parametrize(("rows", "capacity", "words"), [(0, 48, "rows"), (1, 0, "capacity"), (1, 10**6, "capacity")])
def test_sizes_are_checked(models: dict[str, rcd.Pipeline], rows: int, capacity: int, words: str) -> None:
    with pytest.raises(rcd.RCDError, match=words):
        engine(models["sdar"], config(), rows, capacity)


# -- bad requests and faults -----------------------------------------------------------------------------------------


def spoilt(number: int, mask: int) -> Request:
    """A request that cannot be served."""
    prompts: list[list[int]] = [[7] * 60, [], [1, 10**6], [1, mask], [1]]
    return Request(99, prompts[number], 0 if number == 4 else NEW)


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize(
    ("family", "chosen"),
    [
        ("sdar", config(carry="residual")),
        ("llada", flying(carry="residual")),
        ("llada", canvas(carry="residual")),
        ("llada", suffix(carry="residual")),
    ],
)
def test_a_bad_request_fails_alone(
    models: dict[str, rcd.Pipeline], family: str, chosen: DecodeConfig, number: int
) -> None:
    pipeline = models[family]
    want = pipeline.generate(PROMPTS, chosen).sequences
    served, bad = engine(pipeline, chosen), spoilt(number, pipeline.settings.mask_token_id)
    requests = [*asked()[:2], bad, *asked()[2:]]
    answers, failures = outcomes(served, requests)
    assert list(failures) == [99]
    assert answers == dict(enumerate(want))
    with pytest.raises(rcd.RCDError) as caught:
        served.generate(requests)
    assert str(caught.value) == failures[99]


@pytest.mark.parametrize("prompt", [[5, None], [1.5, 2], "text", None, [[1, 2]]], ids=str)
def test_a_prompt_that_is_no_list_of_ids_fails_alone(models: dict[str, rcd.Pipeline], prompt: Any) -> None:
    served = engine(models["sdar"], config())
    answers, failures = outcomes(served, [Request(0, PROMPTS[0], NEW), Request(1, prompt, NEW)])
    assert list(answers) == [0]
    assert "token ids" in failures[1]


def test_a_request_s_number_and_seed_are_whole_numbers_and_its_prompt_any_row_of_ids(
    models: dict[str, rcd.Pipeline],
) -> None:
    served, odd = engine(models["sdar"], config()), Request(1, PROMPTS[0], NEW, seed="x")  # type: ignore[arg-type]
    given = [Request(0, PROMPTS[0], NEW), odd, Request(2, iter(PROMPTS[0]), NEW)]  # type: ignore[arg-type]
    answers, failures = outcomes(served, given)
    assert answers[0] == answers[2]
    assert failures == {1: "request 1: its seed must be a whole number, not 'x'."}
    same = [Request(0, PROMPTS[0], NEW), Request(0, PROMPTS[1], NEW)]
    with pytest.raises(rcd.RCDError, match="two requests have the number 0"):
        served.generate(same)
    assert [type(event).__name__ for event in served.run(same)] == ["Failed", "Finished"]
    with pytest.raises(rcd.RCDError, match="requests are Request"):
        served.generate([PROMPTS[0]])  # type: ignore[list-item]


def test_an_engine_has_one_run_at_a_time(models: dict[str, rcd.Pipeline]) -> None:
    served = engine(models["sdar"], config())
    left = served.run(asked())
    next(left)
    want = models["sdar"].generate(PROMPTS, config()).sequences
    assert [one.ids for one in served.generate(asked())] == want
    with pytest.raises(rcd.RCDError, match="left for another"):
        list(left)
    assert [one.ids for one in served.generate(asked())] == want


def test_an_engine_says_what_it_is_made_of(models: dict[str, rcd.Pipeline]) -> None:
    pipeline = models["sdar"]
    with pytest.raises(rcd.RCDError, match=r"such as pipeline\.model"):
        Engine(pipeline, pipeline.resolve(config()), rows=1, capacity=48)  # type: ignore[arg-type]
    with pytest.raises(rcd.RCDError, match=r"pipeline\.resolve"):
        Engine(pipeline.model, config(window="dual"), rows=1, capacity=48)
    with pytest.raises(rcd.RCDError, match=r"would fit|no cache fits"):
        Engine(pipeline.model, pipeline.resolve(config()), rows=10**9, capacity=48)


def test_prompts_may_come_from_a_generator(models: dict[str, rcd.Pipeline]) -> None:
    pipeline = models["sdar"]
    assert pipeline.encode(prompt for prompt in PROMPTS) == PROMPTS  # type: ignore[arg-type]
    assert pipeline.encode(iter(PROMPTS[0])) == [PROMPTS[0]]  # type: ignore[arg-type]
    for odd in (5, None):
        with pytest.raises(rcd.RCDError, match="prompts are texts"):
            pipeline.generate(odd)  # type: ignore[arg-type]


def test_a_bad_request_costs_no_work(models: dict[str, rcd.Pipeline]) -> None:
    served = engine(models["sdar"], config())
    _, failures = outcomes(served, [Request(0, [7] * 60, NEW)])
    assert "80 positions" in failures[0]
    assert "48 a row" in failures[0]
    assert (served.stats.passes, served.stats.prefills) == (0, 0)


@pytest.mark.parametrize("carry", ["none", "residual", Residual(start="self")], ids=["none", "residual", "started"])
@pytest.mark.parametrize(
    ("family", "window"),
    [("sdar", config), ("sdar", flying), ("llada", flying), ("llada", canvas), ("llada", suffix), ("dream", suffix)],
)
def test_logits_that_are_no_numbers_stop_their_row_alone(family: str, window: Any, carry: Any) -> None:
    pipeline, chosen = exact(family), window(carry=carry)
    want = pipeline.generate(PROMPTS[:3], chosen).sequences
    poison = next(token for token in range(100) if token not in {t for row in [*want, *PROMPTS] for t in row})
    served = engine(pipeline, chosen, rows=3)
    pipeline.model.embed = _poisoned(pipeline.model.embed, poison)  # type: ignore[method-assign]
    requests = [*asked()[:2], Request(7, [3, poison, *[5] * 9], NEW), asked()[2]]
    answers, failures = outcomes(served, requests)
    assert list(failures) == [7]
    assert "NaN or inf at denoising step 1 of request 7" in failures[7]
    assert answers == dict(enumerate(want))
    assert [one.ids for one in served.generate(asked()[:3])] == want  # its row serves again


def _poisoned(embed: Any, poison: int) -> Any:
    def spoil(ids: torch.Tensor) -> torch.Tensor:
        return torch.where((ids == poison).unsqueeze(-1), float("nan"), embed(ids))

    return spoil


def once(work: Any, when: Any = lambda *_: True) -> Any:
    """`work`, but for one call that runs out of memory."""
    left = [1]

    def failing(*given: Any) -> Any:
        if left[0] and when(*given):
            left[0] = 0
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return work(*given)

    return failing


def test_a_prefill_that_runs_out_of_memory_fails_alone(models: dict[str, rcd.Pipeline]) -> None:
    chosen = config(carry="residual")
    want = models["sdar"].generate(PROMPTS, chosen).sequences
    served = engine(models["sdar"], chosen)
    served._prefill = once(served._prefill, lambda prompt, row: len(prompt) == 21)  # type: ignore[method-assign]
    answers, failures = outcomes(served, asked())
    assert list(failures) == [2]
    assert "out of memory" in failures[2]
    assert answers == {row: want[row] for row in (0, 1, 3)}
    assert [one.ids for one in served.generate(asked())] == want


@pytest.mark.parametrize("part", ["step", "settled"])
@pytest.mark.parametrize("at", [1, 2, 6])
@pytest.mark.parametrize(
    ("family", "chosen"),
    [
        ("sdar", config(carry="residual")),
        ("sdar", flying(carry="residual")),
        ("llada", canvas(carry="residual")),
        ("llada", suffix(carry="residual")),
    ],
)
def test_a_step_that_runs_out_of_memory_drops_the_rows_in_flight(
    models: dict[str, rcd.Pipeline], family: str, chosen: DecodeConfig, at: int, part: str
) -> None:
    """Also behind the commit, when the rows are half updated."""
    want = models[family].generate(PROMPTS, chosen).sequences
    served, calls = engine(models[family], chosen), iter(range(1, 10**6))
    setattr(served.steps, part, once(getattr(served.steps, part), lambda *_: next(calls) == at))
    answers, failures = outcomes(served, asked())
    assert 1 <= len(failures) <= 2
    assert all("serve fewer rows" in message for message in failures.values())
    assert answers == {row: want[row] for row in range(4) if row not in failures}
    assert [one.ids for one in served.generate(asked())] == want


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("no graphs here\nat all")]
)
def test_a_capture_that_fails_is_told_once_and_steps_run_without(
    models: dict[str, rcd.Pipeline], monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    chosen = config(carry="residual")
    want = models["sdar"].generate(PROMPTS, chosen).sequences

    def no_graph() -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "CUDAGraph", no_graph)
    served = engine(models["sdar"], chosen)
    served.steps.graphs = True
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        got = [served.generate(asked()) for _ in range(2)]
    assert [[one.ids for one in each] for each in got] == [want, want]
    assert len(told) == 1
    assert "not replayed as CUDA graphs" in str(told[0].message)


def test_a_run_that_is_left_leaves_nothing_behind(models: dict[str, rcd.Pipeline]) -> None:
    chosen = config(carry="residual")
    want = models["sdar"].generate(PROMPTS, chosen).sequences
    served = engine(models["sdar"], chosen)
    events = served.run(asked())
    assert isinstance(next(events), Finished)
    events.close()  # type: ignore[attr-defined]

    def broken() -> Iterator[Request]:
        yield from asked()[:3]
        raise KeyError("a caller's own mistake")

    with pytest.raises(KeyError):
        list(served.run(broken()))
    assert [one.ids for one in served.generate(asked())] == want


def test_a_request_without_a_free_row_is_told(models: dict[str, rcd.Pipeline]) -> None:
    served = engine(models["sdar"], config(), rows=1)
    assert served.admit(asked()[0]) is None
    failed = served.admit(asked()[1])
    assert failed is not None
    assert "all 1 rows are taken" in failed.message


def test_no_requests_are_no_work(models: dict[str, rcd.Pipeline]) -> None:
    served = engine(models["sdar"], config())
    assert served.generate([]) == []
    assert served.stats.passes == 0


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

    monkeypatch.setattr("rcd.engine.backbone.Cache", full)
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
        parts = [kernels.parts_for(torch.device("cuda")) for _ in range(3)]
    assert [str(one.message).split(" (")[0] for one in told] == ["rcd: no Triton on this machine"]
    assert all(part.__name__ == "rcd.kernels.plain" for part in parts)


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("sdar", {}),
        ("sdar", {"window": "d2f"}),
        ("llada", {"window": "d2f"}),
        ("llada", {"window": "dual", "carry_scope": "block"}),
        ("llada", {"window": "prefix"}),
    ],
    ids=["blockwise", "d2f", "d2f behind", "dual", "prefix"],
)
def test_a_pipeline_decodes_the_same_with_the_engine(family: str, more: dict[str, Any]) -> None:
    pipeline = exact(family)

    def config(engine: str) -> rcd.DecodeConfig:
        return rcd.DecodeConfig(
            max_new_tokens=19, block_length=8, threshold=0.55, carry="residual", engine=engine, **more
        )

    plain, fast = (pipeline.generate(PROMPTS, config(name)) for name in ("plain", "fast"))
    assert fast.sequences == plain.sequences
    ways: list[Any] = [{}, {"seeds": [2**63, 5, 5, 0]}, {"generator": torch.Generator().manual_seed(3)}]
    for way in ways:
        texts = []
        for name in ("plain", "fast"):
            if "generator" in way:
                way["generator"].manual_seed(3)
            texts.append(pipeline.generate(PROMPTS, replace(config(name), temperature=1.0, seed=9), **way).sequences)
        assert texts[0] == texts[1]
    assert pipeline.generate(PROMPTS, config("fast")).sequences == plain.sequences
    held = pipeline._engine
    assert held is not None and pipeline.generate(PROMPTS, config("fast")).sequences == plain.sequences
    assert pipeline._engine is held  # what it has captured serves the next call
    steps = [event for event in pipeline.stream(PROMPTS, config("fast")) if isinstance(event, Step)]
    assert steps


def test_what_the_engine_cannot_decode_is_refused_with_the_reason() -> None:
    with pytest.raises(rcd.RCDError, match="the window 'bidirectional' is not"):
        exact("llada").generate([[5, 6]], rcd.DecodeConfig(engine="fast"))
    with pytest.raises(rcd.RCDError, match="unknown engine 'quick'"):
        rcd.DecodeConfig(engine="quick")


def test_an_engine_and_a_tail_are_those_of_the_weights_as_they_are() -> None:
    """A model that is cast or changed after a call is served by a new engine, and its codebook has another mean."""
    pipeline = rcd.Pipeline(toy("sdar", seed=3, spread=6.0))
    chosen = config(engine="fast", carry="residual", delta="kept", delta_tokens=4, delta_rank=2)
    pipeline.generate(PROMPTS[:1], chosen)
    pipeline.model.double()
    assert pipeline.generate(PROMPTS[:1], chosen).sequences[0]
    with torch.no_grad():
        pipeline.model.codebook.add_(1.0)
    mean = pipeline.model.codebook.mean(0)
    torch.testing.assert_close(pipeline.model.tail(2).mean, mean.detach(), atol=1e-6, rtol=0)
    assert (
        pipeline.generate(PROMPTS[:1], chosen).sequences
        == pipeline.generate(PROMPTS[:1], replace(chosen, engine="plain")).sequences
    )
