"""The keys that are let in, from where they are kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rcd.errors import RCDError, reason


def read_keys(given: Any = (), file: Path | None = None) -> list[str]:
    """From the environment, the file and the command line; each is let in."""
    keys = [key for key in os.environ.get("RCD_API_KEY", "").split(",") if key.strip()]
    if file is not None:
        try:
            keys += file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise RCDError(f"{file} cannot be read as keys ({reason(error)}); give a file with one a line.") from error
    found = [key.strip() for key in (*keys, *given) if key.strip()]
    if not found and (file is not None or given or os.environ.get("RCD_API_KEY")):
        raise RCDError("a key was meant but none was given; write one into it, or leave it out.")
    bad = [key for key in found if not key.isascii() or not key.isprintable() or " " in key]
    if bad:
        raise RCDError("a key is of printable ASCII characters without spaces; make one with `openssl rand -hex 32`.")
    return found
