"""`--dry-run`: what a stage would do, from its configuration and the checkpoint's headers."""

from __future__ import annotations

import math
from typing import Any

from rcd.data.rows import generated_tokenizer, rows_of
from rcd.errors import RCDError
from rcd.models.checkpoint import open_checkpoint
from rcd.models.family import FamilySpec
from rcd.models.tensors import Shape, active, layout_of, shape_of
from rcd.train.config import TrainConfig
from rcd.train.stage import BASE

H100_FLOPS = 989e12
CHARACTERS = 3.5
"""Of a token, where there is no tokenizer to ask."""
SAMPLE = 2000
ASSUMED_MFU = 0.4


def plan(name: str, config: TrainConfig, gpus: int = 8, base: TrainConfig | None = None) -> list[str]:
    """Lines for a reader. Without the checkpoint or the data at hand, what cannot be known is said to be unknown.
    `base` is the recipe's first stage, which a target may start from."""
    out = [f"{name}: {config.model}, data {config.data}, {config.method}"]
    start = base if base is not None and config.model == BASE else config
    count, used, why = _parameters(start)
    experts = f", {used:,} of them active" if used != count else ""
    out.append(f"  parameters        {f'{count:,}{experts}' if count else f'unknown ({why})'}")
    examples, tokens, why = _data(config, start)
    steps = config.max_steps
    if steps is None and examples:
        steps = max(1, round(config.epochs * max(1, (examples - config.validation) // config.total_batch)))
    out.append(f"  examples, tokens  {f'{examples:,}, {tokens:,}' if examples else f'unknown ({why})'}")
    out.append(f"  steps             {f'{steps:,}' if steps else 'unknown'} of {config.total_batch} sequences")
    if count:
        state = count * 16 / gpus  # fp32 parameters, gradients and two moments, sharded
        out.append(f"  memory per GPU    {state / 2**30:.1f} GiB of state over {gpus} GPUs, activations not counted")
    if config.needs_reference:
        out.append("                    and the reference whole on every GPU")
    if count and steps and examples:
        computed = steps * config.total_batch * tokens / examples * 2  # the text and its noisy copy
        share = 0.4 if config.needs_reference else _more_passes(config) / 3  # forward alone is a third of a step
        cost = 6 * used * computed * (1 + share)
        trained = steps * config.total_batch * tokens // examples
        out.append(f"  trained on        {trained:,} tokens, {trained / max(1, tokens):.1f} times the data")
        out.append(_time(cost / (gpus * H100_FLOPS * ASSUMED_MFU), gpus))
    return out


def _more_passes(config: TrainConfig) -> float:
    """Forward passes of the model itself before a step's own, on average: of its trajectories, and in the other steps
    of recycling or of what the carry takes (Loopholing's first pass)."""
    source, rest = config.residual, 0.0
    share = source.trajectory_share if source.trajectory else 0.0
    if config.carry is not None and source.recycling:
        rest = source.recycling / 2
    elif config.carry is not None and not config.carry.reads_reference:
        rest = config.carry.extra_pass_share
    return share * source.trajectory / 2 + (1 - share) * rest


def _time(seconds: float, gpus: int) -> str:
    """Hours on all GPUs; a small model cannot fill even one, and its time is not computation."""
    if seconds < 60:
        return "  time              minutes on one GPU (too small to estimate from the computation)"
    return f"  time              {seconds / 3600:.1f} hours on {gpus} x H100 at {ASSUMED_MFU:.0%} utilisation"


def _parameters(config: TrainConfig) -> tuple[int, int, str]:
    """(all, those that a token meets, why they are unknown)."""
    if config.model.startswith("toy:"):
        from rcd.models.toy import toy

        shape: dict[str, Any] = {**config.toy, "vocab": len(generated_tokenizer(config.data))}
        made = toy(config.model.removeprefix("toy:"), **shape)
        layout = layout_of(made.model.spec, {name: tuple(p.shape) for name, p in made.model.named_parameters()})
        return _counted(made.model.spec, made.config, [(name, shape_of(own)) for name, own in layout.items()])
    try:
        opened = open_checkpoint(config.model)
        headers = [(name, tuple(shape)) for name, shape, _ in opened.weights.headers()]
        return _counted(opened.spec, opened.config, headers)
    except RCDError as error:
        return 0, 0, str(error).rstrip(".")


def _counted(spec: FamilySpec, config: dict[str, Any], tensors: list[tuple[str, Shape]]) -> tuple[int, int, str]:
    whole, used = sum(math.prod(shape) for _, shape in tensors), active(spec, config, tensors)
    return whole, whole if used is None else used, ""


def _data(config: TrainConfig, start: TrainConfig) -> tuple[int | None, int, str]:
    """(examples, tokens, why they are unknown), from the first few thousand of generated ones."""
    generated, count = config.data.split(":"), None
    source = config.data
    if generated[0] in ("tasks", "sums") and generated[-1].isdecimal():
        count = int(generated[-1])
        source = ":".join([*generated[:-1], str(min(count, SAMPLE))])
    try:
        texts: list[str] = [
            f"{row.get(config.prompt_field)} {row.get(config.response_field)}"
            for _, row in rows_of(source, config.split)
        ]
    except RCDError as error:
        return None, 0, str(error).rstrip(".")
    if start.model.startswith("toy:"):
        sizes = [len(ids) for ids in generated_tokenizer(config.data)(texts)["input_ids"]]
    else:
        sizes = [round(len(text) / CHARACTERS) for text in texts]
    examples = len(texts) if count is None else count
    return examples, sum(sizes) * examples // max(1, len(texts)), ""
