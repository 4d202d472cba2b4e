"""What is said of a model, and problems to ask it."""

from __future__ import annotations

import dataclasses
from typing import Any

from rcd.api import Pipeline
from rcd.carry.base import describe
from rcd.data.tasks import base
from rcd.data.tasks.sudoku import SIZE
from rcd.decode.config import DecodeConfig
from rcd.errors import RCDError

SHOWN = ("threshold", "temperature", "top_p", "top_k")
PLAIN = (
    "How many primes are below 30?",
    "Write a short story about a lighthouse.",
    "A train leaves at 9:40 and arrives at 12:05. How long does the journey take?",
    "Explain in two sentences why the sky is blue.",
)
"""For models that were trained for no task of ours."""


def task_of(pipeline: Pipeline) -> str | None:
    """The generated task that a model was trained on."""
    kind, _, rest = str(pipeline.checkpoint.rcd.provenance.get("data", "")).partition(":")
    name = rest.partition(":")[0]
    return name if kind == "tasks" and name in base.MIXES else None


def card(name: str, pipeline: Pipeline, config: DecodeConfig) -> dict[str, Any]:
    """A model as /v1/models shows it."""
    resolved, settings = pipeline.resolve(config), pipeline.settings
    carry = resolved.travelling
    own = {} if not carry.carries else {
        key: value for key, value in _described(carry).items() if key in ("t_res", "alpha")
    }  # fmt: skip
    own |= {"alpha_scale": resolved.residual_scale} if carry.carries else {}
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "rcd",
        "rcd": {
            "family": settings.family,
            "carry": _described(carry)["name"],
            "window": resolved.window,
            "block_length": resolved.block_length,
            "max_new_tokens": resolved.max_new_tokens,
            "context_length": settings.context_length,
            "task": task_of(pipeline),
            "chat": bool(getattr(pipeline.tokenizer, "chat_template", None)),
            "defaults": {
                **{key: getattr(resolved, key) for key in SHOWN},
                "steps": resolved.num_inference_steps,
                **own,
            },
        },
    }


def _described(carry: Any) -> dict[str, Any]:
    try:
        return describe(carry)
    except RCDError:  # of another package: it has no name here
        return {"name": carry.method, **dataclasses.asdict(carry)}


def draw(pipeline: Pipeline, seed: int) -> dict[str, Any]:
    """A problem for the model, the same for the same seed."""
    task = task_of(pipeline)
    if task is None:
        return {"prompt": PLAIN[seed % len(PLAIN)], "task": None, "answer": None, "grid": None}
    problem = next(iter(base.problems(task, "test", 1, seed=seed, first=seed % 2 if task == "mixed" else 0)))
    grid = {"rows": SIZE, "cols": SIZE, "box_rows": 2, "box_cols": 3} if problem.task == "sudoku" else None
    return {"prompt": problem.question, "task": problem.task, "answer": problem.answer, "grid": grid}
