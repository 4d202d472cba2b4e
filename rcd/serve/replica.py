"""What runs in an actor of the cluster: the models, loaded there, and the same service as in one process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

from rcd.errors import RCDError
from rcd.serve.loading import Models
from rcd.serve.pieces import Done, Piece, Refused
from rcd.serve.schema import Ask
from rcd.serve.service import SWITCH, Load, LocalService, refused
from rcd.serve.settings import ServeSettings

DEPLOYMENT = "Models"
"""Of the replicas, in their application."""
MOST_FAILURES = 3
"""Requests in a row on which decoding may fail before Ray Serve is told to replace the replica: a GPU whose context is
broken fails on every one. Asking the GPU itself could disturb the capture of a graph."""


class Replica:
    """Ray Serve makes one in each actor. Its methods give plain values, which travel."""

    def __init__(self, models: Models, settings: ServeSettings) -> None:
        sys.setswitchinterval(SWITCH)
        self._service = LocalService(settings=settings)
        self._failures = 0
        models.load_into(self._service)

    async def pieces(self, ask: Ask) -> AsyncIterator[list[Piece]]:
        """As `Service.pieces`; a caller that cancels closes it, and the rows are free."""
        told: Any = self._service.pieces(ask)
        async with contextlib.aclosing(told):
            async for found in told:
                self._count(found)
                yield found

    def _count(self, found: list[Piece]) -> None:
        if any(isinstance(piece, Done) for piece in found):
            self._failures = 0
        elif any(isinstance(piece, Refused) and piece.code == "decoding_failed" for piece in found):
            self._failures += 1

    async def cards(self) -> list[dict[str, Any]]:
        return await self._service.cards()

    async def example(self, model: str | None, seed: int) -> dict[str, Any] | Refused:
        try:
            return await self._service.example(model, seed)
        except RCDError as error:
            return refused(error)

    async def load(self) -> dict[str, Load]:
        return await self._service.load()

    async def check_health(self) -> None:
        """Asked by Ray Serve; one that raises is replaced."""
        if self._failures >= MOST_FAILURES:
            raise RuntimeError(f"decoding failed on {self._failures} requests in a row")
