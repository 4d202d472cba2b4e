"""A generated problem and the ways to ask for one or many."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from rcd.data.tasks import sudoku, words
from rcd.errors import one_of, whole

TASKS = {"words": words.draw, "sudoku": sudoku.draw}
SPLITS = ("train", "test")
MIXES = (*TASKS, "mixed")


@dataclass(frozen=True)
class Problem:
    task: str
    name: str
    """Such as `words test 17`."""
    question: str
    solution: str
    """The response, step by step."""
    answer: str
    """What a grader compares with: the number, or the solved grid."""


def problem(task: str, split: str, index: int, seed: int = 0) -> Problem:
    """A pure function of its arguments."""
    one_of("task", task, TASKS)
    one_of("split", split, SPLITS)
    return Problem(task, f"{task} {split} {index}", *TASKS[task](split, index, seed))


def problems(mix: str, split: str, count: int, seed: int = 0, first: int = 0) -> Iterator[Problem]:
    """`count` problems from index `first` on; `mixed` takes the tasks in turn."""
    one_of("mix", mix, MIXES)
    one_of("split", split, SPLITS)
    tasks = tuple(TASKS) if mix == "mixed" else (mix,)
    places = itertools.islice(itertools.count(whole("first", first, least=0)), whole("count", count, least=0))
    return (problem(tasks[place % len(tasks)], split, place // len(tasks), seed) for place in places)
