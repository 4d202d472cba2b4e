"""What a request may ask for, and what a decoding run is: every setting, checked when it is made.

The settings of a request are tensors beside its row, so that requests with different ones share a batch. What changes
shapes or compiled code belongs to the engine, and an engine is found by it (`DecodeConfig.engine`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, ClassVar

from rcd import registry
from rcd.carry.base import Carry
from rcd.carry.parse import TRAINED, parse_carry
from rcd.decode.names import instead
from rcd.decode.request_settings import RequestSettings, refuse_beyond
from rcd.diffusion.rule import Rule
from rcd.errors import RCDError, one_of
from rcd.models.lm import ModelSettings
from rcd.residual.reading import LARGE
from rcd.settings import setting, settings

DEFAULT_NEW_TOKENS = 256
D2F_BLOCK, SUB_BLOCK = 32, 8
BLOCKS = ("blockwise", "d2f", "sub_blocks")
CACHED = ("prefix", "dual")


def fitting(model: ModelSettings) -> list[str]:
    """The windows that fit a checkpoint's attention, its default first."""
    return list(BLOCKS) if model.attention == "block_causal" else ["bidirectional", *CACHED, "d2f"]


def _room(model: ModelSettings, window: str, block: int, prompt: int) -> int:
    """New tokens that the context has room for. Blocks are whole, on SDAR's absolute grid or behind the prompt."""
    if model.attention == "block_causal":
        return model.context_length // block * block - prompt
    room = model.context_length - prompt
    return room // block * block if window == "d2f" else room


def rounded(count: int) -> int:
    """Up to the next of 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, ...: few sizes, none of them half empty."""
    power = 1 << (count - 1).bit_length()
    between = 3 * power // 4
    return between if power > 16 and between >= count else power


def canvas_length(needed: int) -> int:
    """Up to a multiple of 8, or of a sixteenth of the power of two below: few lengths, and little in vain."""
    unit = max(8, 1 << max(0, needed.bit_length() - 5))
    return -(-needed // unit) * unit


def capacity_for(needed: int, config: DecodeConfig, model: ModelSettings) -> int:
    """Positions of an engine's row for texts that need so many: rounded up, so that a slightly longer text needs no new
    engine."""
    grid = max(64, config.grid(model))
    if config.window in CACHED or config.window == "bidirectional":
        blocks = config.block - 1  # an answer's last block is a whole one
        return max(-(-(needed + blocks) // 64) * 64 + 64, canvas_length(needed + blocks))
    return -(-needed // grid) * grid + (config.block if config.rounding(model)[1] > 1 else 0)


REQUEST = tuple(field.name for field in fields(RequestSettings))


@settings
class DecodeConfig(RequestSettings):
    """The argument names are those of diffusers and transformers where they have one."""

    _instead: ClassVar[Callable[[str], str | None]] = staticmethod(instead)

    block_length: int | None = setting(default=None, ge=1)
    """None: the checkpoint's own (for LLaDA and Dream, without one: the whole canvas is one block)."""
    carry: str | Carry | None = setting(default=None, must="a name or a carry such as Residual()")
    """A name (`rcd list carry`) or `trained` (what rcd.json says), with settings as in `trained,t_res=0.95`: over a
    checkpoint that was trained with that carry only these change. A carry such as `Residual(t_res=0.95)` is taken as it
    is, with none of the checkpoint's own settings. None: what rcd.json says, else `none`."""
    carry_scope: str = setting(default="canvas", choices=("canvas", "block"))
    """On a bidirectional canvas: `canvas` carries at every masked position, those of later blocks too; `block` only in
    the block being decoded, with a fresh start for each. The paper does not say; Eq. 2 reads as `canvas`."""
    window: str | None = setting(default=None, choices="window")
    """Which positions a step computes (`rcd list window`). None: `blockwise` for block-causal models, `bidirectional`
    for the others."""
    refresh_every: int | None = setting(default=None, ge=1)
    """With the windows `prefix` and `dual`: steps of a block between two passes over the whole canvas. None: one such
    pass at each block's start; 1: every step."""
    block_add_threshold: float = setting(default=0.7, ge=0, le=1, why="1 waits for the whole block")
    """With the window `d2f`: a block is added when this share of the last one is decoded."""
    decoded_token_threshold: float = setting(default=0.95, ge=0, le=1, why="1 waits for the whole block")
    """With the window `d2f`: a block must make progress at every step, as the only one would, from when this share of
    its left neighbour is decoded."""
    blocks_in_flight: int = setting(default=4, ge=1)
    """With the window `d2f`: at most so many blocks at once, from the first unfinished to the last."""
    sub_block_length: int | None = setting(default=None, ge=1)
    """Decode a block's parts of so many positions from left to right: only the leftmost unfinished one commits
    (Fast-dLLM v2: 8 of 32). None: all of the block does; with the window `sub_blocks` 8. Of block-causal windows."""
    first_token_alone: bool = setting(default=False)
    """While a block's first position is a mask, commit that one alone, whatever its confidence: Fast-dLLM (v2; v1 on
    Dream) takes it from the pass that ends the block before, or that enters the block."""
    commit: str = setting(default="threshold", choices="commit")
    """Which predictions become tokens (`rcd list commit`)."""
    score: str | None = setting(default=None, choices="score")
    """What the commit rule ranks them by (`rcd list score`). None: the rule's own."""
    schedule: str | None = setting(default=None, choices="schedule")
    """How many a step commits at least (`rcd list schedule`). None: the rule's own."""
    klass_history: int = setting(default=2, ge=1, le=64)
    """Of the commit rule `klass`: for how many steps n a prediction must have been stable. On a canvas none counts as
    stable in the first n - 1 steps of a block, as in KLASS's own code."""
    confidence: str | None = setting(default=None, choices=("tempered", "untempered", "filtered"))
    """`tempered` (softmax(z / temperature), SDAR's evaluator), `untempered` (softmax(z), LLaDA) or `filtered` (after
    top-k and top-p as well, at temperature 0 too; SDAR's generate.py, Dream). None: as the commit rule is published,
    else as the family does."""
    eos_early_stop: bool = setting(default=True)
    """Decode only what can be part of the text: masks behind an end token or beyond max_new_tokens are not committed,
    and decoding stops when no other is left. False: finish the block (blockwise) or the whole canvas (bidirectional),
    filler included, as the families' own code does."""
    eos_suppression: str = setting(default="none", choices=("none", "logits", "logits_all", "confidence"))
    """LLaDA's options: `logits` never predicts the first end token, EOS (`logits_eos_inf`; a text may still end with
    another, such as EOT), `logits_all` none of them, `confidence` commits them last (`confidence_eos_eot_inf`)."""
    delta: str | None = setting(default=None, choices=("exact", "kept"))
    """Delta of Eq. 1: `exact`, p @ E; or `kept`, the most probable tokens exactly and the rest approximated
    (docs/engine.md says how well). None: `kept` for vocabularies of more than 16,384 tokens."""
    delta_tokens: int = setting(default=64, ge=1)
    """On a GPU, tokens that `kept` keeps: a power of two."""
    delta_rank: int = setting(default=16, ge=1)
    """On a GPU, directions of the codebook for the rest."""
    passes: str | None = setting(default=None, choices=("fused", "stock"))
    """`fused`: packed weights and kernels, for the backbones they know; `stock`: any transformers backbone as it is.
    None: fused where that is possible."""
    batch_invariant: bool = setting(default=False)
    """Compute every row's products and attention apart, so that no bit of an answer depends on what shares its batch;
    slower. On a CPU only; a GPU's products depend on the batch."""
    oracle: bool = setting(default=False)
    """Decode by the plain reading of Algorithm 2 (rcd/decode/simple.py): one row at a time, no cache. Slow, and for
    comparison."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delta_tokens & (self.delta_tokens - 1):
            raise RCDError(f"delta_tokens is a power of two, such as 64, not {self.delta_tokens}.")
        refuse_beyond(self, "refresh_every", "blocks_in_flight", "block_length", "sub_block_length")
        if isinstance(self.carry, str) and not self.carry.startswith(TRAINED):
            parse_carry(self.carry, None)

    @property
    def travelling(self) -> Carry:
        """The carry of a resolved configuration."""
        assert isinstance(self.carry, Carry), "resolve the configuration first"
        return self.carry

    @property
    def block(self) -> int:
        """The block length of a resolved configuration."""
        assert self.block_length is not None, "resolve the configuration first"
        return self.block_length

    @property
    def request(self) -> RequestSettings:
        """The part that is a request's own."""
        return RequestSettings(**{name: getattr(self, name) for name in REQUEST})

    def engine(self, model: ModelSettings) -> DecodeConfig:
        """The part that is the engine's own; what a request sets is at its default. An answer that is one block of a
        canvas is one in any larger block, so that requests of several lengths share an engine."""
        block = self.block
        if model.attention != "block_causal" and self.window != "d2f" and block == self.new_tokens:
            block = self.new_tokens if self.batch_invariant else max(16, rounded(self.new_tokens))
        plain = replace(RequestSettings(), guidance=float(self.guidance > 0))  # whether there is a second pass at all
        return replace(self, block_length=block, **{name: getattr(plain, name) for name in REQUEST})

    def resolved(
        self, model: ModelSettings, trained: dict[str, Any] | None = None, longest_prompt: int = 0
    ) -> DecodeConfig:
        """The same with every None filled from the checkpoint; `trained` is rcd.json's carry."""
        carry = parse_carry(TRAINED if self.carry is None else self.carry, trained)
        assert carry is not None
        window = self._window(model)
        block = self.block_length or model.block_length or (D2F_BLOCK if window == "d2f" else None)
        if block is not None and block > model.context_length:
            most = model.context_length
            raise RCDError(f"a block_length of {block} is more than the model's context of {most}; lower it.")
        room = _room(model, window, block or 1, longest_prompt)
        new = self.max_new_tokens or max(1, min(model.max_new_tokens or DEFAULT_NEW_TOKENS, room))
        if block is None or (self.block_length is None and model.attention == "bidirectional"):
            block = min(block or new, new)
        if 0 < self.residual_scale < 1 and not carry.scalable:
            scale = self.residual_scale
            raise RCDError(f"the carry {carry.method} is on or off: residual_scale is 0 or 1, not {scale}.")
        for token in self.stop_ids:
            mask = token == model.mask_token_id
            if mask or token >= model.vocab_size:
                what = "is the mask" if mask else f"is outside the vocabulary of {model.vocab_size}"
                raise RCDError(f"the token {token} of stop_ids {what}, so that no answer holds it; leave it out.")
        part = self.sub_block_length or (min(SUB_BLOCK, block) if window == "sub_blocks" else None)
        if part is not None and (window in (*CACHED, "bidirectional") or block % part):
            raise RCDError(
                f"a sub_block_length of {part} does not divide the block_length of {block}; take one that does."
                if block % part
                else f"sub_block_length is a setting of block-causal windows, and the window is {window!r}; "
                "take a shorter block_length."
            )
        if window == "sub_blocks" and Rule.of(registry.get("commit", self.commit)).revises:
            raise RCDError(
                f"the commit rule {self.commit} replaces tokens of the whole block, and the window sub_blocks computes "
                "a part of it; take the window blockwise, which sub_block_length divides as well."
            )
        flying = min(self.blocks_in_flight, -(-model.context_length // block) + 1)
        return replace(
            self, carry=carry, window=window, block_length=block, sub_block_length=part, max_new_tokens=new,
            blocks_in_flight=flying,
        )  # fmt: skip

    def _window(self, model: ModelSettings) -> str:
        """The window, checked against the checkpoint."""
        window, choices = self.window or model.window, fitting(model)
        one_of("window", window, registry.names("window"))
        if window not in choices:
            raise RCDError(
                f"the window {window!r} does not fit this checkpoint, whose attention is {model.attention}; "
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

    def confidence_of(self, model: ModelSettings, own: str | None) -> str:
        """What a token's confidence is a probability under; `own`: as the commit rule is published."""
        return self.confidence or own or ("tempered" if model.tempered_confidence else "untempered")

    def keeps(self, vocabulary: int) -> bool:
        """Whether delta keeps only the most probable tokens exactly."""
        return self.delta == "kept" or (self.delta is None and vocabulary > LARGE)
