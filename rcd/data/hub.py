"""The hub in plain words: its clients kept quiet, and their many errors as one reason."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from rcd.errors import REASONS, first_line, reason

CLIENTS = ("huggingface_hub", "datasets")
REFUSALS = {
    "GatedRepoError": "it is for those who are logged in and have accepted its terms",
    "RepositoryNotFoundError": "it has no such name, or a private one",
    "DatasetNotFoundError": "it has no such name, or a private one",
    "RevisionNotFoundError": "it has no such revision",
}
"""By the names of the clients' errors; a client need not be installed to be understood."""


@contextmanager
def quiet() -> Iterator[None]:
    """The clients warn of every retry; one sentence at the end says as much."""
    loggers = [logging.getLogger(name) for name in CLIENTS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def why(error: BaseException) -> str:
    """Why the hub gave nothing, as a part of a sentence."""
    for each in _causes(error):
        if type(each).__name__ in REFUSALS:
            return REFUSALS[type(each).__name__]
        if isinstance(each, (ConnectionError, TimeoutError, socket.gaierror)):
            return "the hub cannot be reached"
        if isinstance(each, OSError) and each.errno in REASONS:
            return reason(each)
    return first_line(error)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
