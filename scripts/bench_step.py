"""What a denoising step costs: over the prefix, and with residual context. Ratios of one run; times are noisy.

    python scripts/bench_step.py            # 4 layers, width 256, vocabulary 2,048, block 32, on this CPU
    python scripts/bench_step.py --json

With the KV cache, a step may grow with the prefix only by attention's share: the script times a step at both prefixes
and attention alone (the same calls, the same shapes, every layer), and compares the two differences.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from rcd.carry.none import NoCarry
from rcd.carry.residual import Residual
from rcd.decode.config import DecodeConfig
from rcd.decode.lanes import Run
from rcd.decode.step import denoise
from rcd.diffusion.attention import sdpa
from rcd.models.lm import DiffusionLM
from rcd.models.toy import toy


def step_at(model: DiffusionLM, carry: NoCarry | Residual, prefix: int, block: int) -> Callable[[], object]:
    """One denoising step behind a stored prefix, every position of the block still a mask."""
    device, mask = model.device, model.settings.mask_token_id
    config = DecodeConfig(carry=carry, block_length=block).resolved(model.settings)
    run = Run.of(model, None, config, [torch.Generator()], capacity=prefix + block)
    position = torch.arange(prefix + block, device=device)[None]
    run.target.prefill(torch.full((1, prefix), 7, device=device), position[:, :prefix], block)
    ids = torch.full((1, block), mask, device=device)
    view = run.target.view(position[:, prefix:], position)
    everywhere, one = torch.ones_like(ids, dtype=torch.bool), torch.ones(1, dtype=torch.long, device=device)
    state = run.refresh(None, ids, view, [0], [0])
    state = denoise(model, run.rules, ids, view, state, everywhere, one, None).state  # a warm residual
    return lambda: denoise(model, run.rules, ids, view, state, everywhere, one, None)


def attention_at(model: DiffusionLM, prefix: int, block: int) -> Callable[[], object]:
    """The attention calls of one step, without the rest of the model; every layer has keys and values of its own."""
    config: Any = model.backbone.config
    heads, kv, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    query = torch.randn(1, heads, block, width, device=model.device)
    size = (config.num_hidden_layers, 1, kv, prefix + block, width)
    keys, values = (torch.randn(size, device=model.device) for _ in range(2))

    def all_layers() -> None:
        for key, value in zip(keys, values, strict=True):
            sdpa(model, query, key, value, None)

    return all_layers


def timed(jobs: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each job; the jobs take turns, so that noise falls on all alike."""
    for job in jobs.values():
        for _ in range(5):
            job()
    samples: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            began = time.perf_counter()
            job()
            samples[name].append(1000 * (time.perf_counter() - began))
    return samples


def ratio(samples: dict[str, list[float]], over: str, under: str) -> float:
    """The median of the ratios within a round: steadier than the ratio of the medians."""
    return round(median(a / b for a, b in zip(samples[over], samples[under], strict=True)), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--near", type=int, default=64)
    parser.add_argument("--far", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    shape = dict(layers=args.layers, width=args.width, heads=4, ffn=4 * args.width, vocab=args.vocab)
    model = toy("sdar", context=args.far + args.block, block_length=args.block, **shape).model
    with torch.inference_mode():
        jobs: dict[str, Callable[[], object]] = {}
        for name, prefix in (("near", args.near), ("far", args.far)):
            jobs[f"seqd {name}"] = step_at(model, NoCarry(), prefix, args.block)
            jobs[f"rcd {name}"] = step_at(model, Residual(), prefix, args.block)
            jobs[f"attention {name}"] = attention_at(model, prefix, args.block)
        samples = timed(jobs, args.repeats)
    ms = {name: median(values) for name, values in samples.items()}
    growth, share = ms["seqd far"] - ms["seqd near"], ms["attention far"] - ms["attention near"]
    result = {
        **{name: round(value, 3) for name, value in ms.items()},
        "step_far_over_near": ratio(samples, "seqd far", "seqd near"),
        "growth_beyond_attention_over_step": round((growth - share) / ms["seqd near"], 3),
        "rcd_over_seqd_near": ratio(samples, "rcd near", "seqd near"),
        "rcd_over_seqd_far": ratio(samples, "rcd far", "seqd far"),
    }
    if args.json:
        print(json.dumps(result))
        return
    print(f"{args.layers} layers, width {args.width}, vocabulary {args.vocab}, block {args.block}, fp32, ", end="")
    print(f"{torch.get_num_threads()} threads; medians of {args.repeats}")
    print(f"{'':14}{'prefix ' + str(args.near):>14}{'prefix ' + str(args.far):>14}{'ratio':>9}")
    for name in ("seqd", "rcd", "attention"):
        near, far = ms[f"{name} near"], ms[f"{name} far"]
        print(f"{name:14}{near:11.2f} ms{far:11.2f} ms{far / near:9.2f}")
    print(f"the step grows by {growth:.2f} ms, attention alone by {share:.2f} ms")
    print(f"growth beyond attention: {100 * result['growth_beyond_attention_over_step']:.1f}% of a step")
    print(f"residual context: {100 * (result['rcd_over_seqd_near'] - 1):+.1f}% of a step at the near prefix, ", end="")
    print(f"{100 * (result['rcd_over_seqd_far'] - 1):+.1f}% at the far one")


if __name__ == "__main__":
    main()
