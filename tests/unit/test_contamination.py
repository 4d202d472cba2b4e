"""GSM8K beside GSM1K and GSM-Plus: the drop with its interval, and what could not be loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rcd.cli.main import app
from rcd.data.tasks.base import problems
from rcd.errors import RCDError
from rcd.evaluate.contamination import drop, drops, load_sets

CALL = ["contamination", "--model", "bundled:words-rcd", "--device", "cpu"]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    out = {}
    for name, count in (("gsm8k", 4), ("gsm1k", 3), ("gsm-plus", 2)):
        path = tmp_path / f"{name}.jsonl"
        rows = [
            {"question": item.question, "answer": f"#### {item.answer}"} for item in problems("words", "test", count)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        out[name] = str(path)
    return out


def test_the_drop_has_newcombes_interval() -> None:
    found = drop(56, 70, 48, 80)  # the example of Newcombe (1998), method 10
    assert found == pytest.approx({"drop": 20.0, "low": 5.24, "high": 33.39}, abs=0.01)


def test_there_is_no_drop_without_gsm8k() -> None:
    row = {"accuracy": 0.5, "items": 10}
    assert drops({"gsm1k": row}) == {}
    assert drops({"gsm8k": row, "gsm1k": row | {"accuracy": 0.3}})["gsm1k"]["drop"] == pytest.approx(20)


def test_all_three_sets_from_files(files: dict[str, str], tmp_path: Path) -> None:
    paths = [part for name, file in files.items() for part in ("--path", f"{name}={file}")]
    result = CliRunner().invoke(app, [*CALL, *paths, "--output", str(tmp_path / "out"), "--limit", "3", "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    told = json.loads(result.stdout)
    assert {name: row["items"] for name, row in told["sets"].items()} == {"gsm8k": 3, "gsm1k": 3, "gsm-plus": 2}
    assert set(told["drops"]) == {"gsm1k", "gsm-plus"} and told["skipped"] == {}
    assert told["drops"]["gsm1k"]["drop"] == 0  # the same three problems
    assert (tmp_path / "out/gsm-plus/records.jsonl").is_file()


def test_a_set_that_cannot_be_loaded_is_named_and_the_rest_is_shown(files: dict[str, str]) -> None:
    del files["gsm-plus"]
    paths = [part for name, file in files.items() for part in ("--path", f"{name}={file}")]
    result = CliRunner().invoke(app, [*CALL, *paths])
    assert result.exit_code == 1, (result.output, result.exception)
    table = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert "[" in table["gsm1k"] and "skipped: " in table["gsm-plus"] and "--path gsm-plus=FILE" in table["gsm-plus"]
    found, skipped = load_sets({**files, "gsm1k": "/no/such.jsonl"})
    assert set(found) == {"gsm8k"} and "/no/such.jsonl" in skipped["gsm1k"]


def test_an_unknown_set_is_an_error(files: dict[str, str]) -> None:
    with pytest.raises(RCDError, match="choose from: gsm-plus, gsm1k, gsm8k"):
        load_sets({"gsm": files["gsm8k"]})
    result = CliRunner().invoke(app, [*CALL, "--path", files["gsm8k"]])
    assert isinstance(result.exception, RCDError) and "SET=FILE" in str(result.exception)
