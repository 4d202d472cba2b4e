"""The engine's other windows emit the plain ones' tokens: blocks in flight (`d2f`), and cached canvases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import rcd
from rcd.decode.events import Failed, Finished
from rcd.engine.engine import Engine, Request
from rcd.models.toy import toy
from tests.conftest import exact
from tests.equivalence.test_engine import CARRIES, PROMPTS, RULES, agree, asked, config, engine

STRICT: dict[str, Any] = {"window": "d2f", "block_add_threshold": 1.0, "decoded_token_threshold": 1.0}
LOOSE: dict[str, Any] = {
    "window": "d2f", "block_add_threshold": 0.3, "decoded_token_threshold": 0.6, "block_length": 4, "threshold": 0.4,
}  # fmt: skip
FLYING = ("sdar", "llada")
CANVAS = ("llada", "dream")
TWO = ("none", "residual")


# -- d2f -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FLYING)
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("carry", CARRIES)
def test_blocks_in_flight(models: dict[str, rcd.Pipeline], family: str, carry: str, early: bool) -> None:
    agree(models[family], config(carry=CARRIES[carry], eos_early_stop=early, **LOOSE), rows=(1, 3))


@pytest.mark.parametrize("family", FLYING)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("carry", TWO)
def test_blocks_in_flight_under_every_commit_rule(
    models: dict[str, rcd.Pipeline], family: str, carry: str, rule: str
) -> None:
    agree(models[family], config(carry=carry, **{**LOOSE, **RULES[rule]}), rows=(2, 4))


@pytest.mark.parametrize("family", FLYING)
@pytest.mark.parametrize("block", [1, 3, 8, 16])
@pytest.mark.parametrize("most", [1, 2, 4])
def test_so_many_blocks_of_any_length(models: dict[str, rcd.Pipeline], family: str, block: int, most: int) -> None:
    agree(models[family], config(carry="residual", **{**LOOSE, "block_length": block, "blocks_in_flight": most}), (2,))


@pytest.mark.parametrize("family", FLYING)
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_where_end_tokens_come_in_flight(family: str, seed: int, early: bool) -> None:
    pipeline = exact(family, seed)
    pipeline.model.settings = replace(pipeline.settings, eos_token_ids=tuple(range(0, 128, 16)))
    agree(pipeline, config(carry="residual", eos_early_stop=early, **LOOSE), rows=(3,))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("carry", TWO)
def test_d2f_at_its_strictest_emits_the_tokens_of_blockwise(
    models: dict[str, rcd.Pipeline], carry: str, rule: str
) -> None:
    plain = config(carry=carry, **RULES[rule])
    one, piped = (engine(models["sdar"], chosen, 3).generate(asked()) for chosen in (plain, replace(plain, **STRICT)))
    assert [each.ids for each in piped] == [each.ids for each in one]
    assert [each.counts.denoising for each in piped] == [each.counts.denoising for each in one]


@pytest.mark.parametrize("family", FLYING)
@pytest.mark.parametrize("size", [(4, 4), (4, 6), (16, 16), (16, 32)])
def test_in_slots_of_any_number(models: dict[str, rcd.Pipeline], family: str, size: tuple[int, int]) -> None:
    """Rows wait where their blocks find no slots, and store alone where the finished ones find none; tokens and steps
    stay the same."""
    chosen = config(carry="residual", **LOOSE)
    want = models[family].generate(PROMPTS, chosen).results
    served = engine(models[family], chosen, rows=4)
    served._size = lambda rows: size  # type: ignore[method-assign]
    got = served.generate(asked())
    assert [one.ids for one in got] == [one.ids for one in want]
    assert [one.counts.denoising for one in got] == [one.counts.denoising for one in want]
    assert all(one.counts.store == 0 for one in got) == (size == (16, 32))


@pytest.mark.parametrize("family", FLYING)
def test_no_row_waits_for_a_slot_of_its_blocks(models: dict[str, rcd.Pipeline], family: str) -> None:
    """The host foresees how many blocks may be in flight: one row takes one step a pass, but for those that store."""
    served = engine(models[family], config(carry="residual", **LOOSE), rows=1)
    got = served.generate(asked())
    assert served.stats.passes == served.stats.idle + sum(one.counts.denoising + one.counts.store for one in got)


def test_blocks_in_flight_save_steps(models: dict[str, rcd.Pipeline]) -> None:
    """The checks above are about several blocks."""
    steps = [
        sum(one.counts.denoising for one in engine(models["sdar"], chosen).generate(asked()))
        for chosen in (config(carry="residual", **LOOSE), config(carry="residual", block_length=4, threshold=0.4))
    ]
    assert steps[0] < steps[1]


# -- cached canvases -------------------------------------------------------------------------------------------------


def canvas(window: str, **settings: Any) -> Any:
    return config(window=window, **settings)


@pytest.mark.parametrize("family", CANVAS)
@pytest.mark.parametrize(("early", "scope"), [(True, "block"), (True, "canvas"), (False, "canvas")])
@pytest.mark.parametrize("window", ["prefix", "dual"])
@pytest.mark.parametrize("carry", CARRIES)
def test_a_cached_canvas(
    models: dict[str, rcd.Pipeline], family: str, window: str, carry: str, early: bool, scope: str
) -> None:
    agree(models[family], canvas(window, carry=CARRIES[carry], eos_early_stop=early, carry_scope=scope), rows=(3,))


@pytest.mark.parametrize("family", CANVAS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("window", ["prefix", "dual"])
@pytest.mark.parametrize("carry", TWO)
def test_a_cached_canvas_under_every_commit_rule(
    models: dict[str, rcd.Pipeline], family: str, window: str, carry: str, rule: str
) -> None:
    agree(models[family], canvas(window, carry=carry, **RULES[rule]), rows=(2,))


@pytest.mark.parametrize("family", CANVAS)
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("scope", ["block", "canvas"])
@pytest.mark.parametrize("window", ["prefix", "dual"])
@pytest.mark.parametrize("carry", [*TWO, "loopholing"])
def test_with_refreshes(
    models: dict[str, rcd.Pipeline], family: str, window: str, carry: str, scope: str, every: int
) -> None:
    chosen = canvas(window, carry=CARRIES[carry], carry_scope=scope, refresh_every=every, threshold=0.8)
    agree(models[family], chosen, rows=(3,))


@pytest.mark.parametrize(
    ("scope", "block"), [("block", 1), *((scope, block) for scope in ("block", "canvas") for block in (3, 16, 64))]
)
@pytest.mark.parametrize("window", ["prefix", "dual"])
@pytest.mark.parametrize("family", CANVAS)
def test_a_canvas_of_blocks_of_any_length(
    models: dict[str, rcd.Pipeline], family: str, window: str, block: int, scope: str
) -> None:
    agree(models[family], canvas(window, carry="residual", block_length=block, carry_scope=scope), rows=(2,))


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("more", [{}, {"carry_scope": "block"}, {"refresh_every": 2, "carry_scope": "block"}])
@pytest.mark.parametrize("window", ["prefix", "dual"])
@pytest.mark.parametrize("seed", range(4))
def test_where_several_end_tokens_close_a_canvas(seed: int, window: str, more: dict[str, Any], early: bool) -> None:
    """What stands behind an end token is closed with the predicted one, and read again."""
    pipeline = exact("llada", seed)
    pipeline.model.settings = replace(pipeline.settings, eos_token_ids=tuple(range(0, 128, 9)))
    chosen = canvas(window, carry="residual", eos_early_stop=early, commit="topm", **more)
    agree(pipeline, chosen, rows=(3,))


# -- all of them -----------------------------------------------------------------------------------------------------

KINDS: dict[str, tuple[str, Any]] = {
    "blockwise": ("sdar", config(carry="residual")),
    "d2f": ("sdar", config(carry="residual", **LOOSE)),
    "d2f behind": ("llada", config(carry="residual", **LOOSE)),
    "prefix": ("llada", canvas("prefix", carry="residual")),
    "dual": ("llada", canvas("dual", carry="residual", refresh_every=3)),
    "dream prefix": ("dream", canvas("prefix", carry="residual")),
    "dream dual": ("dream", canvas("dual", carry="residual")),
    "dual block": ("llada", canvas("dual", carry="residual", carry_scope="block")),
}


@pytest.mark.parametrize("kind", ["blockwise", "d2f behind", "prefix", "dual", "dream dual"])
def test_a_steps_bookkeeping_asks_nothing_of_the_host(models: dict[str, rcd.Pipeline], kind: str) -> None:
    """It is traced as one graph, in which no value is known; and emits the same tokens."""
    family, chosen = KINDS[kind]
    served = engine(models[family], chosen)
    served.steps.compile(backend="eager")
    assert [one.ids for one in served.generate(asked())] == models[family].generate(PROMPTS, chosen).sequences


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_its_rows(models: dict[str, rcd.Pipeline], kind: str) -> None:
    family, chosen = KINDS[kind]
    together = engine(models[family], chosen, rows=4).generate(asked())
    for request, one in zip(asked(), together, strict=True):
        (alone,) = engine(models[family], chosen, rows=1).generate([request])
        assert (one.ids, one.counts.denoising) == (alone.ids, alone.counts.denoising)


@pytest.mark.parametrize("kind", KINDS)
def test_step_events_replay_to_the_text(models: dict[str, rcd.Pipeline], kind: str) -> None:
    family, chosen = KINDS[kind]
    text: dict[int, dict[int, int]] = {row: {} for row in range(len(PROMPTS))}
    steps = dict.fromkeys(text, 0)
    for event in engine(models[family], chosen, rows=3, watch=True).run(asked()):
        assert not isinstance(event, Failed)
        if isinstance(event, Finished):
            assert event.ids == [text[event.row][place] for place in range(len(event.ids))]
            assert steps[event.row] == event.counts.denoising
            continue
        assert not (event.committed & event.masked).any() and event.committed.any(-1).all()
        assert event.confidence[event.committed].isfinite().all()
        for k, row in enumerate(event.rows):
            steps[row] += 1
            for place in event.committed[k].nonzero().flatten().tolist():
                assert event.offsets[k] + place not in text[row]
                text[row][event.offsets[k] + place] = int(event.draft[k, place])


@pytest.mark.parametrize("kind", KINDS)
def test_requests_of_other_lengths_share_an_engine(models: dict[str, rcd.Pipeline], kind: str) -> None:
    family, chosen = KINDS[kind]
    lengths = [19, 5, 12, 1]
    requests = [Request(k, prompt, new) for k, (prompt, new) in enumerate(zip(PROMPTS, lengths, strict=True))]
    got = engine(models[family], chosen, rows=3).generate(requests)
    for prompt, new, one in zip(PROMPTS, lengths, got, strict=True):
        want = models[family].generate(prompt, replace(chosen, max_new_tokens=new))
        assert one.ids == want.sequences[0]


def test_a_request_beyond_the_context_or_the_canvas_is_refused(models: dict[str, rcd.Pipeline]) -> None:
    context = models["llada"].settings.context_length
    for kind, prompt, new, words in (
        (
            "d2f behind",
            context - 19,
            19,
            f"19 new ones in whole blocks of 4 needs {context + 1} positions",
        ),
        ("prefix", 4, 20, "more than the canvas has"),
    ):
        served = engine(models["llada"], KINDS[kind][1], capacity=context)
        failed = served.admit(Request(0, [7] * prompt, new))
        assert failed is not None and words in failed.message


@pytest.mark.parametrize(("family", "window"), [("sdar", "blockwise"), ("llada", "dual")])
def test_an_engine_of_fused_kernels_emits_the_same_tokens(
    family: str, window: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter, so few tokens."""
    pytest.importorskip("triton")
    pipeline, texts = rcd.Pipeline(toy(family, seed=3, spread=6.0)), []
    chosen = pipeline.resolve(config(max_new_tokens=4, block_length=4, window=window, carry="residual"))
    for kernels in ("plain", "fused"):
        monkeypatch.setenv("RCD_KERNELS", kernels)
        served = Engine(pipeline.model, chosen, rows=2, capacity=16)
        texts.append([one.ids for one in served.generate([Request(0, [5, 6, 7], 4), Request(1, [9, 8, 7, 6, 5], 4)])])
    assert texts[0] == texts[1]
