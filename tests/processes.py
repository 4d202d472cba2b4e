"""Child processes of tests. No clock decides how a test ends: `FAILSAFE` only ends a child that hangs.

A test of a kill or an interrupt starts its child with `GatedChild`, so that the signal comes at a known place of the
child's work, however fast or busy the machine is.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest

from tests import gated

FAILSAFE = 600.0
"""Seconds until a child is taken to hang: far more than a busy machine needs."""


def finish(command: list[str], stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. It has a process group of its own, so that none of its workers outlives a failure."""
    with subprocess.Popen(
        command, stdin=None if stdin is None else subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    ) as process:  # fmt: skip
        shown, heard = _outcome(process, stdin)
    return subprocess.CompletedProcess(command, process.returncode, shown, heard)


def two_processes(*module: str) -> list[str]:
    """The command that runs a module twice, as torchrun does, on a port that is free."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    return [*run, "--nproc-per-node", "2", "-m", *module]


TERMINAL = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}


class Screen:
    """A terminal of so many columns and rows for a child: keeps every byte that comes to it, and can be typed at."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self._own, self.end = pty.openpty()
        fcntl.ioctl(self._own, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._bytes, self._more = bytearray(), threading.Condition()
        self._reading = threading.Thread(target=self._read, daemon=True)

    def begin(self) -> None:
        os.close(self.end)
        self._reading.start()

    def type(self, text: str) -> None:
        os.write(self._own, text.encode())

    def wait(self, text: str, count: int = 1) -> None:
        """Returns once the text has come so often."""
        until = time.monotonic() + FAILSAFE
        with self._more:
            while self._bytes.count(text.encode()) < count:
                if not self._more.wait(until - time.monotonic()):
                    pytest.fail(f"{text!r} did not come {count} times: {bytes(self._bytes[-2000:])!r}")

    def text(self) -> str:
        """Once the child has ended."""
        self._reading.join(FAILSAFE)
        return self._bytes.decode()

    def _read(self) -> None:
        with suppress(OSError):  # the child's end is closed
            while part := os.read(self._own, 65536):
                with self._more:
                    self._bytes += part
                    self._more.notify_all()
        os.close(self._own)


class GatedChild:
    """`rcd ARGS` in a process (and a group) of its own, which stops before the `call`-th call of `function`, or behind
    it (`after`), until the gate is opened or the process is ended. `function` is `module:name` or `module:Class.name`.
    """

    def __init__(
        self, args: list[str], function: str, call: int = 1, after: bool = False, screen: Screen | None = None
    ) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        folder = Path(self._scratch.name)
        ends = []
        for name in ("arrived", "go"):
            os.mkfifo(folder / name)
            ends.append(os.open(folder / name, os.O_RDWR))  # both ends: opening waits for nobody
        self._arrived, self._go = ends
        self._text = ""
        spec = {"function": function, "call": call, "after": after, "folder": str(folder)}
        stdin, stdout, stderr = (None, subprocess.PIPE, subprocess.PIPE) if screen is None else (screen.end,) * 3
        self.process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-P", gated.__file__, *args], stdin=stdin, stdout=stdout, stderr=stderr, text=True,
            start_new_session=True, env={**os.environ, **TERMINAL, gated.GATE: json.dumps(spec)},
        )  # fmt: skip
        if screen is not None:
            screen.begin()
        self.screen = screen

    def __enter__(self) -> GatedChild:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.send(signal.SIGKILL, group=True)
        os.close(self._arrived)
        os.close(self._go)  # a worker without its parent that still stands at the gate ends now
        self.process.__exit__(None, None, None)
        self._scratch.cleanup()

    def arrive(self, count: int = 1) -> None:
        """Returns once `count` processes stand at the gate."""
        until = time.monotonic() + FAILSAFE
        while self._text.count("\n") < count:
            ended = self.process.poll() is not None  # asked first: what it wrote before its end still counts
            if select.select([self._arrived], [], [], 0 if ended else 0.2)[0]:
                self._text += os.read(self._arrived, 4096).decode()
            elif ended:
                _fail(self.process, "ended before it came to the gate", *self.process.communicate())
            elif time.monotonic() > until:
                _fail(self.process, f"did not come to the gate within {FAILSAFE:g} s", *_end(self.process))

    def send(self, number: signal.Signals, group: bool = False) -> None:
        (os.killpg if group else os.kill)(self.process.pid, number)

    def open(self) -> None:
        """Let one process go on. A signal that was sent before is seen before the child does anything else."""
        os.write(self._go, b"\n")

    def kill(self) -> None:
        """End it as it stands; what it has written is all there will be."""
        self.send(signal.SIGKILL)
        self.process.wait()

    def finish(self) -> tuple[int, str, str]:
        """(exit code, stdout, stderr), once every process that could still write to them has ended; of a child with a
        screen, all that came to it is the first of the two."""
        if self.screen is not None:
            try:
                return self.process.wait(FAILSAFE), self.screen.text(), ""
            except subprocess.TimeoutExpired:
                _fail(self.process, f"did not end within {FAILSAFE:g} s", self.screen.text(), "")
        shown, heard = _outcome(self.process)
        return self.process.returncode, shown, heard


def _outcome(process: subprocess.Popen[str], stdin: str | None = None) -> tuple[str, str]:
    try:
        return process.communicate(stdin, timeout=FAILSAFE)
    except subprocess.TimeoutExpired:
        _fail(process, f"or a process that it started did not end within {FAILSAFE:g} s", *_end(process))
    except BaseException:
        _end(process)
        raise


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Of what hangs: torchrun ends its workers at a SIGTERM, and they are not in its group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=FAILSAFE / 10)
    return "", ""


def _fail(process: subprocess.Popen[str], what: str, shown: str | None, heard: str | None) -> NoReturn:
    told = f"{(shown or '')[-2000:]}\n{(heard or '')[-4000:]}"  # None: of a child with a screen
    pytest.fail(f"{process.args!r} {what} (exit code {process.returncode})\n{told}")
