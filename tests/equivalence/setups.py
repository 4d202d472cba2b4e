"""Prompts, carries, windows and models that the tests of decoding share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import rcd
from rcd.carry.base import Carry, make
from rcd.carry.iter_smooth import IterSmooth
from rcd.carry.latent_refinement import LatentRefinement
from rcd.carry.loopholing import Loopholing
from rcd.carry.residual import Residual
from rcd.carry.soft_mask import SoftMask
from rcd.carry.token_merge import TokenMerge
from rcd.decode.config import DecodeConfig
from rcd.decode.engine import Engine
from rcd.decode.events import Event, Failed, Finished, Step
from rcd.decode.requests import Request
from tests.conftest import exact

NEW = 21
PROMPTS = [[5, 9, 13, 2, 40, 41, 7, 8, 1, 3, 77], [4, 4, 6], [11, 30, 31, 32, 9, 8, 7, 6], [60 + k for k in range(21)]]
RESIDUALS: dict[str, Carry] = {
    "rcd": Residual(),
    "rcd-self": Residual(start="self"),
    "rcd-dirichlet": Residual(start="dirichlet", t_res=0.9),
    "rcd-confidence": Residual(alpha="confidence", alpha_scale=0.5),
}
RIVALS: dict[str, Carry] = {
    "loopholing": Loopholing(),
    "iter_smooth": IterSmooth(start=0.5, growth=0.1, most=1.0),
    "token_merge": TokenMerge(top_k=2),
    "soft_mask": SoftMask(scale=1.0, centre=-3.0),
    "latent_refinement": LatentRefinement(weight=0.9),
}
CARRIES: dict[str, Carry] = {"seqd": make("none"), **RESIDUALS, **RIVALS}
FLYING: dict[str, Any] = {
    "window": "d2f", "block_add_threshold": 0.3, "decoded_token_threshold": 0.6, "block_length": 4, "threshold": 0.4,
}  # fmt: skip
STRICT: dict[str, Any] = {"window": "d2f", "block_add_threshold": 1.0, "decoded_token_threshold": 1.0}
WINDOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "blockwise": ("sdar", {}),
    "d2f": ("sdar", FLYING),
    "d2f behind": ("llada", FLYING),
    "shifted blockwise": ("fast_dllm_qwen", {}),
    "shifted d2f": ("fast_dllm_qwen", FLYING),
    "sub-blocks": ("sdar", {"window": "sub_blocks", "sub_block_length": 4}),
    "shifted sub-blocks": ("fast_dllm_qwen", {"window": "sub_blocks", "sub_block_length": 2}),
    "dream d2f": ("dream", FLYING),
    "bidirectional": ("llada", {}),
    "dream": ("dream", {"carry_scope": "block"}),
    "prefix": ("llada", {"window": "prefix"}),
    "dual": ("llada", {"window": "dual", "refresh_every": 3}),
    "dream prefix": ("dream", {"window": "prefix", "carry_scope": "block"}),
    "dream dual": ("dream", {"window": "dual"}),
}
"""A family and the settings of every kind of pass."""


def config(**settings: Any) -> DecodeConfig:
    return DecodeConfig(**{"max_new_tokens": NEW, "block_length": 8, "threshold": 0.5, **settings})


def looped(family: str, seed: int = 3, **shape: Any) -> rcd.Pipeline:
    """A model that has learnt something for Loopholing, if nothing sensible."""
    pipeline = exact(family, seed, **shape)
    pipeline.model.hold(Loopholing())
    assert pipeline.model.carry_parameters is not None
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in pipeline.model.carry_parameters.parameters():
            parameter.normal_(generator=generator)
    return pipeline


def same(a: rcd.Output, b: rcd.Output) -> None:
    assert a.sequences == b.sequences
    assert [r.counts for r in a.results] == [r.counts for r in b.results]
    assert [r.stop_reason for r in a.results] == [r.stop_reason for r in b.results]


def steps_of(events: Sequence[Event]) -> list[Step]:
    return [event for event in events if isinstance(event, Step)]


def engine(pipeline: rcd.Pipeline, chosen: DecodeConfig, rows: int = 2, capacity: int = 64, **more: Any) -> Engine:
    resolved = pipeline.resolve(chosen)
    return Engine(pipeline.model, resolved.engine(pipeline.settings), rows=rows, capacity=capacity, **more)


def asked(pipeline: rcd.Pipeline, chosen: DecodeConfig, prompts: Any = PROMPTS, **more: Any) -> list[Request]:
    return [Request(prompt, pipeline.resolve(chosen).request, row, **more) for row, prompt in enumerate(prompts)]


def ends(served: Engine, requests: Sequence[Request]) -> tuple[dict[int, list[int]], dict[int, str]]:
    """(the answers, the failures), by the requests' rows; each ends once."""
    told = [event for event in served.run(requests) if not isinstance(event, Step)]
    answers = {event.row: event.ids for event in told if isinstance(event, Finished)}
    failures = {event.row: event.message for event in told if isinstance(event, Failed)}
    assert len(answers) + len(failures) == len(told) == len(requests)
    return answers, failures
