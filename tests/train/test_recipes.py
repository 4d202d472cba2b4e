"""The paper's recipes against tab:combined-hyperparams, value by value."""

from __future__ import annotations

from pathlib import Path

import pytest

from rcd import registry
from rcd.carry.residual import Residual
from rcd.errors import RCDError
from rcd.recipes.base import find

SDAR_TABLE = {
    "learning_rate": 1.0e-5,
    "betas": (0.9, 0.999),
    "scheduler": "constant_with_warmup",
    "warmup_ratio": 0.03,
    "device_batch": 1,
    "total_batch": 96,
    "max_length": 8192,
    "precision": "bfloat16",
    "data": "open-r1/OpenR1-Math-220k",
}
LLADA_TABLE = {
    "learning_rate": 1.0e-5,
    "scheduler": "cosine",
    "max_length": 2048,
    "epochs": 5,
    "device_batch": 2,
    "total_batch": 768,
    "precision": "bfloat16",
    "data": "nvidia/OpenMathInstruct-2",
}


@pytest.mark.parametrize("size", ["4b", "8b"])
@pytest.mark.parametrize("block", [32, 64])
def test_sdar_recipes_hold_the_papers_values(size: str, block: int) -> None:
    recipe = find(f"paper-sdar-{size}-b{block}")
    baseline = find(f"seqd-sdar-{size}-b{block}").target
    assert recipe.reference is not None and recipe.target is not None and baseline is not None
    for config in (recipe.reference, recipe.target, baseline):
        for key, value in SDAR_TABLE.items():
            assert getattr(config, key) == value, key
        assert config.block_length == block
        assert config.total_batch == 8 * config.device_batch * 12  # "Gradient Accumulation Steps 12", 8 GPUs
    assert (recipe.reference.epochs, recipe.target.epochs, baseline.epochs) == (10, 5, 5)
    assert "1.7B" in recipe.reference.model and size.upper() in recipe.target.model
    assert recipe.reference.carry is None and baseline.carry is None
    assert recipe.target.carry == Residual(alpha="entropy", t_res=1.0)


def test_llada_recipes_hold_the_papers_values() -> None:
    recipe, baseline = find("paper-llada-8b"), find("seqd-llada-8b").target
    assert recipe.reference is not None and recipe.target is not None and baseline is not None
    for config in (recipe.reference, recipe.target, baseline):
        for key, value in LLADA_TABLE.items():
            assert getattr(config, key) == value, key
        assert config.total_batch == 8 * config.device_batch * 48  # "Gradient Accumulation Steps 48"
    assert recipe.target.carry == Residual(start="reference")  # LLaDA is decoded with a warm start


def test_the_extended_baseline_has_eight_epochs() -> None:
    target = find("seqd-sdar-8b-b64-extended").target
    assert target is not None and target.epochs == 8


@pytest.mark.parametrize("name", registry.names("recipe"))
def test_every_recipe_has_its_own_name(name: str) -> None:
    assert find(name).name == name


def test_a_yaml_recipe_changes_what_it_names(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: smoke\ntarget: {max_steps: 7, residual.dropout: 0.25}\nreference: {seed: 3}\n")
    recipe = find(str(path))
    assert recipe.target is not None
    assert (recipe.target.max_steps, recipe.target.residual.dropout) == (7, 0.25)
    assert recipe.reference is not None and (recipe.reference.seed, recipe.reference.max_steps) == (3, 120)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("target: {lerning_rate: 1}", "unknown training setting 'lerning_rate'.*did you mean 'learning_rate'"),
        ("target: {residual.drop: 1}", "unknown setting of residual 'drop'"),
        ("target: {seed.x: 1}", "seed has no settings of its own"),
        ("targets: {}", "unknown key of .*'targets'"),
        ("- 1", "should hold a mapping"),
        ("a: [", "not valid YAML"),
        ("target: {total_batch: 0}", "total_batch must be a whole number"),
        ("extends: 5", "cannot extend 5"),
        ("extends: SELF", "cannot extend"),
        ("base: smoke", "the recipe it builds on is `extends`"),
        ("target: [1]", "should be a mapping"),
        ("target: {residual: 5}", "set the parts of residual one by one"),
        ("target: {clip: foo}", "clip should be float, not 'foo'"),
        ("target: {betas: 0.9}", "betas should be tuple"),
        ("target: {validation: -5}", "validation must be a whole number of 0 or more"),
        ("target: {residual.recycling: -1}", "residual.recycling must be"),
        ("target: {pack: true, label_padding: row}", "pack does not go with"),
        ("extends: smokes", "unknown recipe 'smokes'.*did you mean 'smoke'"),
    ],
)
def test_a_bad_yaml_recipe_gets_one_sentence(tmp_path: Path, content: str, match: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content.replace("SELF", str(path)))
    with pytest.raises(RCDError, match=match):
        find(str(path))


def test_a_rate_written_as_yaml_reads_it_is_a_number(tmp_path: Path) -> None:
    path = tmp_path / "rate.yaml"
    path.write_text("extends: smoke\ntarget: {learning_rate: 1e-5}\n")
    target = find(str(path)).target
    assert target is not None and target.learning_rate == 1e-5
