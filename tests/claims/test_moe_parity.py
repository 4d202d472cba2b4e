"""LLaDA2 and SDAR-MoE against their own public code (fixtures/parity/NOTES.md says how the fixtures were made)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rcd
from rcd.diffusion.attention import block_causal
from tests.claims.test_parity import FIXTURES, answer, cases, logits, until_end

FAMILIES = ("llada2_moe", "sdar_moe")
EOT, EOS = 94, 95


@pytest.fixture(scope="module")
def originals() -> dict[str, rcd.Pipeline]:
    ends = {"llada2_moe": [EOS], "sdar_moe": [EOT, EOS]}
    return {
        f: rcd.load(FIXTURES / f / "model", device="cpu", eos_token_ids=ends[f], mask_token_id=93) for f in FAMILIES
    }


@pytest.mark.parametrize(("key", "block"), [("logits", 4), ("logits_block8", 8)])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_original(originals: dict[str, rcd.Pipeline], family: str, key: str, block: int) -> None:
    fixture = load_file(FIXTURES / family / "logits.safetensors")
    position = torch.arange(fixture["input_ids"].shape[1])[None].expand_as(fixture["input_ids"])
    ours = logits(originals[family], fixture["input_ids"], block_causal(position, position, block))
    torch.testing.assert_close(ours, fixture[key], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "case"),
    [pytest.param(f, case.values[0], id=f"{f}-{case.id}") for f in FAMILIES for case in cases(f)],
)
def test_decoding_equals_the_originals_generate(
    originals: dict[str, rcd.Pipeline], family: str, case: dict[str, Any]
) -> None:
    """LLaDA2's own `generate`, and SDAR's evaluator: both commit what is surer than a threshold, or a step's share."""
    ends = list(originals[family].settings.eos_token_ids)
    most = case["gen_length"] if family == "llada2_moe" else case["steps"]  # its generate takes no more steps than that
    config = rcd.DecodeConfig(
        max_new_tokens=case["gen_length"],
        block_length=case["block_length"],
        num_inference_steps=min(case["steps"], most),
        commit="threshold",
        threshold=case["threshold"],
        eos_early_stop=False,
    )
    done, steps = answer(originals[family], case["prompt_ids"], config)
    assert done.ids == until_end(case["output_ids"][: case["gen_length"]], ends)
    if not case["eos_early_stop"]:  # which ends within a block, where we finish it
        assert steps == case["committed_per_step"]


@pytest.mark.parametrize("case", cases("llada2_moe", "edit.json"))
def test_editing_equals_llada21s_generate(originals: dict[str, rcd.Pipeline], case: dict[str, Any]) -> None:
    """Where the whole last block is decoded, as there, its tokens behind the answer's end are replaced as well: they
    are seen by the others."""
    config = rcd.DecodeConfig(
        max_new_tokens=case["gen_length"],
        block_length=case["block_length"],
        commit="joint_threshold",
        threshold=case["threshold"],
        edit_threshold=case["editing_threshold"],
        max_post_steps=case["max_post_steps"],
        eos_early_stop=False,
    )
    done, _ = answer(originals["llada2_moe"], case["prompt_ids"], config)
    assert done.ids == until_end(case["output_ids"][: case["gen_length"]], [EOS])
