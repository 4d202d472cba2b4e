"""Grading is exact, and no text raises."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from rcd.data.tasks.base import problems
from rcd.errors import RCDError
from rcd.evaluate.grading import grade

SOLVED = "1 2 3 4 5 6 / 4 5 6 1 2 3 / 2 3 1 5 6 4 / 5 6 4 2 3 1 / 3 1 2 6 4 5 / 6 4 5 3 1 2"
CLUES = "Sudoku: _ _ 3 4 5 6 / 4 5 6 1 2 3 / 2 3 1 5 6 4 / 5 6 4 2 3 1 / 3 1 2 6 4 5 / 6 4 5 3 1 2"
BLANK = "Sudoku: " + " / ".join(["_ _ _ _ _ _"] * 6)


def words(answer: str = "24") -> Any:
    return SimpleNamespace(task="words", name="w", question="How many?", solution="", answer=answer)


def sudoku(question: str = CLUES) -> Any:
    return SimpleNamespace(task="sudoku", name="s", question=question, solution=SOLVED, answer=SOLVED)


@pytest.mark.parametrize(
    "text",
    [
        "3 * 4 = 12. Answer: 24",
        "Answer: 24.",
        "Answer:24 .\n",
        "Answer: 7. No. Answer: 24",
        "Answer: 024",
        "Answer: +24",
    ],
)
def test_words_right(text: str) -> None:
    assert grade(words(), text)


@pytest.mark.parametrize(
    "text",
    [
        "", "24", "Answer:", "Answer: .", "Answer: 24 25", "Answer: 24 apples", "Answer: 24..", "Answer: 2 4",
        "Answer: 24.0", "Answer: -24", "answer: 24", "Answer: 24 Answer: 25", "Answer: 24 Answer:", "Answer: ２４",
        "Answer: " + "9" * 10_000,
    ],
)  # fmt: skip
def test_words_wrong(text: str) -> None:
    assert not grade(words(), text)


def test_a_negative_answer() -> None:
    assert grade(words("-3"), "Answer: -3.") and not grade(words("-3"), "Answer: 3")


@pytest.mark.parametrize("text", [SOLVED, f"  {SOLVED}\n", SOLVED.replace(" / ", "\n"), SOLVED.replace(" / ", "/")])
def test_sudoku_right(text: str) -> None:
    assert grade(sudoku(), text)


def test_any_valid_grid_counts_that_keeps_the_clues() -> None:
    swapped = SOLVED.translate(str.maketrans("12", "21"))
    assert grade(sudoku(BLANK), swapped)
    assert not grade(sudoku(), swapped)  # valid, but the clues are not kept


@pytest.mark.parametrize(
    "text",
    [
        "", SOLVED + " 1", SOLVED[:-2], SOLVED + " / 1 2 3 4 5 6", SOLVED.replace(" / ", " "), SOLVED[:-1] + "7",
        SOLVED[:-1] + "_", SOLVED[:-1] + "x", "Answer: " + SOLVED, SOLVED.replace(" ", ""),
    ],
)  # fmt: skip
def test_sudoku_of_another_shape_is_wrong(text: str) -> None:
    assert not grade(sudoku(BLANK), text)


def test_rows_columns_and_boxes_are_all_checked() -> None:
    assert grade(sudoku(BLANK), SOLVED)
    latin = " / ".join(" ".join(str((r + c) % 6 + 1) for c in range(6)) for r in range(6))
    assert not grade(sudoku(BLANK), latin)  # rows and columns hold, boxes do not
    assert not grade(sudoku(BLANK), " / ".join(["1 2 3 4 5 6"] * 6))  # only rows hold
    assert not grade(sudoku(BLANK), " / ".join(" ".join([str(n)] * 6) for n in range(1, 7)))  # only columns hold


@pytest.mark.parametrize("task", ["words", "sudoku"])
def test_the_generated_solutions_are_right(task: str) -> None:
    drawn = list(problems(task, "test", 30))
    assert all(grade(each, each.solution) for each in drawn)
    assert not any(grade(each, "") or grade(each, each.question) or grade(each, each.solution[:-1]) for each in drawn)


def test_no_text_raises() -> None:
    draw = random.Random(0)
    pieces = ["Answer:", "24", " ", ".", "/", "\n", "1", "_", "-", "\x00", "é", "²", "9" * 50]
    for _ in range(2000):
        text = "".join(draw.choices(pieces, k=draw.randrange(40)))
        assert grade(words(), text) in (True, False)
        assert grade(sudoku(), text) in (True, False)


def test_a_bad_problem_is_refused() -> None:
    with pytest.raises(RCDError, match="no 6 x 6 grid"):
        grade(sudoku("Sudoku: 1 2"), SOLVED)


def test_every_other_task_goes_to_the_one_grader() -> None:
    problem: Any = SimpleNamespace(task="set.jsonl", name="s 0", question="How many?", solution="", answer="1/2")
    assert grade(problem, r"So \boxed{0.5}.") and not grade(problem, r"So \boxed{2}.") and not grade(problem, "")
