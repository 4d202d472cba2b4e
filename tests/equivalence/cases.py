"""The cases of the fuzz: random models, carries, rules, windows, settings and company, each from one seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from rcd import registry
from rcd.api import Pipeline
from rcd.carry.base import Carry
from rcd.carry.iter_smooth import IterSmooth
from rcd.carry.latent_refinement import LatentRefinement
from rcd.carry.loopholing import Loopholing
from rcd.carry.none import NoCarry
from rcd.carry.residual import Residual
from rcd.carry.soft_mask import SoftMask
from rcd.carry.token_merge import TokenMerge
from rcd.decode.config import DecodeConfig, fitting
from rcd.decode.filling import check_canvas
from rcd.errors import RCDError
from rcd.models.lm import ModelSettings
from rcd.models.toy import toy

VOCAB, MOST_PROMPT, LONG_PROMPT = 48, 12, 40
MASK, EOT, EOS = VOCAB - 3, VOCAB - 2, VOCAB - 1
ENDS = (EOT, EOS)
ALPHAS = ("entropy", "confidence", "fixed", "one", "top1", "inverse_entropy")
CANVAS = ("bidirectional", "prefix", "dual")
LETTERS = 10
"""Of the texts: few, so that a stop string of two or three is found now and then."""


def words(ids: Sequence[int]) -> str:
    """Token ids as a text."""
    return "".join(chr(ord("a") + token % LETTERS) for token in ids)


@cache
def model(family: str, seed: int, learnt: bool) -> Pipeline:
    made = toy(
        family, seed=seed, vocab=VOCAB, width=32, heads=2, layers=2, context=256, spread=(0.5, 1.0, 2.0)[seed % 3]
    )
    made.model.double()
    if learnt:
        made.model.hold(Loopholing())
    return Pipeline(made)


@dataclass
class Case:
    """Requests with the configurations of one engine."""

    family: str
    pipeline: Pipeline
    reference: Pipeline | None
    prompts: list[list[int]]
    configs: list[DecodeConfig]
    """Resolved; the engine's part is the same in all."""
    rows: int
    watch: bool
    lag: int = 0
    """1: the host hears of a step when it has launched the next, as on a GPU."""
    spare: int = 0
    """Positions of an engine's row beside those that are needed."""
    piece: int = 512
    """Prompt tokens of one prefill pass, at most."""
    budget: int = 512
    """Of all prefill passes between two steps."""
    canvases: list[list[int]] = field(default_factory=list)
    """Of every request; an empty one gives nothing."""


def carry_of(draw: random.Random, deep: bool) -> Carry:
    if deep or draw.random() < 0.4:
        return Residual(
            alpha="entropy" if deep else draw.choice(ALPHAS),
            alpha_scale=draw.choice([1.0, 1.0, 0.5]), alpha_most=draw.choice([1.0, 1.0, 0.8]),
            start=draw.choice(["zero", "zero", "zero", "self", "dirichlet", "reference"]),
            t_res=draw.choice([1.0, 1.0, 0.8, 1.5]), t_res_on=draw.choice(["alpha", "both"]),
            t_res_at_start=draw.random() < 0.3, source=draw.choice(["self"] * 5 + ["reference"]),
        )  # fmt: skip
    rivals: list[Carry] = [
        NoCarry(), Loopholing(), IterSmooth(), TokenMerge(top_k=draw.choice([1, 3])), SoftMask(), LatentRefinement()
    ]  # fmt: skip
    return draw.choice(rivals)


def stop_of(draw: random.Random) -> tuple[str, ...]:
    if draw.random() < 0.75:
        return ()
    return tuple(words([draw.randrange(LETTERS) for _ in range(draw.choice([1, 2, 2, 3]))]) for _ in range(2))


def request_of(draw: random.Random, carry: Carry, deep: bool) -> dict[str, Any]:
    """`deep`: one that takes many steps with a residual that is felt."""
    drawn = draw.random() < 0.4
    scales = [0.0, 0.5, 1.0] if carry.scalable else [0.0, 1.0]
    return dict(
        max_new_tokens=draw.randint(10, 20) if deep else draw.randint(1, 24),
        threshold=draw.choice([0.7, 0.9, 0.97, 1.0] if deep else [0.2, 0.5, 0.7, 0.9, 0.97, 1.0]),
        factor=draw.choice([0.5, 1.0, 2.0]), num_inference_steps=draw.choice([None, None, None, 2, 5]),
        temperature=draw.choice([0.5, 1.0, 1.7]) if drawn else 0.0, top_k=draw.choice([0, 0, 5, 20]),
        top_p=draw.choice([1.0, 1.0, 0.8]), seed=draw.randint(0, 2**40),
        residual_scale=1.0 if deep else draw.choice([1.0, 1.0, *scales]),
        stop_ids=(draw.randrange(40),) if draw.random() < 0.2 else (),
        logprobs=draw.choice([None, None, None, 0, 3]), stop=() if deep else stop_of(draw),
    )  # fmt: skip


RULES = (
    "factor_strict", "random", "margin", "neg_entropy", "margin_confidence", "origin", "maskgit_plus", "entropy",
    "topk_margin", "entropy_bound", "klass", "klass", "joint_threshold", "joint_threshold", "joint_threshold",
)  # fmt: skip


def rule_of(draw: random.Random) -> dict[str, Any]:
    """What every second case has instead of its first rule."""
    if draw.random() < 0.5:
        return {}
    return dict(
        commit=draw.choice(RULES),
        klass_history=draw.choice([1, 2, 3]), score=draw.choice([None, None, None, *registry.names("score")]),
        schedule=draw.choice([None, None, None, *registry.names("schedule")]),
        confidence=draw.choice([None, "filtered", "tempered", "untempered"]),
        eos_suppression=draw.choice(["none", "logits", "logits_all", "confidence"]),
    )  # fmt: skip


def rule_request(draw: random.Random) -> dict[str, Any]:
    return dict(
        entropy_bound=draw.choice([0.0, 0.5, 2.0, 6.0]), alg_temp=draw.choice([0.0, 0.0, 0.1, 1.0]),
        kl_threshold=draw.choice([0.01, 0.3, 1.0, 5.0, 5.0, 1e6]),
        edit_threshold=draw.choice([0.0, 0.1, 0.3, 0.6, 1.5]),
        max_post_steps=draw.choice([0, 1, 2, 16]),
    )  # fmt: skip


def parts_of(draw: random.Random, window: str, block: int) -> dict[str, Any]:
    """Where in a block a step may commit; by a generator of its own, so that all else of a case stays as it is."""
    fits = [part for part in (1, 2, 3, 4, 8) if block % part == 0]
    part = draw.choice(fits if window == "sub_blocks" else [None, None, *fits])
    return dict(
        sub_block_length=part if window not in CANVAS else None, first_token_alone=draw.random() < 0.25,
    )  # fmt: skip


def case_of(seed: int) -> Case:
    draw, more = random.Random(seed), random.Random(f"rule {seed}")  # apart, so that the others stay
    deep = draw.random() < 0.66
    family, carry = draw.choice(["sdar", "sdar", "llada", "llada", "dream"]), carry_of(draw, deep)
    if family == "sdar":  # by a draw of its own, so that all else of a case stays as it is
        family = random.Random(f"experts {seed}").choice(
            ["sdar"] * 4 + ["fast_dllm_qwen"] * 3 + ["sdar_moe", "llada2_moe"]
        )
    pipeline = model(family, draw.randrange(6), isinstance(carry, Loopholing))
    reference = model(family, 17 + draw.randrange(2), False) if carry.needs_reference else None
    window, parts = (
        draw.choice([one for one in fitting(pipeline.settings) if one != "sub_blocks"]),
        random.Random(f"sub {seed}"),
    )
    if window == "blockwise" and parts.random() < 0.4:
        window = "sub_blocks"
    block = draw.choice([2, 3, 4, 8, 16])
    common: dict[str, Any] = dict(
        carry=carry, window=window, block_length=block if window not in CANVAS or draw.random() < 0.8 else None,
        commit=draw.choice(["threshold"] * 4 + ["topm", "factor", "sequential"]),
        carry_scope=draw.choice(["canvas", "block"]), blocks_in_flight=draw.choice([1, 2, 3, 4]),
        block_add_threshold=draw.choice([0.1, 0.5, 0.9]), decoded_token_threshold=draw.choice([0.3, 0.95]),
        refresh_every=draw.choice([None, 1, 2, 3]) if window in ("prefix", "dual") else None,
        confidence=draw.choice([None, "tempered", "untempered"]), eos_early_stop=draw.random() < 0.7,
        eos_suppression=draw.choice(["none", "none", "logits", "confidence"]), delta="exact",
        passes=draw.choice([None, None, "stock"]), batch_invariant=draw.random() < 0.3,
    )  # fmt: skip
    common |= rule_of(more)
    if window == "sub_blocks" and common["commit"] == "joint_threshold":  # it computes a part, and that edits the block
        common["commit"] = "klass"
    common |= parts_of(parts, window, block)
    count, longest = draw.randint(1, 5), LONG_PROMPT if draw.random() < 0.25 else MOST_PROMPT
    prompts = [[draw.randrange(40) for _ in range(draw.randint(1, longest))] for _ in range(count)]
    wishes = [request_of(draw, carry, deep and not k) | rule_request(more) for k in range(count)]
    if common["block_length"] is None:  # a canvas that is one block: the engine's block is that of one length
        wishes = [{**wish, "max_new_tokens": wishes[0]["max_new_tokens"]} for wish in wishes]
    configs = [_resolved(pipeline, common, wish, len(prompt)) for wish, prompt in zip(wishes, prompts, strict=True)]
    block = max(config.block for config in configs) if window in CANVAS else configs[0].block
    configs = [replace(config, block_length=block if common["block_length"] else config.block) for config in configs]
    guides = random.Random(f"guidance {seed}")  # of its own, so that the cases before it stay as they are
    if guides.random() < 0.2:
        configs = [replace(config, guidance=guides.choice([0.3, 1.0, 2.5])) for config in configs]
    one = configs[0].engine(pipeline.settings)
    kept = [k for k, config in enumerate(configs) if config.engine(pipeline.settings) == one]
    prompts, configs, count = [prompts[k] for k in kept], [configs[k] for k in kept], len(kept)
    piece = draw.choice([4, 8, 16]) if longest == LONG_PROMPT else 512
    apart = random.Random(f"canvas {seed}")  # so that the rest of a seed's case is what it was without
    return Case(
        family, pipeline, reference, prompts, configs, draw.randint(1, max(1, count - 1)), draw.random() < 0.8,
        lag=draw.randrange(2), spare=draw.choice([0, 0, 0, 7, 64]), piece=piece,
        budget=draw.choice([1, piece, 512]),
        canvases=[canvas_of(apart, config, pipeline.settings) for config in configs],
    )  # fmt: skip


def canvas_of(draw: random.Random, config: DecodeConfig, settings: ModelSettings) -> list[int]:
    """Nothing in three of five; else given tokens here and there, in runs (so that whole blocks of them are common), at
    the beginning or at the end, now and then with an end token among them."""
    length = draw.randint(1, config.new_tokens)
    share, run = draw.choice([0.1, 0.4, 0.8]), draw.choice([1, 3, config.block, 2 * config.block])
    ends = draw.choice([0.0, 0.0, 0.1])
    made: list[int] = []
    while len(made) < length:
        given = draw.random() < share
        for _ in range(run):
            made.append((draw.choice(ENDS) if draw.random() < ends else draw.randrange(40)) if given else MASK)
    del made[length:]
    kept = made if draw.random() < 0.4 else []
    try:
        check_canvas(kept, config.new_tokens, settings, [*settings.eos_token_ids, *config.stop_ids])
    except RCDError:
        return []
    return kept


def _resolved(pipeline: Pipeline, common: dict[str, Any], wish: dict[str, Any], prompt: int) -> DecodeConfig:
    """The texts of a stop string are made here by `words`, so that no tokenizer is needed."""
    resolved = pipeline.resolve(DecodeConfig(**common, **{**wish, "stop": ()}), prompt)
    return replace(resolved, stop=wish["stop"])
