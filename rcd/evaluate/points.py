"""Sweeps as data: one model at several commit thresholds, or values of another setting, over the same items; and the
file that keeps it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcd.errors import RCDError, number, reason, unwritable
from rcd.evaluate.wording import dial

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Point:
    """One threshold: for each item, whether it was right, its new tokens, and its steps."""

    threshold: float | None
    """Or the value of another `setting`; None: of a rule that reads none."""
    right: Array
    tokens: Array
    steps: Array
    seconds: float = 0.0
    """Wall time of the whole point."""
    texts: list[str] = field(default_factory=list)
    setting: str = "threshold"

    def __post_init__(self) -> None:
        if self.threshold is not None:
            number(self.setting, self.threshold, least=0, most=1 if self.setting == "threshold" else math.inf)
        for name, kind in (("right", bool), ("tokens", np.int64), ("steps", np.int64)):
            object.__setattr__(self, name, np.asarray(getattr(self, name)).astype(kind))
        if self.right.ndim != 1 or not len(self.right) == len(self.tokens) == len(self.steps) > 0:
            raise RCDError("a point needs one value of right, tokens and steps for each of its items.")
        if self.texts and len(self.texts) != len(self.right):
            raise RCDError(f"a point of {len(self.right)} items has {len(self.texts)} texts; give one for each item.")
        if self.tokens.min() < 0 or self.steps.min() < 1:
            raise RCDError("an item takes at least one step and has no negative tokens; mend the point's arrays.")

    @property
    def slowest(self) -> bool:
        """Whether every step commits one token."""
        return self.setting == "threshold" and self.threshold == 1

    @property
    def accuracy(self) -> float:
        """100 * right / items."""
        return 100.0 * float(self.right.mean())

    @property
    def tokens_per_step(self) -> float:
        """sum(tokens) / sum(steps): a ratio of sums, so that long answers count by their length."""
        return float(self.tokens.sum() / self.steps.sum())


@dataclass(frozen=True, eq=False)
class Sweep:
    """One model over the same items at several thresholds."""

    name: str
    items: list[str]
    tasks: list[str]
    """The task of each item."""
    points: list[Point]
    settings: dict[str, Any] = field(default_factory=dict)
    """How it was decoded: for the reader of the file."""
    digest: str = ""
    """Of the questions and answers: names may stay the same where a seed has changed."""

    def __post_init__(self) -> None:
        if not self.points:
            raise RCDError(f"the sweep {self.name!r} has no points; give at least one threshold.")
        if len(self.tasks) != len(self.items):
            raise RCDError(f"the sweep {self.name!r} names {len(self.items)} items and {len(self.tasks)} tasks.")
        for point in self.points:
            if len(point.right) != len(self.items):
                raise RCDError(
                    f"the sweep {self.name!r} has {len(self.items)} items, but its point at "
                    f"{dial(point.setting, point.threshold)} has {len(point.right)}; every point must be over the "
                    "same items."
                )

    @property
    def mix(self) -> str:
        """The one task of all items, else `mixed`."""
        return self.tasks[0] if len(set(self.tasks)) == 1 else "mixed"

    @property
    def curve(self) -> list[tuple[float, float]]:
        """(rho, y) of every point, sorted by rho."""
        return sorted((point.tokens_per_step, point.accuracy) for point in self.points)

    @property
    def best(self) -> float:
        """The highest accuracy of any point."""
        return max(point.accuracy for point in self.points)

    def only(self, task: str) -> Sweep:
        """The same over the items of one task."""
        keep = np.array([name == task for name in self.tasks])
        if not keep.any():
            raise RCDError(f"the sweep {self.name!r} has no items of {task!r}; it has: {', '.join(set(self.tasks))}.")
        index = np.flatnonzero(keep)
        points = [
            replace(p, right=p.right[keep], tokens=p.tokens[keep], steps=p.steps[keep],
                    texts=[p.texts[i] for i in index if p.texts])
            for p in self.points
        ]  # fmt: skip
        items = [self.items[i] for i in index]
        return replace(self, items=items, tasks=[task] * len(index), points=points)

    def save(self, path: str | Path) -> Path:
        """JSONL: a header (name, mix, settings, items), then one line a point."""
        header = {
            "name": self.name, "mix": self.mix, "settings": self.settings, "points": len(self.points),
            "digest": self.digest, "items": self.items, "tasks": self.tasks,
        }  # fmt: skip
        rows = [
            {
                "threshold": p.threshold, "accuracy": p.accuracy, "tokens_per_step": p.tokens_per_step,
                "seconds": p.seconds, "right": p.right.astype(int).tolist(), "tokens": p.tokens.tolist(),
                "steps": p.steps.tolist(), "texts": p.texts, "setting": p.setting,
            }
            for p in self.points
        ]  # fmt: skip
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch = path.with_name(f".{path.name}.writing")  # whole or not at all
            scratch.write_text("".join(json.dumps(row) + "\n" for row in [header, *rows]), encoding="utf-8")
            scratch.replace(path)
        except OSError as error:
            raise unwritable("the sweep", path, error, "give another path") from error
        return path

    @classmethod
    def load(cls, path: str | Path) -> Sweep:
        """What `save` wrote; a damaged line is named."""
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise RCDError(
                f"the sweep {path} cannot be read ({reason(error)}); give a file written by Sweep.save."
            ) from error
        at = 1
        points: list[Point] = []
        try:
            header = json.loads(lines[0] if lines else "")
            keys = ("name", "items", "tasks", "settings", "digest", "points")
            name, items, tasks, settings, digest, count = (header[key] for key in keys)
            if len(items) != len(tasks):
                raise RCDError(f"{len(items)} items but {len(tasks)} tasks")
            for at in range(2, count + 2):
                if at > len(lines):
                    raise RCDError(f"the file ends here, {count - len(points)} of {count} points are missing")
                row = json.loads(lines[at - 1])
                point = Point(*({"setting": "threshold", **row}[f.name] for f in fields(Point)))
                if len(point.right) != len(items):
                    raise RCDError(f"{len(point.right)} results for {len(items)} items")
                points.append(point)
            return cls(name, items, tasks, points, settings, digest)
        except KeyError as error:
            raise RCDError(f"line {at} of {path} is damaged (no {error}); run the sweep again.") from error
        except (ValueError, TypeError, AttributeError) as error:
            told = str(error).rstrip(".") if isinstance(error, RCDError) else "it is no line of a sweep"
            raise RCDError(f"line {at} of {path} is damaged ({told}); run the sweep again.") from error
