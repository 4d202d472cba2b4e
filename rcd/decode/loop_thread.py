"""The thread of a decode loop, and what happens to loops when their process ends or forks."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import TYPE_CHECKING

from rcd.errors import RCDError

if TYPE_CHECKING:
    from rcd.decode.loop import DecodeLoop

LOOPS: weakref.WeakSet[DecodeLoop] = weakref.WeakSet()
_ENDING = threading.Event()
"""Set while the interpreter ends."""


def drive(held: weakref.ref[DecodeLoop]) -> None:
    """The thread's work: turns until there is nothing to do, or nobody holds the loop any more."""
    while True:
        loop = held()
        if loop is None:
            return
        try:
            if loop.closed:
                loop.abandon_all(closed_error())
                return
            if not loop.turn() and loop.rest():
                return
        except BaseException as error:
            loop.abandon_all(error)
            return
        del loop


def closed_error() -> BaseException:
    """What those are told who wait for a loop that is closed; a daemon thread ends silently with its interpreter."""
    return SystemExit() if _ENDING.is_set() else RCDError("this loop is closed; load the model again.")


@atexit.register
def _close_all() -> None:
    """A thread that still computes while the interpreter ends would crash it."""
    _ENDING.set()
    for loop in list(LOOPS):
        loop.close()


def _forked() -> None:
    for loop in list(LOOPS):
        loop.begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
