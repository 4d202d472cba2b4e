"""The tasks that `rcd eval` and `rcd sweep` know: public sets by their hub names, generated ones, and JSONL files."""

from __future__ import annotations

import ast
import importlib.util
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rcd import registry
from rcd.data import hub
from rcd.data.rows import rows_of
from rcd.data.tasks.base import MIXES, Problem, problems
from rcd.errors import RCDError, unknown_name, whole
from rcd.evaluate.answers import boxed, check_gold

BOXED = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."
"""SDAR's evaluation prompt."""
MATH_SUBJECTS = (
    "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra",
    "precalculus",
)  # fmt: skip
DRAWN = 500
"""Problems of a generated task where no limit is given."""
IDS = ("id", "unique_id")


@dataclass(frozen=True)
class Exemplars:
    """Worked examples of an lm-eval task, read from that package where it is installed: none is kept here."""

    file: str
    """Below lm_eval/tasks: a YAML task, or the Python file with its `list_fewshot_samples`."""
    prompt: str
    stop: str
    """Where a model begins an example of its own; what follows is not graded."""


@dataclass(frozen=True)
class Task:
    name: str
    about: str
    max_new_tokens: int
    hub: str | None = None
    configs: tuple[str | None, ...] = (None,)
    split: str = "test"
    fields: tuple[str, str] = ("question", "answer")
    """The hub set's names of the two; a file may use any that `load` knows."""
    template: str = BOXED
    exemplars: Exemplars | None = None
    shots: int = 0
    """Unless others are asked for."""


COT = Exemplars("gsm8k/gsm8k-cot.yaml", "Q: {question}\nA:", "\nQ:")
MINERVA = Exemplars("minerva_math/utils.py", "Problem:\n{question}\n\nSolution:", "\nProblem:")

GSM8K = Task(
    "gsm8k", "GSM8K test: 1,319 school problems (with --shots: lm-eval's gsm8k_cot)", 4096,
    "openai/gsm8k", ("main",), exemplars=COT,
)  # fmt: skip
MATH500 = Task(
    "math500", "MATH-500: 500 competition problems", 4096, "HuggingFaceH4/MATH-500", fields=("problem", "answer")
)
MINERVA_MATH = Task(
    "minerva_math", "the 5,000 test problems of MATH, 4-shot as lm-eval's minerva_math (0-shot: the prompt of math500)",
    512, "EleutherAI/hendrycks_math", MATH_SUBJECTS, fields=("problem", "solution"), exemplars=MINERVA, shots=4,
)  # fmt: skip
AIME24 = Task(
    "aime24", "AIME 2024: 30 problems", 16_384, "Maxwell-Jia/AIME_2024", split="train", fields=("Problem", "Answer")
)
AIME25 = Task("aime25", "AIME 2025: 30 problems", 16_384, "math-ai/aime25", fields=("problem", "answer"))
GSM1K = Task("gsm1k", "GSM1K: new problems in the style of GSM8K", 4096, "ScaleAI/gsm1k")
GSM_PLUS = Task(
    "gsm-plus", "GSM-Plus: GSM8K's problems changed in eight ways; some have no answer", 4096, "qintongli/GSM-Plus"
)
WORDS = Task("words", "generated: arithmetic in words, of several steps", 256, template="{question}")
SUDOKU = Task("sudoku", "generated: 6x6 sudoku", 256, template="{question}")
MIXED = Task("mixed", "generated: words and sudoku in turn", 256, template="{question}")


def load(
    task: str | Path,
    *,
    limit: int | None = None,
    seed: int = 0,
    path: str | Path | None = None,
    shots: int | None = None,
) -> list[Problem]:
    """The first `limit` problems of a task (all where it is None), each with its whole prompt as `question`.

    `task` is a name (`rcd list task`) or a JSONL file; `path` a JSONL file to take a named task's rows from. A row has
    `question` or `problem`, and `answer` or a `solution` with a box; also `id`. `seed` draws a generated task.
    """
    found = find(task)
    if limit is not None:
        whole("limit", limit, least=1)
    if shots:
        whole("shots", shots, least=0)
        if found.exemplars is None:
            raise RCDError(f"{found.name} has no worked examples to show; leave the shots out.")
    if found.name in MIXES and found.hub is None:
        if path is not None:
            raise RCDError(f"{found.name} is generated and has no file; leave the path out, or give it as the task.")
        return list(problems(found.name, "test", limit or DRAWN, seed=seed))
    if found.hub is None:
        if path is not None:
            raise RCDError(f"the task {task} is a file itself; leave the path out.")
        path = task
    rows = _file_rows(found, path) if path is not None else _hub_rows(found)
    prompt = _prompt(found, found.shots if shots is None else shots)
    drawn = [_problem(found, prompt, *row, check=path is not None) for row in itertools.islice(rows, limit)]
    if not drawn:
        raise RCDError(f"{path or found.hub} holds no problems.")
    return drawn


def find(task: str | Path) -> Task:
    """The task of that name, or the one that a JSONL file is."""
    name = str(task)
    if name in registry.names("task"):
        found: Task = registry.get("task", name)
        return found
    path = Path(task).expanduser()
    if path.exists():
        name = path.name if path.suffix else path.name + ".jsonl"
        return Task(name, f"problems of {path}", MATH500.max_new_tokens, template="{question}")  # asked as they stand
    if path.suffix in (".jsonl", ".json", ".gz") or len(path.parts) > 1:
        raise RCDError(f"there is no file {name!r}; give a JSONL file or a task: {', '.join(registry.names('task'))}.")
    raise RCDError(f"{unknown_name('task', name, registry.names('task'))} A JSONL file is a task too.")


def new_tokens(task: str | Path) -> int:
    """max_new_tokens, where neither the user nor the checkpoint names it."""
    return find(task).max_new_tokens


def own_part(problem: Problem, text: str) -> str:
    """The text up to where the model goes on with examples of its own; all of it without worked examples."""
    task = registry.get("task", problem.task) if problem.task in registry.names("task") else None
    if task is None or task.exemplars is None or not problem.question.endswith(_end(task.exemplars)):
        return text
    return text.partition(task.exemplars.stop)[0]


Row = tuple[str, str, dict[str, Any]]
"""(where it stands, for messages; a name, for rows without an id; the row)."""


def _file_rows(task: Task, path: str | Path) -> Iterator[Row]:
    place = Path(path).expanduser()
    if not place.exists():
        raise RCDError(f"there is no file {str(path)!r} for {task.name}; give a JSONL file.")
    rows = rows_of(str(place.absolute()))
    return ((f"{where} of {place}", f"{task.name} {number}", row) for number, (where, row) in enumerate(rows))


def _hub_rows(task: Task) -> Iterator[Row]:
    """The configurations in turn, so that any limit holds some of each."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise RCDError(
            f"{task.name} is loaded from the hub with the datasets package: pip install datasets; or give its rows as "
            "a JSONL file (--path FILE)."
        ) from error
    try:
        with hub.quiet():
            sets = [load_dataset(task.hub, config, split=task.split) for config in task.configs]
    except Exception as error:  # the client's errors are many: no network, no such name, gated
        raise RCDError(
            f"the data set {task.hub!r} could not be had ({hub.why(error)}); check the network, or give its rows "
            "as a JSONL file (--path FILE)."
        ) from error
    return _in_turn([_set_rows(task, config, rows) for config, rows in zip(task.configs, sets, strict=True)])


def _set_rows(task: Task, config: str | None, rows: Iterable[dict[str, Any]]) -> Iterator[Row]:
    part = f" {config}" if len(task.configs) > 1 else ""
    for number, row in enumerate(rows):
        yield f"row {number} of {task.hub}{part}", f"{task.name}{part} {number}", dict(row)


def _in_turn(sources: list[Iterator[Row]]) -> Iterator[Row]:
    for rows in itertools.zip_longest(*sources):
        yield from (row for row in rows if row is not None)


def _problem(task: Task, prompt: str, where: str, name: str, row: dict[str, Any], *, check: bool) -> Problem:
    """`check`: the user can mend the row, so an answer that cannot be read is refused."""
    held = {key.lower(): value for key, value in row.items()}
    asked = (task.fields[0].lower(), "question", "problem")
    question = _text(held, asked, numbers=False)
    if question is None:
        raise _lacks(where, row, asked, "question (or problem)", "empty or no text")
    answers = (task.fields[1].lower(), "answer") if task.fields[1] != "solution" else ("answer",)
    told = _text(held, answers)
    solution = _text(held, ("solution",)) or told or ""
    gold = _gold(told) if told is not None else boxed(solution)
    if gold is None:
        raise _lacks(where, row, answers, "answer (or a solution with \\boxed{...})", "no text or number")
    if check or not gold:
        check_gold(gold, where)
    known = next((str(held[key]) for key in IDS if isinstance(held.get(key), (str, int)) and str(held[key])), name)
    return Problem(task.name, known, prompt.replace("{question}", question), solution, gold)


def _lacks(where: str, row: dict[str, Any], names: Iterable[str], what: str, bad: str) -> RCDError:
    """None of these fields is there, or the one that is there is `bad`."""
    there = [name for name in row if name.lower() in names]
    if there:
        return RCDError(f"the {there[0]} of {where} is {bad}; mend it or drop the row.")
    return RCDError(f"{where} has no {what}; its fields are: {', '.join(row) or 'none'}.")


def _text(row: dict[str, Any], names: Iterable[str], numbers: bool = True) -> str | None:
    """The first of these fields that holds a text (or a number)."""
    for name in names:
        value = row.get(name)
        if numbers and isinstance(value, (int, float)) and not isinstance(value, bool):
            return str(value)
        if isinstance(value, str) and (value.strip() or name == "answer"):
            return value.strip()
    return None


def _gold(told: str) -> str:
    """The answer itself: behind GSM8K's mark, in a solution's last box, or all of it."""
    if "####" in told:
        return told.rpartition("####")[2].strip()
    return boxed(told) or told


def _prompt(task: Task, shots: int) -> str:
    """With a place for the question; joined as in lm-eval: a space before an answer, an empty line between examples."""
    if not shots or task.exemplars is None:
        return task.template
    ask = task.exemplars.prompt
    shown = [ask.replace("{question}", question) + " " + answer for question, answer in _exemplars(task, shots)]
    return "\n\n".join([*shown, ask])


def _end(exemplars: Exemplars) -> str:
    return exemplars.prompt.rpartition("{question}")[2]


def _exemplars(task: Task, shots: int) -> list[tuple[str, str]]:
    """(question, worked answer) of the first `shots`. The file is read, never run."""
    assert task.exemplars is not None
    package = importlib.util.find_spec("lm_eval")
    if package is None or not package.submodule_search_locations:
        raise RCDError(
            f"the worked examples of {task.name} come with lm-eval: pip install lm-eval; or ask for none (--shots 0)."
        )
    path = Path(package.submodule_search_locations[0]) / "tasks" / task.exemplars.file
    try:
        held = [{str(key): value for key, value in sample.items()} for sample in _samples(path)]
        pairs = [(str(s.get("question") or s["problem"]), str(s.get("target") or s["solution"])) for s in held]
    except Exception as error:
        raise RCDError(
            f"the worked examples of {task.name} are not where lm-eval 0.4 has them ({path}); install that version, or "
            "ask for none (--shots 0)."
        ) from error
    whole("shots", shots, least=0, most=len(pairs))
    return pairs[:shots]


def _samples(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name == "list_fewshot_samples":
                given = next(each.value for each in node.body if isinstance(each, ast.Return))
                return list(ast.literal_eval(given or ast.List([])))
        raise LookupError("list_fewshot_samples")
    import yaml

    return list(yaml.safe_load(text)["fewshot_config"]["samples"])
