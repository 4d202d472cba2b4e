"""The output of a batch: one record a line, in the order of the input; resumable after a kill at any time.

Beside `answers.jsonl` stand, while it is being made, `answers.jsonl.part-K`, one for each process, with the records in
the order in which they were done; and always `answers.jsonl.run.json`, what the answers depend on. When every line has
its record, the parts are merged into `answers.jsonl`.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from os import unlink
from pathlib import Path
from typing import IO, Any

from rcd.batch.lines import Lines, Scan
from rcd.errors import RCDError, unwritable
from rcd.evaluate.journal import ROOM, Journal, line_of, write_whole
from rcd.evaluate.provenance import comparable, differing
from rcd.evaluate.wording import counted
from rcd.terminal import neutral_json

WHAT = "the answers"
NAMED = 10
"""So many bad lines are named."""


@dataclass(frozen=True)
class Outcome:
    """Of all lines."""

    answered: int
    bad: tuple[int, ...]
    """The numbers of the lines that could not be answered."""

    def complaint(self, output: str) -> str:
        """One sentence about the bad lines."""
        named = ", ".join(map(str, self.bad[:NAMED])) + (", ..." if len(self.bad) > NAMED else "")
        one = len(self.bad) == 1
        return (
            f"{counted(len(self.bad), 'line')} of {self.answered + len(self.bad):,} could not be answered "
            f'({"line" if one else "lines"} {named}); {output} says why under "error", and holds the other answers.'
        )


class Records:
    """Where every line's record stands, over the files that hold some: nine bytes a line."""

    def __init__(self, last: int) -> None:
        self.files: list[Path] = []
        self.count = 0
        self._offset, self._file = array("q", [-1]) * (last + 1), array("b", [0]) * (last + 1)

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and self._offset[number] >= 0

    def add(self, path: Path) -> None:
        """The records of a file; half a line at its end, as a kill leaves it, is passed over."""
        offset = 0
        self.files.append(path)
        with path.open("rb") as file:
            for place, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                number = _number(line)
                if not 0 < number < len(self._offset):
                    raise RCDError(
                        f"line {place} of {path} is damaged; delete the line and run the same command again."
                    )
                if number not in self:
                    self._offset[number], self._file[number] = offset, len(self.files) - 1
                    self.count += 1
                offset += len(line)

    def in_order(self) -> Iterator[str]:
        with ExitStack() as stack:
            files: list[IO[bytes]] = [stack.enter_context(path.open("rb")) for path in self.files]
            for number, offset in enumerate(self._offset):
                if offset >= 0:
                    file = files[self._file[number]]
                    file.seek(offset)
                    yield file.readline().decode()


def _number(line: bytes) -> int:
    """Of a record; 0 where it is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return 0
    number = record.get("line") if isinstance(record, dict) else None
    return number if type(number) is int else 0


class Output:
    """The file of answers, and what stands beside it."""

    def __init__(self, path: str | Path, settings: dict[str, Any], scan: Scan) -> None:
        self.path, self.scan = Path(path), scan
        self.settings = {**settings, "input_lines": scan.count, "input_digest": scan.digest}
        self.run = self.path.with_name(f"{self.path.name}.run.json")

    def claim(self) -> None:
        """Take the file for these settings, or go on where the same ones stopped. One process calls it, before any
        other reads or writes."""
        try:
            if self.path.is_dir():
                raise RCDError(f"{self.path} is a folder; give a file as --output.")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.run.exists():
                self._check()
            elif self.path.exists() or self._parts():
                raise RCDError(
                    f"{self.path} is there already, and no {self.run.name} beside it says how it was made; choose "
                    "another --output."
                )
            else:
                write_whole(self.run, json.dumps(self.settings, indent=1) + "\n")
        except OSError as error:
            raise unwritable(WHAT, self.path, error, "choose another --output") from error

    def _check(self) -> None:
        try:
            run = json.loads(self.run.read_text(encoding="utf-8"))
            held, wanted = comparable(run, self.settings), comparable(self.settings, run)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RCDError(f"{self.run} is damaged; choose another --output.") from error
        other = differing(held, wanted)
        told = [f"{key}: {held.get(key)!r} -> {wanted.get(key)!r}" for key in other if not key.startswith("input")]
        told += ["the input is another one, or was changed"] if any(key.startswith("input") for key in other) else []
        if told:
            raise RCDError(
                f"{self.path} holds answers of another run ({'; '.join(told)}); choose another --output, or give the "
                "same model, settings and input to go on."
            )

    def _parts(self) -> list[Path]:
        return sorted(self.path.parent.glob(f"{_escaped(self.path.name)}.part-*"))

    def held(self) -> Records:
        """The records that there are."""
        records = Records(self.scan.last)
        for path in (*([self.path] if self.path.exists() else []), *self._parts()):
            records.add(path)
        return records

    def journal(self, process: int) -> Journal:
        return Journal(self.path.with_name(f"{self.path.name}.part-{process}"), WHAT)

    def finish(self, speak: bool = False) -> Outcome | None:
        """Once every line has its record: put them in order. None for all processes but the one that did, unless it is
        to `speak` of what was finished before."""
        try:
            with closing(Journal(self.path.with_name(f".{self.path.name}.merging"), WHAT, wait=True)) as lock:
                records = self.held()
                if records.count < self.scan.count:
                    return None
                done = self.path.exists() and not self._parts()
                if not done:
                    write_whole(self.path, records.in_order())
                    for path in self._parts():
                        unlink(path)
                lock.path.unlink(missing_ok=True)  # last: another one without it would take the lock beside this one
                if done:
                    return self.outcome() if speak else None
        except OSError as error:
            raise unwritable(WHAT, self.path, error, ROOM) from error
        return self.outcome()

    def outcome(self) -> Outcome:
        """Of a finished file."""
        with self.path.open(encoding="utf-8") as file:
            rows = (json.loads(line) for line in file if '"error": ' in line)
            bad = tuple(row["line"] for row in rows if "error" in row)
        return Outcome(self.scan.count - len(bad), bad)


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


class Ordered:
    """Records to a stream, each in its turn. What is done early is held: no more than is decoded while the slowest one
    that is being decoded takes."""

    def __init__(self, out: IO[str]) -> None:
        self.out, self.held, self.turn = out, dict[int, dict[str, Any]](), deque[int]()
        self.answered, self.bad = 0, list[int]()

    def noted(self, lines: Lines) -> Iterator[tuple[int, bytes]]:
        """The lines, which are written in the order in which they are read."""
        for number, content in lines:
            self.turn.append(number)
            yield number, content

    @property
    def written(self) -> int:
        return self.answered + len(self.bad)

    def append(self, record: dict[str, Any]) -> None:
        self.held[record["line"]] = record
        while self.turn and self.turn[0] in self.held:
            number = self.turn.popleft()
            found = self.held.pop(number)
            line = line_of(found)
            self.out.write(neutral_json(line) if self.out.isatty() else line)
            self.answered += "error" not in found
            self.bad += [number] if "error" in found else []
        self.out.flush()

    def outcome(self) -> Outcome:
        return Outcome(self.answered, tuple(self.bad))
