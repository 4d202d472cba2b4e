"""math-verify in a process of its own: a formula that hangs, or eats the memory, ends that process and counts as wrong.

The library's own timeouts are signals: they fail outside the main thread and do not stop a long operation of the
interpreter. This works in any thread. The file is also the program that the process runs, by its path; it therefore
imports nothing of the project at the top.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import subprocess
import sys
import threading
from functools import lru_cache
from typing import Any

SECONDS = 10.0
"""For one comparison; a common one takes about 0.02."""
MEMORY = 4 * 2**30


@lru_cache(maxsize=1 << 14)
def same(gold: str, answer: str) -> bool:
    """Whether two formulas in LaTeX are equal; False where one cannot be read, or no decision comes in time."""
    return _PROCESS.ask(gold, answer)


@lru_cache(maxsize=1 << 14)
def readable(formula: str) -> bool:
    """Whether the formula can be read at all."""
    return _PROCESS.ask(formula)


class _Process:
    """Started at the first question, and again after one that it did not survive."""

    def __init__(self) -> None:
        self.reset()
        atexit.register(self.stop)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        self.lock, self.child = threading.Lock(), None

    lock: threading.Lock
    child: subprocess.Popen[str] | None

    def ask(self, *formulas: str) -> bool:
        with self.lock:
            child = self.child = self.child or _start()
            reply = ""
            with contextlib.suppress(OSError):
                assert child.stdin and child.stdout
                child.stdin.write(json.dumps(formulas) + "\n")
                child.stdin.flush()
                reply = child.stdout.readline()
            if not reply:
                self.stop()
            return reply == "1\n"

    def stop(self) -> None:
        child, self.child = self.child, None
        if child is not None:
            child.kill()
            child.wait()
            for stream in (child.stdin, child.stdout):
                with contextlib.suppress(OSError):
                    assert stream
                    stream.close()


def _start() -> subprocess.Popen[str]:
    # -P: a module of this folder must not stand in for one of Python's
    command = [sys.executable, "-P", __file__, str(SECONDS)]
    child = None
    with contextlib.suppress(OSError):
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="ascii"
        )
        assert child.stdout
        if child.stdout.readline() == "ready\n":
            return child
    from rcd.errors import RCDError

    if child is not None:
        child.kill()
        child.communicate()
    raise RCDError(
        "answers that are formulas are compared by math-verify, which does not start: pip install math-verify."
    )


_PROCESS = _Process()


def _serve(seconds: float) -> None:
    """Reads one JSON list of one or two formulas a line; writes 1 (readable; equal) or 0."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no reply
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    judge = _judge()
    judge([r"\frac{1}{2}", "x"])
    replies.write("ready\n")
    with open(os.devnull, "w") as nowhere:
        for line in sys.stdin:
            faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)  # needs no lock of the interpreter
            replies.write("1\n" if judge(json.loads(line)) else "0\n")
            faulthandler.cancel_dump_traceback_later()


def _judge() -> Any:
    import logging

    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import Expr

    logging.disable(logging.CRITICAL)
    # units are taken off before (rcd/evaluate/answers.py): the library would take the t of 2t for one
    how = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
    target = (LatexExtractionConfig(normalization_config=how),)

    def close(gold: list[Any], answer: list[Any]) -> bool:
        """The library compares to fixed places, in which all very small numbers are alike."""
        a, b = gold[0], answer[0]
        if not (isinstance(a, Expr) and isinstance(b, Expr) and a.is_number and b.is_number) or a == b:
            return True
        a, b = abs(a.doit().evalf(30)), abs((a - b).doit().evalf(30))
        return bool(b <= a / 10**5 or a >= 1)

    def judge(formulas: list[str]) -> bool:
        try:
            found = [
                parse(f"${formula}$", target, fallback_mode="no_fallback", parsing_timeout=None) for formula in formulas
            ]
            if not all(found) or len(found) == 1:
                return all(found)
            return bool(verify(*found, allow_set_relation_comp=True, timeout_seconds=None)) and close(*found)
        except Exception:  # parsers raise whatever a text provokes; what cannot be read is not right
            return False

    return judge


if __name__ == "__main__":
    _serve(float(sys.argv[1]))
