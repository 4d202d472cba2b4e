"""The results of an evaluation on disk: what was asked, and one line for every answer, safe against a kill at any time.

A folder holds `run.json` (what the results depend on), `records.jsonl` (one line an answer) and, while several
processes work, a `records-K.jsonl` for each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rcd.errors import RCDError, unwritable
from rcd.evaluate.journal import ROOM, Journal, line_of, write_whole
from rcd.evaluate.provenance import MADE_ON, comparable, differing
from rcd.evaluate.wording import counted

RUN, RECORDS = "run.json", "records.jsonl"
ITEMS = ("items", "items_digest")


@dataclass(frozen=True)
class Record:
    """One answer."""

    item: str
    sample: int
    task: str
    prompt: str
    output: str
    answer: str
    """What is right."""
    right: bool
    tokens: int
    steps: int
    """Passes that commit or prepare a residual (`rcd.evaluate.sweep.steps_of`)."""
    forwards: int
    seconds: float
    """Its share of the time of decoding: every moment is divided evenly among the answers being decoded, so that the
    seconds of all answers add up to the whole."""
    stop_reason: str

    @property
    def key(self) -> tuple[str, int]:
        return self.item, self.sample


class Folder:
    """Of one evaluation. Opening it claims it for these settings, or goes on where the same ones stopped. `digest_of`
    gives the digest of the first so many items, so that a folder which holds those can take more."""

    def __init__(
        self, path: str | Path, settings: dict[str, Any], digest_of: Callable[[int], str] | None = None
    ) -> None:
        self.path, self.settings, self._digest_of = Path(path), settings, digest_of
        self._journal: Journal | None = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if (self.path / RUN).is_file():
                self._check()
            elif any(self.path.glob("records*.jsonl")):
                raise RCDError(f"{self.path} holds records but no {RUN} that says how they were made; choose another.")
            else:
                self._write_run(settings)
        except OSError as error:
            raise unwritable("the results", self.path, error) from error

    def begin(self, made_on: dict[str, str]) -> None:
        """Answers will be added, made in this place; there may be more items than before."""
        before = read_run(self.path).get(MADE_ON, [])
        places = before if made_on in before else [*before, made_on]
        self._write_run({**self.settings, MADE_ON: places})

    def _write_run(self, content: dict[str, Any]) -> None:
        try:
            write_whole(self.path / RUN, json.dumps(content, indent=1) + "\n")
        except OSError as error:
            raise unwritable("the results", self.path, error) from error

    def _check(self) -> None:
        run = read_run(self.path)
        held, wanted = comparable(run, self.settings), comparable(self.settings, run)
        other = [key for key in differing(held, wanted) if not self._unsaid(key, held, wanted)]
        if set(other) == set(ITEMS) and held["items"] > wanted["items"]:
            short = unfinished(self.path)
            what = f"an unfinished run ({short})" if short else counted(held["items"], "item")
            raise RCDError(
                f"{self.path} holds {what}, more than the {wanted['items']:,} asked for; ask for {held['items']:,} or "
                "more (--limit), or choose another --output."
            )
        if set(other) == set(ITEMS) and self._are_first(held):
            return
        if other:
            told = [f"{key}: {held.get(key)!r} -> {wanted.get(key)!r}" for key in other]
            raise RCDError(
                f"{self.path} holds results of other settings ({'; '.join(told)}); choose another --output, or the "
                "same settings to go on."
            )

    def _unsaid(self, key: str, held: dict[str, Any], wanted: dict[str, Any]) -> bool:
        """Whether it is not known yet in which dtype answers are or will be made."""
        unknown = held.get(key) is None and not answered(self.path)
        return key == "dtype" and (wanted.get(key) is None or unknown)

    def _are_first(self, held: dict[str, Any]) -> bool:
        """Whether the folder's items are the first of those asked for."""
        return self._digest_of is not None and self._digest_of(held["items"]) == held["items_digest"]

    def append(self, records: Iterable[Record], process: int | None = None) -> None:
        """Written and flushed to the disk before this returns."""
        if self._journal is None:
            name = RECORDS if process is None else f"records-{process}.jsonl"
            self._journal = Journal(self.path / name, "the records")
        self._journal.append(map(asdict, records))

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def read(self) -> list[Record]:
        return read_records(self.path)

    def merge(self, order: Iterable[tuple[str, int]]) -> list[Record]:
        """All records in one file, in this order; the processes' own files go."""
        self.close()
        found = {record.key: record for record in self.read()}
        records = [found[key] for key in order if key in found]
        try:
            write_whole(self.path / RECORDS, "".join(line_of(asdict(record)) for record in records))
            for part in self.path.glob("records-*.jsonl"):
                part.unlink()
        except OSError as error:
            raise unwritable("the records", self.path, error, ROOM) from error
        return records


def answered(folder: str | Path) -> bool:
    """Whether any answer is in the folder or below it."""
    return any(path.stat().st_size for path in Path(folder).rglob("records*.jsonl"))


def unfinished(folder: str | Path) -> str | None:
    """How far an evaluation has come, such as `25 of 40 answered`; None where it is finished."""
    run, done = read_run(folder), len(read_records(folder))
    total = run["items"] * run["samples"]
    return f"{done:,} of {total:,} answered" if done < total else None


def read_run(folder: str | Path) -> dict[str, Any]:
    """What an evaluation's results depend on."""
    path = Path(folder) / RUN
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        told = "there is no folder" if not Path(folder).exists() else "no evaluation is in"
        raise RCDError(f"{told} {folder}; name one that `rcd eval` wrote.") from error
    except ValueError as error:
        raise RCDError(f"{path} is damaged; run the evaluation again in another folder.") from error
    if not isinstance(content, dict):
        raise RCDError(f"{path} is damaged; run the evaluation again in another folder.")
    return content


def read_records(folder: str | Path) -> list[Record]:
    """Every answer once. A half-written last line, as a kill leaves it, is passed over; any other damage is named."""
    found: dict[tuple[str, int], Record] = {}
    names = [f.name for f in fields(Record)]
    for path in sorted(Path(folder).glob("records*.jsonl")):
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        for number, line in enumerate(lines[:-1], 1):  # behind the last newline: nothing, or half a line
            try:
                row = json.loads(line)
                record = Record(**{name: row[name] for name in names})
            except (ValueError, KeyError, TypeError) as error:
                raise RCDError(
                    f"line {number} of {path} is damaged; delete the line and run the evaluation again."
                ) from error
            found.setdefault(record.key, record)
    return list(found.values())
