"""Training speed of both stages on one GPU: tokens/s, model FLOP utilisation, peak memory, stage 2 over the plain step.

    python scripts/bench_train.py                      # SDAR-1.7B's shape, random weights, 2,048 tokens
    python scripts/bench_train.py --layers 2 --width 64 --vocab 256 --length 64 --device cpu --peak 1e11   # a dry run

Counted FLOPs are the model's own: 6 per matrix parameter and computed token (forward and backward), 2 for a forward
without gradient, attention over the pairs that its mask allows, heads and delta at masked positions only. Recomputation
is not counted. Tokens/s are tokens of the text; the layout also computes a noisy copy of the answer.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from typing import Any

import torch

from rcd.carry.residual import Residual
from rcd.diffusion.noise import draw, generator_of, key_of
from rcd.models.checkpoint import build
from rcd.models.families import SDAR
from rcd.models.lm import DiffusionLM, ModelSettings
from rcd.train.layout import Batch
from rcd.train.objective import Objective


@dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int

    @property
    def matrices(self) -> int:
        """Parameters of the backbone's matrices."""
        attention = self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.width * self.ffn)


def make(shape: Shape, device: torch.device, block: int, dtype: torch.dtype, learns: bool) -> DiffusionLM:
    config: dict[str, Any] = {
        "vocab_size": shape.vocab, "hidden_size": shape.width, "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "tie_word_embeddings": False,
    }  # fmt: skip
    settings = ModelSettings("sdar", "block_causal", shape.vocab, shape.vocab - 1, (shape.vocab - 2,), block, 32768)
    model = build(SDAR, settings, config, device=device).to(device=device, dtype=dtype)
    for parameter in model.parameters():
        parameter.requires_grad_(learns)
    return model.train(learns)


def make_batch(rows: int, length: int, prompt: int, block: int, vocab: int, seed: int) -> Batch:
    ids = torch.randint(0, vocab - 2, (rows, length), generator=generator_of("bench", seed))
    position = torch.arange(length).repeat(rows, 1)
    row = torch.arange(rows)[:, None].expand_as(position)
    answer = position >= prompt
    masked, p_mask = draw(key_of("bench", seed), row, position, position // block, answer)
    normaliser = torch.full((rows, length), 1 / int(answer.sum()))
    document = torch.zeros_like(ids)
    weight = normaliser / p_mask
    return Batch(ids, position, document, answer, masked, weight, normaliser, weight, weight)


def pairs(batch: Batch, block: int) -> int:
    """(query, key) pairs that the layout's mask allows."""
    length = batch.ids.shape[1]
    blocks = length // block
    clean = block * block * blocks * (blocks + 1) // 2
    first = int(batch.answer[0].nonzero()[0]) // block
    noisy = sum(block * block * (number + 1) for number in range(first, blocks))
    return len(batch.ids) * (clean + noisy)


def flops(batch: Batch, block: int, shape: Shape, target: Shape, trains: bool) -> float:
    """Of one model over the batch's layout; `target` gives the codebook of delta where the model is a reference."""
    length = batch.ids.shape[1]
    first = int(batch.answer[0].nonzero()[0]) // block * block
    computed, masked = len(batch.ids) * (2 * length - first), int(batch.masked.sum())
    forward = 2 * shape.matrices * computed + 4 * pairs(batch, block) * shape.heads * shape.head_dim * shape.layers
    forward += 2 * shape.vocab * shape.width * masked
    return 3 * forward if trains else forward + 2 * target.vocab * target.width * masked


def measure(objective: Objective, batches: list[Batch], steps: int, device: torch.device) -> tuple[float, float]:
    """(seconds a step, loss of the last)."""
    learnt = [p for p in objective.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learnt, lr=1e-5, fused=device.type == "cuda")
    total = torch.zeros(())

    def step(number: int) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = objective(batches[number % len(batches)]).total
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    for number in range(len(batches) + 1):  # every batch once, so that every shape is compiled
        step(number)
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for number in range(steps):
        total = step(number)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps, float(total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 28), ("width", 2048), ("heads", 16), ("kv-heads", 8), ("ffn", 6144)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--peak", type=float, default=989e12, help="peak FLOP/s that utilisation is a share of")
    parser.add_argument("--json", default=None, help="also write the table to this file")
    args = parser.parse_args()
    device, cuda = torch.device(args.device), args.device == "cuda"
    head_dim = max(8, args.width // args.heads)
    target = Shape(args.layers, args.width, args.heads, args.kv_heads, head_dim, args.ffn, args.vocab)
    # a quarter of the matrices: half the width and half the ffn at equal depth
    quarter = Shape(
        args.layers, args.width // 2, args.heads // 2, args.kv_heads // 2, head_dim, args.ffn // 2, args.vocab
    )
    prompt = min(args.prompt, args.length // 4)
    batches = [make_batch(args.rows, args.length, prompt, args.block, args.vocab, n).to(device) for n in range(4)]
    rows: list[dict[str, Any]] = []
    for name, shape in (
        ("plain (SeqD)", None),
        ("stage 2, reference of equal size", target),
        ("stage 2, a quarter", quarter),
    ):
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        model = make(target, device, args.block, torch.float32, learns=True)
        reference = (
            None if shape is None else make(shape, device, args.block, torch.bfloat16 if cuda else torch.float32, False)
        )
        if args.checkpointing:
            model.backbone.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        if cuda and not args.no_compile:
            for each in (model, reference):
                layers: Any = [] if each is None else each.backbone.layers
                for layer in layers:
                    layer.compile()
        carry = None if shape is None else Residual()
        objective = Objective(model, carry=carry, reference=reference, block_length=args.block, flex=cuda)
        seconds, loss = measure(objective, batches, args.steps, device)
        used = sum(flops(b, args.block, target, target, True) for b in batches) / len(batches)
        if shape is not None:
            used += sum(flops(b, args.block, shape, target, False) for b in batches) / len(batches)
        rows.append({
            "what": name, "ms": 1000 * seconds, "tokens_per_s": args.rows * args.length / seconds,
            "mfu": used / seconds / args.peak, "over_plain": seconds * 1000 / rows[0]["ms"] if rows else 1.0,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0, "loss": loss,
        })  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
        del model, reference, objective
    print(f"\n{target.matrices / 1e9:.2f}B matrix parameters, {args.rows} x {args.length} tokens, block {args.block}")
    print(f"{'':34}{'ms':>9}{'tokens/s':>11}{'MFU':>7}{'x plain':>9}{'GiB':>7}")
    for row in rows:
        print(
            f"{row['what']:34}{row['ms']:9.1f}{row['tokens_per_s']:11,.0f}{row['mfu']:7.3f}"
            f"{row['over_plain']:9.2f}{row['peak_gib']:7.1f}"
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"settings": vars(args), "rows": rows}, file)


if __name__ == "__main__":
    main()
