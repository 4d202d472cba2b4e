"""Our numbers against the families' own public code (fixtures/parity/NOTES.md says how the fixtures were made)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rcd
from rcd.decode.events import Finished, Step
from rcd.diffusion.attention import block_causal
from rcd.models.lm import View

FIXTURES = Path(__file__).parent.parent / "fixtures" / "parity"


def cases(family: str, file: str = "decode.json") -> list[Any]:
    content = json.loads((FIXTURES / family / file).read_text())
    return [pytest.param(case, id=case["name"]) for case in content]


@pytest.fixture(scope="module")
def originals() -> dict[str, rcd.Pipeline]:
    return {family: rcd.load(FIXTURES / family / "model", device="cpu") for family in ("sdar", "llada", "dream")}


def logits(pipeline: rcd.Pipeline, ids: torch.Tensor, attention: torch.Tensor | None) -> torch.Tensor:
    position = torch.arange(ids.shape[1]).expand_as(ids)
    with torch.inference_mode():
        return pipeline.model(ids, View(position, attention)).logits


@pytest.mark.parametrize(("key", "block"), [("logits", 4), ("logits_block8", 8)])
def test_sdar_logits_equal_the_original(originals: dict[str, rcd.Pipeline], key: str, block: int) -> None:
    fixture = load_file(FIXTURES / "sdar" / "logits.safetensors")
    position = torch.arange(fixture["input_ids"].shape[1])[None]
    ours = logits(originals["sdar"], fixture["input_ids"], block_causal(position, position, block))
    torch.testing.assert_close(ours, fixture[key], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("family", "key"), [("llada", "logits"), ("dream", "shifted_logits")])
def test_bidirectional_logits_equal_the_original(originals: dict[str, rcd.Pipeline], family: str, key: str) -> None:
    fixture = load_file(FIXTURES / family / "logits.safetensors")
    ours = logits(originals[family], fixture["input_ids"], None)
    torch.testing.assert_close(ours, fixture[key], atol=1e-4, rtol=0)


def answer(pipeline: rcd.Pipeline, prompt: list[int], config: rcd.DecodeConfig) -> tuple[Finished, list[int]]:
    """The finished row and how many tokens each step committed."""
    events = list(pipeline.stream(prompt, config))
    steps = [int(event.committed.sum()) for event in events if isinstance(event, Step)]
    done = events[-1]
    assert isinstance(done, Finished)
    return done, steps


def until_end(ids: list[int], stops: list[int]) -> list[int]:
    return next((ids[: k + 1] for k, token in enumerate(ids) if token in stops), ids)


@pytest.mark.parametrize("case", cases("sdar"))
def test_sdar_decoding_equals_its_evaluator(case: dict[str, Any]) -> None:
    """static, dynamic and sequential; our `threshold` with a number of steps is SDAR's dynamic rule."""
    stops = case["stop_ids"]
    pipeline = rcd.load(FIXTURES / "sdar" / "model", device="cpu", eos_token_ids=stops)
    rule = {"low_confidence_static": "topm", "low_confidence_dynamic": "threshold", "sequential": "sequential"}
    config = rcd.DecodeConfig(
        max_new_tokens=case["gen_length"],
        block_length=case["block_length"],
        num_inference_steps=case["denoising_steps"],
        commit=rule[case["strategy"]],
        threshold=min(case["threshold"], 1.0),
        temperature=case["temperature"],
        top_k=case["top_k"],
        eos_early_stop=False,
    )
    done, steps = answer(pipeline, case["prompt_ids"], config)
    assert done.ids == until_end(case["output_ids"][: case["gen_length"]], stops)
    assert steps == case["committed_per_step"]
    assert done.counts.denoising == case["denoise_forwards"]
    assert done.counts.forwards == case["total_forwards"] - 1  # it stores the last block too; nobody reads that


@pytest.mark.parametrize("case", [c for c in cases("llada") if "both_inf" not in c.id])
def test_llada_decoding_equals_its_generate(case: dict[str, Any]) -> None:
    suppression, ends = "none", [88]
    if case["logits_eos_inf"]:
        suppression = "logits"
    elif case["confidence_eos_eot_inf"]:
        suppression, ends = "confidence", [88, 87]
    pipeline = rcd.load(FIXTURES / "llada" / "model", device="cpu", eos_token_ids=ends)
    blocks = case["gen_length"] // case["block_length"]
    config = rcd.DecodeConfig(
        max_new_tokens=case["gen_length"],
        block_length=case["block_length"],
        num_inference_steps=case["steps"] // blocks,
        commit="topm",
        eos_early_stop=False,
        eos_suppression=suppression,
    )
    single = isinstance(case["prompt_ids"][0], int)
    prompts = [case["prompt_ids"]] if single else case["prompt_ids"]
    expected = [case["output_ids"]] if single else case["output_ids"]
    got = pipeline.generate(prompts, config)
    assert got.sequences == [until_end(ids, ends) for ids in expected]
    if not case["name"].startswith("steps_gt_block"):  # its steps without a share are forwards that commit nothing
        assert all(result.denoising_steps == case["forwards"] for result in got.results)
