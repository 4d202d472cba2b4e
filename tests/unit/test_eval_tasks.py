"""Tasks: names, files and hub sets become problems with whole prompts; bad input is one sentence."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rcd import registry
from rcd.data.tasks.base import Problem, problems
from rcd.errors import RCDError
from rcd.evaluate import tasks
from rcd.evaluate.grading import grade
from rcd.evaluate.tasks import find, load, new_tokens

ROWS = [
    {"id": "a/1", "question": "What is 2 + 3?", "answer": "5"},
    {"problem": "Half of {one}?", "solution": r"It is \boxed{\frac{1}{2}}."},
    {"question": "Nine pens at 2 dollars?", "answer": "9 * 2 = 18\n#### 18"},
    {"question": "What is 7?", "answer": 7},
]
ASKED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def written(folder: Path, rows: list[Any], name: str = "set.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_registry_names_every_task_and_its_facts() -> None:
    for name in registry.names("task"):
        task = find(name)
        assert task.name == name and task.about and "{question}" in task.template and new_tokens(name) > 0
        assert (task.hub is None) == (name in ("words", "sudoku", "mixed"))


def test_a_file_is_a_task(tmp_path: Path) -> None:
    path = written(tmp_path, ROWS)
    found = load(path)
    assert [problem.answer for problem in found] == ["5", r"\frac{1}{2}", "18", "7"]
    assert [problem.name for problem in found] == ["a/1", "set.jsonl 1", "set.jsonl 2", "set.jsonl 3"]
    assert {problem.task for problem in found} == {"set.jsonl"}
    assert found[0].question == "What is 2 + 3?" and found[1].question == "Half of {one}?"  # as they stand
    assert load(str(path)) == found and load(path, limit=2) == found[:2] and load(path, shots=0) == found
    assert new_tokens(path) == 4096
    assert grade(found[1], r"\boxed{0.5}") and not grade(found[1], r"\boxed{2}")
    zipped = tmp_path / "set.jsonl.gz"
    zipped.write_bytes(gzip.compress(path.read_bytes()))
    assert [problem.question for problem in load(zipped)] == [problem.question for problem in found]


def test_a_named_task_takes_its_rows_from_a_path(tmp_path: Path) -> None:
    path = written(tmp_path, ROWS)
    for name in ("gsm8k", "math500", "aime24", "gsm1k", "gsm-plus"):
        found = load(name, path=path)
        assert [problem.answer for problem in found] == ["5", r"\frac{1}{2}", "18", "7"]
        assert {problem.task for problem in found} == {name} and found[1].name == f"{name} 1"
    found = load("minerva_math", path=path, shots=0)
    assert found[0].question == "What is 2 + 3?" + ASKED and found[1].answer == r"\frac{1}{2}"


def test_an_answer_may_say_that_there_is_none(tmp_path: Path) -> None:
    (problem,) = load("gsm-plus", path=written(tmp_path, [{"question": "How many?", "answer": "None"}]))
    assert grade(problem, r"\boxed{\text{None}}") and not grade(problem, r"\boxed{3}")


@pytest.mark.parametrize("name", ["words", "sudoku", "mixed"])
def test_generated_tasks_draw_the_test_split_by_seed(name: str) -> None:
    found = load(name, limit=4, seed=3)
    assert found == list(problems(name, "test", 4, seed=3)) and found != load(name, limit=4)
    assert all(grade(problem, problem.solution) for problem in found)
    assert len(load(name)) == tasks.DRAWN


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{oops", r"line 2 of .*set\.jsonl is not valid JSON"),
        ("[1]", r"line 2 of .*set\.jsonl is no JSON object"),
        ('{"answer": "5"}', r"line 2 of .*set\.jsonl has no question \(or problem\); its fields are: answer"),
        ('{"question": "How many?"}', r"line 2 of .*set\.jsonl has no answer \(or a solution"),
        ('{"question": "How many?", "solution": "It is 5."}', r"line 2 of .*set\.jsonl has no answer"),
        *(
            (f'{{"question": "How many?", "answer": {answer}}}', r"the answer of line 2 of .*set\.jsonl is no text")
            for answer in ("null", "[1]", '{"a": 1}', "true")
        ),
        *(
            (f'{{"question": {question}, "answer": "5"}}', r"the question of line 2 of .*set\.jsonl is empty or no")
            for question in ('["How many?"]', "5", '" "', "null")
        ),
        ('{"question": "How many?", "answer": " "}', r"line 2 of .*set\.jsonl has an empty answer"),
        ('{"question": "How many?", "answer": "#### "}', r"line 2 of .*set\.jsonl has an empty answer"),
        (
            '{"question": "How many?", "answer": "\\\\frac{1}\\n{"}',
            r"the answer '\\frac\{1\} \{' of line 2 of .*set\.jsonl cannot be read",
        ),
    ],
)
def test_a_bad_row_is_named_by_its_line(row: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + row + "\n")
    with pytest.raises(RCDError, match=said) as error:
        load(path)
    assert "\n" not in str(error.value)
    assert len(load(path, limit=1)) == 1


def test_a_file_that_is_no_text_is_called_so(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes(b"\x80\x03 not a text \xff")
    with pytest.raises(RCDError, match=r"set\.jsonl is no text file in UTF-8; give a JSONL file\.$"):
        load(path)


def test_bad_requests_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, ROWS)
    empty = written(tmp_path, [], "empty.jsonl")
    for said, call in {
        "unknown task 'gms8k'.*'gsm8k'.*choose from: aime24": lambda: load("gms8k"),
        "there is no file 'none.jsonl'": lambda: load("none.jsonl"),
        "there is no file 'none.jsonl' for gsm8k": lambda: load("gsm8k", path="none.jsonl"),
        "is a folder": lambda: load(tmp_path),
        "holds no problems": lambda: load(empty),
        "limit must be a whole number": lambda: load(path, limit=0),
        "no worked examples": lambda: load("math500", path=path, shots=2),
        "words has no worked examples": lambda: load("words", shots=2),
        "words is generated": lambda: load("words", path=path),
        "is a file itself": lambda: load(path, path=path),
        "shots must be": lambda: load("gsm8k", path=path, shots=-1),
    }.items():
        with pytest.raises(RCDError, match=said):
            call()


# ---- hub sets, with a stand-in for the datasets package


def hub(monkeypatch: pytest.MonkeyPatch, load_dataset: Any) -> None:
    module: Any = ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_a_hub_set_is_asked_for_by_its_name_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: str | None, split: str) -> list[dict[str, Any]]:
        asked.append((name, config, split))
        return [{"ID": "2024-I-1", "Problem": "What is 5 squared?", "Answer": 25}]

    hub(monkeypatch, load_dataset)
    assert load("aime24") == [Problem("aime24", "2024-I-1", "What is 5 squared?" + ASKED, "25", "25")]
    assert load("gsm8k")[0].answer == "25"
    hub(monkeypatch, lambda *_, **__: [{"text": "What?"}])
    with pytest.raises(RCDError, match=r"row 0 of math-ai/aime25 has no question"):
        load("aime25")
    assert asked == [("Maxwell-Jia/AIME_2024", None, "train"), ("openai/gsm8k", "main", "test")]


def test_a_limit_holds_some_of_every_subject(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, config: str, split: str) -> list[dict[str, Any]]:
        count = 2 if config == "algebra" else 1
        return [{"problem": f"{config} {n}", "solution": rf"\boxed{{{n}}}"} for n in range(count)]

    hub(monkeypatch, load_dataset)
    found = load("minerva_math", shots=0)
    assert len(found) == 8 and found[-1].name == "minerva_math algebra 1"
    first = load("minerva_math", shots=0, limit=7)
    assert first == found[:7] and len({problem.name for problem in first}) == 7
    assert {problem.name.split()[1] for problem in first} == set(tasks.MATH_SUBJECTS)


def test_without_network_or_package_the_path_is_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network")

    hub(monkeypatch, load_dataset)
    with pytest.raises(RCDError, match=r"'openai/gsm8k' could not be had \(the hub cannot be reached\).*--path"):
        load("gsm8k")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RCDError, match=r"pip install datasets; or .*--path"):
        load("gsm8k")


# ---- worked examples, with a stand-in for the lm_eval package


@pytest.fixture
def lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "lm_eval" / "tasks"
    (folder / "minerva_math").mkdir(parents=True)
    (folder / "gsm8k").mkdir()
    (folder / "minerva_math" / "utils.py").write_text(
        'raise ImportError("never run")\ndef list_fewshot_samples():\n'
        '    return [{"problem": "P1?", "solution": "S1."}, {"problem": "P2?", "solution": "S2.", "few_shot": "1"}]\n'
    )
    (folder / "gsm8k" / "gsm8k-cot.yaml").write_text(
        "fewshot_config:\n  samples:\n  - question: Q1?\n    target: T1.\n  - question: Q2?\n    target: T2.\n"
    )
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "lm_eval")])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec if name == "lm_eval" else None)
    return folder


def test_worked_examples_come_from_lm_eval_in_its_form(lm_eval: Path, tmp_path: Path) -> None:
    path = written(tmp_path, ROWS)
    found = load("minerva_math", path=path, limit=1, shots=2)[0]
    shown = "Problem:\nP1?\n\nSolution: S1.\n\nProblem:\nP2?\n\nSolution: S2.\n\n"
    assert found.question == shown + "Problem:\nWhat is 2 + 3?\n\nSolution:"
    assert load("gsm8k", path=path, limit=1, shots=1)[0].question == "Q: Q1?\nA: T1.\n\nQ: What is 2 + 3?\nA:"
    assert load("gsm8k", path=path, limit=1)[0].question == "What is 2 + 3?" + ASKED
    with pytest.raises(RCDError, match="shots must be a whole number from 0 to 2, not 4"):
        load("minerva_math", path=path)


def test_what_a_model_adds_behind_its_answer_is_not_graded(lm_eval: Path, tmp_path: Path) -> None:
    path = written(tmp_path, ROWS)
    text = r" It is \boxed{5}." + "\n\nProblem:\nAnother?\n\nSolution: " + r"\boxed{6}"
    assert grade(load("minerva_math", path=path, limit=1, shots=1)[0], text)
    assert not grade(load("minerva_math", path=path, limit=1, shots=0)[0], text)
    assert grade(load("gsm8k", path=path, limit=1, shots=1)[0], " The answer is 5.\n\nQ: And 6?\nA: The answer is 6.")


def test_without_lm_eval_or_with_another_one_no_shots_are_the_way_out(
    lm_eval: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, ROWS)
    (lm_eval / "minerva_math" / "utils.py").write_text("other = 1\n")
    with pytest.raises(RCDError, match=r"not where lm-eval 0\.4 has them.*--shots 0"):
        load("minerva_math", path=path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RCDError, match=r"pip install lm-eval; or ask for none \(--shots 0\)"):
        load("minerva_math", path=path)
