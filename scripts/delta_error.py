"""How far delta by kept tokens is from the exact one, in what the model reads: the injected embedding of Eq. 2.

    python scripts/delta_error.py --model bundled:llada-rcd --task sudoku
    python scripts/delta_error.py --causal FOLDER --gguf FILE --texts questions.jsonl
    python scripts/delta_error.py --synthetic 151936

The first reads the predictions that decoding really makes; the second the next-token predictions of a causal language
model over texts (its vocabulary and embeddings are a language's; a temperature makes it as unsure as masks are); the
third draws logits from a Zipf-like law over random embeddings, which have no strong directions at all. The error is
|e(kept) - e(exact)| / |e(exact)|, e = (1 - alpha) E[M] + alpha delta, alpha the normalised entropy; mean and 99th
percentile over positions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rcd import api
from rcd.data.tasks.base import problems
from rcd.decode.config import DecodeConfig
from rcd.decode.probe import Look
from rcd.errors import RCDError
from rcd.evaluate.answering import answers
from rcd.residual.alpha import normalised
from rcd.residual.summary import Tail, expected_embedding, project, summarise

TOKENS, RANKS = (0, 8, 16, 32, 64), (0, 4, 16, 64)


def errors(logits_PV: Tensor, codebook_VD: Tensor, mask: int, tokens: int, tail: Tail) -> Tensor:
    """[P]"""
    read = summarise(logits_PV, mask, keep=tokens)
    alpha = normalised(read.entropy, logits_PV.shape[-1])[:, None]
    exact = logits_PV.softmax(-1) @ codebook_VD
    kept = expected_embedding(
        read.kept_p, read.kept_ids, project(logits_PV, read.normaliser, tail.coordinates), codebook_VD, tail
    )
    injected = (1 - alpha) * codebook_VD[mask] + alpha * exact
    return (alpha * (kept - exact)).norm(dim=-1) / injected.norm(dim=-1)


def report(name: str, parts: Sequence[Tensor], codebook: Tensor, mask: int) -> None:
    entropy = torch.cat([summarise(part, mask).entropy for part in parts])
    alpha = float(normalised(entropy, codebook.shape[0]).mean())
    print(f"\n{name}: {len(entropy):,} predictions over {codebook.shape[0]:,} tokens, mean alpha {alpha:.3f}")
    print("directions   " + "".join(f"{f'{k} tokens':>18}" for k in TOKENS) + "   (mean / 99%, percent)")
    for rank in RANKS:
        tail = Tail.of(codebook, max(rank, 1))
        if not rank:  # the mean alone
            tail = Tail(tail.mean, torch.zeros_like(tail.coordinates), tail.directions)
        cells = []
        for tokens in TOKENS:
            found = torch.cat([errors(part, codebook, mask, tokens, tail) for part in parts])
            cells.append(f"{100 * found.mean():.2f} / {100 * found.quantile(0.99):.2f}")
        print(f"{rank or 'mean only':<13}" + "".join(f"{cell:>18}" for cell in cells), flush=True)


def decoded(model: str, task: str, limit: int) -> Iterator[Tensor]:
    """The logits of every step at the masks, as decoding sees them."""
    pipeline = api.load(model, device="cpu", dtype="float32")
    prompts = pipeline.encode([problem.question for problem in problems(task, "test", limit)])
    found: list[Tensor] = []

    def probe(look: Look) -> None:
        found.append(look.logits)

    for _ in answers(pipeline, prompts, DecodeConfig(threshold=0.95), probe=probe):
        while found:
            yield found.pop(0)


def read_by(folder: str, gguf: str | None, texts: str, temperature: float, limit: int) -> tuple[Tensor, Tensor]:
    """(logits, codebook) of a causal model over the texts of a JSONL file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lines = Path(texts).read_text().splitlines()[:40]
    joined = "\n\n".join(" ".join(str(value) for value in json.loads(line).values()) for line in lines)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32)
    ids = tokenizer(joined, return_tensors="pt").input_ids[:, : limit + 100]
    with torch.no_grad():
        logits = model(ids).logits[0, 100:] / temperature
    return logits, model.get_input_embeddings().weight.detach()


def synthetic(vocabulary: int, positions: int, width: int = 512) -> tuple[Tensor, Tensor]:
    """Zipf-like logits in an order of their own at every position, steeper or flatter; embeddings without structure."""
    draw = torch.Generator().manual_seed(0)
    rank = torch.rand(positions, vocabulary, generator=draw).argsort(-1).argsort(-1) + 1
    steep = 0.8 + 1.7 * torch.rand(positions, 1, generator=draw)
    return -steep * rank.float().log(), torch.randn(vocabulary, width, generator=draw)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a diffusion model, decoded on --task")
    parser.add_argument("--task", default="sudoku")
    parser.add_argument("--causal", help="the folder of a causal language model")
    parser.add_argument("--gguf", help="its file, if it is a GGUF")
    parser.add_argument("--texts", help="a JSONL file whose values are texts")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--synthetic", type=int, help="a vocabulary's size")
    parser.add_argument("--limit", type=int, default=0, help="problems, tokens or positions")
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    try:
        if given.model:
            pipeline = api.load(given.model, device="cpu", dtype="float32")
            parts = list(decoded(given.model, given.task, given.limit or 20))
            report(given.model, parts, pipeline.model.codebook.detach(), pipeline.settings.mask_token_id)
        if given.causal:
            if not given.texts:
                raise RCDError("--causal needs --texts, a JSONL file to read.")
            logits, codebook = read_by(given.causal, given.gguf, given.texts, given.temperature, given.limit or 1000)
            report(f"{Path(given.causal).name} at temperature {given.temperature:g}", [logits], codebook, 16)
        if given.synthetic:
            logits, codebook = synthetic(given.synthetic, given.limit or 64)
            report("synthetic", [logits], codebook, 0)
        if not (given.model or given.causal or given.synthetic):
            raise RCDError("name what to measure: --model, --causal or --synthetic.")
    except RCDError as error:
        print(f"delta_error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
