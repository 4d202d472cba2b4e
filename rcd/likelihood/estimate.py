"""The bound on one text's likelihood, its standard error, and its tokens' parts.

Shapes: N patterns, Q positions of a pass, L tokens of the continuation, n masked ones, V vocabulary, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from rcd.carry.base import Carry, CarryState, places
from rcd.carry.parse import TRAINED, parse_carry
from rcd.diffusion.guidance import guided
from rcd.diffusion.noise import key_of
from rcd.documented import documented
from rcd.errors import RCDError
from rcd.likelihood.patterns import patterns
from rcd.likelihood.reading import Blocks, Canvas, Lane
from rcd.likelihood.settings import ScoreConfig
from rcd.models.lm import DiffusionLM, ModelSettings
from rcd.residual.distribution import Distribution

AT_ONCE = 2**25
"""Logits that are in memory together."""


@documented
@dataclass(frozen=True)
class Score:
    """How likely a continuation is behind its prompt: a lower bound, in nats."""

    ids: list[int]
    """The continuation."""
    log_likelihood: float
    """The bound, or its estimate: the sum of `tokens`."""
    standard_error: float | None
    """Of the estimate; 0 where nothing was drawn, None of fewer than 16 draws."""
    enumerated: bool
    """Whether every pattern of masks was computed: then this is the bound itself."""
    tokens: list[float]
    """Each token's part of the sum: its log probability, averaged over what else is masked."""
    token_errors: list[float] | None
    patterns: int
    """Of masks, that were computed."""
    forwards: int
    """Passes, each counted as if it were computed alone: patterns, recursions, second passes and the clean text's."""
    greedy: bool | None = None
    """Whether greedy decoding gives this text; None if that was not asked."""

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" ± {self.standard_error:.3f}"
        count = f"{len(self.ids)} token{'s' * (len(self.ids) != 1)}"
        greedy = {None: "", True: ", greedy", False: ", not greedy"}[self.greedy]
        known = " (exact bound)" if self.enumerated else error
        return f"{self.log_likelihood:.3f}{known}, {self.per_token:.3f} a token of {count}{greedy}"

    @property
    def per_token(self) -> float:
        return self.log_likelihood / len(self.ids)

    @property
    def perplexity(self) -> float:
        """exp of the negative bound a token: no less than the model's perplexity, but for the estimate's error."""
        return math.exp(min(-self.per_token, 700.0))

    def to_dict(self) -> dict[str, Any]:
        """The object that `rcd score --json` prints."""
        rounded = [round(value, 6) for value in self.tokens]
        errors = None if self.token_errors is None else [round(value, 6) for value in self.token_errors]
        return {
            "log_likelihood": round(self.log_likelihood, 6),
            "standard_error": None if self.standard_error is None else round(self.standard_error, 6),
            "enumerated": self.enumerated, "tokens": len(self.ids), "per_token": round(self.per_token, 6),
            "perplexity": round(self.perplexity, 4), "ids": self.ids, "token_log_likelihoods": rounded,
            "token_errors": errors, "patterns": self.patterns, "forwards": self.forwards,
            **({} if self.greedy is None else {"greedy": self.greedy}),
        }  # fmt: skip


def resolved(config: ScoreConfig, model: ModelSettings, trained: dict[str, Any] | None) -> ScoreConfig:
    """The same with every None filled from the checkpoint; `trained` is rcd.json's carry."""
    carry = parse_carry(TRAINED if config.carry is None else config.carry, trained)
    assert carry is not None
    if (config.recursions or config.greedy) and carry.needs_reference:
        raise RCDError(
            "a likelihood is scored without a reference model; choose another carry, or neither recursions nor greedy."
        )
    if config.recursions and not carry.carries:
        raise RCDError(
            "recursions hand a carry on, and there is none here; name one with carry, or leave recursions out."
        )
    block = None
    if model.attention == "block_causal":
        block = config.block_length or model.block_length
        if block is None:
            raise RCDError("this checkpoint names no block length; give one with block_length (--block-length).")
        if block > model.context_length:
            most = model.context_length
            raise RCDError(f"a block_length of {block} is more than the model's context of {most}; lower it.")
    elif config.block_length is not None:
        raise RCDError("block_length is for block-causal models, and this one is bidirectional; leave it out.")
    return replace(config, carry=carry, block_length=block)


def room(model: ModelSettings, block: int | None) -> int:
    """Positions of a text, in whole blocks."""
    return model.context_length // (block or 1) * (block or 1)


def check(prompt: Sequence[int], continuation: Sequence[int], model: ModelSettings, block: int | None) -> None:
    """Refuse, before any work, what cannot be scored."""
    for what, ids in (("the prompt", prompt), ("the continuation", continuation)):
        if not all(isinstance(token, Integral) for token in ids):
            raise RCDError(
                f"{what} must be token ids, a list of whole numbers; `Pipeline.encode` makes them of a text."
            )
        bad = next((token for token in ids if not 0 <= token < model.vocab_size), None)
        if bad is not None:
            raise RCDError(f"{what} has the token id {bad}, outside the vocabulary of {model.vocab_size}.")
        if model.mask_token_id in ids:
            raise RCDError(f"{what} contains the mask token (id {model.mask_token_id}); take it out.")
    if not len(continuation):
        raise RCDError("the continuation is empty; give at least one token to score.")
    if len(prompt) + len(continuation) > room(model, block):
        raise RCDError(
            f"the prompt's {len(prompt)} tokens and the continuation's {len(continuation)} are more than the "
            f"{room(model, block)} that the model reads; shorten one of them."
        )


@torch.inference_mode()
def estimate(model: DiffusionLM, prompt: Sequence[int], continuation: Sequence[int], config: ScoreConfig) -> Score:
    """The bound for one text, by a resolved configuration; `greedy` is left to who can decode."""
    prompt, continuation = list(map(int, prompt)), list(map(int, continuation))
    check(prompt, continuation, model.settings, config.block_length)
    lanes = _lanes(model, prompt, continuation, config)
    key = key_of("likelihood", config.seed, *prompt, "then", *continuation)
    found = patterns(lanes[0].sizes, config.draws, key)
    parts = [_log_p(model, lanes, masked, config) for masked in found.masked.split(config.batch_size)]
    each_NL = torch.cat(parts) * found.weight * found.masked
    if not bool(torch.isfinite(each_NL).all()):
        raise RCDError(
            "the model's logits are NaN or inf; try float32 (--dtype float32), and check the checkpoint with "
            "`rcd info --check`."
        )
    means_GL, enumerated = found.means(each_NL), found.groups is None
    tokens, errors = means_GL.mean(0), _errors(torch.cat((means_GL, means_GL.sum(1, keepdim=True)), 1), enumerated)
    passes = len(found.masked) * (config.recursions + 1) + lanes[0].passes
    return Score(
        continuation, float(tokens.sum()), errors[-1] if errors else None, enumerated, tokens.tolist(),
        errors[:-1] if errors else None, len(found.masked), passes * len(lanes),
    )  # fmt: skip


def _errors(means_GK: Tensor, enumerated: bool) -> list[float] | None:
    """The standard errors of means over independent groups; None of a single one."""
    if enumerated:
        return [0.0] * means_GK.shape[1]
    return (means_GK.std(0) / math.sqrt(len(means_GK))).tolist() if len(means_GK) > 1 else None


def _lanes(model: DiffusionLM, prompt: list[int], continuation: list[int], config: ScoreConfig) -> list[Lane]:
    """The text as it is and, under guidance, without its prompt."""
    b, kinds = config.block_length, (False, True) if config.guidance else (False,)
    if b is None:
        return [Canvas(model, prompt, continuation, unread) for unread in kinds]
    return [Blocks(model, prompt, continuation, b, unread) for unread in kinds]


def _log_p(model: DiffusionLM, lanes: Sequence[Lane], masked_NL: Tensor, config: ScoreConfig) -> Tensor:
    """[N, L] log p of the continuation's tokens where they are masked, 0 elsewhere, in fp64."""
    lane, carry, masked_NL = lanes[0], config.carry, masked_NL.to(model.device)
    assert isinstance(carry, Carry)
    masked_NQ = (lane.ids == model.settings.mask_token_id).expand(len(masked_NL), -1).clone()  # behind the text
    masked_NQ[:, lane.answer] = masked_NL
    where, state = places(carry, masked_NQ) & lane.open, None
    hidden = _hidden(model, lanes, masked_NQ, config)
    for _ in range(config.recursions):
        begun = carry.cold((len(masked_NQ), len(lane.ids)), model.codebook) if state is None else state
        state = _handed_on(model, carry, begun, hidden, where)
        hidden = _hidden(model, lanes, masked_NQ, config, partial(_injected, model, carry, state, where))
    chosen, token = hidden[:, lane.answer][masked_NL], lane.ids[lane.answer].expand_as(masked_NL)[masked_NL]
    parts = [
        Distribution(model.head(some)).log_p(own)
        for some, own in zip(chosen.split(_rows(model)), token.split(_rows(model)), strict=True)
    ]
    out = torch.zeros(masked_NL.shape, dtype=torch.float64)
    out[masked_NL.cpu()] = torch.cat(parts).cpu().double()
    return out


def _hidden(
    model: DiffusionLM, lanes: Sequence[Lane], masked_NQ: Tensor, config: ScoreConfig,
    injected: Callable[[Tensor], Tensor] = lambda embeds: embeds,
) -> Tensor:  # fmt: skip
    """[N, Q, D] what the head reads, of one pass or, under guidance, two."""
    mask = model.settings.mask_token_id
    cond, *uncond = (lane.hidden(injected(model.embed(torch.where(masked_NQ, mask, lane.ids)))) for lane in lanes)
    return guided(cond, uncond[0], config.guidance) if uncond else cond


def _injected(model: DiffusionLM, carry: Carry, state: CarryState, where_NQ: Tensor, embeds_NQD: Tensor) -> Tensor:
    return carry.inject(embeds_NQD, where_NQ, state, model.carry_parameters)  # Eq. 2


def _handed_on(model: DiffusionLM, carry: Carry, state: CarryState, hidden_NQD: Tensor, where_NQ: Tensor) -> CarryState:
    """The carry after a pass (Eq. 1 and 3), at the positions where it enters; some at a time, as each takes logits."""
    index = where_NQ.flatten().nonzero().squeeze(1)
    kept = [each.flatten(0, 1).clone() for each in state.tensors()]
    for some in index.split(_rows(model)):
        hidden = hidden_NQD.flatten(0, 1)[None, some]
        before = state.with_tensors([each[None, some] for each in kept])
        after = carry.update(before, Distribution(model.head(hidden)), hidden, model.codebook)
        for each, new in zip(kept, after.tensors(), strict=True):
            each[some] = new[0].to(each.dtype)
    return state.with_tensors([each.unflatten(0, where_NQ.shape) for each in kept])


def _rows(model: DiffusionLM) -> int:
    return max(1, AT_ONCE // model.settings.vocab_size)
