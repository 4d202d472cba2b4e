"""Every fused kernel computes what its plain twin does: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton

from rcd.kernels import attention, fused, plain, products
from rcd.residual.summary import Tail
from tests.processes import finish

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N, Q, H, G, C, T, R = 3, 4, 4, 2, 16, 40, 4


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def same(one: Any, other: Any, within: float = 1e-4) -> None:
    pairs = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
    for a, b in pairs:
        torch.testing.assert_close(a, b, atol=within, rtol=within)


def test_norms() -> None:
    x, stream, weight = normal(6, 48), normal(6, 48, seed=1), normal(48, seed=2)
    same(fused.rms_norm(x, weight, 1e-6), plain.rms_norm(x, weight, 1e-6))
    same(fused.add_norm(x, stream, weight, 1e-6), plain.add_norm(x, stream, weight, 1e-6))


def test_silu_mul() -> None:
    same(fused.silu_mul(normal(5, 20)), plain.silu_mul(normal(5, 20)))


def slots() -> tuple[Tensor, Tensor, Tensor]:
    row, start = torch.tensor([2, 0, 3], device=DEVICE).int(), torch.tensor([8, 0, 36], device=DEVICE).int()
    end = (start[:, None] + Q).expand(N, Q).contiguous()
    end[1] = torch.tensor([2, 2, 4, 4])
    return row, start, end


@pytest.mark.parametrize(("normed", "looking", "width"), [(False, 0, C), (True, 1, C), (True, 0, 12), (False, 1, 12)])
def test_rotation_and_storing(normed: bool, looking: int, width: int) -> None:
    qkv, cos, sin = normal(N, Q, (H + 2 * G) * width), normal(T, width, seed=1), normal(T, width, seed=2)
    row, start, _ = slots()
    norms = (normal(width, seed=3), normal(width, seed=4), 1e-6) if normed else None
    results = []
    for ops in (fused, plain):
        keys, values = normal(R, G, T, width, seed=5), normal(R, G, T, width, seed=6)
        query = ops.rotate_store(qkv, keys, values, row, start, cos, sin, H, norms, looking)
        results.append((query, keys, values))
    same(results[0], results[1])
    kept = normal(R, G, T, width, seed=5)[2, :, 8 : 8 + looking]
    assert torch.equal(results[0][1][2, :, 8 : 8 + looking], kept)


def test_a_token_left_of_a_text_only_looks_and_is_turned_as_the_first() -> None:
    qkv, cos, sin = normal(N, Q, (H + 2 * G) * C), normal(T, C, seed=1), normal(T, C, seed=2)
    row, start, _ = slots()
    results = []
    for ops in (fused, plain):
        keys, values = normal(R, G, T, C, seed=5), normal(R, G, T, C, seed=6)
        results.append((ops.rotate_store(qkv, keys, values, row, start - 1, cos, sin, H, None, 1), keys, values))
    same(results[0], results[1])
    qkv = torch.cat((qkv[:, :1], qkv[:, :1]), dim=1)
    keys, values = normal(R, G, T, C, seed=5), normal(R, G, T, C, seed=6)
    query = plain.rotate_store(qkv[1:2], keys, values, row[1:2], start[1:2] - 1, cos, sin, H, None, 1)
    same(query[:, 0], query[:, 1])
    assert torch.equal(keys[:, :, -1], normal(R, G, T, C, seed=5)[:, :, -1])


@pytest.mark.parametrize(("splits", "heads", "width"), [(1, 2, C), (4, 4, C), (1, 4, 24), (4, 2, 24)])
def test_attention(splits: int, heads: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "splits_for", lambda *_: splits)
    query, keys, values = (normal(*shape, width) for shape in ((N, Q, heads), (R, G, T), (R, G, T)))
    row, _, end = slots()
    wanted = plain.attend(query, keys, values, row, end, 0.25)
    for order in (None, torch.tensor([1, 0, 2], device=DEVICE).int()):
        same(fused.attend(query, keys, values, row, end, 0.25, order), wanted)


@pytest.mark.parametrize("limit", [101_376, 166_912, 232_448])
@pytest.mark.parametrize(("width", "kind"), [(128, torch.float32), (256, torch.bfloat16), (256, torch.float32)])
def test_attention_takes_no_more_memory_than_a_gpu_has(
    limit: int, width: int, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "shared_memory", lambda _: limit)
    pairs, keys, stages = attention._room(64, width, torch.empty(0, dtype=kind))
    size = torch.empty(0, dtype=kind).element_size()
    assert size * (pairs * (width + keys) + 2 * (stages - 1) * keys * width) < limit
    assert min(pairs, keys) >= 16 and stages >= 2


@pytest.mark.filterwarnings("ignore:invalid value")  # the interpreter also subtracts where nothing is taken from it
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("t_res", "keep"), [(1.0, 0), (0.8, 8), (1.0, 16)])
def test_one_reading_of_the_logits(t_res: float, keep: int, kind: torch.dtype) -> None:
    """In bf16 many logits are equal: of equals the first ids are kept."""
    logits = (normal(5, 1000) * 4).to(kind)
    logits[0, 7], logits[1, 3] = 50, float("-inf")
    logits[2, torch.arange(1000, device=DEVICE) // 32 % 8 == 3] = float("-inf")  # a whole chunk of ids is ruled out
    a, b = (ops.summarise(logits, 7, t_res, keep, 128, 4) for ops in (fused, plain))
    assert a[0][0] != 7  # the mask is never the token
    same(a, b)


def test_as_many_tokens_as_there_are_may_be_kept_and_zero_has_no_sign() -> None:
    logits = normal(3, 77) - 20
    logits[:, 3], logits[:, 9] = -0.0, 0.0
    for given in (logits, logits.bfloat16()):
        a, b = (ops.summarise(given, 7, 1.0, 128, 32, 32) for ops in (fused, plain))
        assert a[0].tolist() == [3, 3, 3]
        same(a, b)


def test_expected_embedding_and_its_tail() -> None:
    logits, codebook = normal(5, 1000) * 4, normal(1000, 24, seed=1)
    tail, read = Tail.of(codebook, 6), plain.summarise(logits, 7, 1.0, 16, 128, 4)
    place = plain.project(logits, read.normaliser, tail.coordinates)
    same(fused.project(logits, read.normaliser, tail.coordinates), place)
    for kept in (16, 13):
        given = (read.kept_p[:, :kept].contiguous(), read.kept_ids[:, :kept].contiguous(), place, codebook, tail)
        same(fused.expected_embedding(*given), plain.expected_embedding(*given))
    same(fused.probabilities(logits, read.normaliser, torch.float32), logits.softmax(-1))


def layer(x: Tensor, stream: Tensor, ops: Any, out: Tensor, gate_up: Tensor, norm: Tensor) -> tuple[Tensor, ...]:
    """A product added to the stream, its norm, and products of that."""
    counts = torch.zeros(1024, dtype=torch.int32, device=DEVICE)
    stream, normed = ops.added(x, out, None, stream, norm, 1e-6, counts)
    assert not counts.any()
    return stream, ops.linear(normed, gate_up), ops.gated(normed, gate_up)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU multiplies fp32 less exactly; it has test_products")
def test_a_norm_divides_behind_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_skinny", lambda *_: True)
    x, stream, norm = normal(1, 5, 256), normal(1, 5, 256, seed=1), normal(256, seed=2)
    weights = normal(256, 256, seed=3), normal(96, 256, seed=4)
    same(layer(x, stream, fused, *weights, norm), layer(x, stream, plain, *weights, norm), within=1e-3)


@pytest.mark.skipif(DEVICE == "cpu", reason="products in bf16 are for a GPU")
@pytest.mark.parametrize("tokens", [4, 32, 33, 64, 100])
@pytest.mark.parametrize(("rows", "inner"), [(1536, 1024), (1000, 512), (4096, 4096)])
def test_products(tokens: int, rows: int, inner: int) -> None:
    x, weight = normal(1, tokens, inner).bfloat16(), (normal(rows, inner, seed=1) * 0.05).bfloat16()
    out, stream, norm = (normal(*shape, seed=2).bfloat16() for shape in ((inner, inner), (1, tokens, inner), (inner,)))
    whole = x.float() @ weight.float().t()
    ours = (fused.linear(x, weight), *layer(x, stream, fused, out * 0.05, weight, norm))
    theirs = (whole, *layer(x.float(), stream.float(), plain, out.float() * 0.05, weight.float(), norm.float()))
    for one, other in zip(ours, theirs, strict=True):
        assert (one.float() - other).norm() < 0.01 * other.norm()


COMPILER = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"


@pytest.mark.skipif(not COMPILER.is_file(), reason="this Triton cannot compile for NVIDIA's GPUs")
def test_every_kernel_compiles_for_a_gpu_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = finish([sys.executable, "-m", "tests.compiling"])
    assert done.returncode == 0, done.stderr
    sources = [path.read_text() for path in Path(attention.__file__).parent.glob("*.py")]
    launched = {name for source in sources for name in re.findall(r"^ +(_\w+)\[\(", source, re.M)}
    assert {line.split()[0] for line in done.stdout.splitlines()} == launched and len(launched) > 10
