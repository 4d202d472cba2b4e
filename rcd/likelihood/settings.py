"""What may be set of a likelihood."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rcd.carry.base import Carry
from rcd.carry.parse import TRAINED, parse_carry
from rcd.settings import setting, settings


@settings
class ScoreConfig:
    """How a text's likelihood is estimated."""

    _instead: ClassVar[Callable[[str], str | None]] = staticmethod(
        {"mc_num": "; here it is draws", "cfg": "; here it is guidance", "cfg_scale": "; here it is guidance"}.get
    )

    draws: int = setting(default=128, ge=1, le=65536)
    """Sets of masked tokens that are drawn for a text (LLaDA's `mc_num`). Where there are no more sets than that, each
    is computed once instead, and nothing is random."""
    seed: int = setting(default=0, ge=0, le=2**64 - 1)
    """Of the draws; those of a text depend on it and on the text's own tokens alone."""
    batch_size: int = setting(default=16, ge=1, le=4096)
    """Sets that a pass computes at once."""
    guidance: float = setting(default=0.0, ge=0, le=100, why="LLaDA's cfg_scale is a few units at most")
    """Classifier-free guidance, as in decoding: the likelihood under the combined logits; 0 is none."""
    recursions: int = setting(default=0, ge=0, le=16, why="0 scores without a carry")
    """Passes over the masked text before the one that counts, each of which hands the carry on to the next. 0: the
    model without its carry, whose first step is always cold."""
    carry: str | Carry | None = setting(default=None, must="a name or a carry such as Residual()")
    """What is handed on, by name or as an object; None: what rcd.json says."""
    block_length: int | None = setting(default=None, ge=1)
    """Of a block-causal model. None: the checkpoint's own."""
    greedy: bool = setting(default=False)
    """Also decode: whether greedy decoding, the surest token at each step, gives exactly this text."""

    def __post_init__(self) -> None:
        if isinstance(self.carry, str) and not self.carry.startswith(TRAINED):
            parse_carry(self.carry, None)
