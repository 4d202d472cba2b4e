"""`rcd score`: figures as `Pipeline.score` gives them, continuations ranked, files that go on, clear refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rcd
from rcd.cli.main import app
from rcd.errors import RCDError
from rcd.models.toy import toy, toy_tokenizer
from tests.processes import finish, two_processes

ENDS = (" runs far", " sleeps", " and the dog run")
LINES: list[dict[str, Any]] = [
    {"prompt": "the old", "continuation": " fox runs", "id": "a"}, {"ids": [3, 4, 5], "continuation": [6, 7]},
    {"prompt": "the old fox", "continuations": list(ENDS)}, {"continuation": "the old fox"},
    {"prompt": "the", "messages": [], "continuation": "x"}, {"prompt": "the"}, {"prompt": "the", "continuation": ""},
    {"prompt": "the", "continuation": " fox", "draws": 3}, {"prompt": "the", "continuation": 7, "id": 8},
    {"prompt": "one two three four", "continuation": " five six seven"}, {"prompt": "a", "continuations": []},
]  # fmt: skip
BAD = {
    5: "one of prompt, messages and ids|messages is", 6: "one of continuation and continuations", 7: "is empty",
    8: "'draws'", 9: "a text or a list of token ids, not 7", 11: "continuations is a list",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("score")
    rcd.Pipeline(toy("sdar", seed=2, spread=3.0, block_length=4, tokenizer=toy_tokenizer(128))).save(path / "model")
    (path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES) + "\nno json\n")
    return path


def invoke(folder: Path, *more: str) -> Any:
    return CliRunner().invoke(app, ["score", *more, "--model", str(folder / "model"), "--device", "cpu"])


def test_continuations_are_told_the_likeliest_first(folder: Path) -> None:
    pipeline = rcd.load(folder / "model", device="cpu")
    asked = rcd.ScoreConfig(guidance=0.5, greedy=True)
    found = invoke(folder, "the old fox", *ENDS, "--guidance", "0.5", "--greedy", "--json")
    assert found.exit_code == 0, (found.output, found.exception)
    told = json.loads(found.stdout)
    want = {end: json.loads(json.dumps(pipeline.score("the old fox", end, asked).to_dict())) for end in ENDS}
    assert {each.pop("continuation"): each for each in told["scores"]} == want
    for flag, key in (("--json", "log_likelihood"), ("--mean", "per_token")):
        rows = json.loads(invoke(folder, "the old fox", *ENDS, "--json", flag).stdout)["scores"]
        assert [row[key] for row in rows] == sorted((row[key] for row in rows), reverse=True) and len(rows) == 3
    lines = invoke(folder, "the old fox", *ENDS, "--greedy", "--draws", "1").stdout.splitlines()
    assert len(lines) == 3 and all("not greedy" in line and "a token of" in line for line in lines)
    lines = invoke(folder, "the old fox", ENDS[0], "--tokens").stdout.splitlines()
    assert "exact bound" in lines[0] and [line.split()[-1] for line in lines[1:]] == ["runs", "far"]


def test_token_ids_need_no_tokenizer(folder: Path) -> None:
    pipeline = rcd.load(folder / "model", device="cpu")
    told = json.loads(invoke(folder, "3 4", "6,7", "--ids", "--json").stdout)["scores"][0]
    assert told["log_likelihood"] == pytest.approx(pipeline.score([3, 4], [6, 7]).log_likelihood, abs=1e-6)
    assert told["ids"] == [6, 7] and told["enumerated"] and told["patterns"] == 3


def test_a_file_has_a_record_for_every_line_and_goes_on(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    files = ("--input", str(folder / "in.jsonl"), "--output", str(output), "--draws", "20")
    first = invoke(folder, *files)
    assert isinstance(first.exception, RCDError) and "7 lines of 12 could not be answered" in str(first.exception)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["line"] for row in rows] == [*range(1, 12), 13] and rows[0]["id"] == "a" and rows[8]["id"] == 8
    pipeline = rcd.load(folder / "model", device="cpu")
    asked = rcd.ScoreConfig(draws=20)
    assert rows[0]["log_likelihood"] == pytest.approx(
        pipeline.score("the old", " fox runs", asked).log_likelihood, abs=1e-5
    )
    assert rows[3]["log_likelihood"] == pytest.approx(pipeline.score("", "the old fox", asked).log_likelihood, abs=1e-5)
    many = [pipeline.score("the old fox", end, asked).log_likelihood for end in ENDS]
    assert [each["log_likelihood"] for each in rows[2]["scores"]] == pytest.approx(many, abs=1e-5)
    assert rows[2]["best"] == many.index(max(many))
    for number, said in {**BAD, 12: "no valid JSON"}.items():
        assert any(part in rows[number - 1]["error"] for part in said.split("|")), rows[number - 1]
    whole = output.read_bytes()
    part = output.with_name("out.jsonl.part-0")
    part.write_bytes(b"".join(whole.splitlines(keepends=True)[:4]))
    output.unlink()
    again = invoke(folder, *files)
    assert output.read_bytes() == whole and "4 lines of 12 answered before" in " ".join(again.stderr.split())
    other = invoke(folder, *files[:-1], "21")
    assert isinstance(other.exception, RCDError) and "score.draws: 20 -> 21" in str(other.exception)


def test_words_that_the_tokenizer_does_not_know_are_named_once(folder: Path, tmp_path: Path) -> None:
    lines = [
        {"prompt": "the zebra", "continuation": " fox"},
        {"prompt": "the zebra", "continuations": [" fox", " gnu"]},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for output in (str(tmp_path / "out.jsonl"), "-"):
        found = invoke(folder, "--input", str(tmp_path / "in.jsonl"), "--output", output, "--draws", "1")
        said = " ".join(found.stderr.split())
        assert "does not know 'zebra', 'gnu'; their figures may mean nothing" in said, (said, found.exception)
        assert said.count("zebra") == 1


def test_pipes_and_two_processes_give_the_same_records(folder: Path, tmp_path: Path) -> None:
    good = "".join(json.dumps(line) + "\n" for line in LINES[:4])
    (tmp_path / "good.jsonl").write_text(good)
    given = ["score", "--model", str(folder / "model"), "--device", "cpu", "--draws", "9"]
    piped = finish([sys.executable, "-m", "rcd", *given, "--input", "-", "--output", "-"], good)
    assert piped.returncode == 0, piped.stderr
    files = ["--input", str(tmp_path / "good.jsonl"), "--output", str(tmp_path / "two.jsonl")]
    two = finish(two_processes("rcd", *given, *files))
    assert two.returncode == 0, two.stderr
    assert (tmp_path / "two.jsonl").read_text() == piped.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "give a prompt"), (("a",), "give a prompt"), (("a", "b", "--draws", "0"), "draws must be"),
        (("a", "b", "--input", "x"), "exclude one another"), (("--input", "x"), "needs both"),
        (("--input", "x", "--output", "y", "--json"), "single prompt"), (("a", ""), "is empty"),
        (("1 2", "3 x", "--ids"), "whole numbers"), (("a", "b", "--carry", "nothing"), "nothing"),
        (("", "fox", "--greedy"), "begins with a prompt"), (("--input", "/no/such", "--output", "y"), "cannot be read"),
        (("the", " fox", "--block-length", "10000"), "more than the model's context"),
        (("qqq", "qqq"), "the prompt's last token"), (("the", " fox", "--chat"), "no chat template"),
        (("fox " * 5000, " old"), "more than the"),
    ],
)  # fmt: skip
def test_bad_input_is_told_in_a_sentence(folder: Path, args: tuple[str, ...], said: str) -> None:
    found = invoke(folder, *args)
    assert isinstance(found.exception, RCDError) and said in str(found.exception), (found.output, found.exception)
