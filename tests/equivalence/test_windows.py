"""The windows that compute less: each equals a plainer one at a degenerate setting, token for token, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import rcd
from rcd.carry.residual import Residual
from rcd.decode.config import DecodeConfig, fitting
from rcd.models.toy import toy
from tests.conftest import FAMILIES, exact
from tests.equivalence.setups import CARRIES, FLYING, PROMPTS, STRICT, WINDOWS, config, looped, same

RULES: dict[str, dict[str, Any]] = {
    "threshold": {},
    "topm": {"commit": "topm"},
    "factor": {"commit": "factor"},
    "sequential": {"commit": "sequential", "num_inference_steps": 3},
    "drawn": {"temperature": 0.8},
    "filler": {"eos_early_stop": False},
}
# every carry with the paper's rule, one that enters at masks and one that enters everywhere with others
CASES = [(carry, "threshold") for carry in CARRIES]
CASES += [("rcd", rule) for rule in list(RULES)[1:]] + [("loopholing", "drawn"), ("loopholing", "filler")]
CANVAS = ("llada", "dream")


@pytest.fixture(scope="module")
def loops() -> dict[str, rcd.Pipeline]:
    return {family: looped(family) for family in FAMILIES}


@pytest.fixture(scope="module")
def shallow() -> dict[str, rcd.Pipeline]:
    """Models of one layer: a token's keys and values depend on that token alone, so that kept ones are never old."""
    return {family: looped(family, layers=1) for family in CANVAS}


# -- prefix and dual -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", CANVAS)
@pytest.mark.parametrize(("carry", "rule"), CASES)
def test_with_a_refresh_at_every_step_a_cached_canvas_is_the_whole_one(
    loops: dict[str, rcd.Pipeline], family: str, carry: str, rule: str
) -> None:
    for scope in ("canvas", "block"):
        plain = config(carry=CARRIES[carry], carry_scope=scope, **RULES[rule])
        want = loops[family].generate(PROMPTS, plain)
        for window in ("prefix", "dual"):
            same(loops[family].generate(PROMPTS, replace(plain, window=window, refresh_every=1)), want)


@pytest.mark.parametrize("family", CANVAS)
@pytest.mark.parametrize(("carry", "rule"), CASES)
def test_where_nothing_kept_can_be_old_a_cached_canvas_is_the_whole_one(
    shallow: dict[str, rcd.Pipeline], family: str, carry: str, rule: str
) -> None:
    """One layer, a carry in the current block alone, and no end token, behind which later blocks would be closed: the
    cached steps themselves are exact."""
    plain = config(carry=CARRIES[carry], carry_scope="block", eos_suppression="logits", **RULES[rule])
    want = shallow[family].generate(PROMPTS, plain)
    for window in ("prefix", "dual"):
        same(shallow[family].generate(PROMPTS, replace(plain, window=window)), want)


@pytest.mark.parametrize("family", CANVAS)
@pytest.mark.parametrize("carry", [name for name in CARRIES if name != "loopholing"])
def test_the_prefix_window_carries_behind_the_block_too(
    shallow: dict[str, rcd.Pipeline], family: str, carry: str
) -> None:
    """With one layer it is exact on the whole canvas, where later blocks have a residual (`dual` has an older one).
    Loopholing enters at decided tokens as well, which stay as they were when the canvas was last read."""
    plain = config(carry=CARRIES[carry], block_length=4)
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


# -- d2f -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["sdar", "fast_dllm_qwen"])
@pytest.mark.parametrize(("carry", "rule"), CASES)
def test_d2f_at_its_strictest_emits_the_tokens_of_blockwise(
    loops: dict[str, rcd.Pipeline], carry: str, rule: str, family: str
) -> None:
    plain = config(carry=CARRIES[carry], **RULES[rule])
    one = loops[family].generate(PROMPTS, plain)
    piped = loops[family].generate(PROMPTS, replace(plain, **STRICT))
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


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("carry", CARRIES)
def test_a_canvas_in_flight_is_a_block_causal_model_behind_its_prompt(
    loops: dict[str, rcd.Pipeline], carry: str, family: str
) -> None:
    """A prompt of exactly one block makes both grids the same: the same weights, decoded as SDAR's are."""
    causal = looped(family)
    causal.model.settings = replace(causal.settings, attention="block_causal", block_length=8)
    prompts = [PROMPTS[0][:8], PROMPTS[2]]
    strict = config(carry=CARRIES[carry], **STRICT)
    one = causal.generate(prompts, config(carry=CARRIES[carry], window="blockwise"))
    assert loops[family].generate(prompts, strict).sequences == one.sequences


def test_blocks_in_flight_save_steps(models: dict[str, rcd.Pipeline]) -> None:
    def steps(**settings: Any) -> int:
        output = models["sdar"].generate(PROMPTS, config(carry="residual", commit="topm", **settings))
        return sum(result.denoising_steps for result in output.results)

    assert steps(**FLYING) < steps(block_length=4)


@pytest.mark.parametrize("family", ["sdar", "llada"])
def test_blocks_in_flight_stay_within_the_context(family: str) -> None:
    pipeline = rcd.Pipeline(toy(family, context=64))
    flying = DecodeConfig(window="d2f", eos_suppression="logits", block_length=8, carry="none")
    assert [r.tokens for r in pipeline.generate([[3] * 40, [3] * 5], flying).results] == [24, 24]
    with pytest.raises(rcd.RCDError, match="needs"):
        pipeline.generate([3] * 41, replace(flying, max_new_tokens=24))


# -- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", WINDOWS)
def test_a_reference_in_every_window(models: dict[str, rcd.Pipeline], window: str) -> None:
    """A warm start with the target as reference is the self start, and a reference of every step with alpha 0 is SeqD;
    what a reference that knows something else says is the fuzz's matter."""
    family, settings = WINDOWS[window]
    pipeline, base = models[family], config(**{**settings, "block_length": 4})
    warm, own = (replace(base, carry=Residual(start=start)) for start in ("reference", "self"))
    assert pipeline.generate(PROMPTS, warm, reference=pipeline).sequences == pipeline.generate(PROMPTS, own).sequences
    off = replace(base, carry=Residual(source="reference", alpha_scale=0.0))
    seqd = pipeline.generate(PROMPTS, replace(base, carry="none")).sequences
    assert pipeline.generate(PROMPTS, off, reference=exact(family, 8)).sequences == seqd


def test_windows_that_fit(models: dict[str, rcd.Pipeline]) -> None:
    assert fitting(models["sdar"].settings) == ["blockwise", "d2f", "sub_blocks"]
    assert fitting(models["llada"].settings) == ["bidirectional", "prefix", "dual", "d2f"]
    assert fitting(models["dream"].settings) == ["bidirectional", "prefix", "dual", "d2f"]
    for family, window, match in (
        ("sdar", "dual", r"'dual' does not fit .* block_causal; take 'blockwise' or 'd2f' or 'sub_blocks'\."),
        ("llada", "blockwise", r"bidirectional; take 'bidirectional' or 'prefix' or 'dual' or 'd2f'\."),
        ("dream", "blockwise", r"bidirectional; take 'bidirectional' or 'prefix' or 'dual' or 'd2f'\."),
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
