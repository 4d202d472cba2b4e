"""Shared by all tests: no network, small models, fp32 on the CPU."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"  # tiny models: threads only get in each other's way

import pytest
import torch

from rcd.api import Pipeline
from rcd.models.toy import toy

torch.set_num_threads(1)

FAMILIES = ("sdar", "llada", "dream")


@pytest.fixture(scope="session")
def models() -> dict[str, Pipeline]:
    """One random model of each family, sure enough of itself that thresholds matter."""
    return {family: Pipeline(toy(family, seed=3, spread=6.0)) for family in FAMILIES}
