"""The models in the box: all there, as shipped, and able to do what they were trained for."""

from __future__ import annotations

import fnmatch
import json
import tomllib
from pathlib import Path

import pytest

import rcd
from rcd.data.tasks.base import problem, problems
from rcd.evaluate.grading import grade
from rcd.models import bundled
from rcd.recipes.tasks import SETS

ROOT = Path(bundled.__file__).parents[2]
NAMES = [f"{models}-{kind}" for models in ("llada", "sdar") for kind in ("rcd", "reference", "seqd")]
NAMES += ["words-rcd", "words-seqd"]


def test_the_manifest_lists_every_file_and_nothing_is_too_large() -> None:
    assert sorted(bundled.manifest()) == NAMES
    listed = {f"{name}/{file}" for name, model in bundled.manifest().items() for file in model["files"]}
    there = {str(p.relative_to(bundled.ASSETS)) for p in bundled.ASSETS.rglob("*") if p.is_file()}
    assert there - listed == {"manifest.json", "README.md"} and listed <= there
    assert sum(path.stat().st_size for path in bundled.ASSETS.rglob("*")) <= 45e6


def test_the_wheel_takes_every_asset() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["rcd"]
    for path in bundled.ASSETS.rglob("*"):
        name = str(path.relative_to(ROOT / "rcd"))
        assert path.is_dir() or any(fnmatch.fnmatch(name, pattern) for pattern in patterns), name


@pytest.mark.parametrize("name", NAMES)
def test_a_bundled_model_is_an_ordinary_checkpoint(name: str) -> None:
    pipeline = rcd.load(f"bundled:{name}", device="cpu")
    family, kind = name.split("-")
    assert pipeline.settings.vocab_size >= 1000
    assert pipeline.model.head.weight.data_ptr() != pipeline.model.codebook.data_ptr()  # untied
    carry = pipeline.checkpoint.rcd.carry
    assert carry == ({"name": "residual", **vars(SETS[family].carry)} if kind == "rcd" else None)
    shape = SETS[family].smaller if kind == "reference" else SETS[family].shape
    assert len(pipeline.model.backbone.layers) == shape["layers"]  # type: ignore[arg-type]
    assert pipeline.model.codebook.shape[1] == shape["width"]
    assert pipeline.checkpoint.rcd.provenance["recipe"] == f"tasks-{name}"


@pytest.mark.parametrize(
    ("name", "mix", "least"), [("words-rcd", "words", 26), ("llada-rcd", "sudoku", 20), ("sdar-rcd", "sudoku", 16)]
)
def test_it_answers_problems_that_it_was_not_trained_on(name: str, mix: str, least: int) -> None:
    given = list(problems(mix, "test", 32, seed=11))
    out = rcd.load(f"bundled:{name}", device="cpu").generate(
        [p.question for p in given], rcd.DecodeConfig(threshold=0.95)
    )
    assert sum(map(grade, given, out.texts)) >= least


def test_the_reference_can_warm_start_its_target() -> None:
    target, reference = (rcd.load(f"bundled:sdar-{kind}", device="cpu") for kind in ("rcd", "reference"))
    question = problem("words", "test", 1).question
    out = target.generate(question, rcd.DecodeConfig(carry=rcd.Residual(start="reference")), reference=reference)
    assert out.results[0].counts.reference > 0


def test_every_file_of_the_manifest_has_a_sha256() -> None:
    for model in json.loads((bundled.ASSETS / bundled.MANIFEST).read_text())["models"].values():
        assert model["about"] and model["parameters"] > 0
        assert all(len(digest) == 64 for digest in model["files"].values())
