"""The memory that a commit rule takes which keeps something of every position between steps."""

from __future__ import annotations

from rcd import registry
from rcd.decode.config import BLOCKS, DecodeConfig
from rcd.decode.slots import CACHE_SHARE, free_bytes
from rcd.diffusion.rule import Rule
from rcd.errors import RCDError
from rcd.models.lm import DiffusionLM


def remembered_bytes(model: DiffusionLM, config: DecodeConfig, rows: int, capacity: int) -> int:
    """What the commit rule remembers: a distribution of every position of a canvas, else of the blocks in flight."""
    if Rule.of(registry.get("commit", config.commit)).remembers is None:
        return 0
    block = config.block
    kept = block * (config.blocks_in_flight if config.window == "d2f" else 1)
    if config.window not in BLOCKS:
        kept = -(-capacity // block) * block if config.carry_scope == "canvas" else block
    numbers = model.settings.vocab_size + config.klass_history
    return (rows + 1) * kept * numbers * max(4, model.codebook.element_size())


def check_memory(model: DiffusionLM, config: DecodeConfig, rows: int, capacity: int) -> None:
    """Refuse a memory of the commit rule that cannot fit, and say what would."""
    needed, free = remembered_bytes(model, config, rows, capacity), free_bytes(model.device)
    if needed > CACHE_SHARE * free:
        raise RCDError(
            f"what the commit rule {config.commit} remembers of {rows} rows of {capacity} positions needs "
            f"{needed / 2**30:.1f} GiB and {free / 2**30:.1f} are there; serve fewer rows, or shorter ones."
        )
