"""`--quantize` on the command line: in every command that loads a model, in what is told, and in what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rcd
from rcd.cli.flags import completed
from rcd.cli.main import app
from rcd.models import quantise
from rcd.models.toy import toy, toy_tokenizer

LOADING = {
    "generate", "chat", "serve", "eval", "sweep", "ablate", "calibrate", "recall", "contamination", "lm-eval",
    "reproduce", "score",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("cli") / "model"
    rcd.Pipeline(toy("sdar", seed=2, spread=6.0, tokenizer=toy_tokenizer(128))).save(path)
    return str(path)


def said(*args: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_every_command_that_loads_a_model_takes_the_flag() -> None:
    import typer.main

    group: Any = typer.main.get_command(app)
    takes = set()
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if command is not None and "dtype" in {p.name for p in completed(name, command).params}:
            takes.add(name)
            assert "quantize" in {p.name for p in completed(name, command).params}, name
    assert takes >= LOADING


def test_an_answer_is_that_of_the_python_call(folder: str) -> None:
    want = rcd.load(folder, device="cpu", quantize="int4").generate([1, 2, 3], max_new_tokens=8)
    got = said("generate", "1 2 3", "--ids", "--model", folder, "--max-new-tokens", "8", "--quantize", "int4", "--json")
    assert [got["ids"]] == want.sequences


def test_info_says_what_weights_take_in_so_many_bits(folder: str) -> None:
    memory = said("info", folder, "--json")["memory"]
    assert list(memory) == ["float32", "bfloat16", "int8", "int4"]
    sizes = [float(text.removesuffix(" MB")) for text in memory.values()]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 2 * sizes[-1]


def test_a_step_of_a_named_shape_is_timed_in_four_bits(tmp_path: Path) -> None:
    common = ["bench", "decode", "--shape", "sdar-tiny", "--dtype", "float32", "--rounds", "1", "--blocks", "1",
              "--prefix", "8", "--carry", "none", "--json"]  # fmt: skip
    low, whole = said(*common, "--quantize", "int4"), said(*common)
    assert (low["quantised"], whole["quantised"]) == ("int4", None)
    assert low["weight_bytes"] < whole["weight_bytes"]


def test_an_evaluation_says_how_weights_were_kept_and_goes_on_with_no_other(folder: str, tmp_path: Path) -> None:
    args = ["eval", "--task", "words", "--model", folder, "--limit", "2", "--max-new-tokens", "8",
            "--output", str(tmp_path / "run")]  # fmt: skip
    assert CliRunner().invoke(app, [*args, "--quantize", "int8"]).exit_code == 0
    assert "int8 in float32" in "".join(path.read_text() for path in (tmp_path / "run").glob("*.json*"))


@pytest.mark.parametrize("value", ["int5", "int4,head=none", "int4,tail=exact"])
def test_other_values_end_in_one_sentence(value: str, folder: str) -> None:
    result = CliRunner().invoke(app, ["generate", "1 2", "--ids", "--model", folder, "--quantize", value])
    assert isinstance(result.exception, rcd.RCDError) and "\n" not in str(result.exception)


def test_a_missing_package_ends_in_one_sentence(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantise.importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["generate", "1 2", "--ids", "--model", folder, "--quantize", "int8"])
    assert isinstance(result.exception, rcd.RCDError) and "[quantize]" in str(result.exception)
