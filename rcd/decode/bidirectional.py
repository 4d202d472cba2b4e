"""The window of bidirectional models (LLaDA, Dream): the whole canvas is computed at every step, in blocks or at once.

The canvas is prompt + max_new_tokens masks, padded on the left in a batch. Only masks of a row's current block may
commit; every row moves through its blocks at its own pace and leaves the batch when its text is settled.
Shapes: B rows, T canvas, P answer positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rcd.carry.base import CarryState, places
from rcd.decode.config import DecodeConfig
from rcd.decode.events import Event, Finished, Step
from rcd.decode.lanes import Run
from rcd.decode.step import check_finite, denoise
from rcd.decode.stopping import check_prompts, close, cut, unsettled
from rcd.diffusion.commit import quota
from rcd.models.lm import DiffusionLM, View


def decode(
    target: DiffusionLM,
    reference: DiffusionLM | None,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig,
    generators: list[torch.Generator],
) -> Iterator[Event]:
    """The whole canvas at every step, in blocks or at once (LLaDA, Dream)."""
    model, new, device, b = target.settings, config.new_tokens, target.device, config.block_length
    assert b is not None
    eos = model.eos_token_ids
    check_prompts(prompts, model, new, 1)
    run = Run.of(target, reference, config, generators)

    ids, position, width = _canvas(prompts, new, model.mask_token_id, device)
    answer, rows = slice(width, width + new), list(range(len(prompts)))
    view = run.target.view(position, position, answer)
    block_of = torch.arange(new, device=device) // b
    masked = torch.ones(len(rows), new, dtype=torch.bool, device=device)
    everywhere = torch.ones(1, new, dtype=torch.bool, device=device)
    needed = masked
    current = torch.full((len(rows),), -1, device=device)  # each row's block; -1 before the first
    total, step = torch.zeros_like(current), torch.zeros_like(current)
    state: CarryState | None = None
    while rows:
        # a row's block is the leftmost with a mask that matters
        block = torch.where(needed, block_of, len(block_of)).amin(-1)
        entered = block != current
        candidates = needed & (block_of == block[:, None])
        total = torch.where(entered, candidates.sum(-1), total)
        step, current = torch.where(entered, 0, step), block

        state = _refreshed(run, state, ids, view, rows, entered, config.carry_scope)
        least = quota(total, config.num_inference_steps or b, step)
        own = [generators[row] for row in rows]
        inject = places(run.rules.carry, masked)
        if config.carry_scope == "block":
            inject = inject & (block_of == block[:, None])
        outcome = denoise(target, run.rules, ids, view, state, candidates, least, own, inject)
        run.ledger.count("denoising", rows)
        numbers = [run.ledger[row].denoising for row in rows]
        check_finite(outcome, torch.ones_like(entered), rows, numbers)

        before = ids[:, answer]
        draft = torch.where(masked, outcome.token, before)
        confidence = outcome.confidence.masked_fill(~masked, float("nan"))
        after, masked = torch.where(outcome.committed, outcome.token, before), masked & ~outcome.committed
        after, masked = close(after, masked, outcome.token, everywhere, eos, config.eos_early_stop)
        ids = torch.cat((ids[:, :width], after), dim=1)
        state, step = outcome.state, step + 1
        yield Step(rows, [0] * len(rows), numbers, draft, outcome.committed, masked, confidence, state.alpha)

        needed = unsettled(after, masked, everywhere, eos, config.eos_early_stop)
        open_rows = needed.any(-1).tolist()
        if all(open_rows):
            continue
        for k, row in enumerate(rows):
            if not open_rows[k]:
                yield Finished(row, *cut(after[k].tolist(), eos, new), run.ledger[row])
        keep = [k for k, on in enumerate(open_rows) if on]
        index = torch.tensor(keep, dtype=torch.long, device=device)
        rows, ids, masked, needed = [rows[k] for k in keep], ids[index], masked[index], needed[index]
        current, total, step, state = current[index], total[index], step[index], state.rows(index)
        position, view = position[index], view.rows(index)


def _canvas(prompts: Sequence[Sequence[int]], new: int, mask: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """(ids [B, T], positions [B, T] that are negative in the padding, where the answer begins)."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width + new), mask, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : width - len(prompt)] = prompt[0]  # padding: any token but the mask
        ids[row, width - len(prompt) : width] = torch.as_tensor(prompt)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    position = torch.arange(width + new) - (width - lengths)[:, None]
    return ids.to(device), position.to(device), width


def _refreshed(
    run: Run, state: CarryState | None, ids: Tensor, view: View, rows: list[int], entered: Tensor, scope: str
) -> CarryState:
    """The carry's state for the coming step. With scope "block", the rows that enter a block start anew."""
    starting = entered.nonzero().flatten() if scope == "block" and state is not None else None
    if state is None or starting is None or not len(starting):
        return run.refresh(state, ids, view, rows, rows)
    groups = ((None, starting), (state, (~entered).nonzero().flatten()))
    for before, index in groups:
        if len(index):
            some = [rows[k] for k in index.tolist()]
            old = None if before is None else before.rows(index)
            state = state.put(index, run.refresh(old, ids[index], view.rows(index), some, some))
    return state
