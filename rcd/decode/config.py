"""DecodeConfig: every choice of a decoding run, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rcd import registry
from rcd.carry.base import Carry, make
from rcd.diffusion.commit import CommitSettings
from rcd.diffusion.sampling import SamplingSettings
from rcd.errors import RCDError, number, one_of, whole
from rcd.models.lm import ModelSettings

EOS_SUPPRESSION = ("none", "logits", "confidence")
SCOPES = ("canvas", "block")
DEFAULT_NEW_TOKENS = 256


@dataclass(frozen=True)
class DecodeConfig:
    """The argument names are those of diffusers and transformers where they have one."""

    max_new_tokens: int | None = None
    """None: what rcd.json says, else 256; but no more than the model's context has room for."""
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
    """Decode only what can be part of the text: masks behind an end token or beyond max_new_tokens are not committed,
    and decoding stops when no other is left. False: finish the block (blockwise) or the whole canvas (bidirectional),
    filler included, as the families' own code does."""
    eos_suppression: str = "none"
    """LLaDA's options: `logits` never predicts an end token (`logits_eos_inf`), `confidence` commits it last
    (`confidence_eos_eot_inf`)."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "block_length", "num_inference_steps"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), least=1)
        whole("seed", self.seed, least=0, most=2**63 - 1)
        whole("top_k", self.top_k, least=0)
        one_of("commit", self.commit, registry.names("commit"))
        one_of("window", self.window or "blockwise", registry.names("window"))
        one_of("eos_suppression", self.eos_suppression, EOS_SUPPRESSION)
        one_of("carry_scope", self.carry_scope, SCOPES)
        one_of("confidence", self.confidence or "tempered", ("tempered", "untempered"))
        if isinstance(self.carry, str):
            one_of("carry", self.carry, registry.names("carry"))
        elif self.carry is not None and (isinstance(self.carry, type) or not hasattr(self.carry, "refresh")):
            raise RCDError(f"carry must be a name or a carry such as Residual(), not {self.carry!r}.")
        number("threshold", self.threshold, least=0, most=1, why="1 commits one token a step")
        number("factor", self.factor, least=0)
        number("top_p", self.top_p, least=1e-6, most=1, why="1 keeps every token")
        number("temperature", self.temperature, least=0, why="0 is greedy")
        if 0 < self.temperature < 1e-3:
            raise RCDError(f"a temperature of {self.temperature} overflows; take 0 (greedy) or 0.001 and more.")

    @property
    def new_tokens(self) -> int:
        """max_new_tokens of a resolved configuration."""
        assert self.max_new_tokens is not None, "resolve the configuration first"
        return self.max_new_tokens

    def resolved(
        self, model: ModelSettings, trained: dict[str, Any] | None = None, longest_prompt: int = 0
    ) -> DecodeConfig:
        """The same with every None filled from the checkpoint; `trained` is rcd.json's carry."""
        carry = self.carry
        own = dict(trained or {"name": "none"})
        name = own.pop("name")
        if carry is None:
            carry = make(name, own)
        elif isinstance(carry, str):
            carry = make(carry, own if carry == name else None)
        window = self.window or model.window
        if window != model.window:
            raise RCDError(
                f"the window {window!r} does not fit this checkpoint, whose attention is {model.attention}; "
                f"take {model.window!r}."
            )
        block = self.block_length or model.block_length
        grid = (block or 1) if window == "blockwise" else 1
        room = model.context_length // grid * grid - longest_prompt
        new = self.max_new_tokens or max(1, min(model.max_new_tokens or DEFAULT_NEW_TOKENS, room))
        if block is None or (self.block_length is None and window == "bidirectional"):
            block = min(block or new, new)
        return replace(self, carry=carry, window=window, block_length=block, max_new_tokens=new)

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
