"""GGUF files as llama.cpp's converter writes them, and damaged and hostile ones."""

from __future__ import annotations

import contextlib
import resource
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rcd
from rcd.models import checkpoint as ckpt
from rcd.models.lm import View

FIXTURES = Path(__file__).parent.parent / "fixtures" / "gguf"
FAMILIES = ("llada", "dream")
TEXT = "the cat's 12 mats <|im_end|> ran\n\n to<|endoftext|>"


def log_probabilities(pipeline: rcd.Pipeline) -> torch.Tensor:
    ids = torch.tensor([[5, 9, 13, 2, 40, 41, pipeline.settings.mask_token_id, pipeline.settings.mask_token_id]])
    with torch.inference_mode():
        return pipeline.model(ids, View(torch.arange(ids.shape[1])[None])).logits.log_softmax(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_file_gives_the_originals_logits_settings_and_tokens(family: str) -> None:
    original = rcd.load(FIXTURES / family / "model", device="cpu")
    converted = rcd.load(FIXTURES / family / "f16.gguf", device="cpu")
    assert converted.settings == original.settings
    assert torch.equal(log_probabilities(converted), log_probabilities(original))
    assert converted.encode(TEXT) == original.encode(TEXT)
    assert converted.decode(original.encode(TEXT)[0]) == original.decode(original.encode(TEXT)[0])
    config = rcd.DecodeConfig(max_new_tokens=8, carry="residual")
    assert converted.generate(TEXT, config).sequences == original.generate(TEXT, config).sequences


@pytest.mark.parametrize("family", FAMILIES)
def test_eight_bits_of_a_file_are_close_to_the_original(family: str) -> None:
    want = log_probabilities(rcd.load(FIXTURES / family / "model", device="cpu"))
    found = log_probabilities(rcd.load(FIXTURES / family / "q8_0.gguf", device="cpu"))
    assert 0 < (want.exp() * (want - found)).sum(-1).mean() < 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_file_can_be_quantised_and_saved(family: str, tmp_path: Path) -> None:
    low = rcd.load(FIXTURES / family / "q8_0.gguf", device="cpu", quantize="int8")
    assert low.model.quantised == "int8"
    whole = rcd.load(FIXTURES / family / "f16.gguf", device="cpu")
    whole.save(tmp_path / "copy")
    again = rcd.load(tmp_path / "copy", device="cpu")
    assert again.settings == whole.settings and again.encode(TEXT) == whole.encode(TEXT)
    assert torch.equal(log_probabilities(again), log_probabilities(whole))


def test_headers_tell_of_a_file_without_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def unread(*_: Any, **__: Any) -> None:
        raise AssertionError("no tensor is read")

    monkeypatch.setattr(np, "memmap", unread)
    opened = ckpt.open_checkpoint(FIXTURES / "llada" / "q8_0.gguf")
    found = {name: shape for name, shape, _ in opened.weights.headers()}
    assert found["model.transformer.wte.weight"] == (352, 64) and len(found) == 2 * 9 + 3


@pytest.mark.parametrize(("kind", "number", "block", "width"), [("Q4_0", 2, 32, 18), ("Q4_K", 12, 256, 144)])
def test_blocks_of_four_bits_are_dequantised(kind: str, number: int, block: int, width: int, tmp_path: Path) -> None:
    """The gguf package's own numbers, at the rows where the file has them."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    from rcd.models.gguf import Weights
    from rcd.models.gguf_header import Header, Place

    raw = np.random.default_rng(0).integers(0, 60, (3, width), dtype=np.uint8)
    (tmp_path / "blocks").write_bytes(b"before" + raw.tobytes())
    header = Header(tmp_path / "blocks", {}, {"output.weight": Place((3, block), number, 6)})
    spec: Any = rcd.load(FIXTURES / "dream" / "model", device="cpu").model.spec
    [(name, tensor)] = Weights(header, spec, 2, 2, False)
    assert name == "lm_head.weight" and tensor.shape == (3, block)
    assert torch.equal(tensor, torch.from_numpy(dequantize(raw, GGMLQuantizationType[kind])))


# -- damaged and hostile files -----------------------------------------------------------------------------------------


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def fact(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, dimensions: list[int], kind: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


def file(
    tensors: list[bytes] | None = None, facts: list[bytes] | None = None, version: int = 3,
    count: int | None = None, known: int | None = None,
) -> bytes:  # fmt: skip
    """`count` and `known`: how many tensors and facts it announces."""
    tensors, facts = tensors or [], facts or []
    numbers = len(tensors) if count is None else count, len(facts) if known is None else known
    return b"GGUF" + struct.pack("<IQQ", version, *numbers) + b"".join(facts) + b"".join(tensors) + bytes(256)


LLADA = [
    fact("general.architecture", 8, text("llada")),
    *(
        fact(f"llada.{name}", 4, struct.pack("<I", 4))
        for name in ("block_count", "embedding_length", "feed_forward_length", "attention.head_count", "context_length")
    ),
    fact("tokenizer.ggml.eos_token_id", 4, struct.pack("<I", 3)),
]
HOSTILE = {
    "10^12 tensors": (file(count=10**12), "announces 1000000000000 tensors"),
    "2^64 - 1 facts": (file(known=2**64 - 1), "announces 18446744073709551615 facts"),
    "a text of 2^60 bytes": (file(facts=[struct.pack("<Q", 2**60)]), "a text of 1152921504606846976 bytes"),
    "a list of 2^60 numbers": (
        file(facts=[fact("a", 9, struct.pack("<IQ", 10, 2**60))]), "a list of 9223372036854775808 bytes"
    ),
    "a list of 2^60 texts": (file(facts=[fact("a", 9, struct.pack("<IQ", 8, 2**60))]), "announces 1152921504606846976"),
    "lists in lists": (file(facts=[fact("a", 9, struct.pack("<IQ", 9, 2))]), "elements of the type 9"),
    "an unknown type": (file(facts=[fact("a", 99, b"")]), "unknown type 99"),
    "a tensor of 2^32 dimensions": (
        file(tensors=[text("t") + struct.pack("<I", 2**32 - 1)]), "has 4294967295 dimensions"
    ),
    "a tensor of 2^120 numbers": (
        file(tensors=[tensor("t", [2**60, 2**60])]), "ends at byte .* it is truncated"
    ),
    "an offset of 2^63": (file(tensors=[tensor("t", [1], offset=2**63)]), "it is truncated"),
    "a tensor with a dimension of 0": (file(tensors=[tensor("t", [4, 0])]), r"shape \[0, 4\], which holds no numbers"),
    "a tensor without dimensions": (file(tensors=[tensor("t", [])]), r"shape \[\], which holds no numbers"),
    "an unknown kind of tensor": (file(tensors=[tensor("t", [1], kind=77)]), "type 77, which is not read"),
    "half a block": (file(tensors=[tensor("t", [17], kind=8)]), "rows of 17 numbers, not a multiple of 32"),
    "a tensor twice": (file(tensors=[tensor("t", [1])] * 2), "is there twice"),
    "no words": (file(facts=[fact("a", 8, text(b"\xff\xfe"))]), "codec can't decode"),
    "an alignment of 0": (file(facts=[fact("general.alignment", 4, bytes(4))]), "alignment is 0"),
    "version 1": (file(version=1), "has version 1"),
    "big-endian": (file(version=3 << 24), "little-endian files of versions 2 and 3"),
    "nothing behind the magic word": (b"GGUF", "goes beyond its 4 bytes"),
    "no architecture": (file(), "architecture None, which is not read"),
    "another architecture": (
        file(facts=[fact("general.architecture", 8, text("mamba"))]), "'mamba', which is not read; .*llada, dream"
    ),
    "an architecture that is a number": (file(facts=[fact("general.architecture", 4, bytes(4))]), "architecture 0"),
    "no embeddings": (file(facts=LLADA), "lacks the tensor token_embd.weight"),
    "scaled rotary embeddings": (
        file(facts=[*LLADA, fact("llada.rope.scaling.type", 8, text("yarn"))]), "scales its rotary embedding"
    ),
    "no layers": (
        file(tensors=[tensor("token_embd.weight", [4, 4])], facts=[*LLADA[:1], *LLADA[2:]]), "block_count = None"
    ),
    "heads that are a text": (
        file(
            tensors=[tensor("token_embd.weight", [4, 4])],
            facts=[*LLADA[:4], *LLADA[5:], fact("llada.attention.head_count", 8, text("4"))],
        ),
        "head_count = '4'",
    ),
    "another tensor": (
        file(tensors=[tensor("token_embd.weight", [4, 4]), tensor("blk.0.ssm.weight", [4])], facts=LLADA),
        "holds the tensor blk.0.ssm.weight",
    ),
    **{
        f"a base of RoPE of {value}": (
            file(tensors=[tensor("token_embd.weight", [4, 4])],
                 facts=[*LLADA, fact("llada.rope.freq_base", 6, struct.pack("<f", value))]),
            r"rope.freq_base of the GGUF file .* must be in \[1, 1e\+15\]",
        )
        for value in (0.0, -1.0, float("nan"), float("inf"))
    },
    **{
        f"an epsilon of {value}": (
            file(tensors=[tensor("token_embd.weight", [4, 4])],
                 facts=[*LLADA, fact("llada.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", value))]),
            r"layer_norm_rms_epsilon of the GGUF file .* must be in \[0, 1\)",
        )
        for value in (1.0, -1.0, float("nan"), float("inf"), 1e38)
    },
    "an epsilon that is a text": (
        file(tensors=[tensor("token_embd.weight", [4, 4])],
             facts=[*LLADA, fact("llada.attention.layer_norm_rms_epsilon", 8, text("1e-5"))]),
        r"must be in \[0, 1\), not '1e-5'",
    ),
    "a width without end": (
        file(
            tensors=[tensor("token_embd.weight", [4, 4])],
            facts=[LLADA[0], *LLADA[3:], *(fact(f"llada.{name}", 4, struct.pack("<I", value)) for name, value in
                   (("block_count", 1), ("embedding_length", 1358954560)))],
        ),
        "a width of 1358954560, and none of its 1 tensors is so large",
    ),
    "layers without end": (
        file(
            tensors=[tensor("token_embd.weight", [4, 4])],
            facts=[LLADA[0], *LLADA[2:], fact("llada.block_count", 4, struct.pack("<I", 2**31))],
        ),
        "2147483648 layers.* 1 tensors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_sentence_and_costs_nothing(name: str, tmp_path: Path) -> None:
    content, match = HOSTILE[name]
    (tmp_path / "bad.gguf").write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(rcd.RCDError, match=match) as caught:
        rcd.load(tmp_path / "bad.gguf", device="cpu", mask_token_id=1)
    assert "\n" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # KiB


@pytest.mark.parametrize("part", [0.0001, 0.001, 0.01, 0.05, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_one_sentence(part: float, tmp_path: Path) -> None:
    content = (FIXTURES / "llada" / "q8_0.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[: max(4, int(part * len(content)))])
    with pytest.raises(rcd.RCDError, match=r"cannot be read .*get the file again"):
        rcd.load(tmp_path / "cut.gguf", device="cpu")


def test_flipped_bytes_of_a_header_never_end_in_a_traceback(tmp_path: Path) -> None:
    content = (FIXTURES / "dream" / "q8_0.gguf").read_bytes()
    random = np.random.default_rng(7)
    places = random.integers(4, 9000, 60)
    for place, value in zip(places, random.integers(0, 256, 60), strict=True):
        spoilt = bytearray(content)
        spoilt[place] = value
        (tmp_path / "spoilt.gguf").write_bytes(bytes(spoilt))
        with contextlib.suppress(rcd.RCDError):
            rcd.load(tmp_path / "spoilt.gguf", device="cpu")
