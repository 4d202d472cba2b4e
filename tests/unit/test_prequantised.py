"""Checkpoints that come quantised, by packages that run on a CPU; those of others are one sentence."""

from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import rcd
from rcd.models.prequantised import PACKAGES
from rcd.models.toy import toy

CONFIG = rcd.DecodeConfig(max_new_tokens=12, carry="residual")
ORACLE = rcd.DecodeConfig(max_new_tokens=12, carry="residual", oracle=True)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]


def quantised_folder(family: str, folder: Path, package: str) -> Path:
    """Of a toy, in eight bits as the package writes them: a scale for every output."""
    rcd.Pipeline(toy(family, seed=3, spread=4.0)).save(folder)
    config, state = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    metadata = {"format": "pt"}
    if package == "compressed-tensors":
        weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
        config["quantization_config"] = {
            "quant_method": package, "format": "pack-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"],
        }  # fmt: skip
    else:
        kind = {"_data": {"granularity": {"_data": {"dim": -1}, "_type": "PerRow", "_version": 1}},
               "_type": "Int8WeightOnlyConfig", "_version": 2}  # fmt: skip
        config["quantization_config"] = {"quant_method": "torchao", "quant_type": {"default": kind}}
    out: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        projection = tensor.dim() == 2 and (name.endswith("_proj.weight") or ".blocks." in name)
        if not projection:
            out[name] = tensor
            if package == "torchao":
                metadata[name] = json.dumps({"_type": "Tensor"})
            continue
        scale = tensor.abs().amax(1, keepdim=True) / 127
        q = (tensor / scale).round().to(torch.int8)
        if package == "compressed-tensors":
            packed = (q.to(torch.int32) + 128).view(len(q), -1, 4) << torch.tensor([0, 8, 16, 24], dtype=torch.int32)
            shape = torch.tensor(tensor.shape)
            own = {"packed": packed.sum(-1, dtype=torch.int32), "scale": scale, "shape": shape}
            out |= {f"{name}_{key}": value for key, value in own.items()}
            continue
        stem = name.removesuffix("weight") + "_weight_"
        out |= {f"{stem}qdata": q, f"{stem}scale": scale, f"{stem}zero_point": torch.zeros_like(scale).to(torch.int8)}
        data = {"block_size": [1, tensor.shape[1]], "dtype": {"_type": "torch.dtype", "_data": "float32"},
                "act_quant_kwargs": None}  # fmt: skip
        names = ["qdata", "scale", "zero_point"]
        metadata[name] = json.dumps({"_type": "Int8Tensor", "_data": data, "_tensor_data_names": names})
    metadata["tensor_names"] = json.dumps(list(state))
    save_file(out, folder / "model.safetensors", metadata)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def needs(package: str) -> None:
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        pytest.skip(f"{package} is not installed")


@pytest.mark.parametrize(
    ("family", "package"),
    [("sdar", "torchao"), ("dream", "torchao"), *((f, "compressed-tensors") for f in ("sdar", "llada", "dream"))],
)
def test_a_quantised_checkpoint_decodes_like_the_oracle_and_close_to_its_floats(
    family: str, package: str, tmp_path: Path
) -> None:
    needs(package)
    pipeline = rcd.load(quantised_folder(family, tmp_path / "low", package), device="cpu")
    assert pipeline.model.quantised == package
    got = pipeline.generate(PROMPTS, CONFIG)
    assert got.sequences == pipeline.generate(PROMPTS, ORACLE).sequences
    whole = toy(family, seed=3, spread=4.0).model
    assert torch.equal(pipeline.model.codebook, whole.codebook)
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 125]])
    from rcd.models.lm import View

    view = View(torch.arange(8)[None])
    with torch.inference_mode():
        want, found = (model(ids, view).logits.log_softmax(-1) for model in (whole, pipeline.model))
    assert 0 < (want.exp() * (want - found)).sum(-1).mean() < 0.05
    with pytest.raises(rcd.RCDError, match=r"are quantised .* or copy its folder"):
        pipeline.save(tmp_path / "copy")
    with pytest.raises(rcd.RCDError, match="load it again with another device or dtype"):
        pipeline.to(torch.bfloat16)
    with pytest.raises(rcd.RCDError, match="comes quantised; leave out quantize"):
        rcd.load(tmp_path / "low", device="cpu", quantize="int8")


def test_what_bitsandbytes_writes_is_read(tmp_path: Path) -> None:
    needs("bitsandbytes")
    from transformers import BitsAndBytesConfig, Qwen3ForCausalLM

    rcd.Pipeline(toy("qwen3", seed=3, spread=4.0)).save(tmp_path / "plain")
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    made = Qwen3ForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=four, device_map={"": "cpu"})
    made.save_pretrained(tmp_path / "low")
    pipeline = rcd.load(tmp_path / "low", device="cpu", family="sdar", mask_token_id=125)
    assert pipeline.model.quantised == "bitsandbytes"
    assert pipeline.generate(PROMPTS, CONFIG).sequences == pipeline.generate(PROMPTS, ORACLE).sequences


def spoilt(folder: Path, family: str = "sdar", **quantization: Any) -> Path:
    rcd.Pipeline(toy(family)).save(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization or "int4"}))
    return folder


@pytest.mark.parametrize(
    ("method", "package"), [("gptq", "gptqmodel"), ("awq", "gptqmodel"), ("hqq", "hqq"), ("quanto", "optimum-quanto")]
)
def test_a_package_that_is_missing_is_named(method: str, package: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package.replace("optimum-quanto", "optimum")) is not None:
        pytest.skip(f"{package} is installed")
    folder = spoilt(tmp_path / "low", quant_method=method, bits=4, group_size=32)
    state = load_file(folder / "model.safetensors")
    save_file({**state, "model.layers.0.mlp.up_proj.scales": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(
        rcd.RCDError, match=rf"is quantised by {method}, .*\(pip install {package}\) cannot load it"
    ) as e:
        rcd.load(folder, device="cpu")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"quant_method": "magic"}, "quantised by 'magic', which is not read; .*gptq, awq"),
        ({"quant_method": 4}, "quantised by 4, which is not read"),
        ({"quant_method": ["awq"]}, r"quantised by \['awq'\], which is not read"),
        ({"quant_method": {}}, "quantised by {}, which is not read"),
        ({"bits": 4}, "quantised by None, which is not read"),
        ({}, "quantization_config that is no JSON object: 'int4'"),
    ],
)
def test_unknown_methods_are_one_sentence(given: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(rcd.RCDError, match=match):
        rcd.load(spoilt(tmp_path / "low", **given), device="cpu")


@pytest.mark.parametrize("method", PACKAGES)
def test_floats_that_are_said_to_be_quantised_are_refused(method: str, tmp_path: Path) -> None:
    with pytest.raises(rcd.RCDError, match=rf"quantised by {method}, and holds nothing but the floats of a sdar; take"):
        rcd.load(spoilt(tmp_path / "low", quant_method=method), device="cpu")


def eight_bit_floats(folder: Path, scale: float = 1.0) -> Path:
    """Blocks of 128 x 128 with a scale each, as DeepSeek's files have them."""
    spoilt(folder, quant_method="fp8", weight_block_size=[128, 128])
    out: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            out[name] = tensor
            continue
        largest = tensor.abs().max() / 448
        out |= {name: (tensor / largest).to(torch.float8_e4m3fn), f"{name}_scale_inv": largest.view(1, 1) * scale}
    save_file(out, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("method", ["fp8", "bitsandbytes"])
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_low_bits_without_a_scale_are_refused(method: str, kind: torch.dtype, tmp_path: Path) -> None:
    folder = spoilt(tmp_path / "low", quant_method=method)
    state = load_file(folder / "model.safetensors")
    low = {name: t.to(kind) if name.endswith("_proj.weight") else t for name, t in state.items()}
    save_file(low, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(rcd.RCDError, match=rf"_proj.weight of .* is {kind}, and no scale is beside it"):
        rcd.load(folder, device="cpu")


@pytest.mark.parametrize("family", ["sdar", "llada", "dream"])
def test_a_tensor_that_the_quantiser_passes_over_is_refused(family: str, tmp_path: Path) -> None:
    """bitsandbytes without a word of how many bits quantises nothing; its scales are then left over."""
    folder = spoilt(tmp_path / "low", family, quant_method="bitsandbytes")
    state = load_file(folder / "model.safetensors")
    name = next(name for name in state if ".0." in name and state[name].dim() == 2)
    more = {name: state[name].to(torch.int8), name.replace(".weight", ".SCB"): torch.ones(len(state[name]))}
    save_file({**state, **more}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(rcd.RCDError, match=r"holds 1 tensor.* that its quantization_config does not mean"):
        rcd.load(folder, device="cpu")


def test_floats_of_eight_bits_are_read_as_floats_without_a_gpu(tmp_path: Path) -> None:
    pipeline, whole = rcd.load(eight_bit_floats(tmp_path / "low"), device="cpu"), toy("sdar").model
    for name, tensor in whole.state_dict().items():
        found = pipeline.model.state_dict()[name]
        assert (found - tensor).norm() <= 0.05 * tensor.norm(), name


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    folder = eight_bit_floats(tmp_path / "low", scale=float("inf"))
    with pytest.raises(rcd.RCDError, match=r"_proj\.weight_scale_inv of .* holds NaN or inf"):
        rcd.load(folder, device="cpu")
    state = load_file(eight_bit_floats(tmp_path / "other") / "model.safetensors")
    state["model.layers.0.mlp.up_proj.weight"].view(torch.uint8)[2, 3] = 0x7F
    save_file(state, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    with pytest.raises(rcd.RCDError, match=r"layers\.0\.mlp\.up_proj\.weight of .* holds NaN or inf"):
        rcd.load(tmp_path / "other", device="cpu")


def test_names_that_torchao_does_not_know_are_refused(tmp_path: Path) -> None:
    with pytest.raises(rcd.RCDError, match=r"a llada quantised by torchao, .* with --quantize"):
        rcd.load(quantised_folder("llada", tmp_path / "low", "torchao"), device="cpu")


def test_a_quantised_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    needs("compressed-tensors")
    folder = quantised_folder("sdar", tmp_path / "low", "compressed-tensors")
    state = load_file(folder / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight_scale"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(rcd.RCDError, match=r"lacks 1 tensor.*layers\.1\.mlp\.up_proj\.weight_scale"):
        rcd.load(folder, device="cpu")


def test_transformers_says_nothing_beside(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    needs("torchao")
    folder = quantised_folder("sdar", tmp_path / "low", "torchao")
    capfd.readouterr()
    rcd.load(folder, device="cpu")
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("transformers").level != logging.CRITICAL
