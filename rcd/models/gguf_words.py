"""The tokenizer in a GGUF file: a byte-level BPE, as those of LLaDA and Dream are; of other families, transformers'
own reading of it."""

from __future__ import annotations

import sys
from typing import Any

from rcd.errors import first_line
from rcd.models.gguf_header import Header
from rcd.terminal import show

CONTROL, USER = 3, 4
"""Types of tokens: one that no text shows, one that is found in texts before they are split."""
SPLITS = {
    "gpt-2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+",
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""tokenizer.ggml.pre -> how a text is split before merges."""


def tokenizer(header: Header, family: str) -> Any | None:
    """None where the file has none, or none that can be read, which is told."""
    if "tokenizer.ggml.tokens" not in header.facts:
        return None
    try:
        return _byte_level(header) if family in ("llada", "dream") else _transformers_own(header)
    except Exception as error:  # whatever a vocabulary provokes in a library
        show(f"rcd: note: the tokenizer in {header.path} cannot be read ({first_line(error)})", sys.stderr)
        return None


def _transformers_own(header: Header) -> Any:
    from transformers import AutoTokenizer

    from rcd.models.source import quiet

    with quiet():
        return AutoTokenizer.from_pretrained(str(header.path.parent), gguf_file=header.path.name)


def _byte_level(header: Header) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    facts = header.facts
    kind, split = facts.get("tokenizer.ggml.model"), facts.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ValueError(f"its model is {kind!r}; 'gpt2', a byte-level BPE, is read")
    if split not in SPLITS:
        show(
            f"rcd: note: {header.path} splits texts as {split!r} says, which is not known; gpt-2's is used", sys.stderr
        )
        split = "gpt-2"
    tokens = facts["tokenizer.ggml.tokens"]
    kinds = facts.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    merges = [tuple(merge.split(" ", 1)) for merge in facts.get("tokenizer.ggml.merges", ())]
    backend = Tokenizer(models.BPE(vocab={token: k for k, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLITS[split]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    for token, what in zip(tokens, kinds, strict=True):
        if what in (CONTROL, USER):
            backend.add_tokens([AddedToken(token, normalized=False, special=what == CONTROL)])
    named = {}
    for role, key in (("eos", "eos"), ("bos", "bos"), ("pad", "padding"), ("mask", "mask"), ("unk", "unknown")):
        number = facts.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            named[f"{role}_token"] = tokens[number]
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    template = facts.get("tokenizer.chat_template")
    if isinstance(template, str):
        made.chat_template = template
    return made
