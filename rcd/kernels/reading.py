"""Reading the logits, as Triton kernels: each has the signature of its plain twin in `rcd.residual.summary`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rcd.kernels.launching import begin, launch
from rcd.residual.summary import PER_CHUNK, Reading, Tail, chunk_for, line_for


@triton.jit
def _ordered(z, index):
    """A 64-bit key that sorts by value, and of equals by the smaller index; -0 is 0."""
    bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _index_of(key):
    return 0x7FFFFFFF - (key & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def _value_of(key):
    bits = (key >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _id_of(number, part, PARTS, LINE: tl.constexpr):
    """The id at a place of a chunk; it rises with the place."""
    return ((number // LINE) * PARTS + part) * LINE + number % LINE


@triton.jit
def _widened(key, least, part, PARTS, LINE: tl.constexpr, NARROW: tl.constexpr):
    """A key of 16 bits of value and 16 of place as one of value and id."""
    if NARROW:
        short = key >> 16
        short = tl.where(short < 0, short ^ 0x7FFF, short)
        wide = _ordered((short << 16).to(tl.float32, bitcast=True), _id_of(0xFFFF - (key & 0xFFFF), part, PARTS, LINE))
        return tl.where(key == least, -0x7FFFFFFFFFFFFFFF, wide)
    else:
        return key


@triton.jit
def _read(
    logits, keys, tops, sums, moments, V, never, inverse_t, PARTS,
    CHUNK: tl.constexpr, LINE: tl.constexpr, KEPT: tl.constexpr, TEMPERED: tl.constexpr, NARROW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A chunk of one row: its largest logit, sums of exp(z) and z exp(z) relative to it, its KEPT largest keys and,
    ahead of them, that of the largest but `never`."""
    begin(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    number = tl.arange(0, CHUNK)
    at = _id_of(number, part, PARTS, LINE)
    inside = at < V
    given = tl.load(logits + row * V + at, mask=inside, other=float("-inf"))
    z = given.to(tl.float32)
    mark = row * PARTS + part
    top = tl.max(z, axis=0)
    gap = tl.where(z == float("-inf"), 0.0, z - top)
    e = tl.where(z == float("-inf"), 0.0, tl.exp(gap))
    tl.store(tops + mark, top)
    tl.store(sums + 2 * mark, tl.sum(e, axis=0))
    if TEMPERED:
        gap = gap * inverse_t
        e = tl.where(z == float("-inf"), 0.0, tl.exp(gap))
        tl.store(sums + 2 * mark + 1, tl.sum(e, axis=0))
    tl.store(moments + mark, tl.sum(e * gap, axis=0))
    if NARROW:  # half as much work: what is kept is looked for by 16 bits of value and 16 of place
        short = tl.where(z == 0.0, 0, given.to(tl.int16, bitcast=True).to(tl.int32))  # -0 is 0
        key = (tl.where(short < 0, short ^ 0x7FFF, short) << 16) | (0xFFFF - number)
        least = tl.full((), -0x80000000, tl.int32)
    else:
        key = _ordered(z, at)
        least = tl.full((), -0x7FFFFFFFFFFFFFFF, tl.int64)
    key = tl.where(inside, key, least)
    best = tl.max(tl.where(at == never, least, key), axis=0)
    tl.store(keys + mark * (KEPT + 1), _widened(best, least, part, PARTS, LINE, NARROW))
    for k in tl.static_range(KEPT):
        best = tl.max(key, axis=0)
        tl.store(keys + mark * (KEPT + 1) + 1 + k, _widened(best, least, part, PARTS, LINE, NARROW))
        key = tl.where(key == best, least, key)


@triton.jit
def _finish(
    keys, tops, sums, moments, token, log_p, normaliser, peak, entropy, kept_p, kept_ids, inverse_t, PARTS, V, COUNT,
    ROUND: tl.constexpr, KEPT: tl.constexpr, KEEP: tl.constexpr, POOL: tl.constexpr, TEMPERED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row: join the chunks."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, ROUND)
    there = part < PARTS
    mark = row * PARTS + part
    top = tl.load(tops + mark, mask=there, other=float("-inf"))
    most = tl.max(top, axis=0)
    allowed = there & (top != float("-inf"))  # a chunk of which no id is allowed has no mass
    gap = tl.where(allowed, top - most, 0.0)
    share = tl.where(allowed, tl.exp(gap), 0.0)
    total = tl.sum(share * tl.load(sums + 2 * mark, mask=there, other=0.0), axis=0)
    lse = most + tl.log(total)
    moment = tl.load(moments + mark, mask=there, other=0.0)
    if TEMPERED:
        share = tl.where(allowed, tl.exp(gap * inverse_t), 0.0)
        part_sum = tl.load(sums + 2 * mark + 1, mask=there, other=0.0)
        gap = gap * inverse_t
    else:
        part_sum = tl.load(sums + 2 * mark, mask=there, other=0.0)
    mass = tl.sum(share * part_sum, axis=0)
    mean = tl.sum(share * (moment + gap * part_sum), axis=0) / mass
    tl.store(entropy + row, tl.maximum(tl.log(mass) - mean, 0.0))
    tl.store(normaliser + row, lse)
    tl.store(peak + row, 1.0 / total)
    best = tl.max(tl.load(keys + mark * (KEPT + 1), mask=there, other=-0x7FFFFFFFFFFFFFFF), axis=0)
    tl.store(token + row, _index_of(best).to(tl.int64))
    tl.store(log_p + row, _value_of(best) - lse)
    if KEEP > 0:
        at = tl.arange(0, POOL)
        real = at < PARTS * KEPT
        key = tl.load(
            keys + row * PARTS * (KEPT + 1) + (at // KEPT) * (KEPT + 1) + 1 + at % KEPT,
            mask=real, other=-0x7FFFFFFFFFFFFFFF,
        )  # fmt: skip
        key = tl.topk(key, KEEP)
        k = tl.arange(0, KEEP)
        asked = k < COUNT
        index = tl.minimum(tl.maximum(_index_of(key), 0), V - 1)
        p = tl.where(key == -0x7FFFFFFFFFFFFFFF, 0.0, tl.exp(_value_of(key) - lse))
        tl.store(kept_p + row * COUNT + k, p, mask=asked)
        tl.store(kept_ids + row * COUNT + k, index.to(tl.int64), mask=asked)


def summarise(
    logits_PV: Tensor, never: int, t_res: float = 1.0, keep: int = 0, chunk: int | None = None,
    per_chunk: int = PER_CHUNK,
) -> Reading:  # fmt: skip
    p, v = logits_PV.shape
    keep = min(keep, v)
    chunk = chunk or chunk_for(v, keep)
    parts, kept = triton.cdiv(v, chunk), per_chunk if keep else 0
    round_ = triton.next_power_of_2(keep) if keep else 0
    on: dict[str, Any] = dict(device=logits_PV.device)
    keys = torch.empty(p * parts * (kept + 1), dtype=torch.int64, **on)
    tops, moments = (torch.empty(p * parts, dtype=torch.float32, **on) for _ in "ab")
    sums = torch.empty(p * parts * 2, dtype=torch.float32, **on)
    token, ids = torch.empty(p, dtype=torch.int64, **on), torch.empty(p, keep, dtype=torch.int64, **on)
    log_p, normaliser, peak, entropy = (torch.empty(p, dtype=torch.float32, **on) for _ in "abcd")
    kept_p = torch.empty(p, keep, dtype=torch.float32, **on)
    tempered, inverse = t_res != 1.0, 1.0 / t_res
    _read[(p, parts)](
        logits_PV, keys, tops, sums, moments, v, never, inverse, parts,
        CHUNK=chunk, LINE=line_for(chunk, per_chunk), KEPT=kept, TEMPERED=tempered,
        NARROW=logits_PV.dtype == torch.bfloat16, num_warps=4, **launch(),
    )  # fmt: skip
    _finish[(p,)](
        keys, tops, sums, moments, token, log_p, normaliser, peak, entropy, kept_p, ids, inverse, parts, v, keep,
        ROUND=triton.next_power_of_2(parts), KEPT=kept, KEEP=round_, TEMPERED=tempered,
        POOL=max(triton.next_power_of_2(parts * max(kept, 1)), max(round_, 1)), num_warps=8, **launch(),
    )  # fmt: skip
    return Reading(token, log_p, normaliser, peak, entropy, kept_p, ids)


@triton.jit
def _project(logits, normaliser, coordinates, out, P, V, R, SHARE, ROWS: tl.constexpr, TILE: tl.constexpr,
             WIDE: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    begin(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = rows < P
    part, direction = tl.program_id(1), tl.arange(0, WIDE)
    lse = tl.load(normaliser + rows, mask=real, other=0.0)
    first = part * SHARE
    last = tl.minimum(first + SHARE, V)
    place = tl.zeros((ROWS, WIDE), tl.float32)
    for k in range(first, last, TILE):
        at = k + tl.arange(0, TILE)
        inside = at < last
        z = tl.load(
            logits + rows.to(tl.int64)[:, None] * V + at[None, :], mask=real[:, None] & inside[None, :],
            other=float("-inf"),
        )  # fmt: skip
        p = tl.exp(z.to(tl.float32) - lse[:, None])
        axes = tl.load(
            coordinates + at.to(tl.int64)[:, None] * R + direction[None, :],
            mask=inside[:, None] & (direction < R)[None, :], other=0.0,
        )  # fmt: skip
        if EXACT:
            place += tl.dot(p, axes, input_precision="ieee")
        else:
            place += tl.dot(p.to(axes.dtype), axes)
    target = out + (part * P + rows)[:, None] * R + direction[None, :]
    tl.store(target, place, mask=real[:, None] & (direction < R)[None, :])


@triton.jit
def _add_up(source, out, P, R, COUNT, PARTS: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr):
    """One row [R] of all parts."""
    begin(PDL)
    row, part, r = tl.program_id(0), tl.arange(0, PARTS), tl.arange(0, WIDE)
    there = (part < COUNT)[:, None] & (r < R)[None, :]
    found = tl.load(source + (part[:, None] * P + row) * R + r[None, :], mask=there, other=0.0)
    tl.store(out + row * R + r, tl.sum(found, axis=0), mask=r < R)


def project(logits_PV: Tensor, normaliser_P: Tensor, coordinates_VR: Tensor) -> Tensor:
    (p, v), r, tile = logits_PV.shape, coordinates_VR.shape[1], 128
    parts = min(192, triton.cdiv(v, tile))
    share = triton.cdiv(triton.cdiv(v, parts), tile) * tile
    out = torch.empty(parts, p, r, dtype=torch.float32, device=logits_PV.device)
    _project[(triton.cdiv(p, 16), parts)](
        logits_PV, normaliser_P, coordinates_VR, out, p, v, r, share,
        ROWS=16, TILE=tile, WIDE=max(16, triton.next_power_of_2(r)), EXACT=coordinates_VR.dtype == torch.float32,
        num_warps=4, **launch(),
    )  # fmt: skip
    place = torch.empty(p, r, dtype=torch.float32, device=logits_PV.device)
    width = triton.next_power_of_2(r)
    _add_up[(p,)](out, place, p, r, parts, PARTS=triton.next_power_of_2(parts), WIDE=width, num_warps=4, **launch())
    return place


@triton.jit
def _expected(
    p_of, ids_of, place_of, codebook, mean, coordinates, directions, out, D, R, COUNT,
    K: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    at, k, r = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, K), tl.arange(0, WIDE)
    keep = at < D
    kept = k < COUNT
    p = tl.load(p_of + row * COUNT + k, mask=kept, other=0.0)
    ids = tl.load(ids_of + row * COUNT + k, mask=kept, other=0)
    found = tl.load(codebook + ids[:, None] * D + at[None, :], mask=keep[None, :], other=0.0).to(tl.float32)
    rest = tl.maximum(1.0 - tl.sum(p, axis=0), 0.0)
    mixed = tl.sum(p[:, None] * found, axis=0) + rest * tl.load(mean + at, mask=keep, other=0.0).to(tl.float32)
    own = tl.load(coordinates + ids[:, None] * R + r[None, :], mask=(r < R)[None, :], other=0.0).to(tl.float32)
    place = tl.load(place_of + row * R + r, mask=r < R, other=0.0) - tl.sum(p[:, None] * own, axis=0)
    axes = tl.load(
        directions + r[:, None] * D + at[None, :], mask=(r < R)[:, None] & keep[None, :], other=0.0
    ).to(tl.float32)  # fmt: skip
    mixed += tl.sum(place[:, None] * axes, axis=0)
    tl.store(out + row * D + at, mixed.to(out.dtype.element_ty), mask=keep)


def expected_embedding(p_PK: Tensor, ids_PK: Tensor, place_PR: Tensor, codebook_VD: Tensor, tail: Tail) -> Tensor:
    (p, k), d, r = p_PK.shape, codebook_VD.shape[1], place_PR.shape[1]
    out = codebook_VD.new_empty(p, d)
    block = min(128, triton.next_power_of_2(d))
    _expected[(p, triton.cdiv(d, block))](
        p_PK, ids_PK, place_PR, codebook_VD, tail.mean, tail.coordinates, tail.directions, out, d, r, k,
        K=triton.next_power_of_2(k), WIDE=triton.next_power_of_2(r), BLOCK=block, num_warps=2, **launch(),
    )  # fmt: skip
    return out


@triton.jit
def _probabilities(logits, normaliser, out, V, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + row * V + at, mask=at < V, other=float("-inf")).to(tl.float32)
    p = tl.exp(z - tl.load(normaliser + row))
    tl.store(out + row * V + at, p.to(out.dtype.element_ty), mask=at < V)


def probabilities(logits_PV: Tensor, normaliser_P: Tensor, kind: torch.dtype) -> Tensor:
    p, v = logits_PV.shape
    out = torch.empty(p, v, dtype=kind, device=logits_PV.device)
    _probabilities[(p, triton.cdiv(v, 4096))](logits_PV, normaliser_P, out, v, BLOCK=4096, num_warps=8, **launch())
    return out
