"""Which examples a step takes, and their noise: a pure function of (seed, epoch, step), so nothing is to be saved.

The order of an epoch, the packing, every t and every mask are drawn with keys made of the seed, the epoch and the
example. A resumed run sees what the unbroken one saw, and two processes together see what one sees alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from rcd.data.examples import Example
from rcd.diffusion.noise import draw, generator_of, key_of, uniform
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
    row_padding: int = 0
    """With `row`: 0 to so many further end tokens, drawn for each step, so that a model knows canvases that are longer
    than its answers."""
    pack: int = 0
    """Slots of a row into which several examples are packed; 0: one example a row."""
    seed: int = 0


class Batches:
    def __init__(self, examples: Sequence[Example], batching: Batching, purpose: str = "train"):
        self.examples, self.batching, self.purpose = examples, batching, purpose
        self._epoch: tuple[int, list[list[int]]] | None = None
        self._lengths = torch.tensor([len(example.ids) for example in examples], dtype=torch.long)
        self._prompts = torch.tensor([example.prompt for example in examples], dtype=torch.long)
        self._offsets = self._lengths.cumsum(0) - self._lengths
        flat = array("i", chain.from_iterable(example.ids for example in examples))
        self._ids = torch.frombuffer(flat, dtype=torch.int32) if flat else torch.zeros(0, dtype=torch.int32)
        if len(self.rows(0)) < batching.total:
            raise RCDError(
                f"a step takes total_batch = {batching.total} rows, and the data gives {len(self.rows(0))}; lower "
                "total_batch or give more data."
            )

    def rows(self, epoch: int) -> list[list[int]]:
        """The epoch's rows, each a list of examples."""
        if self._epoch is None or self._epoch[0] != epoch:
            generator = generator_of(self.batching.seed, self.purpose, "order", epoch)
            order = torch.randperm(len(self.examples), generator=generator).tolist()
            self._epoch = (epoch, self._packed(order))
        return self._epoch[1]

    def steps(self, epoch: int) -> int:
        return max(1, len(self.rows(epoch)) // self.batching.total)

    def step(self, epoch: int, step: int, process: int = 0, processes: int = 1) -> list[Batch]:
        """The forward passes of one process for an optimizer step; all processes have equally many."""
        b = self.batching
        rows = self.rows(epoch)
        wanted = [rows[(step * b.total + k) % len(rows)] for k in range(b.total)]
        longest = 0
        if b.label_padding == "row":
            longest = max(sum(self._slots(n) for n in row) for row in wanted)
            drawn = uniform(self._key("row", epoch), torch.tensor(step))
            longest += int(drawn * (b.row_padding + 1)) // b.block_length * b.block_length
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
        """All rows at once: N is the number of slots that hold an example, one after the other."""
        b = self.batching
        numbers = [n for row in rows for n in row]
        sizes = [longest or self._slots(n) for n in numbers]
        length = max(sum(longest or self._slots(n) for n in row) for row in rows)
        starts = [r * length + start for r, row in enumerate(rows) for start in self._starts(row, longest)]
        documents = torch.tensor([d for row in rows for d in range(len(row))])

        size = torch.tensor(sizes)
        which = torch.repeat_interleave(torch.arange(len(numbers)), size)
        position = torch.arange(len(which)) - (size.cumsum(0) - size)[which]
        slot = torch.tensor(starts)[which] + position
        number = torch.tensor(numbers)[which]
        used, prompt = self._lengths[number], self._prompts[number]
        labelled = used if b.label_padding == "none" else size[which]
        answer = (position >= prompt) & (position < labelled)
        real = position < used
        held = self._ids[self._offsets[number] + torch.where(real, position, 0)].long()
        ids = torch.where(real, held, b.pad_token_id)
        key = self._key("noise", epoch)
        masked, p_mask = draw(key, number, position, position // b.block_length, answer, b.per)
        if b.normaliser == "labels":
            one = torch.full(p_mask.shape, 1 / labels)
        else:
            one = 1 / (count * torch.zeros(len(numbers)).index_add_(0, which, answer.float()))[which]
        luck = uniform(self._key("luck", epoch), number)
        extra = uniform(self._key("extra", epoch), number, position)

        def spread(values: Tensor, empty: int = 0) -> Tensor:
            out = torch.full((len(rows) * length,), empty, dtype=values.dtype)
            out[slot] = values
            return out.view(len(rows), length)

        everywhere = torch.arange(length).repeat(len(rows), 1)
        document = spread(documents[which], PADDING)
        names = tuple(self.examples[n].name for n in numbers)
        return Batch(
            spread(ids, b.pad_token_id), torch.where(document == PADDING, everywhere, spread(position)), document,
            spread(answer), spread(masked), spread(one / p_mask), spread(one), spread(luck), spread(extra), names,
        )  # fmt: skip

    def _starts(self, row: list[int], longest: int) -> list[int]:
        """Where each of a row's examples begins."""
        sizes = [longest or self._slots(n) for n in row]
        return [sum(sizes[:k]) for k in range(len(sizes))]

    def _key(self, *parts: int | str) -> int:
        return key_of(self.batching.seed, self.purpose, *parts)
