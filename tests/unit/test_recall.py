"""Recall@k over denoising steps (fig:recall), and the probe that shows a step's predictions."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch import Tensor

from rcd.api import Pipeline
from rcd.carry.residual import Residual
from rcd.decode.config import DecodeConfig
from rcd.decode.events import Finished, Step
from rcd.decode.probe import Look
from rcd.errors import RCDError
from rcd.evaluate.answering import answers
from rcd.evaluate.recall import lines, recall
from tests.conftest import FAMILIES, exact

PROMPTS = [[5, 9, 2], [7, 1, 1, 4, 8, 30, 2, 11], [3], [40, 41, 42, 43, 44]]
CONFIG = DecodeConfig(max_new_tokens=16, threshold=0.6, carry=Residual())


@pytest.mark.parametrize("family", FAMILIES)
def test_recall_at_the_size_of_the_vocabulary_is_one_at_every_step(models: dict[str, Pipeline], family: str) -> None:
    found = recall(models[family], PROMPTS, CONFIG, (1, 128))
    assert len(found["steps"]) > 1
    assert all(row["recall"]["128"] == 1 == row["recall_all"]["128"] for row in found["steps"])
    assert any(row["recall"]["1"] < 1 for row in found["steps"])


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_the_last_step_of_a_greedy_run_of_one_token_a_step_has_recall_one(
    models: dict[str, Pipeline], family: str
) -> None:
    config = DecodeConfig(max_new_tokens=12, threshold=1.0, carry=Residual())
    for prompt in PROMPTS:
        steps = recall(models[family], [prompt], config, (1,))["steps"]
        tokens = models[family].generate([prompt], config).results[0].tokens
        assert steps[-1]["masks"] == 1 and steps[-1]["recall"]["1"] == 1
        assert steps[0]["masks"] == tokens == steps[0]["masks"] + steps[0]["decided"]


@pytest.mark.parametrize("family", FAMILIES)
def test_recall_at_one_is_the_share_of_drafts_that_stay(models: dict[str, Pipeline], family: str) -> None:
    kept: dict[int, list[Step]] = defaultdict(list)
    hits = masks = 0
    for row, prompt in enumerate(PROMPTS):
        for event in models[family].stream([prompt], CONFIG):
            if isinstance(event, Step):
                kept[row].append(event)
                continue
            assert isinstance(event, Finished)
            for step in kept[row]:
                place = torch.arange(len(step.draft)) + step.offset
                there = ~step.confidence.isnan() & (place >= 0) & (place < len(event.ids))
                hits += int((step.draft[there] == torch.tensor(event.ids)[place[there]]).sum())
                masks += int(there.sum())
    found = recall(models[family], PROMPTS, CONFIG, (1,))
    assert found["masks"] == masks and found["mean"]["1"] == hits / masks


@pytest.mark.parametrize("family", FAMILIES)
def test_a_probe_changes_nothing_and_a_batch_shows_what_its_rows_show(models: dict[str, Pipeline], family: str) -> None:
    model = models[family]
    apart, together = (_shown(model, batch) for batch in (1, 4))
    for row, prompt in enumerate(PROMPTS):
        plain = model.generate([prompt], CONFIG).results[0]
        assert plain.ids == apart[row][1] == together[row][1]
        assert len(apart[row][0]) == len(together[row][0]) == plain.denoising_steps
        for one, other in zip(apart[row][0], together[row][0], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _shown(model: Pipeline, batch: int) -> dict[int, tuple[list[tuple[Tensor, ...]], list[int]]]:
    """Row -> (what each of its steps showed, its tokens)."""
    shown: dict[int, list[tuple[Tensor, ...]]] = defaultdict(list)

    def probe(look: Look) -> None:
        there = look.masked
        shown[look.row].append((look.places, look.logits[there], look.inputs[there], look.hidden[there]))

    found = answers(model, PROMPTS, CONFIG, batch=batch, probe=probe)
    return {each.number: (shown[each.number], each.generation.ids) for each in found}


def test_steps_are_counted_in_the_block(models: dict[str, Pipeline]) -> None:
    config = DecodeConfig(max_new_tokens=24, threshold=1.0, eos_early_stop=False)
    found = recall(models["sdar"], [PROMPTS[1]], config, (1,))
    assert [row["step"] for row in found["steps"]] == list(range(1, 9))  # blocks of 8


def test_a_canvas_of_blocks_is_shown_as_a_whole_without_a_carry_too(models: dict[str, Pipeline]) -> None:
    config = DecodeConfig(max_new_tokens=16, block_length=4, threshold=1.0, carry="none")
    plain = models["llada"].generate(PROMPTS, config).results
    found = recall(models["llada"], PROMPTS, config, (1,))["steps"]
    assert found[0]["masks"] == sum(answer.tokens for answer in plain) and found[0]["texts"] == len(PROMPTS)


@pytest.mark.parametrize("ks", [(), (0,), (129,), (2000,), (1.5,)])
def test_a_bad_k_is_refused(models: dict[str, Pipeline], ks: tuple[int, ...]) -> None:
    with pytest.raises(RCDError, match="k"):
        recall(models["llada"], PROMPTS, CONFIG, ks)


def test_nothing_to_decode_is_refused(models: dict[str, Pipeline]) -> None:
    with pytest.raises(RCDError, match="no problems"):
        recall(models["llada"], [], CONFIG)


def test_the_table_shows_few_steps_and_always_the_last() -> None:
    found = recall(exact("llada"), [PROMPTS[0]], DecodeConfig(max_new_tokens=60, threshold=1.0), (1, 5))
    text = lines(found)
    assert len(text) <= 18 and int(text[-2].split()[0]) == found["steps"][-1]["step"]


def test_recall_of_a_part_of_a_block_is_refused(models: dict[str, Pipeline]) -> None:
    with pytest.raises(RCDError, match="sub_blocks predict a part of a block; take the window blockwise"):
        recall(models["sdar"], [[5, 6, 7]], DecodeConfig(window="sub_blocks", max_new_tokens=8))
