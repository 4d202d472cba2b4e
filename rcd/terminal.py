"""What is printed to a person: text of a model, a file or a prompt never steers the terminal.

An escape sequence in a text could move the cursor, rewrite what was shown, set the window's title or the clipboard; a
bidirectional override shows letters in another order than they have. In a terminal such characters are shown as what
they are; a pipe or a file gets the text as it is.
"""

from __future__ import annotations

import sys
from typing import Any, TextIO

BIDI = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Embeddings, overrides and isolates of direction."""
_C1 = range(0x80, 0xA0)
_SHOWN: dict[int, Any] = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"},
    0x7F: "\u2421",
    **{code: f"\\x{code:02x}" for code in _C1},
    **{code: f"\\u{code:04x}" for code in BIDI},
    **dict.fromkeys(range(0xD800, 0xE000), "\ufffd"),
}
_ESCAPED: dict[int, Any] = {code: f"\\u{code:04x}" for code in (0x7F, *_C1, *BIDI, *range(0xD800, 0xE000))}


def neutral(text: str) -> str:
    """The text with control characters made visible, but for newlines and tabs."""
    return text.replace("\r\n", "\n").translate(_SHOWN)


def neutral_json(text: str) -> str:
    """JSON that means the same, and steers no terminal either: control characters below 32 are escaped in any JSON."""
    return text.translate(_ESCAPED)


def show(text: str, file: TextIO | None = None) -> None:
    """Print a line; in a terminal, neutral."""
    file = sys.stdout if file is None else file
    print(neutral(text) if file.isatty() else text, file=file, flush=True)
