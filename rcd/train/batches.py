"""Which examples a step takes, and their noise: a pure function of (seed, epoch, step), so nothing is to be saved.

The order of an epoch, the packing, every t and every mask are drawn from generators keyed by the seed, the epoch and
the example. A resumed run sees what the unbroken one saw, and two processes together see what one sees alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rcd.data.examples import Example
from rcd.diffusion.noise import draw, example_generator
from rcd.errors import RCDError
from rcd.train.layout import PADDING, Batch


@dataclass(frozen=True)
class Batching:
    """How examples become batches."""

    total: int
    """Rows of one optimizer step, over all processes."""
    device: int
    """Rows of one forward pass."""
    block_length: int
    """Rows are padded to a multiple of it."""
    pad_token_id: int
    per: str = "sequence"
    """t is drawn per `sequence` or per `block`."""
    normaliser: str = "labels"
    """`labels`: the loss is divided by the step's number of labels (SDAR). `example`: every example's by its own number
    of labels, then by the number of examples (LLaDA)."""
    label_padding: str = "block"
    """`block`: filled up with the end token to a whole block, which is learnt (SDAR). `row`: to the step's longest row
    (LLaDA fills up to its batch's). `none`: padding is not learnt."""
    pack: int = 0
    """Slots of a row into which several examples are packed; 0: one example a row."""
    seed: int = 0


class Batches:
    def __init__(self, examples: Sequence[Example], batching: Batching, purpose: str = "train"):
        self.examples, self.batching, self.purpose = examples, batching, purpose
        self._epoch: tuple[int, list[list[int]]] | None = None
        if len(self.rows(0)) < batching.total:
            raise RCDError(
                f"a step takes total_batch = {batching.total} rows, and the data gives {len(self.rows(0))}; lower "
                "total_batch or give more data."
            )

    def rows(self, epoch: int) -> list[list[int]]:
        """The epoch's rows, each a list of examples."""
        if self._epoch is None or self._epoch[0] != epoch:
            order = torch.randperm(len(self.examples), generator=self._generator("order", epoch)).tolist()
            self._epoch = (epoch, self._packed(order))
        return self._epoch[1]

    def steps(self, epoch: int) -> int:
        return max(1, len(self.rows(epoch)) // self.batching.total)

    def step(self, epoch: int, step: int, process: int = 0, processes: int = 1) -> list[Batch]:
        """The forward passes of one process for an optimizer step; all processes have equally many."""
        b = self.batching
        rows = self.rows(epoch)
        wanted = [rows[(step * b.total + k) % len(rows)] for k in range(b.total)]
        longest = max(sum(self._slots(n) for n in row) for row in wanted) if b.label_padding == "row" else 0
        labels = sum(self._labels(row, longest) for row in wanted)
        count = sum(len(row) for row in wanted)
        own = wanted[process::processes]
        parts = [own[k : k + b.device] for k in range(0, len(own), b.device)]
        batches = [self._batch(part, epoch, labels, count, longest) for part in parts]
        passes = -(-len(wanted[::processes]) // b.device)
        while len(batches) < passes:
            spare = batches[-1] if batches else self._batch(wanted[:1], epoch, labels, count, longest)
            batches.append(spare.silent())
        return batches

    def _packed(self, order: list[int]) -> list[list[int]]:
        """First fit over a few open rows, in the epoch's order."""
        if not self.batching.pack:
            return [[number] for number in order]
        full: list[list[int]] = []
        opened: list[tuple[int, list[int]]] = []
        for number in order:
            size = self._slots(number)
            place = next((k for k, (used, _) in enumerate(opened) if used + size <= self.batching.pack), None)
            if place is None:
                opened.append((size, [number]))
                if len(opened) > 16:
                    full.append(opened.pop(0)[1])
            else:
                used, row = opened[place]
                opened[place] = (used + size, [*row, number])
        return [*full, *(row for _, row in opened)]

    def _slots(self, number: int) -> int:
        b = self.batching.block_length
        return -(-len(self.examples[number].ids) // b) * b

    def _labels(self, row: list[int], longest: int) -> int:
        """How many positions of a row the loss counts."""
        total = 0
        for n in row:
            size = self._slots(n) if self.batching.label_padding == "block" else len(self.examples[n].ids)
            total += (longest or size) - self.examples[n].prompt
        return total

    def _batch(self, rows: list[list[int]], epoch: int, labels: int, count: int, longest: int) -> Batch:
        b = self.batching
        length = longest or max(sum(self._slots(n) for n in row) for row in rows)
        shape = (len(rows), length)
        ids = torch.full(shape, b.pad_token_id)
        position = torch.arange(length).repeat(len(rows), 1)
        document = torch.full(shape, PADDING)
        answer, masked = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
        weight, normaliser, luck, extra = (torch.zeros(shape) for _ in range(4))
        for r, row in enumerate(rows):
            start = 0
            for d, number in enumerate(row):
                example, slots = self.examples[number], self._slots(number)
                slots = longest or slots
                part = slice(start, start + slots)
                ids[r, start : start + len(example.ids)] = torch.tensor(example.ids)
                position[r, part] = torch.arange(slots)
                document[r, part] = d
                labelled = slots if b.label_padding != "none" else len(example.ids)
                answer[r, start + example.prompt : start + labelled] = True
                noise = self._generator("noise", epoch, example.name)
                masked[r, part], p_mask = draw(answer[r, part], position[r, part] // b.block_length, noise, b.per)
                one = 1 / labels if b.normaliser == "labels" else 1 / (count * int(answer[r, part].sum()))
                normaliser[r, part] = one
                weight[r, part] = one / p_mask
                more = self._generator("residual", epoch, example.name)
                luck[r, part] = torch.rand((), generator=more)
                extra[r, part] = torch.rand(slots, generator=more)
                start += slots
        names = tuple(self.examples[n].name for row in rows for n in row)
        return Batch(ids, position, document, answer, masked, weight, normaliser, luck, extra, names)

    def _generator(self, *key: int | str) -> torch.Generator:
        return example_generator(self.batching.seed, self.purpose, *key)
