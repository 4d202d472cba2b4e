"""Apple's GPUs have no fp64: where `finest` says so, decoding makes none. It never ran there; this is the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rcd
from rcd.carry.residual import Residual
from rcd.decode.events import Failed
from rcd.models.toy import toy
from tests.equivalence.setups import CARRIES, PROMPTS, WINDOWS, asked, config, engine

MORE = {"rcd-reference": Residual(start="reference"), "rcd-source": Residual(source="reference", t_res=0.8)}


class Narrow(TorchDispatchMode):
    """No fp64 tensor is made."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            assert not (isinstance(each, torch.Tensor) and each.dtype == torch.float64), func
        return out


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("rcd.diffusion.noise.finest", "rcd.diffusion.sampling.finest", "rcd.diffusion.schedule.finest"):
        monkeypatch.setattr(place, lambda device: torch.float32)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("carry", [*CARRIES, *MORE])
def test_decoding_makes_no_fp64(window: str, carry: str) -> None:
    family, settings = WINDOWS[window]
    pipeline, second = (rcd.Pipeline(toy(family, seed=seed, spread=6.0)) for seed in (3, 4))
    travelling = {**CARRIES, **MORE}[carry]
    chosen = config(**{**settings, "carry": travelling, "max_new_tokens": 6})
    pipeline.model.hold(travelling)
    ways: list[dict[str, Any]] = [
        {}, {"temperature": 0.8, "logprobs": 2}, {"temperature": 1.2, "top_k": 9, "top_p": 0.8, "residual_scale": 0.5},
    ]  # fmt: skip
    if not chosen.travelling.scalable:
        ways[2]["residual_scale"] = 0.0
    with torch.inference_mode(), Narrow():
        served = engine(pipeline, chosen, rows=2, reference=second.model)
        requests = [
            one for way in ways for one in asked(pipeline, config(**{**vars(chosen), **way}), PROMPTS[:2], watch=True)
        ]
        told = list(served.run(one.numbered(k) for k, one in enumerate(requests)))
    assert not any(isinstance(event, Failed) for event in told)


def test_the_check_sees_fp64() -> None:
    with pytest.raises(AssertionError), Narrow():
        torch.zeros(2).double()
