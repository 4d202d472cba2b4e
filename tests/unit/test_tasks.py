"""The generated tasks: right, pure, and a test side of known words in templates and numbers that train never has."""

from __future__ import annotations

import itertools
import random
import re
from functools import cache
from pathlib import Path

import pytest

from rcd.data.tasks import sudoku, words
from rcd.data.tasks.base import MIXES, Problem, problem, problems
from rcd.data.tasks.vocabulary import task_tokenizer
from rcd.errors import RCDError

COUNT = 2000
SIDES = list(itertools.product(("words", "sudoku"), ("train", "test")))
NUMBER_WORDS = {"doubles": 2, "twice": 2, "triples": 3, "three times": 3, "quadruples": 4, "four times": 4}


@cache
def sample(task: str, split: str) -> list[Problem]:
    return list(problems(task, split, COUNT))


def sentences(text: str) -> set[str]:
    """Without names, things and numbers."""
    parts = re.findall(r"[^.?]+[.?]", text)
    return {
        re.sub(r"\w+", lambda m: "_" if m[0] in words.FILLERS or m[0].isdigit() else m[0], p).strip() for p in parts
    }


def cells(text: str) -> list[int]:
    return [0 if cell == "_" else int(cell) for cell in text.removeprefix(sudoku.INSTRUCTION).replace("/", "").split()]


@pytest.mark.parametrize(("task", "split"), SIDES)
def test_a_problem_is_a_pure_function_of_its_arguments(task: str, split: str) -> None:
    order = random.Random(1).sample(range(COUNT), 100)
    sudoku.base.cache_clear()
    assert [problem(task, split, index) for index in order] == [sample(task, split)[index] for index in order]
    assert problem(task, split, 5, seed=1) != problem(task, split, 5, seed=0)
    assert len({item.question for item in sample(task, split)}) > 0.99 * COUNT


@pytest.mark.parametrize("mix", MIXES)
def test_problems_can_be_taken_from_any_place_on(mix: str) -> None:
    assert list(problems(mix, "train", 5, first=3)) == list(problems(mix, "train", 8))[3:]
    tasks = [item.task for item in problems(mix, "test", 4)]
    assert tasks == (["words", "sudoku"] * 2 if mix == "mixed" else [mix] * 4)


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_equation_is_true_and_made_of_what_is_known(split: str) -> None:
    for item in sample("words", split):
        given = [int(number) for number in re.findall(r"\d+", item.question)]
        known = {*given, *(value for word, value in NUMBER_WORDS.items() if word in item.question)}
        body, answer = item.solution.split(" Answer: ")
        steps = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)\.", body)
        assert " ".join(f"{a} {sign} {b} = {c}." for a, sign, b, c in steps) == body
        assert 1 <= len(steps) <= words.MOST_EQUATIONS == 4
        used: set[int] = set()
        for left, sign, right, result in steps:
            a, b, c = int(left), int(right), int(result)
            assert c == {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[sign], item
            assert {a, b} <= known and 1 <= c <= 99, item
            used |= {a, b}
            known.add(c)
        assert set(given) <= used, item
        assert answer == item.answer == steps[-1][3]


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_story_is_told_in_the_order_of_its_numbers(split: str) -> None:
    told = 0
    for index in range(40):
        story = words._story(random.Random(index))
        text = words._text(story, words.tables(split))
        if text is not None:  # else it was too long
            assert [int(number) for number in re.findall(r"\d+", text)] == story.numbers
            told += 1
    assert told > 10


def brute(grid: list[int]) -> int:
    """Solutions, by trying every digit in the first empty cell."""
    if 0 not in grid:
        return 1
    cell = grid.index(0)
    row, column = divmod(cell, 6)
    peers = {
        grid[k]
        for k in range(36)
        if k // 6 == row or k % 6 == column or (k // 12, k % 6 // 3) == (row // 2, column // 3)
    }
    return sum(brute([*grid[:cell], digit, *grid[cell + 1 :]]) for digit in set(range(1, 7)) - peers)


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_sudoku_has_one_solution_and_it_is_the_answer(split: str) -> None:
    lines = [[6 * k + j for j in range(6)] for k in range(6)] + [[6 * j + k for j in range(6)] for k in range(6)]
    boxes = [[12 * (k // 2) + 3 * (k % 2) + 6 * i + j for i in range(2) for j in range(3)] for k in range(6)]
    for index, item in enumerate(sample("sudoku", split)):
        puzzle, grid = cells(item.question), cells(item.solution)
        assert item.solution == item.answer and len(puzzle) == len(grid) == 36
        assert all({grid[cell] for cell in unit} == set(range(1, 7)) for unit in lines + boxes)
        assert all(clue in (0, digit) for clue, digit in zip(puzzle, grid, strict=True))
        assert sudoku.FEWEST_CLUES <= sum(map(bool, puzzle)) <= sudoku.MOST_CLUES
        if index % 16 == 0:
            assert sudoku.solutions(puzzle) == 1 and sudoku.solve(puzzle) == grid
        if index % 256 == 0:
            assert brute(puzzle) == 1


def test_the_solver_counts_and_refuses() -> None:
    grid = cells(sample("sudoku", "train")[0].answer)
    assert sudoku.solutions([0] * 36, limit=5) == 5
    assert sudoku.solutions(grid) == 1 and sudoku.solve(grid) == grid
    clash = [1, 1, *[0] * 34]
    assert sudoku.solutions(clash) == 0 and sudoku.solve(clash) is None


def test_train_and_test_share_no_numbers() -> None:
    tuples = [{tuple(re.findall(r"\d+", p.question)) for p in sample("words", split)} for split in ("train", "test")]
    assert not tuples[0] & tuples[1]


def test_train_and_test_share_no_sentence() -> None:
    train, test = ({s for p in sample("words", split) for s in sentences(p.question)} for split in ("train", "test"))
    assert len(train) > 1000 and len(test) > 500
    assert not train & test


def test_every_kind_of_sentence_is_in_both_splits() -> None:
    for kind in words.TEMPLATES:
        train, test = words.tables("train")[kind], words.tables("test")[kind]
        assert 0.1 < len(test) / (len(train) + len(test)) < 0.3, kind


def test_train_has_every_word_of_test() -> None:
    for split in ("train", "test"):
        used = {word for p in sample("words", split) for word in re.findall("[A-Za-z]+|[^A-Za-z0-9 ]", p.question)}
        assert used <= words.all_words() | set(".,?")  # what fills the templates' slots is drawn alike for both
    assert len(words.all_words()) > 900
    train, test = (
        {word for table in words.tables(split).values() for text, _ in table for word in re.findall(r"\w+", text)}
        for split in ("train", "test")
    )
    assert train == test


def canonical(puzzle: list[int]) -> tuple[int, ...]:
    """The least of all puzzles that a symmetry leads to."""
    best: tuple[int, ...] = (9,)
    for rows, columns in itertools.product(sudoku.ROW_ORDERS, sudoku.COLUMN_ORDERS):
        labels = {0: 0}
        best = min(best, tuple(labels.setdefault(puzzle[6 * r + c], len(labels)) for r in rows for c in columns))
    return best


def test_a_symmetry_changes_neither_signature_nor_canonical_form() -> None:
    for number in (0, 1):
        same = [
            cells(problem("sudoku", "train", sudoku.PER_BASE * number + k).question) for k in range(sudoku.PER_BASE)
        ]
        assert len({sudoku.signature(puzzle) for puzzle in same}) == 1
        assert len({canonical(puzzle) for puzzle in same[:2]}) == 1


def test_train_and_test_are_equally_hard() -> None:
    """Clues on average; train has 31 puzzles in 2,000 problems, so its mean is of 400 bases instead."""
    train = [36 - sudoku.base("train", number, 0)[0].count("_") for number in range(400)]
    test = [36 - item.question.count("_") for item in sample("sudoku", "test")]
    assert abs(sum(train) / len(train) - sum(test) / len(test)) < 0.25


def test_train_and_test_share_no_puzzle_up_to_symmetry() -> None:
    bases = {
        split: [cells(problem("sudoku", split, sudoku.PER_BASE * k).question) for k in range(150)]
        for split in ("train", "test")
    }
    for split, puzzles in bases.items():
        assert {sudoku.split_of(puzzle) for puzzle in puzzles} == {split}
    train, test = ({sudoku.signature(puzzle) for puzzle in bases[split]} for split in ("train", "test"))
    assert not train & test and len(train) > 130
    train_forms, test_forms = ({canonical(puzzle) for puzzle in bases[split][:12]} for split in ("train", "test"))
    assert not train_forms & test_forms and len(train_forms) == len(test_forms) == 12


@pytest.mark.parametrize("reload", ["none", "fast", "auto"])
def test_the_tokenizer_gives_the_text_back(reload: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokens = task_tokenizer()
    if reload != "none":
        tokens.save_pretrained(tmp_path)
        tokens = (AutoTokenizer if reload == "auto" else PreTrainedTokenizerFast).from_pretrained(tmp_path)
    size = len(tokens)
    assert size % 64 == 0 and tokens.unk_token_id == 0
    assert tokens.convert_ids_to_tokens([size - 3, size - 2, size - 1]) == ["<|MASK|>", "<|im_end|>", "<|endoftext|>"]
    assert tokens.mask_token_id == size - 3 and tokens.pad_token_id == tokens.eos_token_id == size - 1
    for task, split in SIDES:
        items = sample(task, split)[: COUNT if reload == "none" else 200]
        texts = [item.question for item in items] + [item.solution for item in items]
        ids = tokens(texts)["input_ids"]
        assert [tokens.decode(row) for row in ids] == texts
        assert all(min(row) > 0 and max(row) < size - 3 for row in ids)
    assert len(tokens("0 10 999")["input_ids"]) == 6  # digit by digit
    grid = sample("sudoku", "test")[0].question
    assert tokens(grid.replace(" / ", " \n") + "\n")["input_ids"] == tokens(grid)["input_ids"]  # written in lines
    assert tokens("no zebra")["input_ids"].count(0) >= 1


@pytest.mark.parametrize(("task", "split"), SIDES)
def test_lengths_are_moderate(task: str, split: str) -> None:
    tokens = task_tokenizer()
    items = sample(task, split)
    lengths = [len(ids) for ids in tokens([item.question for item in items])["input_ids"]]
    assert max(lengths) <= 54 if task == "words" else set(lengths) == {64}
    assert max(map(len, tokens([item.solution for item in items])["input_ids"])) <= 41


def test_unknown_names_are_refused() -> None:
    with pytest.raises(RCDError, match=r"unknown task 'word' .did you mean 'words'"):
        problem("word", "train", 0)
    with pytest.raises(RCDError, match="unknown split 'valid'; choose from: test, train"):
        problem("words", "valid", 0)
    with pytest.raises(RCDError, match="unknown mix 'all'; choose from: mixed, sudoku, words"):
        problems("all", "train", 1)
    with pytest.raises(RCDError, match="count must be a whole number of 0 or more"):
        problems("mixed", "test", -1)
    with pytest.raises(RCDError, match="unknown split"):
        problems("mixed", "dev", 1)
