"""The same parts as Triton kernels. Each has the signature of its plain twin in `rcd.kernels.plain`, which says what
it computes; tests compare the two, on a CPU through Triton's interpreter and on a GPU by hand.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from rcd.residual.summary import PER_CHUNK, Reading, Tail, chunk_for, line_for

SKINNY = 64
"""Up to so many tokens a product only reads its weights, and is done here; above, the library's is faster."""


@cache
def _pdl() -> bool:
    """Whether a kernel may begin, and fetch its weights, while the one before it ends (Hopper and later)."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


def _launch() -> dict[str, Any]:
    return {"PDL": True, "launch_pdl": True} if _pdl() else {"PDL": False}


@triton.jit
def _begin(PDL: tl.constexpr):
    """What the kernel before has written may be read from here on; the next kernel may begin."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _begin_product(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _product(x, rows, real, weight, places, inside, K, first, share, BK: tl.constexpr):
    """weight [places, first : first + share] times the transpose of x [rows, the same]. The weights stand on the left,
    where the matrix units want 64 rows and more: tokens are few."""
    k = first + tl.arange(0, BK)
    x_at = x + rows[None, :] * K + k[:, None]
    w_at = weight + places[:, None].to(tl.int64) * K + k[None, :]
    total = tl.zeros((places.shape[0], rows.shape[0]), tl.float32)
    for _ in range(0, share, BK):
        w = tl.load(w_at, mask=inside[:, None], other=0.0)
        t = tl.load(x_at, mask=real[None, :], other=0.0)
        total = tl.dot(w, t, total)
        x_at += BK
        w_at += BK
    return total


@triton.jit
def _fetch(weight, columns, inside, K, first, AHEAD: tl.constexpr):
    """Ask for the first AHEAD columns of a weight's tile, which no kernel before this one can change."""
    line = first + tl.arange(0, AHEAD // 64) * 64
    at = (weight + columns[:, None].to(tl.int64) * K + line[None, :]).to(tl.int64, bitcast=True)
    at = tl.where(inside[:, None], at, (weight + first).to(tl.int64, bitcast=True))
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _linear(
    x, weight, bias, out, M, N, K, share,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of columns and a part of the inner sum: out [parts, M, N]."""
    columns, part, rows = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1), tl.arange(0, BM)
    inside, real = columns < N, rows < M
    if PDL:
        _fetch(weight, columns, inside, K, part * share, AHEAD)
    _begin_product(PDL)
    total = _product(x, rows, real, weight, columns, inside, K, part * share, share, BK)
    if BIAS:
        total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[:, None]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    target = out + (part * M + rows)[None, :].to(tl.int64) * N + columns[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=real[None, :] & inside[:, None])


@triton.jit
def _gated(
    x, weight, out, M, F, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same BN / 2 columns of gate and of up in one tile, and silu(gate) * up of them."""
    HALF: tl.constexpr = BN // 2
    both, rows = tl.arange(0, BN), tl.arange(0, BM)
    column = tl.program_id(0) * HALF + both % HALF
    places, inside, real = column + (both // HALF) * F, column < F, rows < M
    if PDL:
        _fetch(weight, places, inside, K, 0, AHEAD)
    _begin_product(PDL)
    total = _product(x, rows, real, weight, places, inside, K, 0, K, BK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    gate, up = tl.split(tl.permute(tl.reshape(total, (2, HALF, BM)), (1, 2, 0)))
    kind = out.dtype.element_ty
    gate, up = gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32)
    value = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32) * up
    mine = tl.program_id(0) * HALF + tl.arange(0, HALF)
    tl.store(out + rows[None, :] * F + mine[:, None], value.to(kind), mask=real[None, :] & (mine < F)[:, None])


def _skinny(tokens: int, weight: Tensor) -> bool:
    return tokens <= SKINNY and weight.shape[1] % 512 == 0 and weight.dtype == torch.bfloat16 and weight.is_cuda


TILES: dict[str, tuple[int, int, int, int, int]] = {
    # kind of product -> columns of a tile, inner step, parts, stages, warps; measured on an H200, 32 and 64 tokens
    "small": (64, 128, 1, 6, 4),
    "sum": (64, 128, 2, 4, 4),
    "large": (128, 128, 1, 4, 8),
    "gated": (64, 64, 1, 4, 4),
}
AHEAD = 256
"""Columns of a tile's weights that are asked for before the kernel may read its tokens."""


def _rows(tokens: int) -> int:
    return max(16, triton.next_power_of_2(tokens))


def _parts(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """The product as [parts, M, N]; several parts are fp32 and still to be added up."""
    (n, k), tokens = weight.shape, x.numel() // x.shape[-1]
    rows, (bn, bk, parts, stages, warps) = _rows(tokens), TILES[kind]
    out = torch.empty(parts, tokens, n, dtype=torch.float32 if parts > 1 else x.dtype, device=x.device)
    _linear[(triton.cdiv(n, bn), parts)](
        x, weight, weight if bias is None else bias, out, tokens, n, k, k // parts,
        BM=rows, BN=bn, BK=bk, BIAS=bias is not None, AHEAD=AHEAD, num_stages=stages, num_warps=warps, **_launch(),
    )  # fmt: skip
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    n, tokens = weight.shape[0], x.numel() // x.shape[-1]
    if not _skinny(tokens, weight):
        return functional.linear(x, weight, bias)
    out = _parts(x, weight, bias, "large" if n > 32768 else "small")
    whole = out[0] if out.shape[0] == 1 else out.sum(0).to(x.dtype)
    return whole.view(*x.shape[:-1], n)


def linear_add_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, stream: Tensor, norm: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    if not _skinny(x.numel() // x.shape[-1], weight) or bias is not None:
        return add_norm(functional.linear(x, weight, bias), stream, norm, eps)
    return add_norm(_parts(x, weight, None, "sum"), stream, norm, eps)


def gated(x: Tensor, gate_up: Tensor) -> Tensor:
    tokens, (two, k) = x.numel() // x.shape[-1], gate_up.shape
    if not _skinny(tokens, gate_up):
        return silu_mul(functional.linear(x, gate_up))
    rows, (bn, bk, _, stages, warps) = _rows(tokens), TILES["gated"]
    out = x.new_empty(*x.shape[:-1], two // 2)
    _gated[(triton.cdiv(two, bn),)](
        x, gate_up, out, tokens, two // 2, k,
        BM=rows, BN=bn, BK=bk, AHEAD=AHEAD, num_stages=stages, num_warps=warps, **_launch(),
    )  # fmt: skip
    return out


@triton.jit
def _add_norm(
    x, stream, weight, out_stream, out, M, D, eps,
    ADD: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    keep = at < D
    factor = tl.load(weight + at, mask=keep, other=0.0).to(tl.float32)
    _begin(PDL)
    kind = out.dtype.element_ty
    value = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        value += tl.load(x + (part * M + row) * D + at, mask=keep, other=0.0).to(tl.float32)
    if ADD:
        value = value.to(kind).to(tl.float32) + tl.load(stream + row * D + at, mask=keep, other=0.0).to(tl.float32)
        tl.store(out_stream + row * D + at, value.to(kind), mask=keep)
        value = value.to(kind).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / D + eps)
    normed = (value * scale).to(kind).to(tl.float32) * factor
    tl.store(out + row * D + at, normed.to(kind), mask=keep)


def _warps(width: int) -> int:
    return 16 if width >= 4096 else 8 if width >= 2048 else 4


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    d, out = x.shape[-1], torch.empty_like(x)
    _add_norm[(x.numel() // d,)](
        x, x, weight, out, out, x.numel() // d, d, eps,
        ADD=False, PARTS=1, BLOCK=triton.next_power_of_2(d), num_warps=_warps(d), **_launch(),
    )  # fmt: skip
    return out


def add_norm(x: Tensor, stream: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x may be a product in parts, [parts, M, D]."""
    d, added, out = stream.shape[-1], torch.empty_like(stream), torch.empty_like(stream)
    tokens = stream.numel() // d
    _add_norm[(tokens,)](
        x, stream, weight, added, out, tokens, d, eps,
        ADD=True, PARTS=x.numel() // stream.numel(), BLOCK=triton.next_power_of_2(d), num_warps=_warps(d), **_launch(),
    )  # fmt: skip
    return added, out


@triton.jit
def _rotate_store(
    qkv, q_out, keys, values, row_of, start_of, cos, sin, q_weight, k_weight, eps, Q, T,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, NORM: tl.constexpr, BUNCH: tl.constexpr,
    LOOKING: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A bunch of heads of one token."""
    _begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BUNCH + tl.arange(0, BUNCH)
    slot = token // Q
    position = tl.load(start_of + slot).to(tl.int64) + token % Q
    row = tl.load(row_of + slot).to(tl.int64)
    HALF: tl.constexpr = C // 2
    low = tl.arange(0, HALF)
    there = (head < H + 2 * G)[:, None]
    source = qkv + (token * (H + 2 * G) + head)[:, None] * C + low[None, :]
    kind = qkv.dtype.element_ty
    a0 = tl.load(source, mask=there, other=0.0).to(tl.float32)
    b0 = tl.load(source + HALF, mask=there, other=0.0).to(tl.float32)
    a, b = a0, b0
    if NORM:
        query = (head < H)[:, None]
        scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / C + eps)[:, None]
        wa = tl.where(query, tl.load(q_weight + low)[None, :], tl.load(k_weight + low)[None, :]).to(tl.float32)
        wb = tl.where(query, tl.load(q_weight + HALF + low)[None, :], tl.load(k_weight + HALF + low)[None, :])
        a = ((a * scale).to(kind).to(tl.float32) * wa).to(kind).to(tl.float32)
        b = ((b * scale).to(kind).to(tl.float32) * wb.to(tl.float32)).to(kind).to(tl.float32)
    ca = tl.load(cos + position * C + low).to(tl.float32)[None, :]
    cb = tl.load(cos + position * C + HALF + low).to(tl.float32)[None, :]
    sa = tl.load(sin + position * C + low).to(tl.float32)[None, :]
    sb = tl.load(sin + position * C + HALF + low).to(tl.float32)[None, :]
    turned = (head < H + G)[:, None]
    first = tl.where(turned, a * ca - b * sa, a0).to(kind)
    second = tl.where(turned, b * cb + a * sb, b0).to(kind)
    to_q = q_out + (token * H + head)[:, None] * C + low[None, :]
    to_k = keys + ((row * G + head - H) * T + position)[:, None] * C + low[None, :]
    to_v = values + ((row * G + head - H - G) * T + position)[:, None] * C + low[None, :]
    stores = head * 0 + token % Q >= LOOKING
    is_q, is_k = (head < H)[:, None], ((head >= H) & (head < H + G) & stores)[:, None]
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
    query = qkv_NQX.new_empty(n, q, heads, c)
    q_weight, k_weight, eps = norms if norms is not None else (query, query, 0.0)
    bunch = 8
    _rotate_store[(n * q, triton.cdiv(heads + 2 * groups, bunch))](
        qkv_NQX, query, keys_RGTC, values_RGTC, row_N, start_N, cos_TC, sin_TC, q_weight, k_weight, eps, q, t,
        H=heads, G=groups, C=c, NORM=norms is not None, BUNCH=bunch, LOOKING=looking,
        num_warps=4 if c >= 64 else 1, **_launch(),
    )  # fmt: skip
    return query


@triton.jit
def _attend(
    query, keys, values, row_of, end_of, order, out, top_of, sum_of, scale, T, Q, SPLITS,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
    SPLIT: tl.constexpr, EXACT: tl.constexpr, ORDERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of (token, head of the group) pairs against one part of the row's keys; parts are joined afterwards."""
    _begin(PDL)
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
    c = tl.arange(0, C)
    at = (token * H + head)[:, None] * C + c[None, :]
    q = tl.load(query + at, mask=real[:, None], other=0.0)
    end = tl.load(end_of + token, mask=real, other=0)
    most = tl.max(end, axis=0)
    share = tl.cdiv(tl.cdiv(most, SPLITS), TILE_K) * TILE_K
    first = part * share
    last = tl.minimum(first + share, most)
    base = (row * G + group) * T
    top = tl.full((TILE_M,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)
    mixed = tl.zeros((TILE_M, C), tl.float32)
    for k in range(first, last, TILE_K):
        place = k + tl.arange(0, TILE_K)
        there = place < last
        offset = (base + place)[:, None] * C + c[None, :]
        key = tl.load(keys + offset, mask=there[:, None], other=0.0)
        value = tl.load(values + offset, mask=there[:, None], other=0.0)
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
        tl.store(out + mark[:, None] * C + c[None, :], mixed, mask=real[:, None])
    else:
        mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + at, mixed.to(out.dtype.element_ty), mask=real[:, None])


@triton.jit
def _join(
    parts, top_of, sum_of, out, SPLITS, C: tl.constexpr, ROUND: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    _begin(PDL)
    pair = tl.program_id(0).to(tl.int64)
    part, c = tl.arange(0, ROUND), tl.arange(0, C)
    there = part < SPLITS
    top = tl.load(top_of + pair * SPLITS + part, mask=there, other=float("-inf"))
    share = tl.exp(top - tl.max(top, axis=0))
    total = tl.sum(share * tl.load(sum_of + pair * SPLITS + part, mask=there, other=0.0), axis=0)
    used = there & (share > 0.0)
    mixed = tl.load(parts + (pair * SPLITS + part)[:, None] * C + c[None, :], mask=used[:, None], other=0.0)
    tl.store(out + pair * C + c, (tl.sum(mixed * share[:, None], axis=0) / total).to(out.dtype.element_ty))


@cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if torch.cuda.is_available() else 4


ATTENTION = {"pairs": 64, "keys": 64, "warps": 4, "stages": 3}
"""Tile sizes of attention; the pairs are (token, head of the group)."""


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
    tile_m = min(ATTENTION["pairs"], max(16, triton.next_power_of_2(pairs)))
    tile_k = ATTENTION["keys"] if c <= 128 else 32
    tiles = triton.cdiv(pairs, tile_m)
    splits = splits_for(tiles * g * n, t, tile_k, _processors(query_NQHC.device.index or 0))
    out = torch.empty_like(query_NQHC)
    wide: dict[str, Any] = dict(dtype=torch.float32, device=out.device)
    parts, top, total = (
        (torch.empty(n * q * h * splits * c, **wide), *(torch.empty(n * q * h * splits, **wide) for _ in "ab"))
        if splits > 1
        else (out, out, out)
    )
    _attend[(tiles, g, n * splits)](
        query_NQHC, keys_RGTC, values_RGTC, row_N, end_NQ, row_N if order_N is None else order_N, parts, top, total,
        scale, t, q, splits, H=h, G=g, C=c, TILE_M=tile_m, TILE_K=tile_k, SPLIT=splits > 1,
        EXACT=query_NQHC.dtype == torch.float32, ORDERED=order_N is not None, num_warps=ATTENTION["warps"],
        num_stages=ATTENTION["stages"], **_launch(),
    )  # fmt: skip
    if splits > 1:
        _join[(n * q * h,)](
            parts, top, total, out, splits, C=c, ROUND=triton.next_power_of_2(splits), num_warps=1, **_launch()
        )
    return out.view(n, q, h * c)


@triton.jit
def _silu_mul(source, out, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = at < F
    gate = tl.load(source + row * 2 * F + at, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(source + row * 2 * F + F + at, mask=keep, other=0.0)
    value = (gate / (1.0 + tl.exp(-gate))).to(up.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * F + at, value.to(out.dtype.element_ty), mask=keep)


def silu_mul(gate_up: Tensor) -> Tensor:
    f = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], f)
    block = min(1024, triton.next_power_of_2(f))
    _silu_mul[(out.numel() // f, triton.cdiv(f, block))](gate_up, out, f, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _ordered(z, index):
    """A 64-bit key that sorts by value, and of equals by the smaller index."""
    bits = z.to(tl.int32, bitcast=True)
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
def _read(
    logits, keys, tops, sums, moments, V, never, inverse_t, PARTS,
    CHUNK: tl.constexpr, LINE: tl.constexpr, KEPT: tl.constexpr, TEMPERED: tl.constexpr,
):  # fmt: skip
    """A chunk of one row: its largest logit, sums of exp(z) and z exp(z) relative to it, its KEPT largest keys and,
    ahead of them, that of the largest but `never`."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    number = tl.arange(0, CHUNK)
    at = ((number // LINE) * PARTS + part) * LINE + number % LINE
    inside = at < V
    z = tl.load(logits + row * V + at, mask=inside, other=float("-inf")).to(tl.float32)
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
    key = _ordered(z, at)
    key = tl.where(inside, key, -0x7FFFFFFFFFFFFFFF)
    tl.store(keys + mark * (KEPT + 1), tl.max(tl.where(at == never, -0x7FFFFFFFFFFFFFFF, key), axis=0))
    for k in tl.static_range(KEPT):
        best = tl.max(key, axis=0)
        tl.store(keys + mark * (KEPT + 1) + 1 + k, best)
        key = tl.where(key == best, -0x7FFFFFFFFFFFFFFF, key)


@triton.jit
def _finish(
    keys, tops, sums, moments, token, log_p, normaliser, peak, entropy, kept_p, kept_ids, inverse_t, PARTS, V,
    ROUND: tl.constexpr, KEPT: tl.constexpr, KEEP: tl.constexpr, POOL: tl.constexpr, TEMPERED: tl.constexpr,
):  # fmt: skip
    """One row: join the chunks."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, ROUND)
    there = part < PARTS
    mark = row * PARTS + part
    top = tl.load(tops + mark, mask=there, other=float("-inf"))
    most = tl.max(top, axis=0)
    gap = tl.where(there, top - most, 0.0)
    share = tl.where(there, tl.exp(gap), 0.0)
    total = tl.sum(share * tl.load(sums + 2 * mark, mask=there, other=0.0), axis=0)
    lse = most + tl.log(total)
    moment = tl.load(moments + mark, mask=there, other=0.0)
    if TEMPERED:
        share = tl.where(there, tl.exp(gap * inverse_t), 0.0)
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
        index = tl.minimum(tl.maximum(_index_of(key), 0), V - 1)
        p = tl.where(key == -0x7FFFFFFFFFFFFFFF, 0.0, tl.exp(_value_of(key) - lse))
        tl.store(kept_p + row * KEEP + k, p)
        tl.store(kept_ids + row * KEEP + k, index.to(tl.int64))


def summarise(
    logits_PV: Tensor, never: int, t_res: float = 1.0, keep: int = 0, chunk: int | None = None,
    per_chunk: int = PER_CHUNK,
) -> Reading:  # fmt: skip
    p, v = logits_PV.shape
    keep = min(keep, v)
    chunk = chunk or chunk_for(v, keep)
    parts, kept = triton.cdiv(v, chunk), per_chunk if keep else 0
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
        CHUNK=chunk, LINE=line_for(chunk, per_chunk), KEPT=kept, TEMPERED=tempered, num_warps=4,
    )  # fmt: skip
    _finish[(p,)](
        keys, tops, sums, moments, token, log_p, normaliser, peak, entropy, kept_p, ids, inverse, parts, v,
        ROUND=triton.next_power_of_2(parts), KEPT=kept, KEEP=keep, TEMPERED=tempered,
        POOL=max(triton.next_power_of_2(parts * max(kept, 1)), max(keep, 1)), num_warps=8,
    )  # fmt: skip
    return Reading(token, log_p, normaliser, peak, entropy, kept_p, ids)


@triton.jit
def _project(logits, normaliser, coordinates, out, P, V, R, SHARE, ROWS: tl.constexpr, TILE: tl.constexpr,
             WIDE: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
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


def project(logits_PV: Tensor, normaliser_P: Tensor, coordinates_VR: Tensor) -> Tensor:
    (p, v), r, tile = logits_PV.shape, coordinates_VR.shape[1], 128
    parts = min(192, triton.cdiv(v, tile))
    share = triton.cdiv(triton.cdiv(v, parts), tile) * tile
    out = torch.empty(parts, p, r, dtype=torch.float32, device=logits_PV.device)
    _project[(triton.cdiv(p, 16), parts)](
        logits_PV, normaliser_P, coordinates_VR, out, p, v, r, share,
        ROWS=16, TILE=tile, WIDE=max(16, triton.next_power_of_2(r)), EXACT=coordinates_VR.dtype == torch.float32,
        num_warps=4,
    )  # fmt: skip
    return out.sum(0)


@triton.jit
def _expected(
    p_of, ids_of, place_of, codebook, mean, coordinates, directions, out, D, R,
    K: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at, k, r = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, K), tl.arange(0, WIDE)
    keep = at < D
    p, ids = tl.load(p_of + row * K + k), tl.load(ids_of + row * K + k)
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
        p_PK, ids_PK, place_PR, codebook_VD, tail.mean, tail.coordinates, tail.directions, out, d, r,
        K=k, WIDE=triton.next_power_of_2(r), BLOCK=block, num_warps=2,
    )  # fmt: skip
    return out


@triton.jit
def _probabilities(logits, normaliser, out, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + row * V + at, mask=at < V, other=float("-inf")).to(tl.float32)
    p = tl.exp(z - tl.load(normaliser + row))
    tl.store(out + row * V + at, p.to(out.dtype.element_ty), mask=at < V)


def probabilities(logits_PV: Tensor, normaliser_P: Tensor, kind: torch.dtype) -> Tensor:
    p, v = logits_PV.shape
    out = torch.empty(p, v, dtype=kind, device=logits_PV.device)
    _probabilities[(p, triton.cdiv(v, 4096))](logits_PV, normaliser_P, out, v, BLOCK=4096, num_warps=8)
    return out
