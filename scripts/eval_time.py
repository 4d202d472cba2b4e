"""How long `rcd eval` takes, beside another checkout of this repository or with other numbers of threads, in turns.

    python -m scripts.eval_time now= before=../before --model bundled:llada-seqd --limit 200 --rounds 5
    python -m scripts.eval_time default= one=,--threads,1 two=,--threads,2 --model bundled:sdar-rcd

Each NAME=PATH[,FLAG,...] is a checkout (empty: this one) and flags of its command. Whole commands are timed, start
included; the order of every round is drawn. Seconds by the clock and of CPU: medians, in brackets the extremes.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent


def timed(checkout: Path, flags: list[str]) -> tuple[float, float]:
    """Seconds by the clock and of CPU that one `rcd eval` takes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "rcd", "eval", *flags, "--output", folder + "/run"]
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(
            command,
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return time.perf_counter() - start, used


def shown(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f}-{max(values):.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="+", metavar="NAME=PATH[,FLAG,...]")
    parser.add_argument("--model", default="bundled:llada-seqd")
    parser.add_argument("--task", default="sudoku")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    ways: dict[str, tuple[Path, list[str]]] = {}
    for text in asked.ways:
        name, _, rest = text.partition("=")
        path, *flags = rest.split(",")
        ways[name] = ((HERE / path).resolve() if path else HERE, flags)
    common = ["--model", asked.model, "--task", asked.task, "--limit", str(asked.limit)]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(asked.rounds):
        for name in random.sample(list(ways), len(ways)):
            checkout, flags = ways[name]
            found[name].append(timed(checkout, common + flags))
            print(f"{name}: {found[name][-1][0]:.2f} s, {found[name][-1][1]:.2f} s of CPU", file=sys.stderr)
    first = next(iter(found.values()))
    for name, pairs in found.items():
        ratio = statistics.median(mine[0] / other[0] for mine, other in zip(pairs, first, strict=True))
        clock, cpu = ([pair[i] for pair in pairs] for i in (0, 1))
        print(f"{name}: {shown(clock)} s, CPU {shown(cpu)} s, {ratio:.2f} times {next(iter(found))} (round by round)")


if __name__ == "__main__":
    main()
