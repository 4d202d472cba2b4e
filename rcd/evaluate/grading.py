"""Grading: an answer is right or wrong, and no text can raise. Sudoku has its own check; all else is an answer."""

from __future__ import annotations

import re
from itertools import chain
from typing import TYPE_CHECKING

from rcd.errors import RCDError
from rcd.evaluate.answers import right
from rcd.evaluate.tasks import own_part

if TYPE_CHECKING:
    from rcd.data.tasks.base import Problem

SIDE = 6
BOX = (2, 3)
"""Rows and columns of a box."""
DIGITS = frozenset(str(n) for n in range(1, SIDE + 1))
EMPTY = "_"
INTEGER = re.compile(r"\s*([+-]?[0-9]{1,40})\s*\.?\s*")

Grid = list[list[str]]


def grade(problem: Problem, text: str) -> bool:
    """Whether the text solves the problem."""
    if problem.task in GRADERS:
        return GRADERS[problem.task](problem, text)
    return right(problem.answer, own_part(problem, text))


def _words(problem: Problem, text: str) -> bool:
    """The integer behind the last "Answer:" equals the answer; only a full stop may follow it."""
    found = INTEGER.fullmatch(text.rpartition("Answer:")[2]) if "Answer:" in text else None
    return found is not None and right(problem.answer, found[1])


def _sudoku(problem: Problem, text: str) -> bool:
    """Any full grid that keeps every clue and holds each digit once in every row, column and box."""
    clues = _grid(problem.question.rpartition(":")[2], DIGITS | {EMPTY})
    if clues is None:
        raise RCDError(f"the sudoku {problem.name!r} has no 6 x 6 grid in its question; mend the problem.")
    grid = _grid(text, DIGITS)
    if grid is None:
        return False
    kept = all(clue in (EMPTY, cell) for cell, clue in zip(chain(*grid), chain(*clues), strict=True))
    return kept and all(set(unit) == DIGITS for unit in _units(grid))


def _grid(text: str, allowed: frozenset[str]) -> Grid | None:
    """6 rows of 6 cells, rows parted by "/" or by line ends; None where the text is anything else."""
    rows = [row.split() for row in re.split(r"[/\n]", text.strip())]
    whole = len(rows) == SIDE and all(len(row) == SIDE and allowed.issuperset(row) for row in rows)
    return rows if whole else None


def _units(grid: Grid) -> Grid:
    """The rows, the columns and the boxes, each as its six cells."""
    high, wide = BOX
    columns = [list(column) for column in zip(*grid, strict=True)]
    boxes = [
        [grid[top + r][left + c] for r in range(high) for c in range(wide)]
        for top in range(0, SIDE, high)
        for left in range(0, SIDE, wide)
    ]
    return grid + columns + boxes


GRADERS = {"words": _words, "sudoku": _sudoku}
