"""Files of one JSON object a line that survive a kill at any time: appended to, repaired, replaced whole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rcd.errors import RCDError, unwritable

ROOM = "make room and run the same command again: nothing is lost"
PIECE = 2**16
"""Bytes that are read at once in search of a line's beginning."""


def line_of(row: dict[str, Any]) -> str:
    text = json.dumps(row, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a pair of surrogates, which JSON can name and UTF-8 cannot
        text = json.dumps(row)
    return text + "\n"


class Journal:
    """A file that grows by whole lines. One process at a time may add to it."""

    def __init__(self, path: Path, what: str, wait: bool = False) -> None:
        """`what` is what a sentence about it calls its lines, such as `the records`. `wait`: until another process that
        has the file is done with it, instead of a refusal."""
        self.path, self.what = path, what
        try:
            self._file = path.open("a", encoding="utf-8")
            _lock(self._file, path, wait)
            repair(path)  # what another process is still writing is not half-written
        except OSError as error:
            raise unwritable(what, path.parent, error, ROOM) from error

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Written and flushed to the disk before this returns."""
        try:
            self._file.write("".join(map(line_of, rows)))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise unwritable(self.what, self.path.parent, error, ROOM) from error

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:  # what could not be written is tried once more
            raise unwritable(self.what, self.path.parent, error, ROOM) from error


def _lock(file: Any, path: Path, wait: bool) -> None:
    """Until the file is closed, or the process is gone."""
    try:
        import fcntl
    except ImportError:  # no Unix
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError as error:
        raise RCDError(
            f"another process is writing to {path}; wait for its end, or choose another --output."
        ) from error
    except OSError:  # a file system without locks
        return


def repair(path: Path) -> int:
    """Cut a half-written last line off; returns how many bytes went."""
    if not path.is_file():
        return 0
    with path.open("r+b") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - PIECE)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            file.truncate(end)
    return size - end


def write_whole(path: Path, text: str | Iterable[str]) -> None:
    """Whole or not at all."""
    scratch = path.with_name(f".{path.name}.writing")
    with scratch.open("w", encoding="utf-8") as file:
        file.writelines([text] if isinstance(text, str) else text)
        file.flush()
        os.fsync(file.fileno())  # or a power cut could leave the new name without its content
    scratch.replace(path)
