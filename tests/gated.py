"""`rcd ARGS` with a gate: at the chosen call of one function it reports to the test, and waits until that lets it go.

The child's side of `tests.processes.GatedChild`, run as a program by its path. Worker processes that the command spawns
import it again as `__mp_main__`, and so stand at the same gate.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

GATE = "RCD_TEST_GATE"


def stand(folder: Path) -> None:
    with (folder / "arrived").open("w") as arrived:
        arrived.write(f"{os.getpid()}\n")
    with (folder / "go").open("rb", buffering=0) as go:
        if not go.read(1):  # the end of the file: nobody is left who could open the gate
            os._exit(1)


def install(function: str, call: int, after: bool, folder: str) -> None:
    """Put the gate before (or behind) a call of `module:name` or `module:Class.name`; each process counts its own."""
    module, _, path = function.partition(":")
    *owners, name = path.split(".")
    owner: Any = functools.reduce(getattr, owners, importlib.import_module(module))
    plain, calls = getattr(owner, name), itertools.count(1)

    @functools.wraps(plain)
    def gated(*args: Any, **kwargs: Any) -> Any:
        here = next(calls) == call
        if here and not after:
            stand(Path(folder))
        result = plain(*args, **kwargs)
        if here and after:
            stand(Path(folder))
        return result

    setattr(owner, name, gated)


if __name__ in ("__main__", "__mp_main__"):
    install(**json.loads(os.environ[GATE]))
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    sys.argv[0] = "rcd"
    runpy.run_module("rcd", run_name="__main__")
