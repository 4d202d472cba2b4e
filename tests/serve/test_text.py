"""Text that is sent is never taken back: whatever the tokenizer and however tokens arrive."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rcd.decode.answers import found_stop
from rcd.models.bundled import ASSETS
from rcd.models.source import tokenizer
from rcd.serve.text import BROKEN, BYTE_OF, TextStream, Words, common_start

END = "<|end|>"


def byte_level() -> Any:
    """Every byte a token, and a few pairs: most texts of it break characters."""
    letters = list(BYTE_OF)
    pairs = [("Ġ", "a"), ("a", "b"), ("Ã", "©"), ("â", "Ĥ")]
    vocabulary = {letter: k for k, letter in enumerate([*letters, *("".join(pair) for pair in pairs)])}
    made = Tokenizer(models.BPE(vocabulary, pairs))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)


def byte_fallback() -> Any:
    """As SentencePiece: words with their spaces, and bytes for all else."""
    pieces = [("<unk>", 0.0), *((f"<0x{k:02X}>", -5.0) for k in range(256))]
    pieces += [("▁", -3.0), ("▁a", -1.0), ("b", -2.0), ("▁cab", -1.0), (".", -2.0), ("é", -2.0)]
    made = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, unk_token="<unk>")


def cleaned() -> Any:
    """Spaces before punctuation go away when it comes."""
    words = ["[UNK]", "do", "n't", "he", "'s", "'", ".", ",", "!", "##ing", "a"]
    made = Tokenizer(models.WordPiece({word: k for k, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=END, unk_token="[UNK]", clean_up_tokenization_spaces=True
    )


def bundled() -> Any:
    return tokenizer(Path(ASSETS) / "words-rcd")


KINDS = {"byte level": byte_level, "byte fallback": byte_fallback, "cleaned": cleaned, "bundled": bundled}


def answer(words: Words, ids: list[int], stops: tuple[str, ...], ends: set[int]) -> str:
    """What the decoder says of the whole answer."""
    until = next((k for k, token in enumerate(ids) if token in ends), len(ids))
    text = words.decode(ids[:until])
    at = found_stop(text, stops)
    return text if at is None else text[:at]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stops", [(), ("ab", " a", "."), ("b.", "éa", "aaa")])
def test_deltas_joined_are_the_answer_however_tokens_arrive(kind: str, stops: tuple[str, ...]) -> None:
    made = KINDS[kind]()
    words, drawn = Words(made), random.Random(f"{kind} {stops}")
    for case in range(120):
        end = made.eos_token_id
        ids = [drawn.randrange(len(made)) for _ in range(drawn.choice((1, 5, 40, 300)) if case % 20 == 0 else 12)]
        stream, sent, place = TextStream(words, stops, {end}), "", 0
        whole = answer(words, ids, stops, {end})
        while place < len(ids):
            step = drawn.choice((1, 1, 2, 7))
            sent += stream.push(ids[place : place + step])
            assert whole.startswith(sent), (ids, sent, whole)
            assert END not in sent
            place += step
            if found_stop(answer(words, ids[:place], (), {end}), stops) is not None:
                break  # the decoder ends there
        whole = answer(words, ids[:place], stops, {end})
        assert sent + stream.finish(whole) == whole


def test_no_half_character_is_sent() -> None:
    made = byte_level()
    words = Words(made)
    stream, sent = TextStream(words), []
    for token in made("aé€b", add_special_tokens=False)["input_ids"]:
        sent.append(stream.push([token]))
    assert not any(BROKEN in part for part in sent)
    assert "".join(sent) == "aé€b" and "" in sent


def test_what_may_be_the_beginning_of_a_stop_string_waits() -> None:
    assert common_start("the an", ("answer", "no")) == 2
    assert common_start("the an", ("answer", "he a")) == 2
    assert common_start("the answer", ("answer",)) == 0
    words = Words(bundled())
    ids = words.encode(["how many marbles"])[0]
    stream = TextStream(words, (" marbles does",))
    sent = stream.push(ids)
    assert sent and "marbles" not in sent
    assert sent + stream.finish(words.decode(ids)) == words.decode(ids)


def test_a_token_is_shown_with_its_space_and_its_bytes() -> None:
    words = Words(bundled())
    ids = words.encode(["Leo has 40 marbles."])[0]
    assert [words.token(token) for token in ids] == [" Leo", " has", " 4", "0", " marbles", "."]
    half = byte_level()
    first = half("é", add_special_tokens=False)["input_ids"]
    assert b"".join(Words(half).token_bytes(token) or b"" for token in first) == "é".encode()
    euro = half("€", add_special_tokens=False)["input_ids"]
    assert b"".join(Words(half).token_bytes(token) or b"" for token in euro) == "€".encode()
    sentence = byte_fallback()
    assert Words(sentence).token_bytes(sentence.convert_tokens_to_ids("<0xE2>")) == b"\xe2"


def test_without_a_tokenizer_the_text_is_the_ids() -> None:
    stream = TextStream(Words(None))
    sent = stream.push([5, 6]) + stream.push([7])
    assert sent + stream.finish("5 6 7") == "5 6 7"
    assert json.dumps(Words(None).token(12)) == '"12"'
