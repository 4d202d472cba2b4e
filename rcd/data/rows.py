"""Rows of a data set: a local JSONL file (also gzipped), a hub data set, or the project's own generators."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rcd.data import hub
from rcd.errors import RCDError, reason
from rcd.jsons import NotJSON, TooDeep, parsed

Row = tuple[str, dict[str, Any]]
"""(where it stands, for messages; the row)."""


def rows_of(source: str, split: str = "train") -> Iterator[Row]:
    """`sums:N` generates N additions, `tasks:MIX:N` N problems; a path is read; anything else is a hub name."""
    kind, _, rest = source.partition(":")
    if kind == "sums":
        from rcd.data.sums import sums

        return sums(_count(source, rest))
    if kind == "tasks":
        from rcd.data.tasks.base import problems

        mix, _, count = rest.partition(":")
        found = problems(mix, split, _count(source, count))
        return ((problem.name, {"prompt": problem.question, "response": problem.solution}) for problem in found)
    path = Path(source).expanduser()
    if path.is_dir():
        raise RCDError(f"{path} is a folder; give a JSONL file.")
    if path.exists():
        return _jsonl(path)
    if source.endswith((".jsonl", ".jsonl.gz", ".json")) or "/" not in source:
        raise RCDError(f"there is no data file {source!r}; give a JSONL file or a hub data set such as org/name.")
    return _hub(source, split)


def _count(source: str, text: str) -> int:
    if not text.isdecimal():
        raise RCDError(f"a generated data set is sums:N or tasks:MIX:N with a whole number N, not {source!r}.")
    return int(text)


def generated_tokenizer(source: str) -> Any:
    """The tokenizer of a model that is trained from nothing: that of the generated tasks, or one of characters."""
    if source.startswith("tasks:"):
        from rcd.data.tasks.vocabulary import task_tokenizer

        return task_tokenizer()
    from rcd.data.sums import character_tokenizer

    return character_tokenizer()


def _jsonl(path: Path) -> Iterator[Row]:
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                row = parsed(line)
                if not isinstance(row, dict):
                    raise RCDError(f"line {number} of {path} is no JSON object.")
                yield f"line {number}", row
    except TooDeep as error:
        raise RCDError(f"line {number} of {path} is nested too deeply; mend it.") from error
    except NotJSON as error:
        raise RCDError(f"line {number} of {path} is not valid JSON; mend it.") from error
    except UnicodeDecodeError as error:
        raise RCDError(f"{path} is no text file in UTF-8; give a JSONL file.") from error
    except (OSError, EOFError, zlib.error) as error:
        raise RCDError(
            f"{path} cannot be read after line {number} ({reason(error)}); mend it, or give another file."
        ) from error


def _hub(name: str, split: str) -> Iterator[Row]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise RCDError(
            "a hub data set needs the datasets package: pip install datasets; or give a JSONL file."
        ) from error
    try:
        with hub.quiet():
            data = load_dataset(name, split=split)
    except Exception as error:  # the client's errors are many: no network, no such name, no such split
        raise RCDError(f"the data set {name!r} (split {split!r}) could not be had ({hub.why(error)}).") from error
    for number, row in enumerate(data):
        yield f"row {number}", dict(row)
