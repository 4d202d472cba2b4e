"""Decoding many prompts, in batches where a batch pays and never where it would change a result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rcd.errors import whole
from rcd.evaluate.early import Enough, until_enough

if TYPE_CHECKING:
    from rcd.api import Generation, Pipeline
    from rcd.decode.config import DecodeConfig


def answers(
    pipeline: Pipeline,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig,
    *,
    seeds: Sequence[int] | None = None,
    reference: Pipeline | None = None,
    batch: int = 32,
    exact: bool = True,
    enough: Enough | None = None,
) -> Iterator[tuple[int, Generation]]:
    """(number of the prompt, its answer), the longest prompts first. `seeds`: one for each prompt (else the
    configuration's seed and the prompt's number), so that no draw depends on who else is in a batch.

    On a CPU every prompt is decoded alone, whatever `batch` says, unless `exact` is off: a batch is somewhat faster
    there, but its sums are made in another order, which can turn a near tie. On a GPU rows share batches, and near
    ties may fall either way. `enough` (the prompt's number, its text so far) cuts answers off (`rcd.evaluate.early`).
    """
    whole("batch", batch, least=1)
    if exact and pipeline.model.device.type == "cpu":
        batch = 1
    own = [config.seed + number for number in range(len(prompts))] if seeds is None else seeds
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    for first in range(0, len(order), batch):
        rows = order[first : first + batch]
        chosen, drawn = [prompts[number] for number in rows], [own[number] for number in rows]
        if enough is None:
            found = pipeline.generate(chosen, config, reference=reference, seeds=drawn).results
        else:
            wanted = _of_rows(enough, rows)
            found = until_enough(pipeline, chosen, config, wanted, reference=reference, seeds=drawn)
        yield from zip(rows, found, strict=True)


def _of_rows(enough: Enough, rows: Sequence[int]) -> Enough:
    return lambda row, ids: enough(rows[row], ids)
