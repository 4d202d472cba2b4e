"""Which tensors of a checkpoint make up which of ours.

Most are one of ours under another name. But transformers keeps the experts of a layer as one tensor, the families'
files every matrix of every expert apart; and LLaDA2's files keep q, k and v as one matrix, the backbone as three. So a
tensor of a checkpoint is a list of pieces of ours, one below the other; a piece is one of ours or a part of it:

    model.layers.1.mlp.experts.5.up_proj.weight       [F, D]    backbone.layers.1.mlp.experts.gate_up_proj[5, F : 2F]
    model.layers.1.attention.query_key_value.weight   [q+k+v, D]   ...q_proj.weight, ...k_proj.weight, ...v_proj.weight

Shapes: F rows of a matrix of one expert, D columns.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rcd.errors import RCDError
from rcd.models.family import FamilySpec, translate

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """One of our tensors, or a part of it."""

    name: str
    shape: Shape
    part: tuple[int, slice] | None = None
    """The expert, and which of its rows; None: the whole tensor."""

    def of(self, whole: Tensor) -> Tensor:
        """A view of it in our tensor."""
        return whole if self.part is None else whole[self.part]


Layout = dict[str, list[Piece]]
"""The name of each of the checkpoint's tensors -> its pieces, one below the other."""


def layout_of(spec: FamilySpec, shapes: Mapping[str, Shape]) -> Layout:
    """Of a model whose tensors have these names and shapes; in our order."""
    found: dict[str, dict[int, Piece]] = {}
    for name, shape in shapes.items():
        for theirs, place, piece in _pieces(spec, name, shape):
            found.setdefault(theirs, {})[place] = piece
    return {theirs: [pieces[place] for place in sorted(pieces)] for theirs, pieces in found.items()}


def _pieces(spec: FamilySpec, name: str, shape: Shape) -> list[tuple[str, int, Piece]]:
    """(the checkpoint's tensor, which part of that one it is, the piece) of each piece of one of ours."""
    for experts in spec.experts:
        parts = [translate(name, ((experts.ours, theirs),)) for theirs in experts.theirs]
        if None in parts:
            continue
        rows = shape[1] // len(parts)
        return [
            (str(part).replace("{e}", str(e)), 0, Piece(name, (rows, *shape[2:]), (e, slice(k * rows, (k + 1) * rows))))
            for e in range(shape[0])
            for k, part in enumerate(parts)
        ]
    for fused in spec.fused:
        for place, ours in enumerate(fused.ours):
            theirs = translate(name, ((ours, fused.theirs),))
            if theirs is not None:
                return [(theirs, place, Piece(name, shape))]
    return [(spec.from_stock(name), 0, Piece(name, shape))]


def shape_of(pieces: list[Piece]) -> Shape:
    """Of the checkpoint's tensor."""
    return (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:])


def put(state: dict[str, Tensor], shapes: Mapping[str, Shape], pieces: list[Piece], tensor: Tensor) -> None:
    """Enter a tensor of the checkpoint into our `state`, which holds it from then on. What is one tensor here is filled
    part by part, so that no second copy of all experts is ever in memory."""
    for piece, part in zip(pieces, tensor.split([piece.shape[0] for piece in pieces]), strict=True):
        if piece.part is None:
            state[piece.name] = part if len(pieces) == 1 else part.clone()
            continue
        held = state.get(piece.name)
        if held is None:
            held = part.new_empty(shapes[piece.name])
        # parts of unequal dtypes: the widest, so that each is kept exactly
        state[piece.name] = held = held.to(torch.promote_types(held.dtype, part.dtype))
        piece.of(held).copy_(part)


def taken(state: Mapping[str, Tensor], pieces: list[Piece]) -> Tensor:
    """The inverse: the checkpoint's tensor, a view of ours where it is one piece."""
    parts = [piece.of(state[piece.name]) for piece in pieces]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _expert(spec: FamilySpec) -> re.Pattern[str]:
    """The checkpoint's names of experts' tensors; the group that is found is the expert's number."""
    theirs = (re.escape(name) for experts in spec.experts for name in experts.theirs)
    return re.compile("|".join(name.replace(r"\{n\}", "[0-9]+").replace(r"\{e\}", "([0-9]{1,9})") for name in theirs))


def check_experts(spec: FamilySpec, shapes: Mapping[str, Shape], names: Collection[str], path: Path) -> None:
    """Of a model whose tensors have these shapes: a file with those names holds as many experts, before as many are
    laid out. A single tensor that is missing is named later."""
    ours = tuple((experts.ours, "") for experts in spec.experts)
    expected = max((shape[0] for name, shape in shapes.items() if translate(name, ours) is not None), default=0)
    if not expected:
        return
    expert = _expert(spec)
    found = (expert.fullmatch(name) for name in names)
    held = 1 + max((int(match[match.lastindex or 0]) for match in found if match), default=-1)
    if held != expected and (held or expected > len(names)):
        raise RCDError(
            f"{path} is said to have {expected} experts in a layer, and holds the tensors of {held}; correct "
            "num_experts in its config.json, or download the checkpoint again."
        )


def active(spec: FamilySpec, config: Mapping[str, Any], shapes: Iterable[tuple[str, Shape]]) -> int | None:
    """How many numbers of a checkpoint's tensors a token meets: of the experts', those of the ones it goes to. None
    where there are no experts."""
    if not spec.experts:
        return None
    expert, sizes = _expert(spec), {True: 0, False: 0}
    for name, shape in shapes:
        sizes[expert.fullmatch(name) is not None] += prod(shape)
    return sizes[False] + sizes[True] * int(config["num_experts_per_tok"]) // int(config["num_experts"])
