"""Whether a reference fits a target: a residual is a distribution over tokens, so both must mean the same by an id."""

from __future__ import annotations

from rcd.errors import RCDError
from rcd.models.checkpoint import Checkpoint


def check_pair(target: Checkpoint, reference: Checkpoint) -> None:
    """The same kind of attention, and equal vocabularies but for the mask, which goes by its id and may be written
    differently."""
    ours, theirs = target.model.settings, reference.model.settings
    if ours.attention != theirs.attention:
        raise RCDError(
            f"the reference's attention is {theirs.attention} and the target's {ours.attention}; "
            "a reference must be of the same kind."
        )
    if target is reference or target.tokenizer is None or reference.tokenizer is None:
        return
    masks = (ours.mask_token_id, theirs.mask_token_id)
    own, other = (
        {item for item in tokenizer.get_vocab().items() if item[1] not in masks}
        for tokenizer in (target.tokenizer, reference.tokenizer)
    )
    if own != other:
        text = min(own ^ other, key=lambda item: item[1])[0]
        raise RCDError(
            f"the reference's tokenizer does not match the target's (they differ at {text!r}); "
            "a reference must share the target's tokenizer."
        )
