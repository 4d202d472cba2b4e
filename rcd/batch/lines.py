"""The input of a batch: JSON lines, each a prompt (text, chat messages or token ids) with settings of its own."""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rcd.decode.config import REQUEST, DecodeConfig
from rcd.errors import RCDError, no_setting, reason
from rcd.evaluate.answering import Job, settle
from rcd.jsons import NotJSON, TooDeep, parsed

if TYPE_CHECKING:
    from rcd.api import Pipeline

Lines = Iterable[tuple[int, bytes]]
"""Numbers and contents."""
STREAM = "-"
"""Standard input, or standard output."""
PROMPTS = ("prompt", "messages", "ids")
FIELDS = ("id", *PROMPTS, "canvas", *REQUEST)
ENGINES = tuple(f.name for f in fields(DecodeConfig) if f.name not in REQUEST)
"""Settings that all lines share."""


@dataclass(frozen=True)
class Line:
    """A line of the input, read and checked."""

    number: int
    """From 1, blank lines counted."""
    prompt: Any
    """A text, chat messages or token ids; None: the first words of the canvas."""
    settings: dict[str, Any] = field(default_factory=dict)
    canvas: Any = None
    """A text or token ids, where tokens of the answer are given."""


def read_object(content: bytes) -> dict[str, Any]:
    """The line as JSON."""
    try:
        row = parsed(content.decode("utf-8-sig"), finite=True)
    except UnicodeDecodeError as error:
        raise RCDError("it is no text in UTF-8.") from error
    except TooDeep as error:
        raise RCDError("its JSON is nested too deeply.") from error
    except NotJSON as error:
        raise RCDError(f"it is no valid JSON ({error}).") from error
    if not isinstance(row, dict):
        raise RCDError("it is no JSON object.")
    return row


DEEP = 64
"""Levels that stand above an id, and more, where its record is written and read again."""


def repeatable(value: Any) -> Any:
    """An id that can be written as it was read."""
    nested = value
    for _ in range(DEEP):
        nested = [nested]
    try:
        json.dumps(nested, allow_nan=False)
    except (ValueError, RecursionError) as error:  # a number too large for any, or lists in lists in lists
        raise RCDError("its id cannot be repeated as JSON; take a text or a number.") from error
    return value


def parse(number: int, row: dict[str, Any]) -> Line:
    """The prompt of a line and its settings."""
    alone = row.get("canvas") and all(row.get(name) in (None, "", []) for name in PROMPTS)
    prompt = None if alone else prompt_of(row)
    for name in row:
        if name in ENGINES:
            raise RCDError(f"{name} is a setting of all lines; give it on the command line.")
        if name not in FIELDS:
            raise no_setting("a line", name, FIELDS)
    canvas = row.get("canvas")
    if canvas is not None and not isinstance(canvas, str):
        if not isinstance(canvas, list):
            raise RCDError(f"canvas is a text or a list of token ids, not {short(canvas)}.")
        check_kind("canvas", canvas)
    return Line(number, prompt, {name: row[name] for name in REQUEST if name in row}, canvas)


def prompt_of(row: dict[str, Any]) -> Any:
    given = [name for name in PROMPTS if row.get(name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise RCDError(f"a line has one of prompt, messages and ids, and this one has {found}.")
    (kind,) = given
    check_kind(kind, row[kind])
    return row[kind]


def check_kind(kind: str, value: Any) -> None:
    """What a field of a line holds."""
    if kind == "prompt" and not isinstance(value, str):
        raise RCDError(f"prompt is a text, not {short(value)}.")
    if kind in ("ids", "canvas"):
        odd = value if not isinstance(value, list) else next((one for one in value if type(one) is not int), None)
        if odd is not None:
            raise RCDError(f"{kind} is a list of whole numbers, not {short(odd)}.")
    if kind == "messages":
        good = isinstance(value, list) and value and all(isinstance(one, dict) for one in value)
        if not (good and all(isinstance(one.get(name), str) for one in value for name in ("role", "content"))):
            raise RCDError('messages is a list of objects such as {"role": "user", "content": "a text"}.')


def short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:40]}..."


def job(pipeline: Pipeline, line: Line, config: DecodeConfig, chat: bool | None) -> Job:
    """The line as decoding takes it. A line draws by the run's seed and its own number, or by its own seed."""
    own = {"seed": (config.seed + line.number - 1) % 2**64, **line.settings}
    asked = replace(config, **own)
    if line.prompt is not None and not line.prompt:
        raise RCDError("its prompt is empty.")
    told = chat if isinstance(line.prompt, str) else None
    prompts = None if line.prompt is None else [line.prompt]
    (ids,), (canvas,) = pipeline.encode_both(prompts, told, [line.canvas])
    return Job(line.number, ids, settle(pipeline, asked, len(ids), exact=True, canvas=len(canvas)), canvas)


@dataclass(frozen=True)
class Scan:
    """What one pass over an input finds: sixteen bytes a line."""

    numbers: array[int]
    """Of the lines that are not blank."""
    offsets: array[int]
    """Where they begin in the file."""
    digest: str

    @property
    def count(self) -> int:
        return len(self.numbers)

    @property
    def last(self) -> int:
        return self.numbers[-1] if self.numbers else 0

    def without(self, held: Container[int], first: int = 0, every: int = 1) -> Scan:
        """The lines that are not held; of several processes, the share of one."""
        numbers, offsets = array("q"), array("q")
        for number, offset in zip(self.numbers[first::every], self.offsets[first::every], strict=True):
            if number not in held:
                numbers.append(number)
                offsets.append(offset)
        return Scan(numbers, offsets, self.digest)


class Input:
    """The file of prompts, or standard input; read as a stream."""

    def __init__(self, path: str | Path) -> None:
        self.path = None if str(path) == STREAM else Path(path)
        try:
            folder = self.path is not None and self.path.is_dir()
        except OSError as error:  # such as a name that is too long
            raise self._unreadable(error) from error
        if folder:
            raise RCDError(f"{self.path} is a folder; give a JSONL file as --input.")

    @property
    def name(self) -> str:
        return "standard input" if self.path is None else str(self.path)

    @property
    def again(self) -> bool:
        """Whether it can be read more than once."""
        return self.path is not None and (self.path.is_file() or not self.path.exists())

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """(number, content) of every line that is not blank."""
        for number, _, content in self._lines():
            yield number, content

    def at(self, numbers: Iterable[int], offsets: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """Some of the lines, by where they begin in the file."""
        with self._reading() as file:
            for number, offset in zip(numbers, offsets, strict=True):
                file.seek(offset)
                yield number, file.readline().strip()

    def scan(self) -> Scan:
        digest, numbers, offsets = hashlib.sha256(), array("q"), array("q")
        for number, offset, content in self._lines():
            digest.update(b"%d %d " % (number, len(content)) + content)
            numbers.append(number)
            offsets.append(offset)
        return Scan(numbers, offsets, digest.hexdigest()[:16])

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        offset = 0
        with self._reading() as file:
            for number, line in enumerate(file, 1):
                if content := line.strip():
                    yield number, offset, content
                offset += len(line)

    @contextmanager
    def _reading(self) -> Iterator[IO[bytes]]:
        try:
            with open(sys.stdin.fileno(), "rb", closefd=False) if self.path is None else self.path.open("rb") as file:
                yield file
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> RCDError:
        return RCDError(f"the input {self.name} cannot be read ({reason(error)}); give another file.")
