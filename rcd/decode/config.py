"""DecodeConfig: every choice of a decoding run, checked when it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from rcd import registry
from rcd.carry.base import Carry, make
from rcd.diffusion.commit import CommitSettings
from rcd.diffusion.sampling import SamplingSettings
from rcd.errors import RCDError, unknown_name
from rcd.models.lm import ModelSettings

EOS_SUPPRESSION = ("none", "logits", "confidence")
SCOPES = ("canvas", "block")


@dataclass(frozen=True)
class DecodeConfig:
    """The argument names are those of diffusers and transformers where they have one."""

    max_new_tokens: int = 256
    block_length: int | None = None
    """None: the checkpoint's own (for LLaDA and Dream, without one: the whole canvas is one block)."""
    num_inference_steps: int | None = None
    """At most this many denoising steps a block: each step then commits at least its share of the block (SDAR's
    dynamic and static rules). None: at least one token a step, as in the paper."""
    carry: str | Carry | None = None
    """A name (`rcd list carry`) or a carry such as `Residual(t_res=0.95)`. None: what rcd.json says, else `none`."""
    carry_scope: str = "canvas"
    """On a bidirectional canvas: `canvas` carries at every masked position, those of later blocks too; `block` only
    in the block being decoded, with a fresh start for each. The paper does not say; Eq. 2 reads as `canvas`."""
    window: str | None = None
    """None: `blockwise` for block-causal models, `bidirectional` for the others."""
    commit: str = "threshold"
    threshold: float = 0.85
    factor: float = 1.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    """Row r of a batch draws from a generator of its own, seeded with seed + r."""
    confidence: str | None = None
    """`tempered` (softmax(z / temperature), SDAR) or `untempered` (softmax(z), LLaDA); None: as the family does."""
    eos_early_stop: bool = True
    """Stop as soon as nothing can change the text: an end token with no mask before it, or the length reached. False:
    finish the block (blockwise) or the whole canvas (bidirectional), as the families' own code does."""
    eos_suppression: str = "none"
    """LLaDA's options: `logits` never predicts an end token (`logits_eos_inf`), `confidence` commits it last
    (`confidence_eos_eot_inf`)."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "block_length", "num_inference_steps"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise RCDError(f"{name} must be a whole number of 1 or more, not {value!r}.")
        for kind, part in (("commit", self.commit), ("window", self.window), ("carry", self.carry)):
            if isinstance(part, str) and part not in registry.names(kind):
                raise unknown_name(kind, part, registry.names(kind))
        for kind, name, choices in (
            ("eos_suppression", self.eos_suppression, EOS_SUPPRESSION),
            ("carry_scope", self.carry_scope, SCOPES),
            ("confidence", self.confidence or "tempered", ("tempered", "untempered")),
        ):
            if name not in choices:
                raise unknown_name(kind, name, choices)
        if not 0.0 <= self.threshold <= 1.0:
            raise RCDError(f"the threshold must be in [0, 1], not {self.threshold}; 1 commits one token a step.")
        if not 0.0 <= self.factor < math.inf:
            raise RCDError(f"the factor must be 0 or more, not {self.factor}.")
        if not 0.0 <= self.temperature < math.inf:
            raise RCDError(f"the temperature must be 0 (greedy) or more, not {self.temperature}.")
        if not 0.0 < self.top_p <= 1.0:
            raise RCDError(f"top_p must be in (0, 1], not {self.top_p}; 1 keeps every token.")
        if self.top_k < 0:
            raise RCDError(f"top_k must be 0 (off) or more, not {self.top_k}.")

    def resolved(self, model: ModelSettings, trained: dict[str, Any] | None = None) -> DecodeConfig:
        """The same with every None filled from the checkpoint; `trained` is rcd.json's carry."""
        carry = self.carry
        if carry is None:
            own = dict(trained or {"name": "none"})
            carry = make(own.pop("name"), own)
        elif isinstance(carry, str):
            own = dict(trained or {})
            carry = make(carry, own if own.pop("name", None) == carry else None)
        window = self.window or model.window
        if window != model.window:
            raise RCDError(
                f"the window {window!r} does not fit this checkpoint, whose attention is {model.attention}; "
                f"take {model.window!r}."
            )
        block = self.block_length or model.block_length or self.max_new_tokens
        if self.block_length is None and window == "bidirectional":
            block = min(block, self.max_new_tokens)
        return replace(self, carry=carry, window=window, block_length=block)

    def commit_settings(self) -> CommitSettings:
        return CommitSettings(threshold=self.threshold, factor=self.factor)

    def sampling_settings(self, model: ModelSettings) -> SamplingSettings:
        tempered = model.tempered_confidence if self.confidence is None else self.confidence == "tempered"
        return SamplingSettings(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            tempered_confidence=tempered,
            never=(model.mask_token_id,),
            last=model.eos_token_ids if self.eos_suppression == "confidence" else (),
        )
