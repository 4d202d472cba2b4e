"""Shared by all tests: no network, small models, the CPU."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"  # tiny models: threads only get in each other's way

from collections.abc import Iterator
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's kernels run without a GPU, slowly; it reads this when imported

from rcd.api import Pipeline
from rcd.evaluate import verifier
from rcd.models.toy import toy
from tests.processes import FAILSAFE

torch.set_num_threads(1)
verifier.SECONDS = FAILSAFE  # no right formula is wrong because the machine is busy

FAMILIES = ("sdar", "llada", "dream", "fast_dllm_qwen")


def exact(family: str, seed: int = 3, **shape: Any) -> Pipeline:
    """A random model, sure enough of itself that thresholds matter, in fp64.

    Two orders of the same computation (a batch and its rows, a cache and none) differ in the last bits. In fp32 a
    random model at a threshold turns one such bit into another token now and then; in fp64 equality is a fair claim.
    """
    checkpoint = toy(family, seed=seed, spread=6.0, **shape)
    checkpoint.model.double()
    return Pipeline(checkpoint)


@pytest.fixture(scope="session")
def models() -> dict[str, Pipeline]:
    """One such model of each family."""
    return {family: exact(family) for family in FAMILIES}


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)
