"""A bad checkpoint gets one clear sentence that names the cause and the way out."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import rcd
from rcd.models.toy import toy, toy_tokenizer

NAN, INF = float("nan"), float("inf")
PARITY = Path(__file__).parent.parent / "fixtures" / "parity"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good checkpoint to spoil."""
    rcd.Pipeline(toy("sdar", tokenizer=toy_tokenizer(128))).save(tmp_path / "model")
    return tmp_path / "model"


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def refused(match: str, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(rcd.RCDError, match=match) as caught:
        rcd.load(*args, device="cpu", **kwargs)
    assert "\n" not in str(caught.value)


def test_missing_folder(tmp_path: Path) -> None:
    refused("there is no folder or file", tmp_path / "nowhere")


def test_unreachable_hub_name() -> None:
    refused("no local folder, and the model hub did not give it", "nobody/nothing")


def test_folder_without_config(tmp_path: Path) -> None:
    refused("no config.json", tmp_path)


def test_config_that_is_no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    refused("not valid JSON", folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "rcd.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    ("content", "match"), [("[" * 10**5, "nested too deeply"), ('{"a": 1' + "0" * 5000 + "}", "Exceeds the limit")]
)
def test_json_that_python_does_not_read_is_one_sentence(folder: Path, name: str, content: str, match: str) -> None:
    (folder / name).write_text(content)
    refused(f"{name} is not valid JSON .*{match}", folder)


@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000, "a\0b", "~nobody-of-that-name/x"])
def test_names_that_no_file_has(name: str) -> None:
    refused("no checkpoint can be named|there is no folder or file", name)


def test_config_without_a_needed_key(folder: Path) -> None:
    edit(folder, num_hidden_layers="many")
    refused("config.json", folder)


def test_unknown_family(folder: Path) -> None:
    edit(folder, model_type="mamba")
    refused("no known family.*sdar", folder)
    refused("unknown family 'sdarr'.*did you mean 'sdar'", folder, family="sdarr")


def test_missing_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused("has no weights", folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    refused("pickled weights.*safetensors", folder)


def test_missing_shard(tmp_path: Path) -> None:
    from rcd.models.writing import save

    save(toy("sdar"), tmp_path / "model", max_shard_size="40KB")
    victim = sorted((tmp_path / "model").glob("*.safetensors"))[1]
    victim.unlink()
    refused(f"shard '{victim.name}' .* is missing", tmp_path / "model")


@pytest.mark.parametrize("keep", [3, 200, 0.5])
def test_truncated_safetensors(folder: Path, keep: float) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: keep if isinstance(keep, int) else int(len(content) * keep)])
    refused("truncated or is no safetensors file", folder)


def test_a_tensor_too_few_too_many_or_of_the_wrong_shape(folder: Path) -> None:
    path = folder / "model.safetensors"
    state = load_file(path)
    save_file({k: v for k, v in state.items() if "layers.1.mlp.up" not in k}, path)
    refused("lacks 1 tensor.*model.layers.1.mlp.up_proj.weight", folder)
    save_file({**state, "surprise": torch.zeros(1)}, path)
    refused("holds the tensor surprise", folder)
    save_file({**state, "model.norm.weight": torch.zeros(3)}, path)
    refused(r"model.norm.weight .* shape \[3\]", folder)


@pytest.mark.parametrize(
    ("family", "twice", "last"),
    [
        ("sdar", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"),
        *(
            (family, "model.layers.1.mlp.experts.0.up_proj.weight", "model.layers.1.mlp.experts.7.up_proj.weight")
            for family in ("sdar_moe", "llada2_moe")
        ),
    ],
)
def test_a_tensor_that_two_shards_hold_is_named(family: str, twice: str, last: str, tmp_path: Path) -> None:
    """Else the expert that came twice would be counted for the one that is still to come."""
    rcd.Pipeline(toy(family)).save(tmp_path / "model")
    state = load_file(tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "model.safetensors").unlink()
    parts = {"a": state.keys() - {last}, "b": {twice}, "c": {last}}
    for file, names in parts.items():
        save_file({name: state[name].clone() for name in names}, tmp_path / "model" / f"{file}.safetensors")
    listed = {name: f"{file}.safetensors" for file, names in parts.items() for name in names}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    refused(f"holds the tensor {twice} twice", tmp_path / "model")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_or_inf_weights_are_named(folder: Path, bad: float) -> None:
    path = folder / "model.safetensors"
    state = load_file(path)
    state["model.layers.1.mlp.up_proj.weight"][2, 3] = bad
    save_file(state, path)
    refused("model.layers.1.mlp.up_proj.weight .* NaN or inf", folder)


def test_nan_logits_name_the_step() -> None:
    checkpoint = toy("sdar")
    with torch.no_grad():
        checkpoint.model.head.weight[5] = float("nan")
    with pytest.raises(rcd.RCDError, match="NaN or inf at denoising step 1"):
        rcd.Pipeline(checkpoint).generate([1, 2, 3])


@pytest.mark.parametrize("mask", [-1, 128, 10**9])
def test_mask_outside_the_vocabulary(folder: Path, mask: int) -> None:
    refused("mask token id .* outside the vocabulary of 128", folder, mask_token_id=mask)


def test_a_model_without_a_known_mask(tmp_path: Path) -> None:
    rcd.Pipeline(toy("qwen3")).save(tmp_path / "model")
    (tmp_path / "model/rcd.json").unlink()
    refused("no mask token is known.*mask_token_id", tmp_path / "model")


def test_gguf_that_is_not_one(tmp_path: Path) -> None:
    fake = tmp_path / "fake.gguf"
    fake.write_bytes(b"this is no such thing")
    refused("is not a GGUF file", fake)
    fake.write_bytes(b"GGUF" + b"\0" * 40)
    refused("GGUF file .* cannot be read", fake)


def test_a_file_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.txt").write_text("hello")
    refused("is a file; give the checkpoint's folder", tmp_path / "model.txt")


def test_bad_rcd_json(folder: Path) -> None:
    (folder / "rcd.json").write_text('{"carri": {}}')
    refused("unknown key .*'carri'.*did you mean 'carry'", folder)
    (folder / "rcd.json").write_text('{"format": 99}')
    refused("format 99", folder)
    (folder / "rcd.json").write_text('{"carry": {"name": "residual", "gamma": 1}}')
    with pytest.raises(rcd.RCDError, match="carry 'residual' has no setting 'gamma'"):
        rcd.load(folder, device="cpu").generate([1, 2])


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ('{"carry": {"alpha": "entropy"}}', "carry without a name"),
        ('{"carry": "residual"}', "carry = 'residual', which is no dict"),
        ('{"carry": {"name": "residual", "t_res": "hot"}}', "t_res must be in"),
        ('{"carry": {"name": ["residual"]}}', r"unknown carry \['residual'\]"),
        ('{"mask_token_id": "5"}', "mask_token_id = '5', which is no int"),
        ('{"eos_token_ids": 5}', "eos_token_ids = 5, which is no list"),
        ('{"provenance": null}', "provenance = None"),
    ],
)
def test_rcd_json_of_the_wrong_kind(folder: Path, content: str, match: str) -> None:
    (folder / "rcd.json").write_text(content)
    refused(match, folder)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"vocab_size": ...}, "lacks the key 'vocab_size'"),
        ({"vocab_size": "128"}, "vocab_size in config.json must be a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads in config.json must be"),
        ({"mask_token_id": "125"}, "mask token id '125' is outside"),
        ({"mask_token_id": 125.0}, "mask token id 125.0 is outside"),
        ({"mask_token_id": True}, "mask token id True is outside"),
        ({"mask_token_id": 127}, "both as the mask and as an end token"),
        ({"eos_token_id": "x"}, "end token id 'x' is outside"),
        ({"eos_token_id": 400}, "end token id 400 is outside"),
        ({"rope_scaling": "yarn"}, "RoPE settings"),
        *(({"rope_theta": bad}, r"rope_theta in config.json must be in \[1, ") for bad in (0, -1, NAN, INF, "x", [1])),
        ({"rope_theta": 10**400}, r"rope_theta in config.json must be in \[1, "),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor of RoPE in config.json must be"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": INF}}, "beta_fast of RoPE in config.json must be"),
        *(
            ({"rms_norm_eps": bad}, r"rms_norm_eps in config.json must be in \[0, 1\)")
            for bad in (-1, 1, NAN, INF, "x")
        ),
        ({"head_dim": "x"}, "head_dim in config.json must be"),
        ({"num_key_value_heads": 3}, "num_key_value_heads in config.json is 3, by which the 4 heads"),
        ({"num_key_value_heads": 8}, "num_key_value_heads in config.json must be a whole number from 1 to 4"),
        ({"hidden_act": "foo"}, "does not fit"),
        ({"use_sliding_window": True}, "sliding-window"),
    ],
)
def test_config_values_that_do_not_fit(folder: Path, changes: dict[str, Any], match: str) -> None:
    edit(folder, **changes)
    refused(match, folder)


@pytest.mark.parametrize("family", ["sdar", "sdar_moe", "llada2_moe"])
def test_widths_without_end_are_refused_before_anything_is_made(family: str, tmp_path: Path) -> None:
    rcd.Pipeline(toy(family)).save(tmp_path / "model")
    began = time.perf_counter()
    keys = {"head_dim": "heads of a width of", "hidden_size": "a width of"}
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    for key in keys.keys() & config.keys():
        edit(tmp_path / "model", **{**config, key: 2 * 10**9})
        refused(f"{keys[key]} 2000000000, and none of its .* tensors is so large", tmp_path / "model")
    assert time.perf_counter() - began < 20


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"embedding_size": "x"}, "embedding_size in config.json must be a whole"),
        ({"embedding_size": [1]}, "embedding_size in config.json must be a whole"),
        ({"embedding_size": {}}, "embedding_size in config.json must be a whole"),
        ({"mlp_hidden_size": "x"}, "mlp_hidden_size in config.json must be"),
        ({"mlp_hidden_size": None, "mlp_ratio": "x"}, "mlp_ratio in config.json must be"),
        ({"n_kv_heads": 3}, "n_kv_heads in config.json is 3, by which the 4 heads"),
        ({"rope_theta": NAN}, r"rope_theta in config.json must be in \[1, "),
        ({"rms_norm_eps": 1e38}, r"rms_norm_eps in config.json must be in \[0, 1\)"),
    ],
)
def test_values_of_llada_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    rcd.Pipeline(toy("llada")).save(tmp_path / "model")
    edit(tmp_path / "model", **changes)
    refused(match, tmp_path / "model")


@pytest.mark.parametrize("family", ["sdar_moe", "llada2_moe"])
def test_values_of_families_with_experts_that_do_not_fit(family: str, tmp_path: Path) -> None:
    rcd.Pipeline(toy(family)).save(tmp_path / "model")
    good = json.loads((tmp_path / "model" / "config.json").read_text())
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"rope_theta": INF}, "rope_theta in config.json must be"),
        ({"rms_norm_eps": -1}, "rms_norm_eps in config.json must be"),
    ]
    if family == "sdar_moe":
        wrong.append(({"mlp_only_layers": [10**9]}, "mlp_only_layers must be a whole number from 0 to 1"))
    for changes, match in wrong:
        edit(tmp_path / "model", **{**good, **changes})
        refused(match, tmp_path / "model")


def test_an_empty_list_of_end_tokens_falls_back_to_the_next_source(folder: Path) -> None:
    edit(folder, eos_token_id=[])
    assert rcd.load(folder, device="cpu").settings.eos_token_ids == (127,)  # the tokenizer's


def test_quantised_weights_are_refused(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    state["model.layers.0.mlp.up_proj.weight"] = state["model.layers.0.mlp.up_proj.weight"].to(torch.int8)
    save_file(state, folder / "model.safetensors")
    refused("up_proj.weight .* is torch.int8; quantised weights are not read", folder)


@pytest.mark.parametrize("content", ['{"weight_map": []}', '{"weight_map": {"a": 3}}', "{}", '{"weight_map": {}}'])
def test_an_index_that_lists_nothing_usable(folder: Path, content: str) -> None:
    (folder / "model.safetensors.index.json").write_text(content)
    refused("download the checkpoint again", folder)


def test_an_index_names_files_of_its_folder_alone(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    (folder / "inside").mkdir()
    for file, match in (
        ("../outside.safetensors", r"names the shard '\.\./outside.safetensors', which is outside"),
        ("inside/../../outside.safetensors", "which is outside of the checkpoint's folder"),
        (str(folder.parent / "outside.safetensors"), "which is outside of the checkpoint's folder"),
        ("x" * 300, r"the shard 'x{99}\.\.\. of .* is missing"),
        ("a\0b", r"the shard 'a\\x00b' of .* is missing"),
        (".", r"the shard '\.' of .* is missing"),
    ):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
        refused(match, folder)


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "~nobody-of-that-name/model", "./" + "x/" * 3000])
def test_names_that_no_file_can_have_are_one_sentence(name: str) -> None:
    refused("there is no folder or file|no checkpoint can be named|the model hub did not give it", name)


def test_a_shift_that_cannot_be_decoded(folder: Path) -> None:
    refused("shift must be a whole number from 0 to 1", folder, shift=7)


def test_unknown_device_and_dtype(folder: Path) -> None:
    with pytest.raises(rcd.RCDError, match="device 'gpu9' cannot be used"):
        rcd.load(folder, device="gpu9")
    with pytest.raises(rcd.RCDError, match="device 'meta' cannot be used"):
        rcd.load(folder, device="meta")
    with pytest.raises(rcd.RCDError, match="unknown dtype 'int3'"):
        rcd.load(folder, device="cpu", dtype="int3")


def test_unknown_model_setting(folder: Path) -> None:
    refused("unknown model setting 'mask_id'.*did you mean 'mask_token_id'", folder, mask_id=3)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(rcd.RCDError, match=r"nothing can be written to|writing .* failed"):
        rcd.Pipeline(toy("sdar")).save(tmp_path / "file" / "model")
    with pytest.raises(rcd.RCDError, match=r"unknown field of rcd.json 'stages'.*did you mean 'stage'"):
        rcd.Pipeline(toy("sdar")).save(tmp_path / "model", stages="target")


def test_saving_over_something_is_refused(folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(rcd.RCDError, match="is not empty"):
        rcd.Pipeline(toy("sdar", seed=9)).save(folder)
    assert (folder / "model.safetensors").read_bytes() == before


def test_llada_variants_that_llama_cannot_express_are_refused(tmp_path: Path) -> None:
    shutil.copytree(PARITY / "llada" / "model", tmp_path / "model")
    edit(tmp_path / "model", include_qkv_bias=True)
    refused("biases on Q, K and V", tmp_path / "model")
    edit(tmp_path / "model", include_qkv_bias=False, block_type="sequential")
    refused("block_type = 'sequential'", tmp_path / "model")
    edit(tmp_path / "model", block_type="llama", d_model=...)
    refused("lacks the key 'd_model'", tmp_path / "model")
