"""Additions with their steps written out: the smallest task on which a training run can be seen to learn."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

CHARACTERS = " 0123456789+=,;?:.abcdefghijklmnopqrstuvwxyz"


def sums(count: int, seed: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    generator = random.Random(seed)
    for number in range(count):
        parts = [generator.randrange(1, 100) for _ in range(generator.choice((2, 2, 3)))]
        total, steps = parts[0], []
        for part in parts[1:]:
            steps.append(f"{total}+{part}={total + part}")
            total += part
        yield f"sum {number}", {"prompt": "+".join(map(str, parts)) + "=?", "response": "; ".join(steps)}


def character_tokenizer() -> Any:
    """One token a character; the last three ids are the mask, the turn's end and the text's end."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<unk>", *CHARACTERS, "<|MASK|>", "<|im_end|>", "<|endoftext|>"]
    backend = Tokenizer(models.WordLevel({token: k for k, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", mask_token="<|MASK|>", eos_token="<|endoftext|>",
        additional_special_tokens=["<|im_end|>"],
    )  # fmt: skip
