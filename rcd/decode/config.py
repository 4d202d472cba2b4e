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
D2F_BLOCK = 32
DELTAS = ("exact", "kept")
EXACT_UP_TO = 16384
"""Vocabularies up to this size have their delta computed exactly: there it costs nothing."""
CACHED = ("prefix", "dual")


def fitting(model: ModelSettings) -> list[str]:
    """The windows that fit a checkpoint's attention, its default first. D2F's blocks would need the output left of
    each block where outputs predict the next position (Dream), and that is in the cache."""
    if model.attention == "block_causal":
        return ["blockwise", "d2f"]
    return ["bidirectional", *CACHED, *(["d2f"] if not model.shift else [])]


def _room(model: ModelSettings, window: str, block: int, prompt: int) -> int:
    """New tokens that the context has room for. Blocks are whole, on SDAR's absolute grid or behind the prompt."""
    if model.attention == "block_causal":
        return model.context_length // block * block - prompt
    room = model.context_length - prompt
    return room // block * block if window == "d2f" else room


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
    """Which positions a step computes (`rcd list window`). None: `blockwise` for block-causal models, `bidirectional`
    for the others."""
    refresh_every: int | None = None
    """With the windows `prefix` and `dual`: steps of a block between two passes over the whole canvas. None: one such
    pass at each block's start; 1: every step."""
    block_add_threshold: float = 0.7
    """With the window `d2f`: a block is added when this share of the last one is decoded."""
    decoded_token_threshold: float = 0.95
    """With the window `d2f`: a block must make progress at every step, as the only one would, from when this share of
    its left neighbour is decoded."""
    blocks_in_flight: int = 4
    """With the window `d2f`: at most so many blocks at once, from the first unfinished to the last."""
    engine: str = "plain"
    """`plain`: the windows as they are written in rcd/decode. `fast`: the engine (docs/engine.md), for many prompts or
    long answers on a GPU; its first steps compile. It refuses what it cannot decode, with the reason."""
    delta: str | None = None
    """Delta of Eq. 1: `exact`, p @ E; or `kept`, the most probable tokens exactly and the rest through the codebook's
    strongest directions (rcd/residual/summary.py). None: `kept` for vocabularies of more than 16,384 tokens."""
    delta_tokens: int = 64
    """Tokens that `kept` keeps, a power of two."""
    delta_rank: int = 16
    """Directions for the rest."""
    commit: str = "threshold"
    threshold: float = 0.85
    factor: float = 1.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    """Row r of a batch draws by seed + r, whoever else is in it."""
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
        for name in ("max_new_tokens", "block_length", "num_inference_steps", "refresh_every"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), least=1)
        whole("blocks_in_flight", self.blocks_in_flight, least=1)
        one_of("delta", self.delta or "exact", DELTAS)
        one_of("engine", self.engine, ("plain", "fast"))
        whole("delta_rank", self.delta_rank, least=1)
        whole("delta_tokens", self.delta_tokens, least=1)
        if self.delta_tokens & (self.delta_tokens - 1):
            raise RCDError(f"delta_tokens is a power of two, such as 64, not {self.delta_tokens}.")
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
        for name in ("block_add_threshold", "decoded_token_threshold"):
            number(name, getattr(self, name), least=0, most=1, why="1 waits for the whole block")
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
        window = self._window(model)
        block = self.block_length or model.block_length
        if window == "d2f":
            block = block or D2F_BLOCK
        room = _room(model, window, block or 1, longest_prompt)
        new = self.max_new_tokens or max(1, min(model.max_new_tokens or DEFAULT_NEW_TOKENS, room))
        if block is None or (self.block_length is None and model.attention == "bidirectional"):
            block = min(block or new, new)
        return replace(self, carry=carry, window=window, block_length=block, max_new_tokens=new)

    def _window(self, model: ModelSettings) -> str:
        """The window, checked against the checkpoint."""
        window, choices = self.window or model.window, fitting(model)
        if window not in choices:
            raise RCDError(
                f"the window {window!r} does not fit this checkpoint, whose attention is {model.attention}"
                f"{', with outputs that predict the next position' if model.shift else ''}; "
                f"take {' or '.join(map(repr, choices))}."
            )
        if self.refresh_every is not None and window not in CACHED:
            raise RCDError(f"refresh_every is a setting of the windows prefix and dual, and the window is {window!r}.")
        return window

    def grid(self, model: ModelSettings) -> int:
        """Positions come in whole blocks of so many where attention is block-causal, else one by one."""
        return (self.block_length or 1) if model.attention == "block_causal" else 1

    def rounding(self, model: ModelSettings) -> tuple[int, int]:
        """(the blocks that positions come in, those that new tokens come in): D2F's begin behind the prompt where
        attention is not block-causal, and the last one is a whole one."""
        behind = self.window == "d2f" and model.attention != "block_causal"
        return self.grid(model), (self.block_length or 1) if behind else 1

    def keeps(self, vocabulary: int) -> bool:
        """Whether delta keeps only the most probable tokens exactly."""
        return self.delta == "kept" or (self.delta is None and vocabulary > EXACT_UP_TO)

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
