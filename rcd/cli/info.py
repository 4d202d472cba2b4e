"""`rcd info`: what a checkpoint is, from its small files and its tensors' headers."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rcd.cli import options as opt

if TYPE_CHECKING:
    from rcd.models.checkpoint import Opened


def info(
    model: Annotated[str, typer.Argument(help="Checkpoint: a folder, a hub name or a .gguf file.")],
    check: Annotated[bool, typer.Option("--check", help="Read every tensor: shapes, NaN, inf.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    family: opt.Family = None,
    mask_token_id: opt.MaskId = None,
    eos_token_id: opt.EosId = None,
    block_length: Annotated[int | None, typer.Option(help="By default the checkpoint's.")] = None,
    attention: opt.Attention = None,
    shift: opt.Shift = None,
    revision: opt.Revision = None,
) -> None:
    """Say what a checkpoint is and how it will be decoded."""
    from rcd.models.checkpoint import load, open_checkpoint
    from rcd.models.tensors import active

    chosen: dict[str, Any] = dict(
        family=family, revision=revision, mask_token_id=mask_token_id, eos_token_ids=eos_token_id or None,
        attention=attention, shift=shift, block_length=block_length,
    )  # fmt: skip
    opened = open_checkpoint(model, **chosen)
    headers = list(opened.weights.headers())
    settings, rcd = opened.settings, opened.rcd
    used = active(opened.spec, opened.config, [(name, tuple(shape)) for name, shape, _ in headers])
    facts: dict[str, Any] = {
        "path": str(opened.path),
        "family": settings.family,
        "backbone": opened.spec.backbone,
        "parameters": sum(math.prod(shape) for _, shape, _ in headers),
        **({} if used is None else {"active_parameters": used}),
        "dtypes": sorted({str(dtype).removeprefix("torch.") for _, _, dtype in headers}),
        "memory": memory(opened),
        "layers": opened.backbone_config.get("num_hidden_layers"),
        "width": opened.backbone_config.get("hidden_size"),
        "vocabulary": settings.vocab_size,
        "context": settings.context_length,
        "attention": settings.attention,
        "window": settings.window,
        "block_length": settings.block_length,
        "max_new_tokens": settings.max_new_tokens,
        "shift": settings.shift,
        "mask_token_id": settings.mask_token_id,
        "mask_token_added": opened.mask_added,
        "eos_token_ids": list(settings.eos_token_ids),
        "tokenizer": None if opened.tokenizer is None else type(opened.tokenizer).__name__,
        "chat_template": bool(getattr(opened.tokenizer, "chat_template", None)),
        "carry": rcd.carry or {"name": "none"},
        "stage": rcd.stage or ("causal, not trained for diffusion" if opened.spec.causal else None),
        "provenance": rcd.provenance,
    }
    if check:
        load(model, device="cpu", **chosen)
        facts["check"] = "every tensor is there, of the right shape and finite"
    if as_json:
        print(json.dumps(facts))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from rcd.terminal import neutral

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for key, value in facts.items():
        table.add_row(key.replace("_", " "), Text(neutral(_readable(value))))
    Console(soft_wrap=False).print(table)


def memory(opened: Opened) -> dict[str, str]:
    """What the weights take as floats and quantised, as `load` estimates it."""
    import torch

    from rcd.models.checkpoint import empty
    from rcd.models.prequantised import method_of
    from rcd.models.quantise import Quantisation
    from rcd.models.room import estimate, shown

    method = method_of(opened.config, opened.path)
    if method is not None:
        stored = sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in opened.weights.headers())
        return {f"as it comes ({method})": shown(stored)}
    model = empty(opened)
    return {
        name: shown(estimate(model, opened.weights, getattr(torch, dtype), Quantisation.parse(quantize)).weights)
        for name, dtype, quantize in (
            ("float32", "float32", None), ("bfloat16", "bfloat16", None), ("int8", "bfloat16", "int8"),
            ("int4", "bfloat16", "int4"),
        )
    }  # fmt: skip


def _readable(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return "\n".join(str(v) if k == "name" else f"{k} = {v}" for k, v in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)
