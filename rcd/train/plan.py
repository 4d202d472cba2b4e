"""`--dry-run`: what a stage would do, from its configuration and the checkpoint's headers."""

from __future__ import annotations

import math
from typing import Any

from rcd.errors import RCDError
from rcd.models.checkpoint import open_checkpoint
from rcd.models.source import shapes
from rcd.train.config import TrainConfig

H100_FLOPS = 989e12
ASSUMED_MFU = 0.4


def plan(name: str, config: TrainConfig, gpus: int = 8) -> list[str]:
    """Lines for a reader. Without the checkpoint or the data at hand, what cannot be known is said to be unknown."""
    out = [f"{name}: {config.model}, data {config.data}, {'RCD' if config.carry else 'SeqD'}"]
    count, why = _parameters(config)
    out.append(f"  parameters        {f'{count:,}' if count else f'unknown ({why})'}")
    examples, tokens, why = _data(config)
    steps = config.max_steps
    if steps is None and examples:
        steps = max(1, round(config.epochs * max(1, (examples - config.validation) // config.total_batch)))
    out.append(f"  examples, tokens  {f'{examples:,}, {tokens:,}' if examples else f'unknown ({why})'}")
    out.append(f"  steps             {f'{steps:,}' if steps else 'unknown'} of {config.total_batch} sequences")
    if count:
        state = count * 16 / gpus  # fp32 parameters, gradients and two moments, sharded
        out.append(f"  memory per GPU    {state / 2**30:.1f} GiB of state over {gpus} GPUs, activations not counted")
    if config.carry and not config.residual.recycling:
        out.append("                    and the reference whole on every GPU")
    if count and steps and examples:
        computed = steps * config.total_batch * tokens / examples * 2  # the text and its noisy copy
        cost = 6 * count * computed * (1.4 if config.carry else 1.0)
        hours = cost / (gpus * H100_FLOPS * ASSUMED_MFU) / 3600
        out.append(f"  hours             {hours:.1f} on {gpus} x H100 at {ASSUMED_MFU:.0%} utilisation")
    return out


def _parameters(config: TrainConfig) -> tuple[int | None, str]:
    if config.model.startswith("toy:"):
        from rcd.data.sums import character_tokenizer
        from rcd.models.toy import toy

        words = character_tokenizer()
        shape: dict[str, Any] = {**config.toy, "vocab": len(words)}
        model = toy(config.model.removeprefix("toy:"), **shape).model
        return sum(p.numel() for p in model.parameters()), ""
    try:
        opened = open_checkpoint(config.model)
        if opened.path.is_dir():
            return sum(math.prod(shape) for _, shape, _ in shapes(opened.path)), ""
    except RCDError as error:
        return None, str(error).rstrip(".")
    return None, "a GGUF file"


def _data(config: TrainConfig) -> tuple[int | None, int, str]:
    from rcd.data.rows import rows_of

    try:
        sizes: list[Any] = [
            len(str(row.get(config.prompt_field))) + len(str(row.get(config.response_field)))
            for _, row in rows_of(config.data, config.split)
        ]
    except RCDError as error:
        return None, 0, str(error).rstrip(".")
    characters = 1 if config.model.startswith("toy:") else 3.5
    return len(sizes), int(sum(sizes) / characters), ""
