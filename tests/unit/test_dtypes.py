"""`auto`: the dtype in which a checkpoint computes, by what the chip does and how large the model is; and threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rcd
from rcd.models import dtypes, threads
from rcd.models.dtypes import LARGE, pick_dtype
from rcd.models.toy import toy

CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("native", "stored", "parameters", "expected"),
    [
        (True, BF16, LARGE, BF16),
        (True, BF16, LARGE - 1, FP32),
        (True, torch.float16, LARGE, FP32),
        (True, FP32, LARGE, FP32),
        (False, BF16, LARGE, FP32),
        (False, BF16, 10, FP32),
    ],
)
def test_auto_on_a_cpu_is_a_question_of_chip_and_size(
    native: bool, stored: torch.dtype, parameters: int, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtypes, "native_bf16", lambda: native)
    assert pick_dtype("auto", stored, CPU, parameters) == pick_dtype(None, stored, CPU, parameters) == expected
    assert pick_dtype("auto", stored, torch.device("meta"), parameters) == stored
    assert pick_dtype("bf16", stored, CPU, parameters) == pick_dtype(BF16, stored, CPU) == BF16


@pytest.mark.parametrize("flag", dtypes.NATIVE)
def test_the_chip_is_asked_for_its_flags(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for there in (True, False):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda there=there: {flag: there, "avx2": True})
        assert dtypes.native_bf16() is there


def test_a_checkpoint_is_read_by_its_whole_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = toy("sdar")
    size = sum(parameter.numel() for parameter in held.model.parameters())
    held.model.to(BF16)
    rcd.Pipeline(held).save(tmp_path / "model")
    monkeypatch.setattr(dtypes, "native_bf16", lambda: True)
    for large, expected in ((size, BF16), (size + 1, FP32)):
        monkeypatch.setattr(dtypes, "LARGE", large)
        assert rcd.load(tmp_path / "model", device="cpu").model.codebook.dtype == expected


def test_threads_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    small = rcd.Pipeline(toy("sdar"))
    threads.limit_threads([small, None])
    assert chosen == [1]
    threads.limit_threads([small], asked=3)
    assert chosen == [1, 3]
    with pytest.raises(rcd.RCDError, match="--threads must be a whole number of 1 or more, not 0"):
        threads.limit_threads([small], asked=0)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    threads.limit_threads([small])
    assert chosen == [1, 3]
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(threads, "SMALL", 10)
    threads.limit_threads([small])
    assert chosen == [1, 3]
    assert threads.threads_for(11) is None and threads.threads_for(10) == 1
    assert threads.threads_for(5, rows=2) == 1 and threads.threads_for(5, rows=3) is None
