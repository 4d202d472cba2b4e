"""One denoising step, the body of Algorithm 2: inject -> predict -> sample -> commit -> update.

The engine and the oracle (`rcd.decode.simple`) call this function; it knows neither the window, nor which carry or
commit rule is in use.
Shapes: B rows (or blocks), P predicted positions of each, V vocabulary, K alternatives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rcd import registry
from rcd.carry.base import Carry, CarryState
from rcd.decode.choice import ChoiceInputs, choose, scored
from rcd.decode.config import DecodeConfig
from rcd.decode.request_settings import RequestSettings
from rcd.diffusion.rule import Rule, Schedule
from rcd.diffusion.sampling import SamplingSettings, ranked, sample
from rcd.diffusion.score import Ranking, Score
from rcd.models.lm import DiffusionLM, ModelSettings, Prediction
from rcd.residual.distribution import Distribution, without
from rcd.residual.reading import Reader, reader_for


class Predictor(Protocol):
    """A model over some view of the text."""

    @property
    def codebook(self) -> Tensor: ...

    def __call__(
        self, ids: Tensor, view: Any, carry: Carry, state: Any, inject: Tensor, places: Places, /
    ) -> Prediction: ...


class Places:
    """Where a step predicts: at all positions [B, P]."""

    counts: list[int] | None = None
    """How many each row has, where rows are computed one after another."""

    def take(self, values_BP: Tensor) -> Tensor:
        return values_BP

    def taken(self, values_BP: Tensor | None) -> Tensor | None:
        return None if values_BP is None else self.take(values_BP)

    def of_rows(self, values_B1: Any) -> Any:
        return values_B1

    def put(self, values: Tensor) -> Tensor:
        return values


class Open(Places):
    """Where a step predicts: at some positions alone, mostly the masks. Their number changes from step to step, so this
    is not for graphs; where the head is a large part of a step (on a CPU), it saves what the others would cost. Their
    values are [n, 1, ...]."""

    def __init__(self, open_BP: Tensor, apart: bool = False):
        """`apart`: every row's predictions are computed by themselves."""
        self.shape = open_BP.shape
        self.index = open_BP.flatten().nonzero().squeeze(1)
        self.counts = open_BP.sum(1).tolist() if apart else None

    @cached_property
    def apart(self) -> tuple[Tensor, Tensor]:
        """[n] each: the row, and where in it."""
        row = self.index // self.shape[1]
        return row, self.index - row * self.shape[1]

    def take(self, values_BP: Tensor) -> Tensor:
        return values_BP.flatten(0, 1).index_select(0, self.index).unsqueeze(1)

    def of_rows(self, values_B1: Any) -> Any:
        return values_B1[self.apart[0]] if isinstance(values_B1, Tensor) else values_B1

    def put(self, values: Tensor) -> Tensor:
        out = values.new_zeros(self.shape.numel(), *values.shape[2:])
        return out.index_copy_(0, self.index, values.squeeze(1)).unflatten(0, self.shape)

    def within(self, run: Any, number_B: Tensor) -> Tensor:
        """[n] the same positions in a larger tensor [rows P, ...], where row k of these is number_B[k]; `run`: the same
        numbers, as a slice where they follow one another."""
        if isinstance(run, slice):
            return self.index + run.start * self.shape[1] if run.start else self.index
        row, place = self.apart
        return number_B[row] * self.shape[1] + place


@dataclass(frozen=True)
class StepSettings:
    """A request's settings of a step: numbers, or tensors [B, 1] with one of each row (`scale`: [B])."""

    rule: tuple[float | Tensor, ...] = ()
    """Those that the commit rule reads, in the order in which it declares them."""
    temperature: float | Tensor = 0.0
    top_k: int | Tensor = 0
    most_k: int = 0
    """The largest top_k."""
    sorts: bool = True
    """Whether some row has a top_p and no top_k."""
    top_p: float | Tensor = 1.0
    scale: Tensor | None = None
    """Of what is carried; None: 1."""

    @classmethod
    def of(cls, request: RequestSettings, rule: Rule, device: torch.device) -> StepSettings:
        scale = None if request.residual_scale == 1.0 else torch.tensor([request.residual_scale], device=device)
        return cls(
            tuple(getattr(request, name) for name in rule.reads), request.temperature, request.top_k, request.top_k,
            top_p=request.top_p, scale=scale,
        )  # fmt: skip


@dataclass(frozen=True)
class StepInputs:
    """What a step works on, beside the ids and the carry."""

    masked: Tensor
    """[B, P] booleans: the positions that are masks."""
    candidates: Tensor
    """[B, P] booleans: what may be committed."""
    inject: Tensor
    """[B, P] booleans: where the carry enters."""
    quota: Tensor
    """[B] the least that each row commits."""
    settings: StepSettings
    noise: Tensor | None = None
    """[B, P] what tokens are drawn by, if they are: U[0, 1)."""
    places: Places = field(default_factory=Places)
    """Where predictions are wanted."""
    choice: ChoiceInputs = field(default_factory=ChoiceInputs)
    memory: tuple[Tensor, ...] = ()
    """[B, P, ...] what a commit rule that `remembers` kept of the step before."""


@dataclass(frozen=True)
class Rules:
    """The parts of a step, resolved once for a whole run."""

    carry: Carry
    rule: Rule
    """Of what is committed."""
    score: Score
    schedule: Schedule
    confidence: str
    never: tuple[int, ...]
    """Ids that are never sampled: the mask."""
    last: tuple[int, ...] = ()
    """Ids that are committed only when nothing else is left."""
    impossible: tuple[int, ...] = ()
    """Ids that the model is not allowed to predict at all."""
    summarise: Reader | None = None
    """How the logits are read, where not as a plain distribution."""
    choose: Callable[..., tuple[Tensor, Tensor]] = field(default=choose)
    """The choice of what is committed; an engine on a GPU has it compiled."""

    @classmethod
    def of(cls, config: DecodeConfig, model: ModelSettings) -> Rules:
        ends, rule = model.eos_token_ids, Rule.of(registry.get("commit", config.commit))
        return cls(
            carry=config.travelling, rule=rule, score=registry.get("score", config.score or rule.score),
            schedule=registry.get("schedule", config.schedule or rule.schedule),
            confidence=config.confidence_of(model, rule.confidence),
            never=(model.mask_token_id,), last=ends if config.eos_suppression == "confidence" else (),
            impossible={"logits": ends[:1], "logits_all": ends}.get(config.eos_suppression, ()),
        )  # fmt: skip

    @property
    def draws(self) -> bool:
        """Whether what is committed is drawn."""
        return self.rule.draws or self.score.draws

    def remembered(self, shape: tuple[int, int], vocabulary: int, history: int, like: Tensor) -> tuple[Tensor, ...]:
        """What a commit rule remembers before the first step."""
        memory = self.rule.remembers
        return () if memory is None else memory.cold(shape, vocabulary, history, like)

    def distribution(
        self, logits: Tensor, hidden: Tensor | None = None, counts: list[int] | None = None
    ) -> Distribution:
        """Of logits, which this model's head computed of `hidden` (None: another model's, or not known); `counts`: of
        so many rows at a time, where rows are computed one after another."""
        allowed = without(logits, self.impossible)
        return Distribution(allowed) if self.summarise is None else self.summarise(allowed, hidden, counts)

    def summarising(self, model: DiffusionLM, config: DecodeConfig, parts: Any) -> Rules:
        """The same, reading the logits as is cheap: with `parts` (`rcd.kernels`), and with the delta that the settings
        ask for."""
        carry = self.carry
        reader = reader_for(
            model, parts, self.never, carries=carry.expects, expects=carry.expects, t_res=carry.entropy_temperature,
            method=config.delta, tokens=config.delta_tokens, rank=config.delta_rank, row_by_row=config.batch_invariant,
        )  # fmt: skip
        return self if reader is None else replace(self, summarise=reader)

    def sampling(self, settings: StepSettings, places: Places) -> SamplingSettings:
        temperature, top_k, top_p = map(places.of_rows, (settings.temperature, settings.top_k, settings.top_p))
        return SamplingSettings(
            temperature, top_k, top_p, self.confidence, self.never, self.last, settings.most_k, settings.sorts
        )  # fmt: skip


class Best(NamedTuple):
    """The most probable tokens of the model's own distribution, before any exclusion, and the chosen one's place."""

    ids: Tensor
    """[B, P, K]"""
    log_p: Tensor
    """[B, P, K] of those."""
    own: Tensor
    """[B, P] of the token."""


@dataclass(frozen=True)
class Outcome:
    """A step's results at the predicted positions."""

    token: Tensor
    confidence: Tensor
    committed: Tensor
    finite: Tensor
    """[B]: whether the row's logits were numbers."""
    state: CarryState
    """What the carry brings into the next step, where `places` says."""
    places: Places
    memory: tuple[Tensor, ...] = ()
    """What the commit rule remembers of it, likewise."""
    scale: Tensor | None = None
    best: Best | None = None

    @property
    def alpha(self) -> Tensor | None:
        """[B, P] the weight that the residual has there, scaled as the request wants it; 0 where nothing is carried."""
        alpha = self.state.alpha
        if alpha is None:
            return None
        found = self.places.put(alpha)
        return found if self.scale is None else found * self.scale[:, None].to(found.dtype)


@dataclass(frozen=True)
class StepRecord:
    """What a probe is shown of a step."""

    inputs: StepInputs
    before: CarryState
    """What the carry brought into the step, as the model saw it."""
    predicted: Distribution
    prediction: Prediction
    outcome: Outcome


def denoise(
    model: Predictor,
    rules: Rules,
    ids: Tensor,
    view: Any,
    state: CarryState,
    inputs: StepInputs,
    logprobs: int | None = None,
    record: Callable[[StepRecord], None] | None = None,
) -> Outcome:
    """Algorithm 2, lines 7-25, once, for any number of rows."""
    scale, where = inputs.settings.scale, inputs.places
    entering = state if scale is None else state.scaled(scale)
    prediction = model(ids, view, rules.carry, entering, inputs.inject, where)
    predicted = rules.distribution(prediction.logits, prediction.hidden, where.counts)
    sampling = rules.sampling(inputs.settings, where)
    token, confidence = sample(predicted, sampling, where.taken(inputs.noise))
    before = state.with_tensors([where.take(each) for each in state.tensors()]) if rules.carry.recalls else state
    after = rules.carry.update(before, predicted, prediction.hidden, model.codebook)
    best = None if logprobs is None else Best(*map(where.put, best_of(prediction.logits, token, logprobs)))
    ranking = Ranking(confidence, lambda: ranked(predicted, sampling), where.taken(inputs.choice.noise))
    score = None if rules.score.plain else where.put(scored(rules.score, ranking, token, rules.last))
    memory, drift = inputs.memory, None
    if rules.rule.remembers is not None:
        memory, drift = rules.rule.remembers.update(tuple(map(where.take, memory)), ranking.distribution)
        drift = where.put(drift)
    token, confidence = where.put(token), where.put(confidence)
    inputs = replace(inputs, choice=inputs.choice.told(token, score, drift))
    committed, finite = rules.choose(
        rules.rule.choice, rules.rule.reads, inputs, confidence, where.put(predicted.normaliser)
    )
    outcome = Outcome(token, confidence, committed, finite, after, where, memory, scale, best)
    if record is not None:
        record(StepRecord(inputs, entering, predicted, prediction, outcome))
    return outcome


def best_of(logits: Tensor, token: Tensor, count: int) -> Best:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    normaliser = wide.logsumexp(-1, keepdim=True)
    value, ids = wide.topk(min(count, wide.shape[-1]), dim=-1)
    own = wide.gather(-1, token.unsqueeze(-1)) - normaliser
    return Best(ids, value - normaliser, own.squeeze(-1))
