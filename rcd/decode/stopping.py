"""When a row's text can no longer change, and where it ends.

Shapes: B rows, P positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor

from rcd.errors import RCDError
from rcd.models.lm import ModelSettings


def is_end(ids_BP: Tensor, ends_BE: Tensor) -> Tensor:
    """Where a row's own end and stop tokens are; what fills up its list of them is no token (-1)."""
    return (ids_BP[:, :, None] == ends_BE[:, None, :]).any(-1)


def settle(
    ids_BP: Tensor, masked_BP: Tensor, token_BP: Tensor, output_BP: Tensor, ending_BP: Tensor, ends_BE: Tensor,
    early: bool, eos: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(ids, masked, needed). With `early`, the masks behind an end token become end tokens: the text's own or, of a
    model that has several (`eos`: the first so many of its ends), the predicted one. They are no part of the text and
    cost no step; left masked beside a text so complete, they would be out of distribution. `needed` are the masks that
    must still be decoded, which are also those that may be committed: with `early` none outside the answer (`output`:
    behind the prompt, within the length) or behind its end. `ending` is where an end token ends the text: the answer,
    from the last token on that its canvas gives.

        ids  5 [M] END [M] [M]   ->   5 [M] END END END      needed  . x . . .
    """
    if not early:
        return ids_BP, masked_BP, masked_BP
    ended = (is_end(ids_BP, ends_BE) & ending_BP).cumsum(-1) > 0
    filler = masked_BP & output_BP & ended
    own = ids_BP.gather(1, ended.byte().argmax(-1, keepdim=True))  # argmax: the first
    if eos > 1:
        own = torch.where(is_end(token_BP, ends_BE[:, :eos]), token_BP, own)
    ids = torch.where(filler, own, ids_BP)
    masked = masked_BP & ~filler
    return ids, masked, masked & output_BP & ~ended


def unsettled(
    ids_BP: Tensor, masked_BP: Tensor, output_BP: Tensor, ending_BP: Tensor, ends_BE: Tensor, early: bool
) -> Tensor:
    """The masks that must still be decoded of a text whose end is closed (`settle`)."""
    if not early:
        return masked_BP
    return masked_BP & output_BP & ((is_end(ids_BP, ends_BE) & ending_BP).cumsum(-1) == 0)


def revisable(ids_BP: Tensor, masked_BP: Tensor, output_BP: Tensor, ends_BE: Tensor, early: bool) -> Tensor:
    """The tokens of an answer (`output`: but those that its canvas gives) that a rule which revises may replace; with
    `early` an end token stays one, since what stands behind it has become filler."""
    tokens = output_BP & ~masked_BP
    return tokens & ~is_end(ids_BP, ends_BE) if early else tokens


def cut(
    new_ids: list[int], eos: Sequence[int], stops: Sequence[int], limit: int, first: int = 0
) -> tuple[list[int], str]:
    """(the tokens up to and including the first end or stop token, from place `first` on and within the limit; the stop
    reason)."""
    for k, token in enumerate(new_ids[:limit]):
        if k >= first and (token in eos or token in stops):
            return new_ids[: k + 1], "eos" if token in eos else "stop"
    return new_ids[:limit], "length"


def check_prompts(
    prompts: Sequence[Sequence[int]], model: ModelSettings, new_tokens: int, block_length: int, answer_in: int = 1,
    numbers: Sequence[int] = (),
) -> None:  # fmt: skip
    """Refuse, before any work, what cannot be decoded. Positions come in blocks of `block_length`, and new tokens in
    blocks of `answer_in` (`DecodeConfig.rounding`). `numbers`: what the prompts are called, where they are some of a
    call's."""
    for number, prompt in zip(numbers or range(len(prompts)), prompts, strict=True):
        which = f"prompt {number}" if numbers or len(prompts) > 1 else "the prompt"
        if not all(isinstance(token, Integral) for token in prompt):
            raise RCDError(
                f"{which} must be token ids, a list of whole numbers; `Pipeline.encode` makes them of a text."
            )
        if not len(prompt):
            raise RCDError(f"{which} is empty; give at least one token.")
        bad = next((token for token in prompt if not 0 <= token < model.vocab_size), None)
        if bad is not None:
            raise RCDError(f"{which} has the token id {bad}, outside the vocabulary of {model.vocab_size}.")
        if model.mask_token_id in prompt:
            raise RCDError(f"{which} contains the mask token (id {model.mask_token_id}); take it out.")
        filled = -(-new_tokens // answer_in) * answer_in
        total = -(-(len(prompt) + filled) // block_length) * block_length
        if total > model.context_length:
            room = (model.context_length // block_length * block_length - len(prompt)) // answer_in * answer_in
            way_out = f"lower max_new_tokens to {room} or less" if room > 0 else "shorten the prompt (or the blocks)"
            rounded = f" in whole blocks of {max(block_length, answer_in)}" if total > len(prompt) + new_tokens else ""
            raise RCDError(
                f"{which} has {len(prompt)} tokens and with {new_tokens} new ones{rounded} needs {total} positions, "
                f"but the model has {model.context_length}; {way_out}."
            )
