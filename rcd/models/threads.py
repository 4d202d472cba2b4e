"""How many threads of torch a model is worth on a CPU. The command line asks; `rcd.load` leaves torch as it is."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch

from rcd.errors import whole

SMALL = 20_000_000
"""Parameters up to which one thread is enough: on busy cores two lose up to 40% there, and at most 20% above."""


def threads_for(parameters: int) -> int | None:
    """Threads for a model of so many parameters; None: as many as torch takes by itself."""
    return 1 if parameters <= SMALL else None


def limit_threads(models: Iterable[Any], asked: int | None = None) -> None:
    """Set torch's threads for decoding with these models (those that are not None): what was asked for, else what
    OMP_NUM_THREADS says, else by the largest one's size."""
    if asked is not None:
        torch.set_num_threads(whole("--threads", asked, least=1))
        return
    there = [one.model for one in models if one is not None]
    if os.environ.get("OMP_NUM_THREADS") or any(model.device.type != "cpu" for model in there):
        return
    chosen = threads_for(max(sum(p.numel() for p in model.parameters()) for model in there))
    if chosen is not None:
        torch.set_num_threads(chosen)
