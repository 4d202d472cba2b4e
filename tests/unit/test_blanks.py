"""Canvases as callers write them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rcd
from rcd import blanks
from rcd.errors import RCDError
from rcd.models.toy import toy, toy_tokenizer


def letters(text: str, behind: bool = False) -> list[int]:
    return [ord(one) for one in text]


def tokenizer(kind: str) -> Any:
    """Of a bundled model, SentencePiece's spaces, and bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if kind == "words":
        return rcd.load("bundled:words-rcd").tokenizer
    letters = [*"Aabis.,=12", "\n"]
    if kind == "bytes":
        space = "\u0120"
        found = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), f"{space}a", f"{space}i", f"{space}is"])
        merges = [(space, "a"), (space, "i"), (f"{space}i", "s")]
        one = Tokenizer(models.BPE({token: k for k, token in enumerate(found)}, merges))
        one.pre_tokenizer, one.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        return PreTrainedTokenizerFast(tokenizer_object=one)
    space = "\u2581"
    words = ["<unk>", *letters, space, f"{space}a", f"{space}i", f"{space}is"]
    merges = [(space, "a"), (space, "i"), (f"{space}i", "s")]
    one = Tokenizer(models.BPE({token: k for k, token in enumerate(words)}, merges, unk_token="<unk>"))
    one.pre_tokenizer, one.decoder = pre_tokenizers.Metaspace(prepend_scheme="always"), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=one, unk_token="<unk>")


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("ab[MASK]c", [97, 98, 0, 99]),
        ("[MASK:3]", [0, 0, 0]),
        ("a [MASK:2] b", [97, 0, 0, 32, 98]),  # the space before a mask is the word's that fills it in
        ("a  [MASK]", [97, 32, 0]),  # unless there are two
        ("[MASK] [MASK]", [0, 0]),
        (r"\[MASK]", letters("[MASK]")),
        (r"a \[MASK:2] [MASK]", [*letters("a [MASK:2]"), 0]),
        ("[mask] [MASKS]", letters("[mask] [MASKS]")),
        ("", []),
    ],
)
def test_a_text_with_masks_is_read(text: str, ids: list[int]) -> None:
    assert blanks.read(text, letters, 0, 64) == ids


@pytest.mark.parametrize(
    ("kind", "text", "tokens"),
    [
        ("words", "15 = [MASK:2]. Answer: [MASK]", [" 1", "5", " =", -1, -1, ".", " Answer", ":", -1]),
        ("words", "Leo has [MASK]5.", [" Leo", " has", -1, "5", "."]),
        ("words", "[MASK]Answer", [-1, " Answer"]),  # of words this one knows only those behind a space
        ("metaspace", "a [MASK]. is [MASK], a", ["\u2581a", -1, ".", "\u2581is", -1, ",", "\u2581a"]),
        ("metaspace", "a [MASK] is[MASK]\n2", ["\u2581a", -1, "\u2581is", -1, "\n", "2"]),
        ("bytes", "a [MASK]. is [MASK], a", ["a", -1, ".", "\u0120is", -1, ",", "\u0120a"]),
        ("bytes", "a [MASK]\n\n[MASK]is", ["a", -1, "\u010a", "\u010a", -1, "i", "s"]),
    ],
)
def test_words_behind_a_mask_are_encoded_as_those_of_a_sentence(kind: str, text: str, tokens: list[Any]) -> None:
    used = tokenizer(kind)
    right = [token if token == -1 else used.convert_tokens_to_ids(token) for token in tokens]
    assert blanks.read(text, blanks.Spelling(used), -1, 64) == right


@pytest.mark.parametrize("kind", ["metaspace", "bytes"])
@pytest.mark.parametrize("words", [".", " is", "is", ", a", "  a", "12", "\n", " = 1.", "s a."])
def test_words_behind_a_mask_are_decoded_as_they_were_written(kind: str, words: str) -> None:
    used = tokenizer(kind)
    before = used("ba", add_special_tokens=False)["input_ids"]
    assert used.decode([*before, *blanks.Spelling(used)(words, True)]) == f"ba{words}"


@pytest.mark.parametrize(
    "bad", ["[MASK:0]", "[MASK:]", "[MASK: 3]", "[MASK:-1]", "[MASK:1e3]", "[MASK:²]", "[MASK:9999999999]"]
)
def test_a_count_that_is_none_is_refused(bad: str) -> None:
    with pytest.raises(RCDError, match="is no number of masks; write such as"):
        blanks.read(f"a {bad}", letters, 0, 64)


@pytest.mark.parametrize("long", ["[MASK:65]", "[MASK:60]" * 1_000, "[MASK]" * 65])
def test_a_canvas_that_no_context_has_room_for_is_refused_before_it_is_made(long: str) -> None:
    with pytest.raises(RCDError, match="has more than 64 tokens"):
        blanks.read(long, letters, 0, 64)


def test_one_canvas_is_for_all_prompts_or_each_has_its_own() -> None:
    assert blanks.each(None, 2) == [None, None]
    assert blanks.each("a", 2) == ["a", "a"]
    assert blanks.each([1, 2], 2) == [[1, 2], [1, 2]]
    assert blanks.each([[1], None], 2) == [[1], None]
    assert blanks.each(["a", [1]], 2) == ["a", [1]]
    with pytest.raises(RCDError, match="3 prompts need 3 canvases"):
        blanks.each(["a", None], 3)


@pytest.fixture(scope="module")
def pipeline() -> rcd.Pipeline:
    return rcd.Pipeline(toy("llada", seed=2, spread=6.0, vocab=128, tokenizer=toy_tokenizer(128)))


HOSTILE = [
    5, {"a": 1}, [1.5, 2], [True], [[1], [2], [3]], b"ab", [None, None], object(), "the \ud800 [MASK]", [[["deep"]]],
    ["[MASK:x]"], [-1], [9999], "the old fox", torch.tensor(3), torch.rand(2, 2), [1, "a"], [{}],
]  # fmt: skip


@pytest.mark.parametrize("prompts", ["the old fox", None])
@pytest.mark.parametrize("canvas", HOSTILE)
def test_what_is_no_canvas_is_one_sentence(pipeline: rcd.Pipeline, canvas: Any, prompts: Any) -> None:
    if prompts is None and ((isinstance(canvas, str) and "MASK" not in canvas) or canvas == [[1], [2], [3]]):
        return  # which are prompts
    with pytest.raises(RCDError) as refused:
        pipeline.generate(prompts, canvas=canvas)
    assert str(refused.value).endswith((".", "?)")) and "\n" not in str(refused.value)


def test_a_canvas_alone_is_prompt_and_canvas(pipeline: rcd.Pipeline) -> None:
    alone = pipeline.generate(canvas="the old [MASK:3] sees a [MASK] .", threshold=1.0)
    both = pipeline.generate("the old", canvas="[MASK:3] sees a [MASK] .", threshold=1.0)
    assert alone.sequences == both.sequences and len(alone.sequences[0]) == 7
    assert pipeline.decode(alone.sequences[0][3:5]) == "sees a"
    empty = pipeline.generate("", canvas="the old [MASK:3] sees a [MASK] .", threshold=1.0)
    assert empty.sequences == alone.sequences
    handle = pipeline.submit([1], canvas="[MASK:3] sees", threshold=1.0)
    assert handle.result().ids == pipeline.generate([1], canvas="[MASK:3] sees", threshold=1.0).sequences[0]
    several = pipeline.generate(canvas=["the old [MASK:3]", "a [MASK:2] fox"], threshold=1.0)
    assert [len(ids) for ids in several.sequences] == [3, 3]
    with pytest.raises(RCDError, match="there is no prompt"):
        pipeline.generate()
    with pytest.raises(RCDError, match="the prompt is empty"):
        pipeline.generate(canvas="[MASK:2] fox")


def test_a_mask_written_as_the_tokenizer_does_is_one(pipeline: rcd.Pipeline) -> None:
    ours = pipeline.generate("the old", canvas="[MASK][MASK] sees", threshold=1.0)
    assert pipeline.generate("the old", canvas="<|MASK|><|MASK|> sees", threshold=1.0).sequences == ours.sequences
    assert pipeline.generate("the old <|MASK|><|MASK|> sees", threshold=1.0).sequences == ours.sequences


def test_a_chat_is_no_canvas_but_may_have_one() -> None:
    tokenizer = toy_tokenizer(128)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }} . {% endfor %}so"
    pipeline = rcd.Pipeline(toy("llada", seed=2, spread=6.0, vocab=128, tokenizer=tokenizer))
    asked = [{"role": "user", "content": "the old fox"}]
    assert pipeline.generate([asked], canvas="[MASK:2] sees", threshold=1.0).results[0].given == 1
    for prompt in ("the <|MASK|> fox", [{"role": "user", "content": "the <|MASK|> fox"}]):
        with pytest.raises(RCDError, match="a chat holds the mask"):
            pipeline.generate(prompt)
