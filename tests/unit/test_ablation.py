"""Ablations as tables of evaluations, the norms of what a step reads, and the calibration of T_res."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rcd
from rcd import registry
from rcd.carry.none import NoCarry
from rcd.carry.residual import Residual
from rcd.cli import ablate as cli
from rcd.data.tasks.base import Problem, problems
from rcd.decode.config import DecodeConfig
from rcd.decode.events import Step
from rcd.errors import RCDError
from rcd.evaluate import calibration
from rcd.evaluate.ablation import TABLES, Row, Table, ablate, lines, norm_lines, norms, reference_rows, table
from rcd.evaluate.evaluation import evaluate
from rcd.evaluate.records import read_records
from rcd.models.toy import toy, toy_tokenizer
from rcd.residual.alpha import normalised_entropy
from tests.conftest import exact

QUESTIONS = ("the cat sees one dog", "two", "a red fox runs over the old hill near the sea")
PROBLEMS = [Problem("words", f"p{k}", question, "Answer: 4", "4") for k, question in enumerate(QUESTIONS)]
CONFIG = DecodeConfig(max_new_tokens=16, threshold=0.6)
TRAINED = Residual(alpha_scale=4, alpha_most=0.5)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, rcd.Pipeline]]:
    """A target and a smaller reference of one vocabulary, saved."""
    folder, out = tmp_path_factory.mktemp("models"), {}
    for name, seed, width in (("target", 3, 64), ("small", 4, 32)):
        made = rcd.Pipeline(toy("sdar", seed=seed, spread=6.0, width=width, tokenizer=toy_tokenizer(128)))
        out[name] = (str(made.save(folder / name)), made)
    return out


def run(models: dict[str, tuple[str, rcd.Pipeline]], which: Table, folder: Path, **changes: Any) -> dict[str, Any]:
    (name, target), small = models["target"], models["small"]
    return ablate(
        which, target, PROBLEMS, CONFIG, folder, model=name, task="words", references={small[0]: small[1]}, **changes
    )


def test_the_command_and_the_library_name_the_same_tables() -> None:
    assert cli.TABLES == TABLES


def test_alpha_has_the_eight_weights_and_keeps_everything_else() -> None:
    base = replace(TRAINED, start="dirichlet", t_res=0.9)
    found = table("alpha", base)
    rows = {row.name: row.carry for row in found.rows}
    assert list(rows) == registry.names("alpha") and found.default == "entropy"
    assert rows.pop("none") == NoCarry()
    for name, carry in rows.items():
        assert isinstance(carry, Residual)
        scaled = name in ("entropy", "top1")
        assert (carry.alpha_scale, carry.alpha_most) == ((4, 0.5) if scaled else (1, 1))
        assert replace(carry, alpha="entropy", alpha_scale=4, alpha_most=0.5) == base
    capped = {row.name: row.carry for row in table("alpha", base, keep_cap=True).rows}
    assert capped["one"] == replace(base, alpha="one", alpha_scale=1.0)


def test_start_has_the_rows_of_its_table_one_for_each_reference() -> None:
    found = table("start", TRAINED, references=["bundled:a-1", "runs/b"], seqd=True)
    assert [row.name for row in found.rows] == ["seqd", "zero", "dirichlet", "self", "reference-a-1", "reference-b"]
    assert [row.reference for row in found.rows[-2:]] == ["bundled:a-1", "runs/b"]
    assert found.default == "zero" and found.rows[2].carry == replace(TRAINED, start="dirichlet")
    assert list(reference_rows(["a/model", "b/model"])) == ["reference-a-model", "reference-b-model"]
    picked = table("start", TRAINED, references=["bundled:a-1"], rows=["reference"])
    assert [row.name for row in picked.rows] == ["zero", "reference-a-1"]


def test_t_res_has_the_grid_and_the_trained_value() -> None:
    found = table("t_res", replace(TRAINED, t_res=0.92), grid=(2, 0.5))
    assert [row.name for row in found.rows] == ["0.5", "0.92", "2"] and found.default == "0.92"


def test_the_row_none_equals_seqd_token_for_token(models: dict[str, tuple[str, rcd.Pipeline]], tmp_path: Path) -> None:
    run(models, table("alpha", TRAINED, rows=["none"]), tmp_path)
    name, target = models["target"]
    for plain in ("none", Residual(alpha="none")):
        folder = tmp_path / f"plain-{type(plain).__name__}"
        evaluate(target, PROBLEMS, replace(CONFIG, carry=plain), folder, model=name, task="words")
        rows = [(r.item, r.output, r.tokens, r.steps) for r in read_records(tmp_path / "alpha" / "none")]
        assert rows == [(r.item, r.output, r.tokens, r.steps) for r in read_records(folder)]


def test_a_failing_row_is_told_and_the_rest_is_kept(
    models: dict[str, tuple[str, rcd.Pipeline]], tmp_path: Path
) -> None:
    (tmp_path / "t_res" / "2").mkdir(parents=True)
    (tmp_path / "t_res" / "2" / "run.json").write_text("{}")
    found = run(models, table("t_res", TRAINED, grid=(0.5, 2)), tmp_path)
    rows = {row["row"]: row for row in found["rows"]}
    assert "other settings" in rows["2"]["error"] and rows["2"]["difference"] is None
    assert rows["1"]["difference"] is None and set(rows["0.5"]["difference"]) >= {"difference", "low", "high"}
    assert json.loads((tmp_path / "t_res" / "table.json").read_text()) == found
    text = lines(found)
    assert "failed" in text[-1] and text[3].startswith("1*")
    broken = Table("t_res", [Row("2", TRAINED)], "2")
    with pytest.raises(RCDError, match="every row of t_res failed"):
        run(models, broken, tmp_path)


def test_a_second_run_answers_nothing_again_and_tables_share_rows(
    models: dict[str, tuple[str, rcd.Pipeline]], tmp_path: Path
) -> None:
    heard: list[str] = []

    def say(row: str) -> Any:
        return lambda *_: heard.append(row)

    done: dict[str, Path] = {}
    first = run(models, table("t_res", TRAINED, grid=(0.5,)), tmp_path, say=say, done=done)
    assert set(heard) == {"0.5", "1"}
    heard.clear()
    assert run(models, table("t_res", TRAINED, grid=(0.5,)), tmp_path, say=say) == first
    other = run(models, table("start", TRAINED, rows=["zero"]), tmp_path, say=say, done=done)
    assert heard == [] and other["rows"][0]["accuracy"] == first["rows"][1]["accuracy"]


def test_passes_of_starts_and_references_are_counted(
    models: dict[str, tuple[str, rcd.Pipeline]], tmp_path: Path
) -> None:
    (_, target), (small, reference) = models["target"], models["small"]
    found = run(models, table("alpha-reference", NoCarry(), references=[small]), tmp_path)
    row = found["rows"][0]
    assert row["carry"]["source"] == "reference" and row["carry"]["alpha_scale"] == 1.0
    config = replace(CONFIG, carry=Residual(source="reference"))
    given = [target.generate([p.question], config, reference=reference).results[0] for p in PROBLEMS]
    per_step = sum(g.tokens for g in given) / sum(g.denoising_steps for g in given)
    assert row["tokens_per_target_step"] == pytest.approx(per_step)
    assert row["tokens_per_step"] == pytest.approx(per_step / 2)
    starts = run(models, table("start", TRAINED, references=[small]), tmp_path)
    assert "tokens/target step" in lines(found)[1] and "target step" not in lines(starts)[1]
    for row in starts["rows"][2:]:
        records = read_records(tmp_path / "start" / row["row"])
        second = reference if "reference" in row["row"] else None
        config = replace(CONFIG, carry=replace(TRAINED, start=row["carry"]["start"]))
        given = [target.generate([p.question], config, reference=second).results[0] for p in PROBLEMS]
        assert sum(r.steps for r in records) > sum(g.denoising_steps for g in given)


@pytest.mark.parametrize(
    ("what", "changes", "words"),
    [
        ("beta", {}, "choose from: alpha"),
        ("start", {"rows": ["reference"]}, "name one or more with --reference"),
        ("start", {"rows": ["hot"]}, "choose from: dirichlet, self, zero"),
        ("alpha-reference", {}, "name it with --reference"),
        ("t_res", {"grid": (-1,)}, "t_res must be"),
    ],
)
def test_a_bad_table_is_refused(what: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RCDError, match=words):
        table(what, TRAINED, **changes)


@pytest.mark.parametrize("family", ["sdar", "llada", "dream"])
def test_norms_are_those_of_the_embeddings_and_hidden_states(family: str) -> None:
    model, prompts = exact(family), [[5, 9, 2], [7, 1, 4]]
    found = norms(model, prompts, DecodeConfig(max_new_tokens=8, threshold=0.6, carry=Residual()))
    mask = float(model.model.codebook[model.settings.mask_token_id].norm())
    first, last = found["steps"][0], found["steps"][-1]
    assert found["mean"]["mask"] == pytest.approx(mask) == first["input"] and first["delta"] is None
    assert 0 < last["delta"] < found["mean"]["token"]  # a mean of embeddings is shorter than they are
    assert last["hidden"] > 0 and last["raw"] > 0 and len(norm_lines(found)) == 7
    assert not model.model.backbone.norm._forward_pre_hooks  # type: ignore[union-attr]
    with torch.no_grad():
        model.model.codebook.mul_(3)
    tripled = norms(model, prompts, DecodeConfig(max_new_tokens=8, threshold=0.6))["mean"]
    assert tripled["mask"] == pytest.approx(3 * mask) and tripled["delta"] is None


def test_the_same_distribution_asks_for_no_temperature() -> None:
    logits = torch.randn(400, 50, generator=torch.Generator().manual_seed(0)) * 3
    own = calibration.alphas(logits, Residual(), calibration.TEMPERATURES)
    assert calibration.fit(own, normalised_entropy(logits.softmax(-1)).double().numpy()) == 1.0
    flat = np.full((9, len(calibration.TEMPERATURES)), 0.3)
    assert calibration.fit(flat, np.full(5, 0.3)) == 1.0


@pytest.mark.parametrize("scale", [0.6, 0.95, 1.3, 2.0])
@pytest.mark.parametrize("carry", [Residual(), TRAINED, Residual(alpha="inverse_confidence")])
def test_a_known_temperature_is_recovered(scale: float, carry: Residual) -> None:
    logits = torch.randn(500, 50, generator=torch.Generator().manual_seed(0)) * 3
    wanted = calibration.alphas(logits, carry, (1.0,))[:, 0]
    own = calibration.alphas(logits[torch.randperm(500)] * scale, carry, calibration.TEMPERATURES)
    assert calibration.fit(own, wanted) == pytest.approx(scale, rel=0.02)


def test_the_interval_of_a_temperature_covers_it_and_narrows_with_the_items() -> None:
    """Items differ in how sharp they are; the true temperature is that of all of them."""
    draw, widths = torch.Generator().manual_seed(0), []
    for items in (12, 108):
        sharp = (0.3 * torch.randn(items, 1, 1, generator=draw)).exp()
        own = torch.randn(items, 20, 30, generator=draw) * 3 * sharp * 1.4
        wanted = torch.randn(items, 20, 30, generator=draw) * 3 * sharp
        ours = [calibration.alphas(each, Residual(), calibration.TEMPERATURES) for each in own]
        theirs = [calibration.alphas(each, Residual(), (1.0,))[:, 0] for each in wanted]
        best = calibration.fit(np.concatenate(ours), np.concatenate(theirs))
        low, high = calibration.spread(best, ours, theirs, resamples=60)
        assert low < 1.4 < high and low < best < high
        widths.append(high / low)
    assert 1 < widths[1] < 1 + 0.75 * (widths[0] - 1)


@pytest.mark.parametrize("family", ["sdar", "llada", "dream"])
def test_a_fully_masked_solution_is_read_as_decoding_reads_its_first_step(family: str) -> None:
    model = rcd.Pipeline(toy(family, seed=3, spread=3.0, tokenizer=toy_tokenizer(128)))
    items = [Problem("words", f"p{k}", "one two three four", "five six seven", "7") for k in range(60)]
    by_item = calibration.training_alphas(model, items, Residual(), vocabulary=128, canvas=8, draws=2)
    assert len(by_item) == len(items) and max(map(len, by_item)) <= 2 * 4
    values = np.concatenate(by_item)
    config = DecodeConfig(max_new_tokens=8, carry=Residual())
    first = next(iter(model.stream(items[0].question, config)))
    assert isinstance(first, Step) and first.alpha is not None
    text = first.alpha[-first.offset :][:4].double().numpy()  # three words and the end
    # 120 draws: t near 1 masks everything in some of them
    assert np.isclose(values[:, None], text, rtol=0, atol=1e-5).any(0).all()


def test_undecided_predictions_are_those_not_above_the_threshold() -> None:
    logits = torch.tensor([[0.9, 0.1], [0.5, 0.5], [0.7, 0.3]]).log()
    assert calibration.undecided(logits, 0.8).tolist() == [False, True, True]
    assert calibration.undecided(logits, 1.0).all()


def test_calibration_brings_the_two_distributions_together() -> None:
    """The reference is the model itself with logits twice as sharp, so a T_res below 1 is called for."""
    items = list(problems("sudoku", "test", 4, seed=5))
    model, sharper = (rcd.load("bundled:sdar-rcd", device="cpu", dtype="float32") for _ in range(2))
    with torch.no_grad():
        sharper.model.head.weight.mul_(2)
    found = calibration.calibrate(model, sharper, items, DecodeConfig(threshold=0.8), Residual(), masks="all")
    assert found["low"] <= found["t_res"] <= found["high"] < 1
    assert found["t_res"] < 0.9 and found["after"]["distance"] < found["before"]["distance"]
    assert found["rounds"][0]["t_res"] == 1.0 and found["before"]["mean"] == found["rounds"][0]["mean"]
    assert len(calibration.lines(found)) == 4
    assert calibration.own_training(model) is True
    assert calibration.own_training(rcd.Pipeline(toy("sdar"))) is None


@pytest.mark.parametrize(
    ("carry", "words"),
    [(Residual(alpha="fixed"), "no effect on the weight 'fixed'"), (Residual(source="reference"), "nothing to")],
)
def test_what_cannot_be_calibrated_is_refused(
    models: dict[str, tuple[str, rcd.Pipeline]], carry: Residual, words: str
) -> None:
    (_, target), (_, small) = models["target"], models["small"]
    with pytest.raises(RCDError, match=words):
        calibration.calibrate(target, small, PROBLEMS, CONFIG, carry)
    other = rcd.Pipeline(toy("sdar", tokenizer=toy_tokenizer(128, mask="[M]"), vocab=128))
    bare = rcd.Pipeline(toy("llada"))
    with pytest.raises(RCDError, match="attention"):
        calibration.calibrate(target, bare, PROBLEMS, CONFIG, TRAINED)
    with pytest.raises(RCDError, match="choose from: all, undecided"):
        calibration.calibrate(target, other, PROBLEMS, CONFIG, TRAINED, masks="some")
    with pytest.raises(RCDError, match="no worked solution"):
        calibration.calibrate(target, other, [replace(PROBLEMS[0], solution="")], CONFIG, TRAINED)
