"""`rcd generate --input ... --output ...`: formats, order, bad lines, kills at any moment, pipes, several processes."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rcd
from rcd.batch.running import answer
from rcd.cli.main import app
from rcd.errors import RCDError
from rcd.evaluate.journal import Journal
from tests.batches import BAD, good_line, save_model, write_lines
from tests.processes import GatedChild, finish, two_processes

SETTINGS = ["--max-new-tokens", "12", "--device", "cpu", "--carry", "residual"]
CONFIG = rcd.DecodeConfig(max_new_tokens=12, carry="residual", batch_invariant=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the model, the lines, and the answers that one run without a break gives."""
    path = tmp_path_factory.mktemp("batch")
    save_model(path / "model")
    write_lines(path / "in.jsonl")
    code, heard, error = run(path, path / "whole.jsonl")
    assert (code, type(error)) == (1, RCDError), heard
    assert "30/30 lines, 6 bad  0:00 left" in heard.splitlines()
    assert str(error) == (
        "6 lines of 30 could not be answered (lines 3, 5, 7, 9, 11, 13); "
        f'{path / "whole.jsonl"} says why under "error", and holds the other answers.'
    )
    return path


def command(folder: Path, output: Path | str, *more: str, given: Path | str | None = None) -> list[str]:
    given = folder / "in.jsonl" if given is None else given
    files = ["--input", str(given), "--output", str(output)]
    return ["generate", "--model", str(folder / "model"), *files, *SETTINGS, *more]


def run(
    folder: Path, output: Path | str, *more: str, given: Path | str | None = None, stdin: bytes | None = None
) -> tuple[int, str, BaseException | None]:
    """In this process; an RCDError is what `main` turns into exit code 2."""
    result = CliRunner().invoke(app, command(folder, output, *more, given=given), input=stdin)
    return result.exit_code, result.stderr, result.exception


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_line_has_the_answer_that_it_has_alone_in_the_order_of_the_input(folder: Path) -> None:
    found = rows(folder / "whole.jsonl")
    numbers = [*range(1, 15), *range(17, 33)]  # two blank lines are passed over, and counted
    assert [row["line"] for row in found] == numbers
    pipeline = rcd.load(folder / "model", device="cpu")
    for place, row in enumerate(found, 1):
        if place in BAD:
            assert BAD[place][1] in row["error"] and "text" not in row
            continue
        line = good_line(place)
        own = {name: value for name, value in line.items() if name not in ("prompt", "messages", "ids", "id")}
        config = rcd.DecodeConfig(**{**vars_of(CONFIG), "seed": row["line"] - 1, **own})
        prompt: Any = line.get("prompt") or line.get("messages") or line.get("ids")
        alone = pipeline.generate([prompt], config, seeds=[config.seed]).results[0]
        expected = {name: value for name, value in alone.to_dict(pipeline.token_text).items() if name != "seconds"}
        head = {"line": row["line"], **({"id": line["id"]} if "id" in line else {})}
        assert row == {**head, **expected}
    assert found[4]["id"] == "t", "the id of a bad line is told"


def vars_of(config: rcd.DecodeConfig) -> dict[str, Any]:
    return {"max_new_tokens": config.max_new_tokens, "carry": config.carry, "batch_invariant": True}


def test_lines_draw_by_their_number_and_not_by_who_else_is_there(folder: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "good.jsonl", bad=False)
    assert run(folder, tmp_path / "good-out.jsonl", given=tmp_path / "good.jsonl")[0] == 0
    found, whole = rows(tmp_path / "good-out.jsonl"), rows(folder / "whole.jsonl")
    assert [a for a, b in zip(found, whole, strict=True) if "error" not in b] == [b for b in whole if "error" not in b]


@pytest.mark.parametrize("call", [1, 9, 29])
def test_a_killed_run_goes_on_and_asks_nothing_twice(
    call: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    with GatedChild(command(folder, output), "rcd.evaluate.journal:Journal.append", call=call, after=True) as child:
        child.arrive()
        child.kill()
    part = tmp_path / "out.jsonl.part-0"
    held = {row["line"] for row in rows(part)}
    assert len(held) == call and not output.exists()
    with part.open("ab") as file:
        file.write(b'{"line": 31, "text": "ha')  # as a kill in the middle of a write leaves it
    asked, plain = list[int](), Journal.append

    def noted(self: Journal, some: Any) -> None:
        asked.extend(row["line"] for row in some)
        plain(self, some)

    monkeypatch.setattr(Journal, "append", noted)
    code, heard, error = run(folder, output)
    assert (code, type(error)) == (1, RCDError) and f"note: {call} line" in heard
    assert held.isdisjoint(asked) and len(asked) == 30 - call
    assert output.read_bytes() == (folder / "whole.jsonl").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.run.json"]


@pytest.mark.parametrize(("function", "call"), [("rcd.batch.output:write_whole", 2), ("rcd.batch.output:unlink", 1)])
def test_a_kill_while_the_answers_are_put_in_order_loses_none(
    function: str, call: int, folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    with GatedChild(command(folder, output), function, call=call) as child:
        child.arrive()
        child.kill()
    assert (tmp_path / "out.jsonl.part-0").exists() and output.exists() == (function.endswith("unlink"))
    assert isinstance(run(folder, output)[2], RCDError)
    assert output.read_bytes() == (folder / "whole.jsonl").read_bytes()
    assert not list(tmp_path.glob("*.part-*"))


def test_ctrl_c_says_how_to_go_on(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with GatedChild(command(folder, output), "rcd.evaluate.journal:Journal.append", call=5, after=True) as child:
        child.arrive()
        child.send(signal.SIGINT)
        child.open()
        code, shown, heard = child.finish()
    assert (code, shown) == (130, "")
    assert heard.strip().splitlines()[-1] == "rcd: interrupted; 5 lines answered, and the same command goes on"
    assert "Traceback" not in heard
    run(folder, output)
    assert output.read_bytes() == (folder / "whole.jsonl").read_bytes()


def test_a_finished_run_is_not_run_again(folder: Path, tmp_path: Path) -> None:
    before = (folder / "whole.jsonl").stat().st_mtime_ns
    code, _, error = run(folder, folder / "whole.jsonl")
    assert code == 1 and "6 lines of 30" in str(error)
    assert (folder / "whole.jsonl").stat().st_mtime_ns == before


def test_other_settings_another_model_or_input_are_refused(folder: Path, tmp_path: Path) -> None:
    whole, end = folder / "whole.jsonl", "choose another --output, or give the same model, settings and input to go on."
    save_model(tmp_path / "other", seed=4)
    changed = tmp_path / "in.jsonl"
    changed.write_bytes((folder / "in.jsonl").read_bytes() + b'\n{"prompt": "one more"}')
    cases: list[tuple[tuple[str, ...], Path | None, str]] = [
        (("--threshold", "0.5"), None, "(threshold: 0.85 -> 0.5)"),
        (("--raw",), None, "(chat: None -> False)"),
        (("--model", str(tmp_path / "other")), None, "(model: "),
        ((), changed, "(the input is another one, or was changed)"),
    ]
    for more, given, why in cases:
        _, _, error = run(folder, whole, *more, given=given)
        told = str(error)
        assert isinstance(error, RCDError) and f"{whole} holds answers of another run " in told and "\n" not in told
        assert why in told and told.endswith(end)


def test_what_cannot_be_done_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("mine\n")
    (tmp_path / "held.jsonl").write_text("")
    cases: list[tuple[list[str], str]] = [
        (command(folder, tmp_path / "mine.jsonl"), "is there already, and no mine.jsonl.run.json beside it"),
        (command(folder, folder / "in.jsonl"), "--input and --output are the same file"),
        (command(folder, tmp_path), "is a folder; give a file as --output."),
        (command(folder, tmp_path / ("x" * 300)), "(its name is too long); choose another --output."),
        (command(folder, tmp_path / "x", given=tmp_path / ("x" * 300)), "(its name is too long); give another file."),
        (command(folder, "-", given=tmp_path / "none.jsonl"), "(it is not there); give another file."),
        (command(folder, tmp_path / "held.jsonl", given="-"), "no run can go on with what comes from a pipe"),
        ([*command(folder, "x"), "a prompt"], "exclude one another; leave the prompt out."),
        (["generate", "--input", "x"], "a batch needs both --input and --output"),
        (["generate"], "there is no prompt; give one, or a file of prompts with --input."),
        ([*command(folder, "x"), "--json"], "--json is for a single prompt"),
        (command(folder, tmp_path / "x", "--batch", "0"), "--batch must be a whole number of 1 or more"),
        (command(folder, tmp_path / "x", "--start", "reference"), "needs a reference model"),
        (command(folder, tmp_path / "x", "--set", "oracle=true"), "leave oracle out with --input."),
        (command(folder, tmp_path / "x", "--threshold", "7"), "threshold must be in [0, 1]"),
    ]
    for args, expected in cases:
        error = CliRunner().invoke(app, args, input=b"").exception
        assert isinstance(error, RCDError) and expected in str(error) and "\n" not in str(error), args
    assert (tmp_path / "mine.jsonl").read_text() == "mine\n"


@pytest.mark.parametrize(
    "record",
    [
        b'{"line": 3, "error": x}', b'{"line": 3, "text": "\xff"}', b'{"line": 3, "text": "a"}{"line": 4}', b"\0" * 64,
        b'{"line": 03}', b'{"line": true}', b'{"line": 310}', b'{"line": 9' + b"9" * 30 + b"}", b"[" * 10**5, b'"line"',
    ],
)  # fmt: skip
def test_a_damaged_record_is_named_and_never_taken_for_an_answer(folder: Path, tmp_path: Path, record: bytes) -> None:
    (tmp_path / "out.jsonl.run.json").write_bytes((folder / "whole.jsonl.run.json").read_bytes())
    part = tmp_path / "out.jsonl.part-0"
    part.write_bytes(b'{"line": 1, "text": "a"}\n' + record + b"\n")
    _, _, error = run(folder, tmp_path / "out.jsonl")
    assert str(error) == f"line 2 of {part} is damaged; delete the line and run the same command again."


@pytest.mark.parametrize("content", [b"", b"{", b"null", b"[]", b"\xff\xfe", b"[" * 10**5])
def test_a_damaged_note_of_a_run_is_named(folder: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "out.jsonl.run.json").write_bytes(content)
    _, _, error = run(folder, tmp_path / "out.jsonl")
    assert str(error) == f"{tmp_path / 'out.jsonl.run.json'} is damaged; choose another --output."


def test_an_id_that_can_be_written_can_be_read_when_the_run_goes_on(folder: Path, tmp_path: Path) -> None:
    lines = [b'{"prompt": "the fox", "id": ' + b"[" * deep + b"]" * deep + b"}" for deep in range(700, 1000, 3)]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    output, given = tmp_path / "out.jsonl", tmp_path / "in.jsonl"
    first, second = (run(folder, output, given=given)[2] for _ in range(2))
    assert "could not be answered" in str(first) and str(second) == str(first)


def test_what_another_process_is_writing_is_not_cut_off(tmp_path: Path) -> None:
    first = Journal(tmp_path / "j", "the answers")
    (tmp_path / "j").write_text("half a li")
    with pytest.raises(RCDError, match="another process is writing"):
        Journal(tmp_path / "j", "the answers")
    assert (tmp_path / "j").read_text() == "half a li"
    first.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device")
def test_a_journal_on_a_full_disk_says_so_when_it_is_closed_as_well() -> None:
    journal = Journal(Path("/dev/full"), "the answers")
    for last in (lambda: journal.append([{"line": 1}]), journal.close):
        with pytest.raises(RCDError, match=r"\(the disk is full\); make room and run the same command again"):
            last()


def test_a_second_run_beside_the_first_is_refused(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with GatedChild(command(folder, output), "rcd.evaluate.journal:Journal.append") as child:
        child.arrive()
        _, _, error = run(folder, output)
        assert isinstance(error, RCDError) and "another process is writing to" in str(error)


def test_pipes_get_the_same_answers_in_the_same_order(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "whole.jsonl").read_text()
    assert CliRunner().invoke(app, command(folder, "-")).stdout == whole
    given = (folder / "in.jsonl").read_text(errors="replace")  # a test's pipe is UTF-8, and one bad line is not
    done = finish([sys.executable, "-m", "rcd.cli.main", *command(folder, "-", given="-")], given)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("rcd: 5 lines of 30 could not")
    shown, expected = done.stdout.splitlines(), whole.splitlines()
    assert shown[:10] + shown[11:] == expected[:10] + expected[11:]


def test_two_processes_share_the_lines(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    done = finish(two_processes("rcd.cli.main", *command(folder, output)))
    assert "rcd: 6 lines of 30 could not be answered" in done.stderr
    assert output.read_bytes() == (folder / "whole.jsonl").read_bytes()
    assert not list(tmp_path.glob("*.part-*"))


def test_an_endless_input_is_read_as_it_is_needed(folder: Path) -> None:
    read = 0

    def endless() -> Iterator[tuple[int, bytes]]:
        nonlocal read
        while True:
            read += 1
            yield read, b'{"prompt": "the old fox", "max_new_tokens": 2}'

    records = answer(rcd.load(folder / "model", device="cpu"), endless(), CONFIG, batch=4, ahead=8)
    found = [next(records)["line"] for _ in range(40)]
    records.close()
    assert len(set(found)) == 40
    assert read <= 40 + 4 + 4 + 8 + 8, "rows, as many queued, what is sorted, and what was answered meanwhile"


def test_a_model_without_a_tokenizer_takes_ids(tmp_path: Path) -> None:
    from rcd.models.toy import toy

    pipeline = rcd.Pipeline(toy("llada", seed=2, spread=6.0))
    lines = [(1, b'{"ids": [5, 6, 7]}'), (2, b'{"prompt": "the fox"}'), (3, b'{"ids": [5, 6, 7], "logprobs": 1}')]
    found = {row["line"]: row for row in answer(pipeline, lines, rcd.DecodeConfig(max_new_tokens=4))}
    assert found[1]["text"] == found[3]["text"] and len(found[3]["logprobs"]) == found[3]["tokens"]
    assert "this checkpoint has no tokenizer" in found[2]["error"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"prompt": "the fox", "id": 1e999}', "its id cannot be repeated as JSON"),
        (b'{"prompt": "the fox", "id": NaN}', "NaN is no number in JSON"),
        (b"[" * 10**5, "its JSON is nested too deeply."),
        (b'{"ids": ' + b"1" * 10**4 + b"}", "it is no valid JSON (Exceeds the limit"),
        (b'{"ids": [1, 2.0]}', "ids is a list of whole numbers, not 2.0."),
        (b'{"ids": [true]}', "ids is a list of whole numbers, not true."),
        (b'{"prompt": 5}', "prompt is a text, not 5."),
        (b'{"prompt": ""}', "its prompt is empty."),
        (b'{"prompt": "a", "ids": [1]}', "this one has prompt and ids."),
        (b'{"id": 1}', "this one has none of them."),
        (b'{"messages": []}', "messages is a list of objects"),
        (b'{"messages": [{"role": "user"}]}', "messages is a list of objects"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "no Unicode text"),
        (b'{"prompt": "the fox", "seed": -1}', "seed must be a whole number from 0"),
        (b'{"prompt": "the fox", "temperature": "hot"}', "temperature must be"),
        (b'{"prompt": "the fox", "stop": [""]}', "a stop string is empty"),
        (b'{"prompt": "the fox", "max_new_tokens": 999999}', "lower max_new_tokens"),
        (b'"the fox"', "it is no JSON object."),
    ],
)  # fmt: skip
def test_whatever_a_line_holds_it_stops_no_other(folder: Path, line: bytes, why: str) -> None:
    lines = [(1, line), (2, b'{"prompt": "the old fox"}')]
    bad, good = sorted(answer(rcd.load(folder / "model", device="cpu"), lines, CONFIG), key=lambda row: row["line"])
    assert why in bad["error"] and "\n" not in bad["error"] and good["tokens"]
    json.dumps([bad, good], allow_nan=False)


def test_a_line_may_have_a_canvas(folder: Path, tmp_path: Path) -> None:
    lines = [
        {"ids": [7, 8, 9], "canvas": "[MASK:2] sees [MASK]"}, {"ids": [7, 8, 9], "canvas": [1, 2, 3, 4]},
        {"prompt": "the fox", "canvas": {"a": 1}}, {"ids": [7, 8, 9]},
        {"canvas": "the fox [MASK:2] sees"}, {"prompt": "", "canvas": "the fox [MASK:2] sees"},
        {"canvas": "[MASK:2] sees"},
    ]  # fmt: skip
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run(folder, tmp_path / "out.jsonl", "--max-new-tokens", "4", given=tmp_path / "in.jsonl")
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert found[0]["given"] == 1 and len(found[0]["ids"]) == 4
    assert "has no mask" in found[1]["error"] and "canvas is a text or a list" in found[2]["error"]
    assert "given" not in found[3]
    assert found[4]["ids"] == found[5]["ids"] and found[4]["given"] == 1 and len(found[4]["ids"]) == 4
    assert "the prompt is empty" in found[6]["error"]
