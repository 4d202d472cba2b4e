"""The paper's tables and figures as data: its settings, and the numbers that it prints.

Settings that the paper leaves open are those of its authors' release (LLaDA's T_res and shots) or of this project.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

COLD = "residual,start=zero"
WARM = "residual,start=reference"
AIME = {"temperature": 0.6}
AIME_SAMPLES = 16
THRESHOLD = 0.85
LONG, SHORT, SHORT_AIME = 16_384, 512, 1_024
THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0)


@dataclass(frozen=True)
class Cell:
    """One number of a table."""

    model: str
    """The row's model, such as SDAR-8B-b64."""
    role: str
    """Which checkpoint: chat, base, seqd, rcd, extended, loopholing."""
    task: str
    paper: float | None
    """In percent; None: the paper has no number there (`NA`)."""
    carry: str = "none"
    decode: dict[str, Any] = field(default_factory=dict)
    samples: int = 1
    shots: int | None = None
    label: str = ""
    """The row's name, where it is not the role's."""
    reference: str = "reference"
    """Which reference a warm start asks: reference or reference-large."""

    @property
    def row(self) -> str:
        return f"{self.model} {self.label or ROLES[self.role]}"


ROLES = {
    "chat": "Chat", "base": "Base", "seqd": "SeqD", "rcd": "RCD", "extended": "SeqD (extended)",
    "loopholing": "Loopholing",
}  # fmt: skip


@dataclass(frozen=True)
class Exhibit:
    label: str
    about: str
    family: str
    """Whose models: sdar or llada; the bundled set that stands in for them."""
    kind: str
    """table, sweep, throughput, alpha, start or recall: what is run."""
    cells: tuple[Cell, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    note: str = ""


def _block(model: str) -> int:
    return int(model.rpartition("-b")[2])


def _sdar(model: str, role: str, numbers: tuple[float, ...]) -> list[Cell]:
    """GSM8K, MATH500, AIME24, AIME25 of one row of tab:sdar-main-results."""
    cells = []
    for task, paper in zip(("gsm8k", "math500", "aime24", "aime25"), numbers, strict=True):
        hard = task.startswith("aime")
        length = LONG if role != "chat" else SHORT_AIME if hard else SHORT
        decode = {"threshold": THRESHOLD, "block_length": _block(model), "max_new_tokens": length}
        carry = COLD if role == "rcd" else "none"
        cells.append(
            Cell(model, role, task, paper, carry, decode | (AIME if hard else {}), AIME_SAMPLES if hard else 1)
        )
    return cells


SDAR_ROWS: dict[str, dict[str, tuple[float, ...]]] = {
    "SDAR-4B-b32": {
        "chat": (86.13, 50.20, 5.83, 2.50), "seqd": (81.73, 61.20, 6.04, 11.88), "rcd": (84.91, 65.40, 9.17, 17.08),
    },
    "SDAR-4B-b64": {
        "chat": (85.90, 49.80, 6.25, 1.67), "seqd": (78.85, 56.80, 4.17, 7.29), "rcd": (87.04, 68.40, 11.04, 14.79),
    },
    "SDAR-8B-b32": {
        "chat": (88.40, 50.00, 6.46, 4.17), "seqd": (86.50, 65.80, 11.67, 14.79), "rcd": (90.45, 76.20, 18.96, 20.00),
    },
    "SDAR-8B-b64": {
        "chat": (88.32, 51.60, 5.20, 2.50), "seqd": (82.87, 64.20, 7.08, 9.79), "rcd": (86.05, 74.40, 18.75, 16.04),
    },
}  # fmt: skip

LLADA_TASKS = {"gsm8k": ("0.92", 5), "minerva_math": ("0.98", 4)}
"""Task -> (T_res, shots), of the authors' release."""


def _llada(role: str, numbers: tuple[float, float]) -> list[Cell]:
    cells = []
    for (task, (t_res, shots)), paper in zip(LLADA_TASKS.items(), numbers, strict=True):
        decode = {"threshold": 1.0, "max_new_tokens": SHORT}
        carry = f"{WARM},t_res={t_res}" if role == "rcd" else "none"
        cells.append(Cell("LLaDA", role, task, paper, carry, decode, shots=shots))
    return cells


def _plain(model: str, role: str, task: str, paper: float | None, carry: str = "none", label: str = "") -> Cell:
    decode = {"threshold": THRESHOLD, "block_length": _block(model), "max_new_tokens": LONG}
    if task.startswith("aime"):
        return Cell(model, role, task, paper, carry, decode | AIME, AIME_SAMPLES, label=label)
    return Cell(model, role, task, paper, carry, decode, label=label)


def _chat(model: str, numbers: tuple[float, float, float]) -> list[Cell]:
    decode = {"threshold": THRESHOLD, "block_length": _block(model), "max_new_tokens": SHORT}
    tasks = ("gsm8k", "gsm1k", "gsm-plus")
    return [Cell(model, "chat", task, paper, "none", decode) for task, paper in zip(tasks, numbers, strict=True)]


def _speed(family: str, task: str, length: int, seqd: float, rcd: float) -> tuple[Cell, Cell]:
    decode: dict[str, Any] = {"block_length": 64, "max_new_tokens": length}
    warm = WARM if family == "LLaDA" else COLD
    return Cell(family, "seqd", task, seqd, "none", decode), Cell(family, "rcd", task, rcd, warm, decode)


EXHIBITS = {
    exhibit.label: exhibit
    for exhibit in (
        Exhibit(
            "tab:sdar-main-results", "SDAR on four mathematics sets, threshold 0.85, cold start", "sdar", "table",
            tuple(cell for model, rows in SDAR_ROWS.items() for each in rows.items() for cell in _sdar(model, *each)),
        ),
        Exhibit(
            "tab:llada-main-results", "LLaDA on GSM8K and Minerva MATH, one token a step, warm start", "llada", "table",
            (*_llada("base", (70.30, 31.40)), *_llada("seqd", (75.74, 31.10)), *_llada("rcd", (78.09, 37.00))),
            note="The paper's Base row is quoted from LLaDA's own paper.",
        ),
        Exhibit(
            "tab:combined_inference", "accuracy at equal tokens per second", "llada", "throughput",
            (
                *_speed("LLaDA", "minerva_math", SHORT, 34.20, 36.22), *_speed("LLaDA", "gsm8k", SHORT, 76.12, 78.70),
                *_speed("SDAR", "minerva_math", LONG, 50.82, 59.82), *_speed("SDAR", "gsm8k", LONG, 75.36, 81.43),
            ),
            note="The paper runs LLaDA in Fast-dLLM and SDAR in D2F, at 65 to 149 tokens per second on 8 H100; here "
            "the plain windows are used.",
        ),
        Exhibit(
            "tab:comparison", "RCD against Loopholing after one epoch", "sdar", "table",
            (
                _plain("SDAR-4B-b64", "loopholing", "gsm8k", None, "trained"),
                _plain("SDAR-4B-b64", "loopholing", "math500", None, "trained"),
                _plain("SDAR-4B-b64", "rcd", "gsm8k", 86.35, COLD, "RCD (1 epoch)"),
                _plain("SDAR-4B-b64", "rcd", "math500", 66.20, COLD, "RCD (1 epoch)"),
            ),
            note="NA in the paper: Loopholing's model wrote nothing that could be graded.",
        ),
        Exhibit(
            "tab:init-ablation", "where the first residual comes from (MATH500, SDAR-8B-b64)", "sdar", "start",
            (
                _plain("SDAR-8B-b64", "seqd", "math500", 64.2, "none", "SeqD"),
                _plain("SDAR-8B-b64", "rcd", "math500", 74.2, WARM, "RCD, reference (1.7B)"),
                replace(
                    _plain("SDAR-8B-b64", "rcd", "math500", 71.8, WARM, "RCD, reference (4B)"),
                    reference="reference-large",
                ),
                _plain("SDAR-8B-b64", "rcd", "math500", 76.4, "residual,start=self", "RCD, self"),
                _plain("SDAR-8B-b64", "rcd", "math500", 75.6, COLD, "RCD, zero"),
                _plain("SDAR-8B-b64", "rcd", "math500", 77.4, "residual,start=dirichlet", "RCD, Dirichlet"),
            ),
        ),
        Exhibit(
            "tab:extra-training", "RCD against a SeqD that was trained longer (SDAR-8B-b64)", "sdar", "table",
            (
                *(_plain("SDAR-8B-b64", "extended", task, paper) for task, paper in
                  (("gsm8k", 84.61), ("math500", 68.00), ("aime24", 8.96), ("aime25", 10.83))),
                *(_plain("SDAR-8B-b64", "rcd", task, paper, COLD) for task, paper in
                  (("gsm8k", 86.05), ("math500", 74.40), ("aime24", 18.75), ("aime25", 16.04))),
            ),
        ),
        Exhibit(
            "tab:gsm-contamination-study", "the Chat models on GSM8K, GSM1K and GSM-Plus", "sdar", "table",
            (
                *_chat("SDAR-4B-b32", (86.13, 82.57, 75.89)), *_chat("SDAR-4B-b64", (85.90, 79.25, 73.87)),
                *_chat("SDAR-8B-b32", (88.40, 86.22, 78.38)), *_chat("SDAR-8B-b64", (88.32, 83.24, 77.62)),
            ),
        ),
        Exhibit(
            "fig:recall", "recall@5 of the final tokens over the steps (LLaDA, GSM8K)", "llada", "recall",
            settings={"task": "gsm8k", "k": (5,), "threshold": 1.0, "max_new_tokens": SHORT},
            note="A figure without printed numbers.",
        ),
        Exhibit(
            "fig:sdar-accuracy-vs-tokens", "accuracy over tokens per step, thresholds 0.5 to 1", "sdar", "sweep",
            settings={"task": "math500", "thresholds": THRESHOLDS, "max_new_tokens": LONG},
            note="A figure without printed numbers; the text says 4 to 5 times fewer steps at equal accuracy.",
        ),
        Exhibit(
            "fig:ablation-on-alpha", "eight weights, a draft model's residual at every step", "sdar", "alpha",
            settings={"task": "math500", "threshold": THRESHOLD, "max_new_tokens": LONG},
            note="A figure without printed numbers; the text says that normalised entropy has the best frontier.",
        ),
    )
}  # fmt: skip
