"""The tokenizer of the generated tasks: a word, a digit or a mark is one token, with the space before it."""

from __future__ import annotations

import re
from typing import Any

from rcd.data.tasks import sudoku, words

MARKS = [*".,?:", *(f" {mark}" for mark in "+-*/=_")]


def task_tokenizer() -> Any:
    """The tasks' texts round-trip exactly; the last three ids are the mask, the turn's end and the text's end."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ends = ["<|MASK|>", "<|im_end|>", "<|endoftext|>"]
    digits = [f"{space}{digit}" for space in ("", " ") for digit in range(10)]
    tokens = [
        "<unk>",
        *MARKS,
        *digits,
        *(f" {word}" for word in sorted(words.all_words() | set(re.findall("[A-Za-z]+", sudoku.INSTRUCTION)))),
    ]
    tokens += [f"<spare_{k}>" for k in range(-(len(tokens) + len(ends)) % 64)] + ends
    backend = Tokenizer(models.WordLevel({token: k for k, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [
            normalizers.Replace(Regex(r"(?<=[0-9_])\s*\n\s*(?=[0-9_])"), " / "),  # a grid written in lines
            normalizers.Replace(Regex(r"\s+$"), ""),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Prepend(" "),
            normalizers.Replace(Regex("^  "), " "),
        ]
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]"), "isolated")
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", mask_token="<|MASK|>", eos_token="<|endoftext|>",
        pad_token="<|endoftext|>", additional_special_tokens=["<|im_end|>"], clean_up_tokenization_spaces=False,
    )  # fmt: skip
