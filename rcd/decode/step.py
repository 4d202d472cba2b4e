"""One denoising step, the body of Algorithm 2: inject -> predict -> sample -> commit -> update.

Every window calls this function; none of it knows which carry, commit rule or window is in use.
Shapes: B rows, L window, P predicted positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rcd import registry
from rcd.carry.base import Carry, CarryState
from rcd.decode.config import DecodeConfig
from rcd.diffusion.commit import CommitSettings
from rcd.diffusion.sampling import SamplingSettings, sample, without
from rcd.errors import RCDError
from rcd.models.lm import DiffusionLM, ModelSettings, Prediction, View
from rcd.residual.distribution import Distribution


@dataclass(frozen=True)
class Rules:
    """The parts of a step, resolved once for a whole run."""

    carry: Carry
    commit: Callable[[Tensor, Tensor, CommitSettings], Tensor]
    commit_settings: CommitSettings
    sampling: SamplingSettings
    impossible: tuple[int, ...] = ()
    """Ids that the model is not allowed to predict at all."""

    @classmethod
    def of(cls, config: DecodeConfig, model: ModelSettings) -> Rules:
        assert config.carry is not None and not isinstance(config.carry, str), "resolve the configuration first"
        return cls(
            carry=config.carry,
            commit=registry.get("commit", config.commit),
            commit_settings=config.commit_settings(),
            sampling=config.sampling_settings(model),
            impossible=model.eos_token_ids if config.eos_suppression == "logits" else (),
        )

    def distribution(self, logits: Tensor) -> Distribution:
        return Distribution(without(logits, self.impossible))


@dataclass(frozen=True)
class Outcome:
    """A step's results at the predicted positions."""

    token: Tensor
    confidence: Tensor
    committed: Tensor
    finite: Tensor
    """[B]: whether the row's logits were numbers."""
    state: CarryState


def denoise(
    model: DiffusionLM,
    rules: Rules,
    ids_BL: Tensor,
    view: View,
    state: CarryState,
    candidates_BP: Tensor,
    quota_B: Tensor,
    generators: Sequence[torch.Generator | None],
    inject_BP: Tensor | None = None,
) -> Outcome:
    """Algorithm 2, lines 7-25, once. `candidates` may be committed; the carry enters at `inject`."""
    prediction: Prediction = model(ids_BL, view, rules.carry, state, inject_BP)
    predicted = rules.distribution(prediction.logits)
    token, confidence = sample(predicted, rules.sampling, generators)
    offered = confidence.masked_fill(~candidates_BP, float("-inf"))
    committed = rules.commit(offered, quota_B, rules.commit_settings)
    after = rules.carry.update(state, predicted, prediction.hidden, model.codebook)
    # a confidence that is no number would never commit; the normaliser also sees what no candidate does
    finite = torch.isfinite(predicted.normaliser).all(-1) & torch.isfinite(confidence).all(-1)
    return Outcome(token, confidence, committed, finite, after)


def check_finite(outcome: Outcome, open_B: Tensor, rows: Sequence[int], numbers: Sequence[int]) -> None:
    """Logits that are no numbers stop the run with the row and the step that had them."""
    bad = ~outcome.finite & open_B
    if bool(bad.any()):
        k = int(bad.nonzero()[0])
        raise RCDError(
            f"the model's logits are NaN or inf at denoising step {numbers[k]} of prompt {rows[k]}; "
            "try float32 (--dtype float32), and check the checkpoint with `rcd info --check`."
        )
