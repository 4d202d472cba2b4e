"""The command line as a user meets it: in a process of its own, its output piped."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rcd
from rcd.cli.main import app, main
from rcd.models.toy import toy, toy_tokenizer
from tests.processes import finish


def run(*args: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return finish([sys.executable, "-m", "rcd.cli.main", *args], stdin)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("cli") / "model"
    rcd.Pipeline(toy("sdar", seed=2, spread=6.0, tokenizer=toy_tokenizer(128))).save(path)
    return str(path)


def main_in_process(*args: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """`main` itself, quicker than a process; returns the exit code."""
    monkeypatch.setattr(sys, "argv", ["rcd", *args])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(str(caught.value.code))


def call(*args: str) -> tuple[int, str, BaseException | None]:
    """In this process, which is quicker; an RCDError is what `main` turns into exit code 2."""
    result = CliRunner().invoke(app, list(args))
    return result.exit_code, result.output, result.exception


FULL = (
    "--carry residual --alpha entropy --start zero --t-res 1.0 --threshold 0.85 --block-length 32 "
    "--max-new-tokens 24 --temperature 0 --seed 0 --json"
).split()


def test_generate_prints_one_json_object(folder: str) -> None:
    done = run("generate", "the old fox", "--model", folder, *FULL)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result) == {
        "text", "ids", "tokens", "denoising_steps", "tokens_per_step", "forwards", "tokens_per_forward", "counts",
        "seconds", "stop_reason",
    }  # fmt: skip
    assert len(result["ids"]) == result["tokens"]
    assert result["tokens_per_step"] == pytest.approx(result["tokens"] / result["denoising_steps"], abs=1e-3)


def test_log_probabilities_have_the_tokens_texts(folder: str) -> None:
    flags = ["--model", folder, "--device", "cpu", "--max-new-tokens", "6", "--logprobs", "2", "--json"]
    result = json.loads(call("generate", "the old fox", *flags)[1])
    tokenizer: Any = rcd.load(folder, device="cpu").tokenizer
    assert [one["token"] for one in result["logprobs"]] == result["ids"]
    for one in result["logprobs"]:
        assert len(one["best"]) == 2 and max(each["logprob"] for each in one["best"]) >= one["logprob"]
        assert all(each["text"] == tokenizer.decode([each["token"]]) for each in (one, *one["best"]))


def test_a_pipe_gets_the_text_alone_and_the_figures_go_to_stderr(folder: str) -> None:
    done = run("generate", "-", "--model", folder, "--max-new-tokens", "8", stdin="the old fox")
    assert done.returncode == 0, done.stderr
    text = rcd.load(folder, device="cpu").generate("the old fox", rcd.DecodeConfig(max_new_tokens=8)).texts[0]
    assert done.stdout.strip() == text.strip()
    assert "denoising step" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_the_command_and_the_api_agree(folder: str) -> None:
    code, output, _ = call("generate", "the old fox", "--model", folder, "--device", "cpu", *FULL)
    expected = rcd.load(folder, device="cpu").generate(
        "the old fox", rcd.DecodeConfig(carry="residual", block_length=32, max_new_tokens=24)
    )
    assert code == 0
    assert json.loads(output)["text"] == expected.texts[0]
    assert json.loads(output)["forwards"] == expected.results[0].forwards


def test_settings_without_effect_are_said(folder: str) -> None:
    done = run("generate", "the fox", "--model", folder, "--carry", "none", "--alpha", "entropy", "--json")
    assert done.returncode == 0
    assert "--alpha: no effect with --carry none" in done.stderr
    given = ["--kl-threshold", "1", "--factor", "2", "--set", "klass_history=3"]
    done = run("generate", "the fox", "--model", folder, *given, "--json")
    assert "--factor, --kl-threshold, --klass-history: no effect with --commit threshold" in done.stderr
    done = run("generate", "the fox", "--model", folder, "--commit", "klass", "--kl-threshold", "1", "--json")
    assert "no effect" not in done.stderr and done.returncode == 0
    json.loads(done.stdout)


def test_unknown_words_are_named(folder: str) -> None:
    runner, flags = CliRunner(), ["--model", folder, "--device", "cpu", "--max-new-tokens", "4"]
    for output in ([], ["--json"]):
        result = runner.invoke(app, ["generate", "the purple fox, purple and loud", *flags, *output])
        assert result.exit_code == 0
        assert "note: the tokenizer does not know 'purple', 'loud'; the answer may be nonsense" in result.stderr
        assert "purple" not in result.stdout
    result = runner.invoke(app, ["generate", "zu viele neue Worte sind da hier", *flags])
    assert "'sind' and 2 more" in result.stderr
    for prompt in (["the old fox"], ["0 1", "--ids"]):
        assert "does not know" not in runner.invoke(app, ["generate", *prompt, *flags]).stderr


def test_an_empty_answer_is_said(folder: str) -> None:
    flags = ["--model", folder, "--device", "cpu", "--max-new-tokens", "1"]
    model, config = rcd.load(folder, device="cpu"), rcd.DecodeConfig(max_new_tokens=1)
    first = model.generate("the old fox", config).sequences[0][0]
    for output in ([], ["--json"]):
        result = CliRunner().invoke(app, ["generate", "the old fox", *flags, *output])
        assert "empty" not in result.stderr
        result = CliRunner().invoke(app, ["generate", "the old fox", *flags, "--eos-token-id", str(first), *output])
        assert result.exit_code == 0
        assert "note: the answer is empty: the model ended its text at once" in result.stderr


BAD = {
    "missing folder": (["--model", "/no/such/folder"], "there is no folder or file"),
    "unknown carry": (["--carry", "residul"], "did you mean 'residual'"),
    "unknown alpha": (["--alpha", "entrpy"], "did you mean 'entropy'"),
    "unknown start": (["--start", "hot"], "unknown start"),
    "block length 0": (["--block-length", "0"], "block_length must be"),
    "threshold": (["--threshold", "1.5"], "threshold must be in [0, 1]"),
    "mask id": (["--mask-token-id", "5000"], "outside the vocabulary"),
    "reference": (["--start", "reference"], "needs a reference model"),
    "long": (["--max-new-tokens", "100000"], "lower max_new_tokens"),
    "family": (["--family", "gpt"], "unknown family"),
    "device": (["--device", "tpu7"], "cannot be used"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(
    folder: str, case: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    flags, expected = BAD[case]
    model = [] if "--model" in flags else ["--model", folder]
    assert main_in_process("generate", "the fox", *model, *flags, monkeypatch=monkeypatch) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert expected in err
    assert len(err.strip().splitlines()) == 1 and err.startswith("rcd: ")


def test_a_process_ends_with_code_2_and_no_traceback(folder: str) -> None:
    done = run("generate", "the fox", "--model", folder, "--mask-token-id", "5000")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.strip().splitlines()) == 1 and "outside the vocabulary" in done.stderr


@pytest.mark.parametrize(
    "args", [["generate", "x", "--model", "m", "--no-such-flag"], ["nonsense"], ["list", "nothing"]]
)
def test_wrong_words_exit_with_code_2(args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main_in_process(*args, monkeypatch=monkeypatch) == 2


def test_list_names_every_part() -> None:
    from rcd import registry

    code, output, _ = call("list")
    assert code == 0
    for kind in registry.PARTS:
        assert all(name in output for name in registry.names(kind))
    found = json.loads(call("list", "carry", "--json")[1])["carry"]
    assert list(found) == ["trained", *registry.names("carry")] and found["residual"].startswith("RCD: ")


def test_a_piped_list_has_a_line_for_every_part() -> None:
    from rcd import registry

    lines = call("list", "recipe")[1].splitlines()
    assert [line.split()[:2] for line in lines] == [["recipe", name] for name in registry.names("recipe")]


EARLY = """
import importlib.abc, sys
class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *_):
        if name == "rcd.cli.flags":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
from rcd.__main__ import main
main()
"""


def test_an_interrupt_at_start_up_is_one_line() -> None:
    done = finish([sys.executable, "-c", EARLY])
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "rcd: interrupted\n")


LEAVING = """
import threading, rcd
model, begun = rcd.load("bundled:words-rcd", device="cpu"), threading.Event()
def work():
    while True:
        for event in model.stream([[5, 9]] * 4):
            begun.set()
threading.Thread(target=work, daemon=True).start()
begun.wait()
"""


def test_the_interpreter_ends_silently_while_a_daemon_thread_decodes() -> None:
    done = finish([sys.executable, "-c", LEAVING])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_info_says_what_a_checkpoint_is(folder: str) -> None:
    code, output, _ = call("info", folder, "--json", "--check")
    facts = json.loads(output)
    assert code == 0
    model = rcd.load(folder, device="cpu").model
    assert facts["parameters"] == sum(p.numel() for p in model.parameters())
    assert (facts["family"], facts["window"], facts["mask_token_id"]) == ("sdar", "blockwise", 125)
    assert facts["max_new_tokens"] is None
    assert "finite" in facts["check"]


def test_info_check_finds_a_damaged_tensor(folder: str, tmp_path: Path) -> None:
    pipeline = rcd.load(folder, device="cpu")
    pipeline.model.head.weight[0, 0] = float("nan")
    pipeline.save(tmp_path / "bad")
    assert call("info", str(tmp_path / "bad"))[0] == 0
    _, _, error = call("info", str(tmp_path / "bad"), "--check")
    assert isinstance(error, rcd.RCDError) and "lm_head.weight" in str(error)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["eval", "--task", "words", "-o", "x", "--threshold", "abc"], "--threshold should be a number, not 'abc'."),
        (["generate", "x", "--seed", "1.5"], "--seed should be a whole number, not '1.5'."),
        (["generate", "x", "--eos-token-id", "end"], "--eos-token-id should be a whole number, not 'end'."),
        (["bench", "decode", "--batch", "many"], "--batch should be a whole number, not 'many'."),
    ],
)
def test_a_flag_that_is_no_number_is_one_sentence(
    args: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_in_process(*args, monkeypatch=monkeypatch) == 2
    assert capsys.readouterr().err == f"rcd: {said}\n"


@pytest.mark.parametrize(
    ("family", "window", "noted"), [("llada", "d2f", True), ("llada", "dual", False), ("sdar", "d2f", False)]
)
def test_d2f_on_a_model_that_was_not_trained_for_it_is_noted(
    family: str, window: str, noted: bool, tmp_path: Path
) -> None:
    rcd.Pipeline(toy(family, seed=2, tokenizer=toy_tokenizer(128))).save(tmp_path / "model")
    model = ["--model", str(tmp_path / "model"), "--max-new-tokens", "32", "--device", "cpu"]
    (tmp_path / "set.jsonl").write_text('{"question": "the old fox", "answer": "5"}\n')
    file, own = ["--task", str(tmp_path / "set.jsonl"), *model], ["--set", f"window={window}"]
    for args in (
        ["generate", "the old fox", *model, "--window", window],
        ["eval", *file, *own, "-o", str(tmp_path / "eval")],
        ["sweep", *file, *own, "-o", str(tmp_path / "sweep"), "--thresholds", "0.9", "--jobs", "1"],
    ):
        result = CliRunner().invoke(app, args)
        assert result.exit_code == 0, result.output
        assert result.stderr.count("which is what D2F trains LLaDA for") == noted


def test_without_a_network_the_sentence_is_plain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s")
        raise FileNotFoundError("Got: ConnectError") from socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    assert main_in_process("generate", "x", "--model", "org/name", monkeypatch=monkeypatch) == 2
    assert capsys.readouterr().err == (
        "rcd: 'org/name' is no local folder, and the model hub did not give it (the hub cannot be reached); check the "
        "name and the network, or give a folder.\n"
    )


def redirected(how: str, *args: str) -> subprocess.CompletedProcess[str]:
    return finish(["sh", "-c", f'exec "$@" {how}', "sh", sys.executable, "-m", "rcd.cli.main", *args])


def test_streams_that_the_caller_closed_are_empty_ones(folder: str, tmp_path: Path) -> None:
    flags = ["--model", folder, "--device", "cpu", "--max-new-tokens", "2"]
    for how, args in (
        ("<&-", ["generate", "--input", "-", "--output", "-", *flags]),
        ("<&-", ["chat", *flags]),
        (">&-", ["generate", "the old fox", *flags]),
        ("<&- >&- 2>&-", ["generate", "the old fox", *flags]),
    ):
        done = redirected(how, *args)
        assert done.returncode == 0 and not done.stdout and "Traceback" not in done.stderr, (how, args, done)
    nothing = redirected("<&-", "generate", "-", *flags)
    assert nothing.returncode == 2 and nothing.stderr == "rcd: the prompt is empty; give at least one token.\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device")
def test_an_output_that_is_full_is_one_sentence(folder: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "the old fox"}\n')
    flags = ["--model", folder, "--device", "cpu", "--max-new-tokens", "2"]
    for args in (["the old fox"], ["--input", str(tmp_path / "in.jsonl"), "--output", "-"]):
        done = redirected("> /dev/full", "generate", *args, *flags)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1] == (
            "rcd: the output cannot be written (the disk is full); make room, or write it elsewhere."
        )


def test_a_canvas_is_filled_in(folder: str) -> None:
    flags = ["--model", folder, "--device", "cpu", "--threshold", "1", "--json"]
    code, printed, _ = call("generate", "the old", "--canvas", "[MASK:3] sees a [MASK]", *flags)
    found = json.loads(printed)
    assert code == 0 and (len(found["ids"]), found["given"], found["tokens"]) == (6, 2, 4)
    alone = json.loads(call("generate", "--canvas", "the old [MASK:3] sees a [MASK]", *flags)[1])
    assert alone["ids"] == found["ids"]
    by_ids = json.loads(call("generate", "--ids", "2 35", "--canvas", "[MASK:2] 7 [MASK]", *flags)[1])
    assert by_ids["ids"][2] == 7 and by_ids["given"] == 1


def test_of_a_canvas_alone_the_whole_sentence_is_printed(folder: str) -> None:
    flags = ["--model", folder, "--device", "cpu", "--threshold", "1", "--eos-suppression", "logits_all"]
    for prompt in ([], [""]):
        given = ["generate", *prompt, "--canvas", "the old [MASK:3] sees a [MASK].", *flags]
        result = CliRunner().invoke(app, given)
        assert result.exit_code == 0 and result.stdout.startswith("the old ") and " sees a " in result.stdout
        assert "does not know" not in result.stderr


def test_masks_that_are_read_as_text_are_said(folder: str) -> None:
    runner, flags = CliRunner(), ["--model", folder, "--device", "cpu", "--max-new-tokens", "4"]
    told = runner.invoke(app, ["generate", "the old [MASK]", *flags]).stderr
    assert "note: [MASK] in a prompt is text like any other; give masks with --canvas" in told
    told = runner.invoke(app, ["generate", "the old", "--canvas", r"\[MASK] is [MASK]", *flags]).stderr
    assert "does not know" in told and "in a prompt" not in told


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["a", "--canvas", "[MASK:x]"], "is no number of masks"),
        (["a", "--canvas", "the fox"], "has no mask"),
        (["a", "--canvas", "[MASK:9]", "--max-new-tokens", "4"], "has 9 tokens and max_new_tokens is 4"),
        (["--canvas", "[MASK:2] fox"], "the prompt is empty"),
        (["--ids", "5", "--canvas", "a [MASK]"], "--ids takes whole numbers"),
        (["--canvas", "a [MASK]", "--input", "x", "--output", "y"], "--canvas is for a single prompt"),
    ],
)
def test_a_canvas_that_cannot_be_filled_in_is_one_sentence(folder: str, args: list[str], said: str) -> None:
    code, _, error = call("generate", *args, "--model", folder, "--device", "cpu")
    assert code and isinstance(error, rcd.RCDError) and said in str(error)
