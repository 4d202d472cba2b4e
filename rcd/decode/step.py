"""One denoising step, the body of Algorithm 2: inject -> predict -> sample -> commit -> update.

Every window calls this function; none of it knows which carry, commit rule or window is in use.
Shapes: B rows, L window, P predicted positions, N blocks of a row that commit each for itself (mostly one).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rcd import registry
from rcd.carry.base import Carry, CarryState
from rcd.decode.config import DecodeConfig
from rcd.decode.events import Step
from rcd.diffusion.commit import CommitSettings
from rcd.diffusion.sampling import SamplingSettings, sample
from rcd.errors import RCDError
from rcd.models.lm import DiffusionLM, ModelSettings, Prediction, View
from rcd.residual.distribution import Distribution, without
from rcd.residual.reading import Reader, reader_for


@dataclass(frozen=True)
class Rules:
    """The parts of a step, resolved once for a whole run."""

    carry: Carry
    commit: Callable[[Tensor, Tensor, CommitSettings], Tensor]
    commit_settings: CommitSettings
    sampling: SamplingSettings
    impossible: tuple[int, ...] = ()
    """Ids that the model is not allowed to predict at all."""
    summarise: Reader | None = None
    """How the logits are read, where not as a plain distribution."""
    choose: Callable[..., tuple[Tensor, Tensor]] = field(default_factory=lambda: choose)
    """The choice of what is committed; an engine has it compiled."""

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

    def distribution(self, logits: Tensor, hidden: Tensor | None = None) -> Distribution:
        """Of logits, which this model's head computed of `hidden` (None: another model's, or not known)."""
        allowed = without(logits, self.impossible)
        return Distribution(allowed) if self.summarise is None else self.summarise(allowed, hidden)

    def summarising(self, model: DiffusionLM, config: DecodeConfig, parts: Any) -> Rules:
        """The same, reading the logits as is cheap: with `parts` (`rcd.kernels`), and with the delta that the settings
        ask for."""
        reader = reader_for(
            model,
            parts,
            self.sampling.never,
            carries=hasattr(self.carry, "t_res"),
            expects=getattr(self.carry, "expects", False),
            t_res=getattr(self.carry, "t_res", 1.0),
            method=config.delta,
            tokens=config.delta_tokens,
            rank=config.delta_rank,
        )
        return self if reader is None else replace(self, summarise=reader)


@dataclass(frozen=True)
class Outcome:
    """A step's results at the predicted positions."""

    token: Tensor
    confidence: Tensor
    committed: Tensor
    finite: Tensor
    """[B]: whether the row's logits were numbers."""
    state: CarryState

    def told(
        self, rows: list[int], offsets: list[int], numbers: list[int], before: Tensor, masked: Tensor, left: Tensor
    ) -> Step:
        """The step's event: what was there `before`, where it was `masked`, and where masks are `left`."""
        draft = torch.where(masked, self.token, before)
        confidence = self.confidence.masked_fill(~masked, float("nan"))
        return Step(rows, offsets, numbers, draft, self.committed, left, confidence, self.state.alpha)


def denoise(
    model: DiffusionLM,
    rules: Rules,
    ids_BL: Tensor,
    view: View,
    state: CarryState,
    candidates_BP: Tensor,
    quota: Tensor,
    noise_BP: Tensor | None,
    inject_BP: Tensor | None = None,
) -> Outcome:
    """Algorithm 2, lines 7-25, once. `candidates` may be committed; the carry enters at `inject`. `quota` is [B], or
    [B, N] for predicted positions that are N equal blocks; `noise` is what tokens are drawn by, if they are."""
    prediction: Prediction = model(ids_BL, view, rules.carry, state, inject_BP)
    predicted = rules.distribution(prediction.logits, prediction.hidden)
    token, confidence = sample(predicted, rules.sampling, noise_BP)
    committed, finite = rules.choose(
        rules.commit, rules.commit_settings, confidence, candidates_BP, quota.flatten(), predicted.normaliser
    )
    after = rules.carry.update(state, predicted, prediction.hidden, model.codebook)
    return Outcome(token, confidence, committed, finite, after)


def choose(
    commit: Callable[[Tensor, Tensor, CommitSettings], Tensor],
    settings: CommitSettings,
    confidence_BP: Tensor,
    candidates_BP: Tensor,
    quota: Tensor,
    normaliser_BP: Tensor,
) -> tuple[Tensor, Tensor]:
    """(what is committed [B, P], whether each row's logits were numbers [B]); every block that has a quota commits for
    itself."""
    offered = confidence_BP.masked_fill(~candidates_BP, float("-inf"))
    committed = commit(offered.reshape(len(quota), -1), quota, settings).view_as(candidates_BP)
    # a confidence that is no number would never commit; the normaliser also sees what no candidate does
    finite = torch.isfinite(normaliser_BP).all(-1) & torch.isfinite(confidence_BP).all(-1)
    return committed, finite


def check_finite(outcome: Outcome, rows: Sequence[int], numbers: Sequence[int], taking: Sequence[int]) -> None:
    """Logits that are no numbers stop the run with the row and the step that had them, among those taking the step."""
    bad = [k for k, fine in enumerate(outcome.finite.tolist()) if not fine and rows[k] in taking]
    if bad:
        raise RCDError(
            f"the model's logits are NaN or inf at denoising step {numbers[bad[0]]} of prompt {rows[bad[0]]}; "
            "try float32 (--dtype float32), and check the checkpoint with `rcd info --check`."
        )
