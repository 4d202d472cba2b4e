"""Recall@k over denoising steps (fig:recall): how early the tokens of the final text are among the k most probable."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rcd.decode.config import DecodeConfig
from rcd.errors import RCDError, whole
from rcd.evaluate.answering import answers
from rcd.residual.distribution import without

if TYPE_CHECKING:
    from rcd.api import Pipeline
    from rcd.decode.probe import Look

KS = (1, 2, 5, 10)
MOST = 1000
SHOWN = 16
"""So many steps of a table, at most."""


def recall(
    pipeline: Pipeline,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig | None = None,
    ks: Sequence[int] = KS,
    *,
    reference: Pipeline | None = None,
    batch: int = 32,
) -> dict[str, Any]:
    """For every step: `recall`, the share of its masks whose final token is among the k most probable (the mask's own
    id, which can never be drawn, is not ranked); and `recall_all`, the same over all tokens of the window, where those
    committed before count as found. Masks that do not become part of the text are not counted.

    Steps are counted from the beginning of the window: of the block, or of the canvas. Texts that are done are not in
    the later steps; `texts` says how many (for a block diffusion model: blocks) are.
    """
    ks = checked(ks, pipeline.settings.vocab_size)
    if not prompts:
        raise RCDError("there are no problems to decode; ask for at least one.")
    mask = pipeline.settings.mask_token_id
    open_texts: dict[int, list[_Guess]] = defaultdict(list)
    steps, tally = StepsOfWindow(), _Tally(ks)

    def probe(look: Look) -> None:
        best = without(look.logits[look.masked], (mask,)).topk(ks[-1], dim=-1).indices.to(torch.int32).cpu()
        masked, places = look.masked.cpu(), look.places.cpu()
        open_texts[look.row].append(_Guess(steps.number(look), places[masked], best, places[~masked]))

    config = of_whole_canvas(pipeline, prompts, config)
    for found in answers(pipeline, prompts, config, reference=reference, batch=batch, probe=probe):
        for guess in open_texts.pop(found.number, []):
            tally.add(guess, found.generation.ids)
    return tally.result()


def of_whole_canvas(pipeline: Pipeline, prompts: Sequence[Sequence[int]], config: DecodeConfig | None) -> DecodeConfig:
    """The same, resolved. Decoding without a carry predicts the current block of a canvas alone, as no other is asked
    for; as a residual of weight 0 it commits the same tokens, and every step predicts the whole canvas."""
    resolved = pipeline.resolve(config, max(map(len, prompts), default=0))
    if resolved.window == "sub_blocks":
        raise RCDError("steps of the window sub_blocks predict a part of a block; take the window blockwise.")
    parts = pipeline.settings.attention == "bidirectional" and resolved.block < resolved.new_tokens
    if resolved.travelling.carries or not parts or resolved.window == "d2f":
        return resolved
    return replace(resolved, carry=resolved.travelling.for_ablation(), carry_scope="canvas", residual_scale=0.0)


class StepsOfWindow:
    """Numbers the steps of requests from the beginning of their windows: of each block, or of the canvas."""

    def __init__(self) -> None:
        self._since: dict[int, tuple[int, int]] = {}
        """Request -> (its window's first place, steps before it)."""

    def number(self, look: Look) -> int:
        first = int(look.places[0])
        if look.row not in self._since or self._since[look.row][0] != first:
            self._since[look.row] = (first, look.number - 1)
        return look.number - self._since[look.row][1]


def checked(ks: Sequence[int], vocabulary: int) -> list[int]:
    """Sorted, each once."""
    if not ks:
        raise RCDError("recall needs at least one k, such as --k 1,5.")
    for k in ks:
        whole("k", k, least=1, most=min(MOST, vocabulary))
    return sorted(set(ks))


@dataclass(frozen=True)
class _Guess:
    """What one step knew of one text; places are counted from the end of the prompt."""

    step: int
    places: Tensor
    """[N] of its masks."""
    best: Tensor
    """[N, k] the most probable tokens there."""
    decided: Tensor
    """Places of the tokens that it had."""


class _Tally:
    def __init__(self, ks: list[int]):
        self.ks = ks
        self.hits: dict[int, list[int]] = defaultdict(lambda: [0] * len(ks))
        self.masks: dict[int, int] = defaultdict(int)
        self.decided: dict[int, int] = defaultdict(int)
        self.texts: dict[int, int] = defaultdict(int)

    def add(self, guess: _Guess, ids: list[int]) -> None:
        inside = guess.places < len(ids)  # masks are behind the prompt
        final = torch.tensor(ids, dtype=torch.int32)[guess.places[inside]]
        found = guess.best[inside] == final[:, None]
        for at, k in enumerate(self.ks):
            self.hits[guess.step][at] += int(found[:, :k].any(-1).sum())
        self.masks[guess.step] += int(inside.sum())
        self.decided[guess.step] += int(((guess.decided >= 0) & (guess.decided < len(ids))).sum())
        self.texts[guess.step] += 1

    def result(self) -> dict[str, Any]:
        steps = [step for step in sorted(self.masks) if self.masks[step]]
        rows = []
        for step in steps:
            masks, decided = self.masks[step], self.decided[step]
            pairs = list(zip(self.ks, self.hits[step], strict=True))
            rows.append(
                {
                    "step": step, "texts": self.texts[step], "masks": masks, "decided": decided,
                    "recall": {str(k): hits / masks for k, hits in pairs},
                    "recall_all": {str(k): (hits + decided) / (masks + decided) for k, hits in pairs},
                }
            )  # fmt: skip
        total = sum(self.masks[step] for step in steps)
        mean = {str(k): sum(self.hits[s][at] for s in steps) / total for at, k in enumerate(self.ks)}
        return {"ks": self.ks, "steps": rows, "masks": total, "mean": mean}


def lines(found: dict[str, Any]) -> list[str]:
    """A table: at most so many steps, evenly."""
    rows, ks = found["steps"], [str(k) for k in found["ks"]]
    count = min(SHOWN, len(rows))
    chosen = sorted({round(k * (len(rows) - 1) / max(1, count - 1)) for k in range(count)})
    text = [f"{'step':>5} {'texts':>6} {'masks':>7}" + "".join(f"{'@' + k:>8}" for k in ks)]
    for row in (rows[k] for k in chosen):
        shares = "".join(f"{100 * row['recall'][k]:7.1f}%" for k in ks)
        text.append(f"{row['step']:5} {row['texts']:6} {row['masks']:7}{shares}")
    text.append(f"{'all':>5} {'':>6} {found['masks']:7}" + "".join(f"{100 * found['mean'][k]:7.1f}%" for k in ks))
    return text
