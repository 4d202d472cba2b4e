"""Training of a block-causal model whose outputs predict the next position (Fast-dLLM v2)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

import rcd
from rcd.carry.residual import Residual
from rcd.train.layout import frame_of
from tests.train.runs import metrics, run, weights
from tests.train.test_objective import B, batch


def test_a_blocks_first_copy_is_predicted_by_the_clean_token_before_the_block() -> None:
    """And a document's first position by its own output, in both layouts, packed or not."""
    for copy in ("full", "answer"):
        given = batch()
        frame = frame_of(given, attention="block_causal", block_length=B, copy=copy)
        length, (layout, text) = given.ids.shape[1], frame.window
        for (row, slot), (_, place) in zip(layout.tolist(), text.tolist(), strict=True):
            position, left = int(given.position[row, place]), int(frame.left[row, slot])
            if position == 0:
                assert left == slot
            elif position % B == 0:
                assert left == place - 1 < length
            else:
                assert left == slot - 1 >= length
                assert int(frame.position[row, left]) == position - 1


def test_of_a_canvas_it_is_the_token_to_the_left() -> None:
    given = batch()
    left = frame_of(given, attention="bidirectional", block_length=B).left
    here = torch.arange(left.shape[1])
    assert torch.equal(left, torch.where(given.position > 0, here - 1, here))


def test_both_stages_lower_the_loss_and_the_target_decodes_with_its_carry(tmp_path: Path) -> None:
    run(tmp_path / "run", "model=toy:fast_dllm_qwen")
    for stage in ("reference", "target"):
        logged = metrics(tmp_path / "run" / stage)
        assert logged[-1]["cross_entropy"] < logged[0]["cross_entropy"]
    target = rcd.load(tmp_path / "run/target/model", device="cpu")
    assert (target.settings.family, target.settings.shift) == ("fast_dllm_qwen", 1)
    assert target.resolve().carry == Residual()
    assert "model.layers.0.self_attn.q_proj.bias" in weights(tmp_path / "run/target")
    for window in ("blockwise", "d2f", "sub_blocks"):
        config = rcd.DecodeConfig(max_new_tokens=8, window=window, threshold=0.3)
        oracle = target.generate("12+3=?", replace(config, oracle=True))
        assert target.generate("12+3=?", config).sequences == oracle.sequences
