"""The results of an evaluation on disk: what was asked, and one line for every answer, safe against a kill at any time.

A folder holds `run.json` (what the results depend on), `records.jsonl` (one line an answer) and, while several
processes work, a `records-K.jsonl` for each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

from rcd.errors import RCDError, unwritable
from rcd.evaluate.provenance import MADE_ON, comparable
from rcd.evaluate.wording import counted

RUN, RECORDS = "run.json", "records.jsonl"
ITEMS = ("items", "items_digest")
ROOM = "make room and run the same command again: nothing is lost"


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
        self._file: IO[str] | None = None
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
            _write(self.path / RUN, json.dumps(content, indent=1) + "\n")
        except OSError as error:
            raise unwritable("the results", self.path, error) from error

    def _check(self) -> None:
        run = read_run(self.path)
        held, wanted = comparable(run, self.settings), comparable(self.settings, run)
        differing = [key for key in _differing(held, wanted) if not self._unsaid(key, held, wanted)]
        if set(differing) == set(ITEMS) and held["items"] > wanted["items"]:
            short = unfinished(self.path)
            what = f"an unfinished run ({short})" if short else counted(held["items"], "item")
            raise RCDError(
                f"{self.path} holds {what}, more than the {wanted['items']:,} asked for; ask for {held['items']:,} or "
                "more (--limit), or choose another --output."
            )
        if set(differing) == set(ITEMS) and self._are_first(held):
            return
        if differing:
            told = [f"{key}: {held.get(key)!r} -> {wanted.get(key)!r}" for key in differing]
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
        try:
            if self._file is None:
                name = RECORDS if process is None else f"records-{process}.jsonl"
                repair(self.path / name)
                self._file = (self.path / name).open("a", encoding="utf-8")
            self._file.write("".join(json.dumps(asdict(record), ensure_ascii=False) + "\n" for record in records))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise unwritable("the records", self.path, error, ROOM) from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def read(self) -> list[Record]:
        return read_records(self.path)

    def merge(self, order: Iterable[tuple[str, int]]) -> list[Record]:
        """All records in one file, in this order; the processes' own files go."""
        self.close()
        found = {record.key: record for record in self.read()}
        records = [found[key] for key in order if key in found]
        text = "".join(json.dumps(asdict(record), ensure_ascii=False) + "\n" for record in records)
        try:
            _write(self.path / RECORDS, text)
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


def _differing(held: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """The settings that are not the same. Those of another carry are others anyway: its name says it all."""
    keys = [key for key in {**held, **wanted} if held.get(key) != wanted.get(key)]
    if "carry.name" not in keys:
        return keys
    return [key for key in keys if key == "carry.name" or not (key.startswith("carry.") or key == "delta")]


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


def repair(path: Path) -> int:
    """Cut a half-written last line off; returns how many bytes went."""
    if not path.is_file():
        return 0
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
    return len(content) - whole


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    scratch = path.with_name(f".{path.name}.writing")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)
