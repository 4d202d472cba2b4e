"""The window of block diffusion models (SDAR): one block at a time on an absolute grid, the past in a KV cache.

Blocks begin at multiples of b counted from the text's first token. The prompt's whole blocks are prefilled; its
remainder sits as fixed tokens in the first decoded block. In a batch, every row is padded on the left by whole blocks,
so that the rows' current blocks share the same slots while each keeps its own positions.
Shapes: B rows, T slots.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import torch
from torch import Tensor

from rcd.carry.base import places
from rcd.decode.config import DecodeConfig
from rcd.decode.events import Event, Finished
from rcd.decode.lanes import Run
from rcd.decode.layout import Grid
from rcd.decode.step import denoise
from rcd.decode.stopping import check_prompts, close, cut, is_end, unsettled
from rcd.diffusion.commit import quota
from rcd.models.lm import DiffusionLM, View


def decode(
    target: DiffusionLM,
    reference: DiffusionLM | None,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig,
    generators: list[torch.Generator],
) -> Iterator[Event]:
    """One cached block at a time on an absolute grid (SDAR)."""
    b, model, device = config.block_length, target.settings, target.device
    assert b is not None
    eos, mask, limit = model.eos_token_ids, model.mask_token_id, config.new_tokens
    check_prompts(prompts, model, limit, b)
    grid = Grid.of(prompts, b, limit, mask, device)
    run = Run.of(target, reference, config, generators, capacity=grid.ids.shape[1])

    rows = list(range(len(prompts)))
    run.prefill(grid)

    for start in range(grid.prefilled, grid.ids.shape[1], b):
        window, end = slice(start, start + b), start + b
        view = run.target.view(grid.position[:, window], grid.position[:, :end])
        offsets = [len(prompts[row]) // b * b + start - grid.prefilled - len(prompts[row]) for row in rows]
        grid.ids[:, window] = yield from _block(
            run, grid.ids[:, window], grid.output[:, window], view, rows, offsets, config
        )

        ended = (is_end(grid.ids, eos) & grid.output)[:, window].any(-1) | ~grid.output[:, end:].any(-1)
        keep = [k for k, done in enumerate(ended.tolist()) if not done]
        for k in sorted(set(range(len(rows))) - set(keep)):
            new = grid.ids[k, :end][grid.position[k, :end] >= len(prompts[rows[k]])].tolist()
            yield Finished(rows[k], *cut(new, eos, limit), run.ledger[rows[k]])
        if not keep:
            return
        if len(keep) < len(rows):
            index = torch.tensor(keep, device=device)
            rows, grid = [rows[k] for k in keep], grid.rows(index)
            run.rows(index)
            view = run.target.view(grid.position[:, window], grid.position[:, :end])
        for lane, _, kind in run.lanes:
            lane.store(grid.ids[:, window], view)
            run.ledger.count(kind, rows)


def _block(
    run: Run, ids: Tensor, output: Tensor, view: View, rows: list[int], offsets: list[int], config: DecodeConfig
) -> Generator[Event, None, Tensor]:
    """Denoise one block of every row until its text is settled; returns its ids."""
    model, rules, b = run.target.model, run.rules, ids.shape[1]
    masked = ids == model.settings.mask_token_id
    total = torch.full((len(rows),), b, device=ids.device)
    state, step = None, 0
    while True:
        candidates = unsettled(ids, masked, output, model.settings.eos_token_ids, config.eos_early_stop)
        live = candidates.any(-1)
        alive = live.tolist()
        if not any(alive):
            return ids
        taking = [row for row, on in zip(rows, alive, strict=True) if on]
        state = run.refresh(state, ids, view, rows, taking)
        least = quota(total, config.num_inference_steps or b, torch.full_like(total, step))
        inject = places(rules.carry, masked)
        outcome = denoise(model, rules, ids, view, state, candidates, least, run.noise(rows, view), inject)
        numbers, before, was_masked = run.counted(outcome, rows, taking), ids, masked
        ids, masked = torch.where(outcome.committed, outcome.token, ids), masked & ~outcome.committed
        ids, masked = close(ids, masked, outcome.token, output, model.settings.eos_token_ids, config.eos_early_stop)
        state, step = outcome.state, step + 1
        event = outcome.told(rows, offsets, numbers, before, was_masked, masked)
        yield event if all(alive) else event.of(alive)
