"""The command `rcd`, also as `python -m rcd`."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from rcd.cli.main import main as run
    except KeyboardInterrupt:  # while it is still being imported
        print("rcd: interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
