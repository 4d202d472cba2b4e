"""What sub-blocks, a block's cache and a first token alone do, where it can be said in a sentence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import rcd
from rcd.decode.config import DecodeConfig
from rcd.decode.events import Step
from tests.conftest import exact
from tests.equivalence.setups import CARRIES, PROMPTS, config, looped, same

SHIFTED = ("sdar", "fast_dllm_qwen")
"""Outputs that predict their own positions, and the next ones."""


@pytest.fixture(scope="module")
def loops() -> dict[str, rcd.Pipeline]:
    return {family: looped(family) for family in SHIFTED}


def steps(pipeline: rcd.Pipeline, chosen: DecodeConfig, prompt: list[int]) -> list[Step]:
    return [event for event in pipeline.stream(prompt, chosen) if isinstance(event, Step)]


@pytest.mark.parametrize("family", SHIFTED)
@pytest.mark.parametrize("carry", CARRIES)
@pytest.mark.parametrize("window", ["blockwise", "sub_blocks"])
def test_a_sub_block_as_long_as_the_block_is_the_block(
    loops: dict[str, rcd.Pipeline], family: str, carry: str, window: str
) -> None:
    plain = config(carry=CARRIES[carry])
    parts = replace(plain, window=window, sub_block_length=8)
    same(loops[family].generate(PROMPTS, parts), loops[family].generate(PROMPTS, plain))


@pytest.mark.parametrize("family", SHIFTED)
@pytest.mark.parametrize("window", ["blockwise", "d2f"])
def test_sub_blocks_of_one_position_are_decoded_in_sequence(
    loops: dict[str, rcd.Pipeline], family: str, window: str
) -> None:
    plain = config(carry="residual", window=window, decoded_token_threshold=0.0, threshold=0.0)
    sequence = loops[family].generate(PROMPTS, replace(plain, commit="sequential"))
    same(loops[family].generate(PROMPTS, replace(plain, sub_block_length=1)), sequence)


@pytest.mark.parametrize("family", SHIFTED)
@pytest.mark.parametrize("window", ["blockwise", "sub_blocks"])
def test_sub_blocks_are_finished_from_left_to_right(loops: dict[str, rcd.Pipeline], family: str, window: str) -> None:
    chosen = config(carry="residual", window=window, sub_block_length=2, threshold=0.1, eos_early_stop=False)
    for prompt in PROMPTS:
        for step in steps(loops[family], chosen, prompt):
            open_ = (step.masked | step.committed).nonzero().flatten()
            number = (step.committed.nonzero().flatten() + step.offset + len(prompt)) // 2
            assert set(number.tolist()) == {(int(open_[0]) + step.offset + len(prompt)) // 2}


@pytest.mark.parametrize("family", SHIFTED)
def test_of_a_model_of_one_layer_the_rest_of_a_block_does_not_grow_old(family: str) -> None:
    """There a token's keys and values depend on it alone, and what a step changes is in the part that it computes."""
    plain = config(carry="none", sub_block_length=4, threshold=0.9)
    for layers in (1, 3):
        pipeline = exact(family, layers=layers)
        cached, one = (
            pipeline.generate(PROMPTS, replace(plain, window=window)) for window in ("sub_blocks", "blockwise")
        )
        assert (cached.sequences == one.sequences) == (layers == 1)


@pytest.mark.parametrize(
    ("family", "window"),
    [("sdar", "blockwise"), ("fast_dllm_qwen", "blockwise"), ("fast_dllm_qwen", "sub_blocks"), ("dream", "dual"),
     ("dream", "bidirectional"), ("dream", "d2f")],
)  # fmt: skip
def test_a_first_token_alone_is_committed_by_the_step_that_enters_its_block(family: str, window: str) -> None:
    """Whatever its confidence; the others then commit all at once, since the threshold is 0."""
    chosen = config(
        carry="residual", window=window, first_token_alone=True, threshold=0.0, eos_early_stop=False, max_new_tokens=24,
        blocks_in_flight=1,
    )  # fmt: skip
    told = [step.committed.nonzero().flatten() + step.offset for step in steps(exact(family), chosen, PROMPTS[2])]
    assert [committed.tolist() for committed in told] == [
        places for block in range(3) for places in ([8 * block], list(range(8 * block + 1, 8 * block + 8)))
    ]


def test_a_prompt_that_ends_in_a_block_has_said_its_first_token(loops: dict[str, rcd.Pipeline]) -> None:
    chosen = config(carry="none", first_token_alone=True, threshold=0.0, max_new_tokens=5, eos_early_stop=False)
    assert len(steps(loops["sdar"], chosen, PROMPTS[0])) == 1  # 11 tokens, blocks of 8


def test_sub_blocks_are_eight_long_where_nothing_is_said(loops: dict[str, rcd.Pipeline]) -> None:
    def length(**settings: Any) -> int | None:
        return loops["fast_dllm_qwen"].resolve(DecodeConfig(**settings)).sub_block_length

    assert (length(window="sub_blocks", block_length=32), length(window="sub_blocks", block_length=4)) == (8, 4)
    assert (length(), length(sub_block_length=2)) == (None, 2)


@pytest.mark.parametrize(
    ("family", "settings", "match"),
    [
        ("sdar", {"sub_block_length": 3}, "a sub_block_length of 3 does not divide the block_length of 8"),
        ("sdar", {"window": "sub_blocks", "block_length": 20}, "sub_block_length of 8 does not divide .* of 20"),
        ("dream", {"sub_block_length": 4, "block_length": 8}, "a setting of block-causal windows.*'bidirectional'"),
        ("dream", {"window": "sub_blocks"}, "the window 'sub_blocks' does not fit"),
        ("sdar", {"window": "sub_blocks", "commit": "joint_threshold"}, "replaces tokens of the whole block"),
        ("sdar", {"sub_block_length": 0}, "sub_block_length must be a whole number of 1 or more"),
        ("sdar", {"sub_block_length": "two"}, "sub_block_length must be a whole number"),
        ("sdar", {"sub_block_length": 2**40}, "sub_block_length is .* is the most"),
        ("sdar", {"first_token_alone": "perhaps"}, "first_token_alone must be"),
    ],
)
def test_parts_that_cannot_be(family: str, settings: dict[str, Any], match: str) -> None:
    with pytest.raises(rcd.RCDError, match=match):
        exact(family).resolve(DecodeConfig(**settings))
