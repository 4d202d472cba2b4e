"""Weights in eight and four bits: the products, loading, what refuses them, and the memory that is asked for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rcd
from rcd.decode.fused import misfit, plain
from rcd.models import checkpoint as ckpt
from rcd.models import filling, quantise, room
from rcd.models.lm import kept
from rcd.models.lowbit import FEW, TILE, Int4Linear, Int8Linear, LowBitLinear
from rcd.models.quantise import Quantisation, quantised
from rcd.models.toy import toy

METHODS = ("int8", "int4")
ERROR = {"int8": 0.01, "int4": 0.09}
"""Of a random matrix, relative."""


def matrix(outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rcd.Pipeline(toy("sdar", seed=3, spread=6.0)).save(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(64, 64), (96, 64), (TILE + 188, 128), (2 * TILE, 32), (1, 32), (7, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_product_is_that_with_the_floats_that_the_layer_tells(
    method: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = matrix(*shape)
    layer = quantised(weight, method, dtype)
    floats = layer.floats()
    assert floats.shape == shape and floats.dtype == dtype
    assert (floats.double() - weight.double()).norm() / weight.norm() < ERROR[method]
    accuracy = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.02}[dtype]
    for tokens in (1, 5, FEW + 1, 40):
        x = matrix(tokens, shape[1], seed=1).to(dtype)
        want = x.double() @ floats.double().t()
        assert (layer(x).double() - want).norm() / want.norm() < accuracy, tokens
    assert torch.equal(layer.floats(3), floats[::3])
    assert layer(x.view(2, -1, shape[1])).shape == (2, 20, shape[0])


@pytest.mark.parametrize("inputs", [*range(33, 41), 48])
def test_torchs_kernel_for_eight_bits_gets_no_shape_that_it_reads_past_the_end_of(
    inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With inputs that are no multiple of 16 it takes the bytes behind the matrix for weights, or crashes."""
    kernel, given = torch._weight_int8pack_mm, []

    def checked(x_MK: torch.Tensor, q_NK: torch.Tensor, scale_N: torch.Tensor) -> torch.Tensor:
        given.append(x_MK.shape[1])
        assert x_MK.shape[1] % 16 == 0
        return kernel(x_MK, q_NK, scale_N)

    monkeypatch.setattr(torch, "_weight_int8pack_mm", checked)
    for outputs in (1, 32, 35, 64, 101):
        layer = quantised(matrix(outputs, inputs), "int8", torch.bfloat16)
        for tokens in range(1, FEW + 1):
            x = matrix(tokens, inputs, seed=1).to(torch.bfloat16)
            want = x.double() @ layer.floats().double().t()
            assert (layer(x).double() - want).norm() / want.norm() < 0.02, (outputs, tokens)
    assert bool(given) == (inputs == 48)


def test_torchaos_own_layers_give_our_product_and_are_not_taken_for_plain_ones() -> None:
    """Those that a GPU takes; of eight bits, which run on a CPU as well."""
    weight, x = matrix(96, 64), matrix(5, 64, seed=1)
    theirs = quantise._by_torchao(quantise.torchao(), weight, "int8", torch.float32)
    torch.testing.assert_close(theirs(x), quantised(weight, "int8", torch.float32)(x))
    assert type(theirs) is nn.Linear and not plain(theirs) and plain(nn.Linear(2, 2))
    inside = list(kept(theirs))
    assert {tensor.dtype for tensor in inside} >= {torch.int8} and all(tensor.data_ptr() for tensor in inside)


def test_four_bits_hold_what_they_can_hold_exactly() -> None:
    """Whole numbers from 0 to 15 in every group: scale 1, origin 0."""
    whole = torch.arange(64).remainder(16).repeat(20, 1).float()
    assert torch.equal(quantised(whole, "int4", torch.float32).floats(), whole)


def test_inputs_that_are_no_whole_groups_take_eight_bits() -> None:
    assert Quantisation("int4").of("backbone.layers.0.mlp.down_proj.weight", (64, 100)) == "int8"
    assert Quantisation("int4").of("backbone.layers.0.mlp.down_proj.weight", (64, 96)) == "int4"


@pytest.mark.parametrize("method", METHODS)
def test_codebook_and_norms_stay_exact_and_layers_do_not(method: str, folder: Path) -> None:
    whole, low = rcd.load(folder, device="cpu").model, rcd.load(folder, device="cpu", quantize=method).model
    assert torch.equal(low.codebook, whole.codebook)
    kinds = {type(module) for name, module in low.named_modules() if name.endswith("_proj")}
    assert kinds == {Int8Linear if method == "int8" else Int4Linear} and type(low.get_submodule("head")) is Int8Linear
    assert torch.equal(low.get_parameter("backbone.norm.weight"), whole.get_parameter("backbone.norm.weight"))
    assert low.size == whole.size and low.bytes < whole.bytes
    assert misfit(low) and misfit(whole) is None


def test_biases_stay(tmp_path: Path) -> None:
    rcd.Pipeline(toy("dream", seed=3)).save(tmp_path / "dream")
    whole, low = (rcd.load(tmp_path / "dream", device="cpu", quantize=q).model for q in (None, "int4"))
    name = "backbone.layers.0.self_attn.q_proj.bias"
    assert torch.equal(low.get_parameter(name), whole.get_parameter(name)) and whole.get_parameter(name).abs().sum() > 0


def test_experts_are_quantised_one_by_one(tmp_path: Path) -> None:
    pipeline = rcd.Pipeline(toy("sdar_moe", seed=3))
    pipeline.save(tmp_path / "moe")
    low = rcd.load(tmp_path / "moe", device="cpu", quantize="int8")
    whole = pipeline.model.get_parameter("backbone.layers.0.mlp.experts.down_proj")
    experts: Any = low.model.get_submodule("backbone.layers.0.mlp.experts.down_proj")
    assert len(experts) == len(whole)
    for expert, weight in zip(experts, whole, strict=True):
        assert (expert.floats() - weight).norm() / weight.norm() < 0.01
    config = rcd.DecodeConfig(max_new_tokens=8)
    plain = low.generate([1, 2, 3], rcd.DecodeConfig(max_new_tokens=8, oracle=True))
    assert low.generate([1, 2, 3], config).sequences == plain.sequences


def test_a_tied_head_becomes_a_copy_unless_it_is_to_stay(tmp_path: Path) -> None:
    source = toy("sdar", seed=3)
    source.config["tie_word_embeddings"] = True
    source.model.head.weight = source.model.backbone.embed_tokens.weight  # type: ignore[union-attr, assignment]
    rcd.Pipeline(source).save(tmp_path / "tied")
    copied, exact = (rcd.load(tmp_path / "tied", device="cpu", quantize=q).model for q in ("int8", "int8,head=exact"))
    head = copied.get_submodule("head")
    assert isinstance(head, Int8Linear) and exact.head.weight is exact.codebook
    assert copied.bytes - exact.bytes == 128 * (64 + 4)  # ids x (width + a scale)
    want = (head.floats() - copied.codebook).norm() / copied.codebook.norm()
    assert 0 < want < 0.01


@pytest.mark.parametrize("method", METHODS)
def test_a_model_in_memory_is_quantised_like_one_that_is_read(method: str, folder: Path) -> None:
    read, held = rcd.load(folder, device="cpu", quantize=method).model, rcd.load(folder, device="cpu").model
    filling.quantise_all(held, Quantisation(method))
    states = read.state_dict(), held.state_dict()
    assert states[0].keys() == states[1].keys() and all(
        torch.equal(states[0][name], states[1][name]) for name in states[0]
    )
    with pytest.raises(rcd.RCDError, match="quantised already"):
        filling.quantise_all(held, Quantisation(method))


def test_what_a_short_cut_knows_of_the_head_is_of_the_quantised_one(folder: Path) -> None:
    low = rcd.load(folder, device="cpu", quantize="int8").model
    want = low.head.floats().t() @ (low.codebook - low.codebook.mean(0)) / len(low.codebook)  # type: ignore[operator]
    covariance = low.regression().covariance
    assert covariance is not None
    torch.testing.assert_close(covariance, want)


def test_an_edited_number_of_a_quantised_model_is_noticed(folder: Path) -> None:
    model = rcd.load(folder, device="cpu", quantize="int8").model
    before = model.weights_version
    assert model.weights_version == before
    model.head.q.add_(1)  # type: ignore[operator]
    edited = model.weights_version
    assert edited != before
    layer: Any = model.get_submodule("backbone.layers.0.mlp.up_proj")
    layer.q = layer.q.clone()
    assert model.weights_version != edited


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ("int3", "unknown quantisation 'int3'.*did you mean 'int[84]'"),
        ("", "unknown quantisation ''"),
        ("int4,head=fp16", "unknown quantisation of the head 'fp16'"),
        ("int4,heads=int8", "one setting, head; write int4,head=exact"),
        ("int4,", "one setting, head"),
        (4, "quantize takes one of int8, int4 as a text, not 4"),
        (["int8"], "quantize takes one of"),
        (True, "quantize takes one of"),
    ],
)
def test_other_values_are_refused_before_anything_is_read(given: Any, match: str) -> None:
    with pytest.raises(rcd.RCDError, match=match):
        rcd.load("/nowhere", quantize=given)


def test_a_missing_package_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantise.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(rcd.RCDError, match=re.escape("pip install 'residual-context-diffusion[quantize]'")):
        rcd.load(folder, device="cpu", quantize="int8")
    assert rcd.load(folder, device="cpu").model.quantised is None


def test_a_quantised_model_is_neither_written_nor_trained(folder: Path, tmp_path: Path) -> None:
    from rcd.train.objective import Objective

    pipeline = rcd.load(folder, device="cpu", quantize="int4")
    with pytest.raises(rcd.RCDError, match=r"quantised \(int4\), .* load it without quantize to save it"):
        pipeline.save(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    with pytest.raises(rcd.RCDError, match=r"quantised \(int4\), and training needs floats"):
        Objective(pipeline.model)
    with pytest.raises(rcd.RCDError, match=r"cannot be run through packed weights.*leave passes='fused' out"):
        pipeline.generate([1, 2], rcd.DecodeConfig(passes="fused", max_new_tokens=4))


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["sdar", "llada", "dream", "sdar_moe", "llada2_moe"])
@pytest.mark.parametrize("given", [None, "int8", "int4", "int4,head=exact"])
def test_the_estimate_is_what_the_model_takes(family: str, given: str | None, tmp_path: Path) -> None:
    rcd.Pipeline(toy(family)).save(tmp_path / "model")
    opened = ckpt.open_checkpoint(tmp_path / "model")
    empty = ckpt.build(opened.spec, opened.settings, opened.backbone_config)
    estimate = room.estimate(empty, opened.weights, torch.float32, Quantisation.parse(given))
    model = rcd.load(tmp_path / "model", device="cpu", quantize=given).model
    rope = sum(buffer.nbytes for name, buffer in model.named_buffers() if "rotary" in name)
    assert estimate.weights == model.bytes - rope


def test_a_model_that_cannot_fit_is_refused_with_what_would(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_memory", lambda device: 250_000)

    def unread(self: Any) -> Any:
        raise AssertionError("no tensor is read")

    monkeypatch.setattr("rcd.models.source.Folder.__iter__", unread)
    with pytest.raises(
        rcd.RCDError, match=r"take 0\.5 MB .* 0\.2 MB are free on cpu; take --quantize int8 \(0\.2 MB\)"
    ):
        rcd.load(folder, device="cpu")
    monkeypatch.setattr(room, "free_memory", lambda device: 1000)
    with pytest.raises(rcd.RCDError, match="take a smaller model, or free some memory"):
        rcd.load(folder, device="cpu")


def test_no_more_than_a_tensor_is_held_beside_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a tensor comes, those before it are in their places, quantised, but for embeddings and head."""
    held: list[int] = []
    add = filling.Filling.add

    def noted(self: filling.Filling, name: str, tensor: torch.Tensor) -> None:
        held.append(len(self._held))
        add(self, name, tensor)

    monkeypatch.setattr(filling.Filling, "add", noted)
    model = rcd.load(folder, device="cpu", quantize="int4").model
    assert max(held) <= 2 and len(held) > 10
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert any(isinstance(module, LowBitLinear) for module in model.modules())
