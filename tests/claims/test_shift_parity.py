"""Fast-dLLM v2, and D2F and Fast-dLLM v1 on Dream, against their own code: outputs that predict the next position
(fixtures/parity/NOTES.md says how the fixtures were made)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rcd
from rcd.diffusion.attention import block_causal
from tests.claims.test_parity import FIXTURES, logits, until_end

FAST_DLLM, DREAM = FIXTURES / "fast_dllm", FIXTURES / "dream"


@pytest.fixture(scope="module")
def fast_dllm() -> rcd.Pipeline:
    return rcd.load(FAST_DLLM / "model", device="cpu", mask_token_id=93)


def cases(path: Path) -> list[Any]:
    return [pytest.param(case, id=case["name"]) for case in json.loads(path.read_text())]


@pytest.mark.parametrize("block", [8, 32])
def test_fast_dllm_v2_logits_equal_the_original(fast_dllm: rcd.Pipeline, block: int) -> None:
    fixture = load_file(FAST_DLLM / "logits.safetensors")
    position = torch.arange(fixture["input_ids"].shape[1])[None]
    ours = logits(fast_dllm, fixture["input_ids"], block_causal(position, position, block))
    torch.testing.assert_close(ours[:, 1:], fixture[f"logits_block{block}"][:, :-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", cases(FAST_DLLM / "decode.json"))
@pytest.mark.parametrize("oracle", [False, True], ids=["engine", "oracle"])
def test_fast_dllm_v2_decoding_equals_its_generate(fast_dllm: rcd.Pipeline, case: dict[str, Any], oracle: bool) -> None:
    """Sub-blocks with the block cache and without; its blocks are counted from that of the prompt's end."""
    block, prompt = case["block_length"], case["prompt_ids"]
    new = case["blocks"] * block - len(prompt) % block
    config = rcd.DecodeConfig(
        max_new_tokens=new,
        block_length=block,
        window="sub_blocks" if case["use_block_cache"] else "blockwise",
        sub_block_length=case["small_block_size"],
        first_token_alone=True,
        threshold=case["threshold"],
        eos_early_stop=False,
        oracle=oracle,
    )
    assert fast_dllm.generate(prompt, config).sequences[0] == until_end(case["output_ids"][:new], [94])


def test_fast_dllm_v2_is_written_in_its_own_names_byte_for_byte(fast_dllm: rcd.Pipeline, tmp_path: Path) -> None:
    fast_dllm.save(tmp_path / "again")
    was, now = (load_file(folder / "model.safetensors") for folder in (FAST_DLLM / "model", tmp_path / "again"))
    assert was.keys() == now.keys()
    assert all(torch.equal(was[name], now[name]) for name in was)
    config = [json.loads((folder / "config.json").read_text()) for folder in (FAST_DLLM / "model", tmp_path / "again")]
    assert config[0] == config[1]
    assert rcd.load(tmp_path / "again", device="cpu").settings == fast_dllm.settings


def test_the_mask_that_its_config_does_not_name_is_asked_for(tmp_path: Path) -> None:
    """Of a vocabulary that has no 151665."""
    shutil.copytree(FAST_DLLM / "model", tmp_path / "model")
    with pytest.raises(rcd.RCDError, match=r"mask token id 151665 is outside the vocabulary of 96 .*--mask-token-id"):
        rcd.load(tmp_path / "model", device="cpu")


@pytest.mark.parametrize("case", cases(DREAM / "d2f.json"))
@pytest.mark.parametrize("oracle", [False, True], ids=["engine", "oracle"])
def test_dream_in_flight_equals_d2f(case: dict[str, Any], oracle: bool) -> None:
    pipeline = rcd.load(DREAM / "model", device="cpu", eos_token_ids=[90])
    config = rcd.DecodeConfig(
        max_new_tokens=case["gen_length"],
        block_length=case["block_length"],
        window="d2f",
        threshold=case["skip_threshold"],
        block_add_threshold=case["block_add_threshold"],
        decoded_token_threshold=case["decoded_token_threshold"],
        blocks_in_flight=64,
        eos_early_stop=False,
        oracle=oracle,
    )
    done = pipeline.generate(case["prompt_ids"], config).results[0]
    assert done.ids == until_end(case["output_ids"], [90])
    assert done.counts.denoising == case["forwards"]


@pytest.mark.parametrize("case", cases(DREAM / "fast_dllm.json"))
@pytest.mark.parametrize("oracle", [False, True], ids=["engine", "oracle"])
def test_dream_with_a_first_token_alone_equals_fast_dllm_v1(case: dict[str, Any], oracle: bool) -> None:
    """Its two caches, with its threshold (at or above; here above)."""
    pipeline = rcd.load(DREAM / "model", device="cpu", eos_token_ids=[90])
    config = rcd.DecodeConfig(
        max_new_tokens=case["gen_length"],
        block_length=case["block_length"],
        window="dual" if case["dual_cache"] else "prefix",
        first_token_alone=True,
        threshold=case["threshold"],
        eos_early_stop=False,
        oracle=oracle,
    )
    done = pipeline.generate(case["prompt_ids"], config).results[0]
    assert done.ids == case["output_ids"]
    assert done.counts.denoising == case["forwards"]
