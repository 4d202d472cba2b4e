"""The engine's steps as CUDA graphs, of every window. Skipped without a CUDA device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import rcd
from rcd.carry.residual import Residual
from rcd.models.toy import toy
from tests.conftest import exact
from tests.equivalence.setups import NEW, PROMPTS, WINDOWS, asked, config, ends, engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none"),
]


@pytest.mark.parametrize("more", [{}, {"temperature": 0.8}, {"carry": Residual(start="self")}], ids=str)
@pytest.mark.parametrize("window", WINDOWS)
def test_every_step_is_captured_and_replayed(window: str, more: dict[str, Any]) -> None:
    """No step asks the host, or its capture would fail; texts are complete, and the same with and without graphs."""
    family, settings = WINDOWS[window]
    pipeline = rcd.Pipeline(toy(family, seed=3, spread=6.0))
    pipeline.model.to("cuda")
    chosen = config(**{"carry": "residual", **settings, **more})
    texts = []
    for graphs in (False, True):
        served = engine(pipeline, chosen, graphs=graphs)
        for _ in range(3):
            answers, failures = ends(served, asked(pipeline, chosen))
        assert not failures and all(pipeline.settings.mask_token_id not in ids for ids in answers.values())
        texts.append([answers[row] for row in range(len(PROMPTS))])
    replay = served.units.replay
    assert replay.graphs
    assert all(unit.graph is not None for unit in replay._units.values() if unit.used > 1)
    # in fp32 compiled sums are added up in another order: a near tie may fall either way, in few texts
    assert sum(a == b for a, b in zip(*texts, strict=True)) >= len(PROMPTS) - 1
    assert all(len(ids) <= NEW for ids in texts[0])


@pytest.mark.parametrize("window", WINDOWS)
def test_in_fp64_the_gpus_answers_are_the_oracles(window: str) -> None:
    """With a host that lags, and requests of their own settings in one batch."""
    family, settings = WINDOWS[window]
    pipeline = exact(family)
    chosen = config(**{**settings, "carry": "residual"})
    many = [
        replace(chosen, threshold=0.4 + 0.1 * k, temperature=0.5 * (k % 2), max_new_tokens=NEW - k) for k in range(4)
    ]
    want = pipeline.generate(PROMPTS, [replace(one, oracle=True) for one in many])
    pipeline.model.to("cuda")
    got = pipeline.generate(PROMPTS, many)
    assert got.sequences == want.sequences
    assert [one.counts for one in got.results] == [one.counts for one in want.results]
