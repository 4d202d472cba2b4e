"""Reading logits in chunks equals reading them whole, and the short cut to delta is as near as it claims."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rcd.residual import chunked
from rcd.residual.chunked import statistics
from rcd.residual.distribution import without
from rcd.residual.product import padded_rows, product
from rcd.residual.reading import ChunkedReader
from rcd.residual.shortcut import Regression

SIZES = [1, 2, 31, 32, 33, 100, 4096, 5003, 20_000]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def truth(logits: Tensor, temperature: float = 1.0) -> dict[str, Tensor]:
    z = logits.double() / temperature
    p = z.softmax(-1)
    return {
        "normaliser": z.logsumexp(-1),
        "peak": p.amax(-1),
        "entropy": torch.special.entr(p).sum(-1),
        "squares": p.square().sum(-1),
    }


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
def test_statistics_of_any_shape(kind: torch.dtype, rows: int, size: int, temperature: float) -> None:
    logits = (normal(rows, size) * 4 - 100).to(kind)
    read, want = statistics(logits, temperature, moments=True), truth(logits, temperature)
    within = 1e-12 if kind == torch.float64 else 2e-6
    for name, value in want.items():
        found = getattr(read, name)
        assert found.dtype == torch.promote_types(kind, torch.float32)
        torch.testing.assert_close(found.double(), value, atol=within, rtol=4 * within)
    seqd = statistics(logits, temperature)
    torch.testing.assert_close(seqd.normaliser.double(), want["normaliser"], atol=10 * within, rtol=1e-6)
    assert seqd.entropy is None


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_row_is_read_the_same_whatever_stands_beside_it(kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "CHUNK", 100_000)  # chunks of few rows, and one that is not full
    logits, hidden, codebook = tied(11, 40_000, 64)
    known = Regression.of(codebook.to(kind), codebook.to(kind))
    reader = ChunkedReader(known, row_by_row=True)
    logits, hidden = logits.to(kind)[None], hidden.to(kind)[None]

    def found(at: slice) -> tuple[Tensor, ...]:
        one = reader(logits[:, at], hidden[:, at])
        token = one.best((3,))
        return token, one.log_p(token), one.normaliser, one.entropy_at(1.0), one.expectation(codebook.to(kind))

    together = found(slice(None))
    for row in range(11):
        assert all(
            torch.equal(a, b[:, row : row + 1]) for a, b in zip(found(slice(row, row + 1)), together, strict=True)
        )


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("never", [(), (0,), (1,), (0, 1)])
def test_the_best_token_is_the_first_of_equals(size: int, never: tuple[int, ...]) -> None:
    if len(never) >= size:
        pytest.skip("nothing is left")
    logits = (normal(40, size, seed=size) * 2).bfloat16()  # many equal ones
    logits[0], logits[1, :1], logits[2, -1] = 0.5, 50, 50
    logits[3], logits[4, size // 2 :] = -0.0, 60
    logits[5, : size // 2] = float("-inf")
    for given in (logits, logits.float()):
        found = ChunkedReader()(given[None]).best(never)[0]
        assert torch.equal(found, without(given, never).argmax(-1))


def test_ids_that_are_ruled_out_leave_the_entropy_a_number() -> None:
    logits = normal(4, 20_000) * 3
    logits[1, 100:900], logits[2, 1:] = float("-inf"), float("-inf")
    read = statistics(logits, moments=True)
    assert read.entropy is not None
    torch.testing.assert_close(read.entropy.double(), truth(logits)["entropy"], atol=1e-5, rtol=1e-5)
    assert read.entropy[2] == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("size", [100, 20_000])
def test_a_row_that_is_no_number_leaves_its_neighbours_alone(bad: float, size: int) -> None:
    logits, hidden, codebook = tied(5, size, 32)
    reader = ChunkedReader(Regression.of(codebook, codebook))
    clean = reader(logits[None], hidden[None])
    logits = logits.clone()
    logits[2, size // 3], logits[3] = bad, float("nan")
    spoilt = reader(logits[None], hidden[None])
    fine = torch.tensor([True, True, False, False, True])
    assert torch.equal(spoilt.normaliser.isfinite()[0], fine)
    for a, b in (
        (spoilt.normaliser, clean.normaliser),
        (spoilt.best((7,)), clean.best((7,))),
        (spoilt.log_p(spoilt.best((7,))), clean.log_p(clean.best((7,)))),
        (spoilt.entropy_at(1.0), clean.entropy_at(1.0)),
        (spoilt.peak, clean.peak),
        (spoilt.expectation(codebook), clean.expectation(codebook)),
    ):
        torch.testing.assert_close(a[0][fine], b[0][fine], atol=0, rtol=1e-6)


def tied(rows: int, size: int, width: int, seed: int = 0, steep: float = 4.0) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, hidden, codebook) of a head that is the codebook."""
    codebook, hidden = normal(size, width, seed=seed), normal(rows, width, seed=seed + 1) * steep / math.sqrt(width)
    return hidden @ codebook.t(), hidden, codebook


def sure(vocabulary: int, alpha: Tensor) -> Tensor:
    """About how far normal logits must spread for that normalised entropy."""
    return ((1.0 - alpha).clamp_min(0.01) * 2 * math.log(vocabulary)).sqrt()


def errors(logits: Tensor, hidden: Tensor | None, codebook: Tensor, head: Tensor | None) -> tuple[Tensor, Tensor, int]:
    """(alpha, error, rows that took p @ E)."""
    reader = ChunkedReader(Regression.of(codebook, head))
    predicted = reader(logits[None], None if hidden is None else hidden[None])
    delta, exact = predicted.expectation(codebook)[0].double(), logits.double().softmax(-1) @ codebook.double()
    alpha = predicted.entropy_at(1.0)[0] / math.log(logits.shape[-1])
    assert reader.counts.rows == len(logits)
    return alpha, (delta - exact).norm(dim=-1) / exact.norm(dim=-1), reader.counts.exact


@pytest.mark.parametrize("origin", ["tied", "another head", "none"])
def test_delta_is_within_half_a_percent_at_every_alpha(origin: str) -> None:
    size, width = 20_000, 128
    codebook, head = normal(size, width) + 0.3, normal(size, width, seed=1)
    head = codebook - 0.3 if origin == "tied" else head
    spread = sure(size, torch.linspace(0.0, 1.0, 240))[:, None]
    spread[:20] *= 2
    hidden = normal(240, width, seed=2) * spread / math.sqrt(width)
    logits = hidden @ head.t() if origin != "none" else normal(240, size, seed=3) * spread
    alpha, error, exact = errors(logits, hidden if origin != "none" else None, codebook, head)
    bins = (alpha * 10).long().clamp(0, 9)
    assert set(bins.tolist()) == set(range(10))
    for one in range(10):
        assert error[bins == one].mean() < 0.005
    assert 0 < exact < 240  # flat rows take p @ E, and not all do


def test_a_short_cut_leaves_something_out() -> None:
    """The check above could fail."""
    _, error, exact = errors(*tied(16, 20_000, 128, steep=4.0), None)
    assert error.max() > 1e-5 and exact < 16


def test_the_regression_helps() -> None:
    """Without it, as many tokens kept, the error is larger."""
    logits, hidden, codebook = tied(32, 30_000, 64, steep=3.8)
    known = Regression.of(codebook, codebook)
    exact = logits.softmax(-1) @ codebook
    found = []
    for given in (hidden, hidden * 0):
        delta = ChunkedReader(known)(logits[None], given[None]).expectation(codebook)[0]
        found.append(float(((delta - exact).norm(dim=-1) / exact.norm(dim=-1)).mean()))
    assert found[0] < 0.8 * found[1]


@pytest.mark.parametrize("size", SIZES[2:])
def test_a_short_cut_through_a_small_vocabulary(size: int) -> None:
    _, error, _ = errors(normal(9, size) * 3, None, normal(size, 16, seed=1), None)
    assert error.mean() < 0.005


def test_no_rows() -> None:
    codebook = normal(20_000, 16)
    for known in (None, Regression.of(codebook, codebook)):
        empty = ChunkedReader(known)(torch.zeros(2, 0, 20_000), torch.zeros(2, 0, 16))
        assert empty.best((0,)).shape == empty.normaliser.shape == empty.entropy_at(1.0).shape == (2, 0)
        assert empty.expectation(codebook).shape == (2, 0, 16)


def test_bf16_delta_is_as_near_as_bf16_can_be() -> None:
    logits, hidden, codebook = (one.bfloat16() for one in tied(32, 20_000, 128, steep=4.0))
    found = ChunkedReader(Regression.of(codebook, codebook))(logits[None], hidden[None]).expectation(codebook)[0]
    whole = logits.float().softmax(-1).bfloat16() @ codebook
    exact = logits.double().softmax(-1) @ codebook.double()
    off, least = ((one.double() - exact).norm(dim=-1) / exact.norm(dim=-1) for one in (found, whole))
    assert found.dtype == torch.bfloat16 and off.mean() < 0.005 + least.mean()


def test_fp64_is_exact() -> None:
    logits, codebook = normal(3, 20_000).double() * 3, normal(20_000, 16, seed=1).double()
    predicted = ChunkedReader()(logits[None])
    torch.testing.assert_close(predicted.expectation(codebook)[0], logits.softmax(-1) @ codebook, atol=1e-14, rtol=0)
    assert predicted.entropy_at(0.8).dtype == predicted.peak.dtype == torch.float64


def test_another_temperature_is_a_reading_of_its_own() -> None:
    logits, hidden, codebook = tied(8, 20_000, 64)
    predicted = ChunkedReader(Regression.of(codebook, codebook))(logits[None], hidden[None])
    for temperature in (0.7, 1.3):
        other = predicted.at(temperature)
        p = (logits.double() / temperature).softmax(-1)
        entropy = torch.special.entr(p).sum(-1)
        torch.testing.assert_close(predicted.entropy_at(temperature)[0].double(), entropy, atol=1e-5, rtol=1e-5)
        exact = p @ codebook.double()
        off = (other.expectation(codebook)[0] - exact).norm(dim=-1) / exact.norm(dim=-1)
        assert off.mean() < 0.005
        assert other is predicted.at(temperature) and predicted.at(1.0) is predicted


def test_logits_that_are_a_part_of_wider_ones() -> None:
    wide = normal(6, 21_000) * 3
    part = wide[:, :20_000]
    one, other = (ChunkedReader()(given[None]) for given in (part, part.contiguous()))
    assert torch.equal(one.best((0,)), other.best((0,)))
    assert torch.equal(one.entropy_at(1.0), other.entropy_at(1.0))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("ids", [(), (3,), (0, 99), (150,)])
def test_ids_are_ruled_out_to_the_last_bit(ids: tuple[int, ...], kind: torch.dtype) -> None:
    """An id beyond the vocabulary rules out nothing."""
    logits = normal(2, 5, 100).to(kind)
    logits[0, 0] = float("nan")
    want = logits.clone()
    want[..., [one for one in ids if one < 100]] = float("-inf")
    found = without(logits, ids)
    assert found.dtype == kind
    assert torch.equal(found.nan_to_num(7.0)[0, 1:], want.nan_to_num(7.0)[0, 1:]) and torch.equal(found[1], want[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 8), (33, 8), (3, 23, 8), (600, 8)])
def test_a_padded_product_is_the_product(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = (torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype) for size in (shape, (5, 8)))
    with torch.inference_mode():
        found = product(x, weight)
    assert found.shape == (*shape[:-1], 5) and found.dtype == dtype
    assert torch.allclose(found, torch.nn.functional.linear(x, weight), atol=1e-5 if dtype == torch.float32 else 0.05)


def test_few_numbers_of_rows_are_multiplied() -> None:
    """oneDNN keeps code for each of them."""
    sizes = [padded_rows(rows) for rows in range(1, 2049)]
    assert len({*sizes}) == 44 and all(rows <= size <= 1.25 * rows for rows, size in enumerate(sizes, 1))
