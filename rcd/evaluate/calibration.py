"""T_res by matching two distributions of alpha (Sec. 3.3): that of the model's own predictions as it decodes, and that
of the reference's as training shows them (randomly masked answers, T_res = 1).

Decoding carries only what it did not commit, while half of the random masks are easy. So by default both sides are
taken where the prediction is not above the threshold: else a temperature would have to make up for that choice.

Shapes: N predictions, M others, G temperatures, V vocabulary.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rcd.carry.residual import Residual
from rcd.data.examples import Example, encode
from rcd.errors import RCDError, one_of, whole
from rcd.evaluate.answering import answers
from rcd.models.lm import View
from rcd.models.pairing import check_pair
from rcd.recipes.base import find
from rcd.residual.alpha import weight
from rcd.residual.distribution import Distribution, align_vocabulary
from rcd.train.batches import Batches, Batching
from rcd.train.layout import frame_of

if TYPE_CHECKING:
    from rcd.api import Pipeline
    from rcd.data.tasks.base import Problem
    from rcd.decode.config import DecodeConfig
    from rcd.decode.probe import Look

Array = NDArray[np.float64]
TEMPERATURES = tuple(2.0 ** (k / 6) for k in range(-12, 13))
"""1/4 to 4; between them alpha is interpolated over log T."""
FINER = 16
RESAMPLES = 200
"""Of the items, for the interval of T_res."""
LEVELS = np.linspace(0.005, 0.995, 100)
"""Quantiles at which two distributions are compared."""
SHOWN = (0.1, 0.25, 0.5, 0.75, 0.9)
ROUNDS = 4
CLOSE = 0.01
"""Rounds end when T_res changes by less than this share."""
CHUNK = 1 << 26
"""Logits at a time."""
MASKS = ("undecided", "all")
WITHOUT = ("fixed", "one", "none")
"""Weights that no temperature changes."""


def alphas(logits_NV: Tensor, carry: Residual, temperatures: Sequence[float]) -> Array:
    """[N, G] the weight of each prediction at each temperature, scaled and capped as the carry has it."""
    name = carry.top1_alpha if carry.alpha == "top1" else carry.alpha
    settings = dict(scale=carry.alpha_scale, value=carry.alpha_value, most=carry.alpha_most)
    parts = []
    for part in logits_NV.split(max(1, CHUNK // logits_NV.shape[-1])):
        columns = [weight(name, Distribution(part, t).p, **settings) for t in temperatures]
        parts.append(torch.stack(columns, dim=-1).double().cpu().numpy())
    return np.concatenate(parts) if parts else np.zeros((0, len(temperatures)))


def distance(a: Array, b: Array) -> float:
    """Between two samples: the mean difference of their quantiles (Wasserstein's, by 100 quantiles)."""
    return _apart(quantiles(a), quantiles(b))


def quantiles(values: Array) -> Array:
    return np.asarray(np.quantile(values, LEVELS))


def _apart(a: Array, b: Array) -> float:
    return float(np.abs(a - b).mean())


def at(own_NG: Array, t: float) -> Array:
    """[N] alpha at any temperature within the grid."""
    k = min(int(np.searchsorted(TEMPERATURES, t, side="right")) - 1, len(TEMPERATURES) - 2)
    low, high = TEMPERATURES[k], TEMPERATURES[k + 1]
    share = math.log(t / low) / math.log(high / low)
    return np.asarray((1 - share) * own_NG[:, k] + share * own_NG[:, k + 1])


def fit(own_NG: Array, wanted_M: Array) -> float:
    """The temperature at which own predictions have the wanted distribution: the best of the grid, then of a finer one
    around it. Where several are equally good (nothing depends on it), the one nearest to 1."""
    goal = quantiles(wanted_M)

    def best(candidates: Sequence[float]) -> float:
        return min(candidates, key=lambda t: (round(_apart(quantiles(at(own_NG, t)), goal), 9), abs(math.log(t))))

    middle, ratio = best(TEMPERATURES), TEMPERATURES[1] / TEMPERATURES[0]
    finer = [middle * ratio ** (k / FINER) for k in range(-FINER, FINER + 1)]
    return best([t for t in finer if TEMPERATURES[0] <= t <= TEMPERATURES[-1]])


def spread(
    chosen: float, own: Sequence[Array], wanted: Sequence[Array], resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """95% of T_res by a bootstrap over items (`own`: [N, G] of each, decoded at `chosen`; `wanted`: [M] of each): how
    far the fit moves with the items, around `chosen`. Decoding is not repeated."""
    draw, first = np.random.default_rng(seed), fit(np.concatenate(own), np.concatenate(wanted))
    moves = []
    for _ in range(resamples):
        items = draw.integers(len(own), size=len(own))
        a, b = (np.concatenate([side[item] for item in items]) for side in (own, wanted))
        if len(a) and len(b):
            moves.append(fit(a, b) / first)
    low, high = np.percentile(moves, [2.5, 97.5])
    return max(chosen * float(low), TEMPERATURES[0]), min(chosen * float(high), TEMPERATURES[-1])


def decoding_alphas(
    pipeline: Pipeline,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig,
    carry: Residual,
    *,
    below: float = 1.0,
    reference: Pipeline | None = None,
    batch: int = 32,
) -> list[Array]:
    """For each prompt, [N, G] of the model's own predictions: at every step, those that enter the next one, at masks of
    the text."""
    waiting: dict[int, list[tuple[Array, Tensor]]] = defaultdict(list)
    found = [[np.zeros((0, len(TEMPERATURES)))] for _ in prompts]

    def probe(look: Look) -> None:
        stay = look.masked & ~look.committed & undecided(look.logits, below)
        waiting[look.row].append((alphas(look.logits[stay], carry, TEMPERATURES), look.places[stay].cpu()))

    config = replace(config, carry=carry)
    for each in answers(pipeline, prompts, config, reference=reference, batch=batch, probe=probe):
        length = len(each.generation.ids)
        found[each.number] += [values[(places < length).numpy()] for values, places in waiting.pop(each.number, [])]
    return [np.concatenate(each) for each in found]


@torch.inference_mode()
def training_alphas(
    reference: Pipeline,
    problems: Sequence[Problem],
    carry: Residual,
    *,
    vocabulary: int,
    block_length: int | None = None,
    canvas: int | None = None,
    below: float = 1.0,
    draws: int = 4,
    batch: int = 32,
    seed: int = 0,
) -> list[Array]:
    """For each problem, [M] of the reference's reading of its randomly masked solution, at T_res = 1 and at masks of
    the text, each solution masked `draws` times. `canvas`: the answers of a bidirectional model are filled up with end
    tokens to so many."""
    model, settings = reference.model, reference.settings
    examples, lengths = _examples(reference, problems, canvas)
    grid = (block_length or settings.block_length or 1) if settings.attention == "block_causal" else 1
    batching = Batching(
        len(examples), min(batch, len(examples)), grid, settings.eos_token_ids[0], label_padding="none", seed=seed
    )
    batches, found = Batches(examples, batching, "calibration"), {problem.name: [np.zeros(0)] for problem in problems}
    for each in (part for epoch in range(whole("draws", draws, least=1)) for part in batches.step(epoch, 0)):
        text = each.position < torch.tensor([lengths[name] for name in each.names])[:, None]
        each, text = each.to(model.device), text.to(model.device)
        frame = frame_of(each, attention=settings.attention, block_length=grid)
        layout = frame.lay_out(each.ids.masked_fill(each.masked, settings.mask_token_id), each.masked)
        hidden = model.encode(model.embed(layout.ids), View(layout.position, layout.attention))
        inside = text[layout.source[:, 0], layout.source[:, 1]]
        outputs, texts = layout.outputs(hidden, layout.noisy[inside], settings.shift), layout.source[inside, 0]
        logits = align_vocabulary(model.head(outputs), vocabulary)
        open_ones = undecided(logits, below)
        values, owner = alphas(logits[open_ones], carry, (1.0,))[:, 0], texts[open_ones].cpu().numpy()
        for row, name in enumerate(each.names):
            found[name].append(values[owner == row])
    return [np.concatenate(each) for each in found.values()]


def undecided(logits_NV: Tensor, below: float) -> Tensor:
    """[N] booleans: the largest probability is not above `below`."""
    if below >= 1:
        return torch.ones(len(logits_NV), dtype=torch.bool, device=logits_NV.device)
    z = logits_NV.float()
    return (z.amax(-1) - torch.logsumexp(z, dim=-1)).exp() <= below


def _examples(
    reference: Pipeline, problems: Sequence[Problem], canvas: int | None
) -> tuple[list[Example], dict[str, int]]:
    """Solutions as tokens, and how many of each are text."""
    eos, bare = reference.settings.eos_token_ids[0], [problem.name for problem in problems if not problem.solution]
    if reference.tokenizer is None:
        raise RCDError("calibration reads solutions, and this checkpoint has no tokenizer; give one that has.")
    if bare:
        raise RCDError(f"{bare[0]} has no worked solution for the reference to read; choose another task.")
    rows = ((problem.name, {"prompt": problem.question, "response": problem.solution}) for problem in problems)
    room = reference.settings.context_length
    examples, _ = encode(rows, reference.tokenizer, eos_token_id=eos, max_length=room)
    lengths = {example.name: len(example.ids) for example in examples}
    wide = canvas if reference.settings.attention != "block_causal" else None
    filled = [replace(each, ids=each.ids + [eos] * ((wide or 0) - (len(each.ids) - each.prompt))) for each in examples]
    return [each for each in filled if len(each.ids) <= room], lengths


def calibrate(
    pipeline: Pipeline,
    reference: Pipeline,
    problems: Sequence[Problem],
    config: DecodeConfig,
    carry: Residual,
    *,
    masks: str = "undecided",
    draws: int = 4,
    batch: int = 32,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """T_res for this carry. A temperature changes what later steps predict, so the model decodes again with what was
    found until it stays. `before` is T_res = 1, `after` the best that was tried, both from real decoding; `low` and
    `high` are the interval of `spread`. `masks`: `undecided` (not above the threshold, on both sides) or `all`."""
    one_of("masks", masks, MASKS)
    name = carry.top1_alpha if carry.alpha == "top1" else carry.alpha
    if not problems:
        raise RCDError("there are no problems to decode; ask for at least one.")
    if name in WITHOUT:
        raise RCDError(f"T_res has no effect on the weight {name!r}; calibrate another, such as 'entropy'.")
    if carry.source == "reference":
        raise RCDError("with source 'reference' the residual is the reference's own; there is nothing to calibrate.")
    check_pair(pipeline.checkpoint, reference.checkpoint)
    prompts = pipeline.encode([problem.question for problem in problems])
    config = pipeline.resolve(replace(config, carry=carry), max(map(len, prompts)))
    below = config.threshold if masks == "undecided" else 1.0
    shown = training_alphas(
        reference, problems, carry, vocabulary=pipeline.settings.vocab_size, block_length=config.block_length,
        canvas=config.new_tokens, below=below, draws=draws, batch=batch,
    )  # fmt: skip
    wanted = np.concatenate(shown)
    if not len(wanted):
        raise RCDError("the reference is above the threshold at every mask; raise --threshold, or take --masks all.")
    say(f"the reference at {len(wanted):,} masks: mean alpha {wanted.mean():.3f}")
    t_res, tried = 1.0, list[tuple[float, list[Array], Array]]()
    for _ in range(ROUNDS):
        by_item = decoding_alphas(
            pipeline, prompts, config, replace(carry, t_res=t_res), below=below, reference=reference, batch=batch
        )
        own = np.concatenate(by_item)
        if not len(own):
            raise RCDError("every answer was complete after one step, so no residual was used; raise --threshold.")
        tried.append((t_res, by_item, at(own, t_res)))
        found = fit(own, wanted)
        say(f"decoding at T_res {t_res:.3f}: mean alpha {tried[-1][2].mean():.3f}, best T_res {found:.3f}")
        if abs(found / t_res - 1) < CLOSE:
            break
        t_res = found
    chosen, by_item, after = min(tried, key=lambda each: (round(distance(each[2], wanted), 9), abs(math.log(each[0]))))
    low, high = spread(chosen, by_item, shown)
    return {
        "t_res": round(chosen, 3), "low": round(low, 3), "high": round(high, 3), "masks": masks,
        "threshold": config.threshold, "items": len(problems),
        "at_the_edge": chosen in (TEMPERATURES[0], TEMPERATURES[-1]), "reference": _told(wanted),
        "before": _told(tried[0][2], wanted), "after": _told(after, wanted),
        "rounds": [{"t_res": t, **_told(values, wanted)} for t, _, values in tried],
    }  # fmt: skip


def own_training(pipeline: Pipeline) -> bool | None:
    """Whether the model was trained on residuals of its own predictions rather than a reference's; None: not known."""
    held = pipeline.checkpoint.rcd.provenance
    if "reference" in held:
        return held["reference"] is None
    with suppress(RCDError):  # a recipe that is not here
        target = find(str(held["recipe"])).target if "recipe" in held else None
        return None if target is None else not target.needs_reference
    return None


def _told(values: Array, wanted: Array | None = None) -> dict[str, Any]:
    out: dict[str, Any] = {"predictions": len(values), "mean": float(values.mean())}
    out["quantiles"] = {f"{q:g}": float(np.quantile(values, q)) for q in SHOWN}
    return out if wanted is None else {**out, "distance": distance(values, wanted)}


def lines(found: dict[str, Any]) -> list[str]:
    """Both distributions before and after, and what to do with the result."""
    heads = "".join(f"{f'{100 * q:g}%':>8}" for q in SHOWN)
    text = [f"{'alpha':<28}{'mean':>8}{heads}{'distance':>10}"]
    for words, row in (
        ("reference, in training", found["reference"]),
        ("decoding, T_res 1", found["before"]),
        (f"decoding, T_res {found['t_res']:g}", found["after"]),
    ):
        quantiles = "".join(f"{value:8.3f}" for value in row["quantiles"].values())
        apart = f"{row['distance']:10.4f}" if "distance" in row else ""
        text.append(f"{words:<28}{row['mean']:8.3f}{quantiles}{apart}")
    return text
