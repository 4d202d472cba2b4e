"""A small model with a chat template, and a file of lines for it, good and bad ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import rcd
from rcd.models.toy import toy, toy_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} . {% endfor %}so"
BAD = {
    3: (b"{oops", "it is no valid JSON (expecting property name enclosed in double quotes, at character 2)."),
    5: (b'{"prompt": "a", "treshold": 1, "id": "t"}', "a line has no setting 'treshold' (did you mean 'threshold'?)"),
    7: (b'{"prompt": "the fox", "window": "d2f"}', "window is a setting of all lines; give it on the command line."),
    9: (b'{"ids": [5, 9999]}', "the prompt has the token id 9999, outside the vocabulary"),
    11: (b'{"prompt": "\xff"}', "it is no text in UTF-8."),
    13: (b'{"prompt": "the fox", "threshold": 2}', "threshold must be in [0, 1], not 2"),
}  # fmt: skip
"""Number of a line -> (its content, what is said of it)."""


def save_model(folder: Path, family: str = "sdar", seed: int = 2) -> str:
    tokenizer = toy_tokenizer(128)
    tokenizer.chat_template = TEMPLATE
    rcd.Pipeline(toy(family, seed=seed, spread=6.0, tokenizer=tokenizer)).save(folder)
    return str(folder)


def good_line(number: int) -> dict[str, Any]:
    """Texts, messages and ids of several lengths, some with an id and settings of their own."""
    words = ["the", "old", "fox", "runs", "to", "a", "red", "river"] * 3
    text = " ".join(words[number % 5 : number % 5 + 2 + number % 11])
    kinds: list[dict[str, Any]] = [
        {"prompt": text},
        {"messages": [{"role": "user", "content": text}], "id": {"n": number}},
        {"ids": [7, 8, 9, *range(10, 11 + number % 4)], "max_new_tokens": 5 + number % 6},
        {"prompt": text, "temperature": 0.8, "id": f"line {number}", "threshold": 0.5},
        {"prompt": text, "temperature": 1.0, "top_k": 20, "seed": 5, "stop": ["fox"], "residual_scale": 0},
    ]
    return kinds[number % len(kinds)]


def write_lines(path: Path, count: int = 30, bad: bool = True) -> Path:
    """Blank lines are among them."""
    lines = [json.dumps(good_line(number)).encode() for number in range(1, count + 1)]
    for number, (content, _) in BAD.items() if bad else ():
        lines[number - 1] = content
    lines[14:14] = [b"", b"  "]
    path.write_bytes(b"\n".join(lines))
    return path
