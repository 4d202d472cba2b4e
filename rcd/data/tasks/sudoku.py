"""Sudokus of 6x6 cells, in boxes of two rows and three columns, each with exactly one solution.

A base puzzle is dug out of a random grid; each serves many problems through symmetries (digits relabelled; rows, bands,
columns and stacks swapped). Bases are dealt to train or test by a hash that no symmetry changes.
"""

from __future__ import annotations

import functools
import itertools
import random
import zlib
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

SIZE, CELLS = 6, 36
PER_BASE = 64
"""So many training problems are the same puzzle but for symmetries."""
TEST_BASES = 4096
"""So many test problems in a row are all of puzzles of their own."""
FEWEST_CLUES, MOST_CLUES = 8, 13
INSTRUCTION = "Fill in the empty cells: each row, column and box of 2 by 3 has 1 to 6. Sudoku: "
"""With it a question has 64 tokens: a whole number of blocks, so that blocks of 64 hold a whole answer."""

ROW = [cell // 6 for cell in range(CELLS)]
COLUMN = [cell % 6 for cell in range(CELLS)]
BOX = [cell // 12 * 2 + cell % 6 // 3 for cell in range(CELLS)]
BITS = [[1 << digit for digit in range(6) if mask >> digit & 1] for mask in range(64)]

ROW_ORDERS = [
    [2 * band + (row ^ swap) for band, swap in zip(bands, swaps, strict=True) for row in range(2)]
    for bands in itertools.permutations(range(3))
    for swaps in itertools.product((0, 1), repeat=3)
]
COLUMN_ORDERS = [
    [3 * stack + column for stack, columns in zip(stacks, orders, strict=True) for column in columns]
    for stacks in itertools.permutations(range(2))
    for orders in itertools.product(itertools.permutations(range(3)), repeat=2)
]
RELABELLINGS = [str.maketrans("123456", "".join(digits)) for digits in itertools.permutations("123456")]


class Search:
    """Backtracking over the emptiest choices first; digit d is the bit 1 << (d - 1)."""

    def __init__(self, cells: Sequence[int]) -> None:
        self.cells = list(cells)
        self.rows, self.columns, self.boxes = [63] * 6, [63] * 6, [63] * 6
        clues = [(cell, digit) for cell, digit in enumerate(cells) if digit]
        self.empty = [cell for cell in range(CELLS) if not cells[cell]]
        self.sound = all(self.free(cell) & 1 << d - 1 and self.toggle(cell, 1 << d - 1) for cell, d in clues)

    def free(self, cell: int) -> int:
        return self.rows[ROW[cell]] & self.columns[COLUMN[cell]] & self.boxes[BOX[cell]]

    def toggle(self, cell: int, bit: int) -> bool:
        self.rows[ROW[cell]] ^= bit
        self.columns[COLUMN[cell]] ^= bit
        self.boxes[BOX[cell]] ^= bit
        return True

    def count(self, limit: int, generator: random.Random | None = None) -> int:
        """Solutions, counted up to `limit`; the cells are left at the last one where the limit is reached."""
        if not self.sound:
            return 0
        rows, columns, boxes, empty = self.rows, self.columns, self.boxes, self.empty
        best, choices, fewest = -1, 0, 7
        for place, cell in enumerate(empty):
            mask = rows[cell // 6] & columns[cell % 6] & boxes[BOX[cell]]
            options = mask.bit_count()
            if options < fewest:
                best, choices, fewest = place, mask, options
                if options < 2:
                    break
        if best < 0:
            return 1
        if not choices:
            return 0
        cell, empty[best] = empty[best], empty[-1]
        empty.pop()
        found, bits = 0, BITS[choices]
        for bit in generator.sample(bits, len(bits)) if generator else bits:
            self.toggle(cell, bit)
            self.cells[cell] = bit.bit_length()
            found += self.count(limit - found, generator)
            if found >= limit:
                return found
            self.toggle(cell, bit)
        self.cells[cell] = 0
        empty.append(cell)
        empty[best], empty[-1] = empty[-1], empty[best]
        return found


def solutions(cells: Sequence[int], limit: int = 2) -> int:
    """How many solutions there are, counted up to `limit`; 0 is an empty cell."""
    return Search(cells).count(limit)


def solve(cells: Sequence[int]) -> list[int] | None:
    """A solution, or None."""
    search = Search(cells)
    return search.cells if search.count(1) else None


def signature(cells: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The same for every puzzle that a symmetry leads to: each clue's company in its row, column, box and digit."""
    clues = [cell for cell in range(CELLS) if cells[cell]]
    rows, columns = Counter(ROW[cell] for cell in clues), Counter(COLUMN[cell] for cell in clues)
    boxes, digits = Counter(BOX[cell] for cell in clues), Counter(cells[cell] for cell in clues)
    return tuple(sorted((rows[ROW[c]], columns[COLUMN[c]], boxes[BOX[c]], digits[cells[c]]) for c in clues))


def split_of(cells: Sequence[int]) -> str:
    return "test" if zlib.crc32(repr(signature(cells)).encode()) % 2 == 0 else "train"


def _removable(cells: list[int], cell: int) -> bool:
    """No other digit in this cell leads to a solution."""
    digit, cells[cell] = cells[cell], 0
    search = Search(cells)
    cells[cell] = digit
    search.empty.remove(cell)
    for bit in BITS[search.free(cell) & ~(1 << digit - 1)]:
        search.toggle(cell, bit)
        if search.count(1):
            return False
        search.toggle(cell, bit)
    return True


@functools.lru_cache(maxsize=1 << 16)
def base(split: str, number: int, seed: int) -> tuple[str, str]:
    """(puzzle, solution), each as 36 characters."""
    generator = random.Random(f"sudoku base {split} {number} {seed}")
    while True:
        search = Search([0] * CELLS)
        search.count(1, generator)
        cells, clues, target = list(search.cells), CELLS, generator.randint(FEWEST_CLUES, MOST_CLUES)
        for cell in generator.sample(range(CELLS), CELLS):
            if clues > target and _removable(cells, cell):
                cells[cell], clues = 0, clues - 1
        if clues <= MOST_CLUES and split_of(cells) == split:
            return "".join(str(digit or "_") for digit in cells), "".join(map(str, search.cells))


@functools.cache
def _layout(rows: int, columns: int) -> Any:
    """Picks the cells in their new order from 36 characters and a final slash."""
    lines = [[6 * row + column for column in COLUMN_ORDERS[columns]] for row in ROW_ORDERS[rows]]
    return itemgetter(*[cell for line in lines for cell in (*line, CELLS)][:-1])


def draw(split: str, index: int, seed: int) -> tuple[str, str, str]:
    """(question, solution, answer)."""
    puzzle, solution = base(split, index // PER_BASE if split == "train" else index % TEST_BASES, seed)
    generator = random.Random(f"sudoku {split} {index} {seed}")
    layout = _layout(int(generator.random() * len(ROW_ORDERS)), int(generator.random() * len(COLUMN_ORDERS)))
    digits = RELABELLINGS[int(generator.random() * len(RELABELLINGS))]
    grid = " ".join(layout(solution.translate(digits) + "/"))
    return INSTRUCTION + " ".join(layout(puzzle.translate(digits) + "/")), grid, grid
