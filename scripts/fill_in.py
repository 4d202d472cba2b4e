"""How well models fill in what they were never trained to: `python scripts/fill_in.py --problems 400`.

Sudokus whose solution is partly given on the canvas, and word problems whose last words are given and whose working is
missing. The models were trained on whole answers alone; figures of the table in docs/decoding.md. A block-causal
model's answers are whole blocks, as in its training: where one ends inside a block, what is behind it stays masks.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable

import rcd
from rcd import DecodeConfig
from rcd.data.tasks.base import Problem, problems
from rcd.data.tasks.sudoku import SIZE
from rcd.evaluate.grading import grade

Layout = Callable[[Problem, list[int], random.Random], list[bool]]
"""Which of the solution's tokens are given."""


def nothing(problem: Problem, ids: list[int], draw: random.Random) -> list[bool]:
    return [False] * len(ids)


def clues(problem: Problem, ids: list[int], draw: random.Random) -> list[bool]:
    """The question's own cells, and the marks between rows."""
    asked = problem.question.rpartition(":")[2].split()
    return [mark != "_" for mark in asked] + [False] * (len(ids) - len(asked))


def cells(count: int) -> Layout:
    """So many of the open cells as well."""

    def given(problem: Problem, ids: list[int], draw: random.Random) -> list[bool]:
        found = clues(problem, ids, draw)
        free = [place for place in range(7 * SIZE - 1) if not found[place]]
        for place in draw.sample(free, min(count, len(free))):
            found[place] = True
        return found

    return given


def last(words: int) -> Layout:
    """So many tokens at the end, the end token not counted among them."""
    return lambda problem, ids, draw: [len(ids) - 1 - words <= place < len(ids) for place in range(len(ids))]


SUDOKU: dict[str, Layout] = {"nothing": nothing, "clues": clues, "clues, 4 cells": cells(4), "clues, 8 cells": cells(8)}
WORDS: dict[str, Layout] = {"nothing": nothing, "the answer": last(3)}


def solved(problem: Problem, result: rcd.Generation) -> bool:
    """A sudoku by its rules; of a word problem the whole working must be the solution's."""
    return result.text == problem.solution if problem.task == "words" else grade(problem, result.text)


def blocks(pipeline: rcd.Pipeline, canvas: list[int]) -> int:
    """The length of an answer: of a block-causal model, whole blocks."""
    b = pipeline.settings.block_length or 1
    return -(-len(canvas) // b) * b if pipeline.settings.attention == "block_causal" else len(canvas)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=400)
    parser.add_argument("--threshold", type=float, default=0.95)
    parser.add_argument("--models", nargs="+", default=["llada-rcd", "llada-seqd", "sdar-rcd", "words-rcd"])
    asked = parser.parse_args()
    print("| model | given | solved | tokens a step |\n|---|---|---|---|")
    for name in asked.models:
        pipeline = rcd.load(f"bundled:{name}")
        task = "words" if name.startswith("words") else "sudoku"
        found = list(problems(task, "test", asked.problems, seed=3))
        mask, end = pipeline.settings.mask_token_id, pipeline.settings.eos_token_ids[0]
        for given, layout in (WORDS if task == "words" else SUDOKU).items():
            draw, canvases = random.Random(0), list[list[int]]()
            for problem in found:
                ids = [*pipeline.encode(problem.solution)[0], end]
                kept = layout(problem, ids, draw)
                canvases.append([token if keep else mask for token, keep in zip(ids, kept, strict=True)])
            config = [DecodeConfig(threshold=asked.threshold, max_new_tokens=blocks(pipeline, one)) for one in canvases]
            results = pipeline.generate([problem.question for problem in found], config, canvas=canvases).results
            right = sum(solved(problem, result) for problem, result in zip(found, results, strict=True))
            tokens, steps = (sum(getattr(one, what) for one in results) for what in ("tokens", "denoising_steps"))
            print(f"| {name} | {given} | {100 * right / len(found):.1f}% | {tokens / steps:.2f} |", flush=True)


if __name__ == "__main__":
    main()
