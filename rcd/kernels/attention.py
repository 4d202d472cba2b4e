"""Attention over slots and the cache as Triton kernels. Each has a twin in `rcd.kernels.plain`."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rcd.kernels.launching import begin, launch


@triton.jit
def _rotate_store(
    qkv, q_out, keys, values, row_of, start_of, cos, sin, q_weight, k_weight, eps, Q, T,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, NORM: tl.constexpr, BUNCH: tl.constexpr,
    LOOKING: tl.constexpr, LOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A bunch of heads of one token; LOW is half a head, rounded up to a power of two."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BUNCH + tl.arange(0, BUNCH)
    slot = token // Q
    position = tl.maximum(tl.load(start_of + slot).to(tl.int64) + token % Q, 0)  # -1: a token that only looks
    row = tl.load(row_of + slot).to(tl.int64)
    HALF: tl.constexpr = C // 2
    low = tl.arange(0, LOW)
    part = low < HALF
    ca = tl.load(cos + position * C + low, mask=part).to(tl.float32)[None, :]
    cb = tl.load(cos + position * C + HALF + low, mask=part).to(tl.float32)[None, :]
    sa = tl.load(sin + position * C + low, mask=part).to(tl.float32)[None, :]
    sb = tl.load(sin + position * C + HALF + low, mask=part).to(tl.float32)[None, :]
    there = (head < H + 2 * G)[:, None]
    there = there if LOW == HALF else there & part[None, :]
    source = qkv + (token * (H + 2 * G) + head)[:, None] * C + low[None, :]
    kind = q_out.dtype.element_ty
    a0 = tl.load(source, mask=there, other=0.0).to(tl.float32)
    b0 = tl.load(source + HALF, mask=there, other=0.0).to(tl.float32)
    a, b = a0, b0
    if NORM:
        query = (head < H)[:, None]
        scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / C + eps)[:, None]
        qa, qb = tl.load(q_weight + low, mask=part), tl.load(q_weight + HALF + low, mask=part)
        ka, kb = tl.load(k_weight + low, mask=part), tl.load(k_weight + HALF + low, mask=part)
        wa = tl.where(query, qa[None, :], ka[None, :]).to(tl.float32)
        wb = tl.where(query, qb[None, :], kb[None, :]).to(tl.float32)
        a = ((a * scale).to(kind).to(tl.float32) * wa).to(kind).to(tl.float32)
        b = ((b * scale).to(kind).to(tl.float32) * wb).to(kind).to(tl.float32)
    turned = (head < H + G)[:, None]
    first = tl.where(turned, a * ca - b * sa, a0).to(kind)
    second = tl.where(turned, b * cb + a * sb, b0).to(kind)
    to_q = q_out + (token * H + head)[:, None] * C + low[None, :]
    to_k = keys + ((row * G + head - H) * T + position)[:, None] * C + low[None, :]
    to_v = values + ((row * G + head - H - G) * T + position)[:, None] * C + low[None, :]
    stores = head * 0 + token % Q >= LOOKING
    is_q, is_k = (head < H)[:, None] & there, ((head >= H) & (head < H + G) & stores)[:, None] & there
    is_v = ((head >= H + G) & stores)[:, None] & there
    tl.store(to_q, first, mask=is_q)
    tl.store(to_q + HALF, second, mask=is_q)
    tl.store(to_k, first, mask=is_k)
    tl.store(to_k + HALF, second, mask=is_k)
    tl.store(to_v, first, mask=is_v)
    tl.store(to_v + HALF, second, mask=is_v)


def rotate_store(
    qkv_NQX: Tensor, keys_RGTC: Tensor, values_RGTC: Tensor, row_N: Tensor, start_N: Tensor, cos_TC: Tensor,
    sin_TC: Tensor, heads: int, norms: tuple[Tensor, Tensor, float] | None = None, looking: int = 0,
) -> Tensor:  # fmt: skip
    (n, q, _), (_, groups, t, c) = qkv_NQX.shape, keys_RGTC.shape
    query = keys_RGTC.new_empty(n, q, heads, c)
    q_weight, k_weight, eps = norms if norms is not None else (query, query, 0.0)
    bunch = 8
    _rotate_store[(n * q, triton.cdiv(heads + 2 * groups, bunch))](
        qkv_NQX, query, keys_RGTC, values_RGTC, row_N, start_N, cos_TC, sin_TC, q_weight, k_weight, eps, q, t,
        H=heads, G=groups, C=c, NORM=norms is not None, BUNCH=bunch, LOOKING=looking,
        LOW=triton.next_power_of_2(c // 2),
        num_warps=4 if c >= 64 else 1, **launch(),
    )  # fmt: skip
    return query


@triton.jit
def _attend(
    query, keys, values, row_of, end_of, order, out, top_of, sum_of, scale, T, Q, SPLITS,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
    SPLIT: tl.constexpr, EXACT: tl.constexpr, ORDERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of (token, head of the group) pairs against one part of the row's keys; parts are joined afterwards.
    WIDE is a head, rounded up to a power of two."""
    begin(PDL)
    GROUP: tl.constexpr = H // G
    tile, group = tl.program_id(0), tl.program_id(1)
    slot, part = tl.program_id(2) // SPLITS, tl.program_id(2) % SPLITS
    if ORDERED:
        slot = tl.load(order + slot)
    slot = slot.to(tl.int64)
    row = tl.load(row_of + slot).to(tl.int64)
    pair = tile * TILE_M + tl.arange(0, TILE_M)
    real = pair < Q * GROUP
    token, head = slot * Q + pair // GROUP, group * GROUP + pair % GROUP
    c = tl.arange(0, WIDE)
    at = (token * H + head)[:, None] * C + c[None, :]
    whole = real[:, None] if WIDE == C else real[:, None] & (c < C)[None, :]
    end = tl.load(end_of + token, mask=real, other=0)
    most = tl.max(end, axis=0)
    share = tl.cdiv(tl.cdiv(most, SPLITS), TILE_K) * TILE_K
    first = part * share
    last = tl.minimum(first + share, most)
    base = (row * G + group) * T
    q = tl.load(query + at, mask=whole, other=0.0)
    top = tl.full((TILE_M,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)
    mixed = tl.zeros((TILE_M, WIDE), tl.float32)
    for k in range(first, last, TILE_K):
        place = k + tl.arange(0, TILE_K)
        there = (place < last)[:, None]
        there = there if WIDE == C else there & (c < C)[None, :]
        offset = (base + place)[:, None] * C + c[None, :]
        key = tl.load(keys + offset, mask=there, other=0.0)
        value = tl.load(values + offset, mask=there, other=0.0)
        if EXACT:  # noqa: SIM108 - a kernel has no ternary of tiles
            score = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
        else:
            score = tl.dot(q, tl.trans(key)) * scale
        score = tl.where(place[None, :] < end[:, None], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp(top - safe)
        p = tl.exp(score - safe[:, None])
        total = total * shrink + tl.sum(p, axis=1)
        mixed = mixed * shrink[:, None]
        if EXACT:
            mixed += tl.dot(p.to(value.dtype), value, input_precision="ieee")
        else:
            mixed += tl.dot(p.to(value.dtype), value)
        top = higher
    if SPLIT:
        mark = (token * H + head) * SPLITS + part
        tl.store(top_of + mark, top, mask=real)
        tl.store(sum_of + mark, total, mask=real)
        tl.store(out + mark[:, None] * C + c[None, :], mixed, mask=whole)
    else:
        mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + at, mixed.to(out.dtype.element_ty), mask=whole)


@triton.jit
def _join(
    parts, top_of, sum_of, out, SPLITS, C: tl.constexpr, WIDE: tl.constexpr, ROUND: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    begin(PDL)
    pair = tl.program_id(0).to(tl.int64)
    part, c = tl.arange(0, ROUND), tl.arange(0, WIDE)
    there = part < SPLITS
    top = tl.load(top_of + pair * SPLITS + part, mask=there, other=float("-inf"))
    share = tl.exp(top - tl.max(top, axis=0))
    total = tl.sum(share * tl.load(sum_of + pair * SPLITS + part, mask=there, other=0.0), axis=0)
    used = (there & (share > 0.0))[:, None]
    used = used if WIDE == C else used & (c < C)[None, :]
    mixed = tl.load(parts + (pair * SPLITS + part)[:, None] * C + c[None, :], mask=used, other=0.0)
    tl.store(out + pair * C + c, (tl.sum(mixed * share[:, None], axis=0) / total).to(out.dtype.element_ty), mask=c < C)


@cache
def processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if torch.cuda.is_available() else 4


ATTENTION = {"pairs": 64, "keys": 64, "warps": 4, "stages": 3}
"""Tile sizes of attention; the pairs are (token, head of the group)."""


@cache
def shared_memory(device: int) -> int:
    """Bytes that a kernel's block may have."""
    if not torch.cuda.is_available():
        return 232_448
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 101_376))


def _room(pairs: int, width: int, like: Tensor) -> tuple[int, int, int]:
    """(pairs and keys of a tile, stages) for which the GPU has room: queries, scores, keys and values on their way."""
    size, most = like.element_size(), shared_memory(like.device.index or 0) - 1024
    keys, stages = ATTENTION["keys"] if width <= 128 else 32, ATTENTION["stages"]
    while size * (pairs * (width + keys) + 2 * (stages - 1) * keys * width) > most:
        if stages > 2:
            stages -= 1
        elif keys > 16:
            keys //= 2
        elif pairs > 16:
            pairs //= 2
        else:
            break
    return pairs, keys, stages


PART = 128
"""The fewest keys that are worth a part of their own."""


def splits_for(programs: int, longest: int, tile: int, processors: int) -> int:
    """Enough parts to keep the GPU busy, none of them shorter than PART keys."""
    return max(1, min(32, longest // max(PART, tile), -(-processors // programs)))


def attend(
    query_NQHC: Tensor, keys_RGTC: Tensor, values_RGTC: Tensor, row_N: Tensor, end_NQ: Tensor, scale: float,
    order_N: Tensor | None = None,
) -> Tensor:  # fmt: skip
    n, q, h, c = query_NQHC.shape
    g, t = keys_RGTC.shape[1:3]
    pairs = q * h // g
    tile_m, wide_c = min(ATTENTION["pairs"], max(16, triton.next_power_of_2(pairs))), triton.next_power_of_2(c)
    tile_m, tile_k, stages = _room(tile_m, wide_c, query_NQHC)
    tiles = triton.cdiv(pairs, tile_m)
    splits = splits_for(tiles * g * n, t, tile_k, processors(query_NQHC.device.index or 0))
    out = torch.empty_like(query_NQHC)
    wide: dict[str, Any] = dict(dtype=torch.float32, device=out.device)
    parts, top, total = (
        (torch.empty(n * q * h * splits * c, **wide), *(torch.empty(n * q * h * splits, **wide) for _ in "ab"))
        if splits > 1
        else (out, out, out)
    )
    _attend[(tiles, g, n * splits)](
        query_NQHC, keys_RGTC, values_RGTC, row_N, end_NQ, row_N if order_N is None else order_N, parts, top, total,
        scale, t, q, splits, H=h, G=g, C=c, WIDE=wide_c, TILE_M=tile_m, TILE_K=tile_k, SPLIT=splits > 1,
        EXACT=query_NQHC.dtype == torch.float32, ORDERED=order_N is not None, num_warps=ATTENTION["warps"],
        num_stages=stages, **launch(),
    )  # fmt: skip
    if splits > 1:
        _join[(n * q * h,)](
            parts,
            top,
            total,
            out,
            splits,
            C=c,
            WIDE=wide_c,
            ROUND=triton.next_power_of_2(splits),
            num_warps=1,
            **launch(),
        )
    return out.view(n, q, h * c)
