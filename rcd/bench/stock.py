"""The families' own kind of loop over the stock transformers modules: what our steps are compared with.

A step is the forward of one block behind a `DynamicCache` of the prefix (SDAR), or of the whole canvas (LLaDA, Dream),
eager, then the head, an fp32 softmax and its maximum. `Loop.step` also commits by a threshold and writes the tokens.
Neither stores a finished block, carries anything or tells anyone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rcd.bench.workload import SEQD, Workload
from rcd.models.lm import DiffusionLM, View

THRESHOLD = 0.85


class Loop:
    """One block's, or one canvas's, steps for `load.batch` rows."""

    def __init__(self, model: DiffusionLM, load: Workload):
        from transformers import DynamicCache

        self.model, b = model, load.block_length
        mask, device, start = model.settings.mask_token_id, model.device, load.prefix
        ids = torch.tensor([request.prompt for request in load.requests(model, SEQD)], device=device)
        self.cache: Any = None
        self.seen = 0
        if load.window != "bidirectional":
            # behind the middle of what our steps see, in whole blocks
            start = load.prefix // b * b
            self.seen = start + (load.blocks - 1) // 2 * b
            filled = torch.nn.functional.pad(ids[:, :start], (0, self.seen - start), value=7)
            self.cache = DynamicCache()
            if self.seen:
                with torch.inference_mode():
                    for low in range(0, self.seen, 512):  # a long prefix in pieces
                        piece = filled[:, low : low + 512]
                        model.encode(
                            model.embed(piece), View(self._position(low, piece.shape[1], load.batch), None, self.cache)
                        )
            self.masks = torch.full((load.batch, b), mask, device=device)
        else:
            answer = torch.full((load.batch, load.new_tokens), mask, device=device)
            self.masks = torch.cat((ids, answer), dim=1)
        self.view = View(self._position(self.seen, self.masks.shape[1], load.batch), None, self.cache)
        self.ids = self.masks.clone()
        self.mask = mask

    def _position(self, start: int, count: int, batch: int) -> Tensor:
        return torch.arange(start, start + count, device=self.model.device).expand(batch, -1)

    def predict(self) -> tuple[Tensor, Tensor]:
        """(confidence, token) of every position of the block or the canvas."""
        logits = self.model(self.ids, self.view).logits
        if self.cache is not None:
            self.cache.crop(-self.ids.shape[1])
        confidence, token = logits.float().softmax(-1).max(-1)
        return confidence, token

    @torch.inference_mode()
    def forward(self) -> None:
        """A step without its commit."""
        self.predict()

    @torch.inference_mode()
    def step(self) -> None:
        """A step. It begins anew with a full canvas where no mask is left."""
        confidence, token = self.predict()
        masked = self.ids == self.mask
        confidence = confidence.masked_fill(~masked, float("-inf"))
        best = torch.zeros_like(masked).scatter_(1, confidence.argmax(-1, keepdim=True), True)
        chosen = masked & ((confidence > THRESHOLD) | best)
        self.ids = torch.where(chosen, token, self.ids)
        if not bool((self.ids == self.mask).any()):
            self.ids = self.masks.clone()
