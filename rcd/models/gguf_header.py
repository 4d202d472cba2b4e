"""The header of a GGUF file: its facts, and where its tensors stand. Every number in it is checked against the file's
size before it is followed, so that a damaged or hostile file costs no more time and memory than its own bytes."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from rcd.errors import RCDError

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
LEAST_FACT, LEAST_TENSOR = 13, 24
"""Bytes of the shortest fact (an empty name, its type and a byte) and of a tensor's shortest description."""
MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class Place:
    """A tensor's bytes."""

    shape: tuple[int, ...]
    """As torch has it: the file names the last dimension first."""
    kind: int
    """ggml's number of the type."""
    start: int


@dataclass
class Header:
    path: Path
    facts: dict[str, Any] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    """By name; starts count from the file's first byte."""


class Damaged(ValueError):
    """What is wrong, as part of a sentence."""


class _Reader:
    """Little-endian numbers and strings, one after the other."""

    def __init__(self, data: mmap.mmap):
        self.data, self.size, self.at = data, len(data), 0

    def take(self, count: int, what: str) -> int:
        """Step over so many bytes; returns where they begin."""
        if count > self.size - self.at:
            raise Damaged(f"{what} of {count} bytes at byte {self.at} goes beyond its {self.size} bytes")
        self.at += count
        return self.at - count

    def number(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self.take(struct.calcsize("<" + code), "a number"))[0]

    def text(self) -> str:
        count = self.number("Q")
        start = self.take(count, "a text")
        return self.data[start : start + count].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            raise Damaged(f"a fact has the unknown type {kind}")
        of, count = self.number("I"), self.number("Q")
        if of == STRING:
            self.fits(count, 8, "texts")
            return [self.text() for _ in range(count)]
        if of not in SCALARS:
            raise Damaged(f"a list has elements of the type {of}, which lists do not hold")
        start = self.take(count * struct.calcsize("<" + SCALARS[of]), "a list")
        return list(struct.unpack_from(f"<{count}{SCALARS[of]}", self.data, start))

    def fits(self, count: int, least: int, what: str) -> None:
        if count > (self.size - self.at) // least:
            raise Damaged(f"it announces {count} {what}, which its {self.size} bytes cannot hold")


def read_header(path: Path, sizes: dict[int, tuple[int, int]]) -> Header:
    """`sizes`: (numbers of a block, its bytes) of every type of tensor that can be read."""
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise RCDError(f"{path} is not a GGUF file: it does not begin with the letters GGUF.")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(path, data, sizes)
    except (Damaged, UnicodeDecodeError) as error:
        raise RCDError(f"the GGUF file {path} cannot be read ({error}); get the file again.") from error


def _read(path: Path, data: mmap.mmap, sizes: dict[int, tuple[int, int]]) -> Header:
    reader, found = _Reader(data), Header(path)
    reader.take(4, "the magic word")
    version = reader.number("I")
    if version not in (2, 3):
        raise Damaged(f"it has version {version}; little-endian files of versions 2 and 3 are read")
    tensors, facts = reader.number("Q"), reader.number("Q")
    reader.fits(tensors, LEAST_TENSOR, "tensors")
    reader.fits(facts, LEAST_FACT, "facts")
    for _ in range(facts):
        name, kind = reader.text(), reader.number("I")
        found.facts[name] = reader.value(kind)
    for _ in range(tensors):
        name, dimensions = reader.text(), reader.number("I")
        if dimensions > MOST_DIMENSIONS:
            raise Damaged(f"the tensor {name} has {dimensions} dimensions")
        shape = tuple(reader.number("Q") for _ in range(dimensions))[::-1]
        if name in found.places:
            raise Damaged(f"the tensor {name} is there twice")
        found.places[name] = Place(shape, reader.number("I"), reader.number("Q"))
    alignment = found.facts.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
        raise Damaged(f"its alignment is {alignment!r}")
    start = -(-reader.at // alignment) * alignment
    found.places = {name: _checked(name, place, start, reader.size, sizes) for name, place in found.places.items()}
    return found


def _checked(name: str, place: Place, start: int, size: int, sizes: dict[int, tuple[int, int]]) -> Place:
    if place.kind not in sizes:
        raise Damaged(f"the tensor {name} has the type {place.kind}, which is not read")
    if not place.shape or 0 in place.shape:
        raise Damaged(f"the tensor {name} has the shape {list(place.shape)}, which holds no numbers")
    block, width = sizes[place.kind]
    if place.shape[-1] % block:
        raise Damaged(f"the tensor {name} has rows of {place.shape[-1]} numbers, not a multiple of {block}")
    end = start + place.start + prod(place.shape) // block * width
    if end > size:
        raise Damaged(f"the tensor {name} ends at byte {end}, and the file has {size}: it is truncated")
    return Place(place.shape, place.kind, start + place.start)
