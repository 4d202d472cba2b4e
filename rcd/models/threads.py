"""How many threads of torch a model is worth on a CPU. The command line asks; `rcd.load` leaves torch as it is."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch

from rcd.errors import whole

SMALL = 20_000_000
"""Parameters, times the rows decoded at once, up to which a second thread costs more than it brings on busy cores."""


def threads_for(parameters: int, rows: int = 1) -> int | None:
    """Threads for so many rows of a model of so many parameters; None: as many as torch takes by itself."""
    return 1 if parameters * rows <= SMALL else None


def limit_threads(models: Iterable[Any], asked: int | None = None, rows: int = 1) -> None:
    """Set torch's threads for decoding with these models (those that are not None): what was asked for, else what
    OMP_NUM_THREADS says, else by the largest one's size and the rows that it decodes at once."""
    if asked is not None:
        torch.set_num_threads(whole("--threads", asked, least=1))
        return
    there = [one.model for one in models if one is not None]
    if os.environ.get("OMP_NUM_THREADS") or any(model.device.type != "cpu" for model in there):
        return
    chosen = threads_for(max(model.size for model in there), rows)
    if chosen is not None:
        torch.set_num_threads(chosen)
