"""Reading and writing checkpoints: the families' own names and bytes, rcd.json, adaptation of causal models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import rcd
from rcd.models import checkpoint as ckpt
from rcd.models import writing
from rcd.models.toy import toy, toy_tokenizer

PARITY = Path(__file__).parent.parent / "fixtures" / "parity"
FAMILIES = ("sdar", "llada", "dream")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_same_bytes(a: Path, b: Path) -> None:
    ours, theirs = tensors(a), tensors(b)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor.contiguous().view(torch.uint8), theirs[name].contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("family", FAMILIES)
def test_load_then_save_gives_the_same_names_and_bytes(family: str, tmp_path: Path) -> None:
    original = PARITY / family / "model"
    rcd.load(original, device="cpu").save(tmp_path / "copy")
    assert_same_bytes(original, tmp_path / "copy")
    assert json.loads((tmp_path / "copy/config.json").read_text()) == json.loads((original / "config.json").read_text())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_fp32_on_a_cpu_and_written_back_as_it_was(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    original = PARITY / "sdar" / "model"
    half = tmp_path / "half"
    half.mkdir()
    (half / "config.json").write_text((original / "config.json").read_text())
    save_file({k: v.to(dtype) for k, v in tensors(original).items()}, half / "model.safetensors")
    pipeline = rcd.load(half, device="cpu")
    assert pipeline.model.codebook.dtype == torch.float32
    pipeline.save(tmp_path / "copy")
    assert_same_bytes(half, tmp_path / "copy")
    assert rcd.load(half, device="cpu", dtype="bfloat16").model.codebook.dtype == torch.bfloat16


def test_sharded_checkpoints_are_read_and_written(tmp_path: Path) -> None:
    checkpoint = ckpt.load(PARITY / "llada" / "model", device="cpu")
    writing.save(checkpoint, tmp_path / "sharded", max_shard_size="40KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert (tmp_path / "sharded/model.safetensors.index.json").is_file()
    assert_same_bytes(PARITY / "llada" / "model", tmp_path / "sharded")
    again = rcd.load(tmp_path / "sharded", device="cpu")
    assert torch.equal(again.model.codebook, checkpoint.model.codebook)


def test_side_files_travel_along_and_pickles_do_not(tmp_path: Path) -> None:
    source = tmp_path / "source"
    rcd.Pipeline(toy("sdar", tokenizer=toy_tokenizer(128))).save(source)
    (source / "modeling_sdar.py").write_text("# the family's own code: copied, never run\n")
    (source / "training_args.bin").write_bytes(b"pickle")
    rcd.load(source, device="cpu").save(tmp_path / "copy")
    names = {path.name for path in (tmp_path / "copy").iterdir()}
    assert {"modeling_sdar.py", "tokenizer.json", "config.json", "model.safetensors"} <= names
    assert "training_args.bin" not in names
    assert (tmp_path / "copy/tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_rcd_json_keeps_the_carry_and_the_overrides(tmp_path: Path) -> None:
    carry = rcd.Residual(alpha_scale=0.3, t_res=0.95, start="self")
    loaded = rcd.load(PARITY / "sdar" / "model", device="cpu", block_length=16, mask_token_id=50)
    loaded.save(tmp_path / "trained", carry=carry, stage="target", provenance={"recipe": "smoke"})
    again = rcd.load(tmp_path / "trained", device="cpu")
    assert (again.settings.block_length, again.settings.mask_token_id) == (16, 50)
    assert again.resolve().carry == carry
    assert again.resolve(rcd.DecodeConfig(carry="residual")).carry == carry
    assert again.resolve(rcd.DecodeConfig(carry="none")).carry == rcd.NoCarry()
    for text in ("trained,t_res=0.5", "residual,t_res=0.5"):  # what is not named stays as it was trained
        assert again.resolve(rcd.DecodeConfig(carry=text)).carry == replace(carry, t_res=0.5)
    assert again.resolve(rcd.DecodeConfig(carry=rcd.Residual(t_res=0.5))).carry == rcd.Residual(t_res=0.5)
    assert "block length 16, carry residual)" in repr(again)
    assert again.checkpoint.rcd.stage == "target"


def test_a_checkpoint_without_rcd_json_decodes_as_seqd() -> None:
    assert rcd.load(PARITY / "sdar" / "model", device="cpu").resolve().carry == rcd.NoCarry()


def test_settings_come_from_the_familys_files_and_can_be_overridden() -> None:
    sdar = rcd.load(PARITY / "sdar" / "model", device="cpu").settings
    assert (sdar.mask_token_id, sdar.eos_token_ids, sdar.block_length) == (93, (94, 95), 4)
    assert (sdar.window, sdar.shift) == ("blockwise", 0)
    dream = rcd.load(PARITY / "dream" / "model", device="cpu").settings
    assert (dream.window, dream.shift, dream.mask_token_id) == ("bidirectional", 1, 91)
    changed = rcd.load(PARITY / "dream" / "model", device="cpu", shift=0, eos_token_ids=[3], block_length=2).settings
    assert (changed.shift, changed.eos_token_ids, changed.block_length) == (0, (3,), 2)


def test_fast_dllm_v2_is_block_causal_and_shifted_by_its_config_alone() -> None:
    """Its config.json names a block's size (`bd_size`), and no mask."""
    from rcd.models.families import FAST_DLLM
    from rcd.models.settings import RCDFile, resolve

    config, generation = {"bd_size": 16, "eos_token_id": 151645}, {"eos_token_id": [151645, 151643]}
    settings = resolve(FAST_DLLM, config, generation, RCDFile(), {}, vocab_size=152064, context_length=32768)
    assert (settings.window, settings.shift, settings.block_length) == ("blockwise", 1, 16)
    assert (settings.mask_token_id, settings.eos_token_ids) == (151665, (151645, 151643))


def test_llada_knows_its_end_of_turn_which_no_file_names() -> None:
    from rcd.models.families import LLADA
    from rcd.models.settings import RCDFile, resolve

    config = {"mask_token_id": 126336, "eos_token_id": 126081}
    settings = resolve(LLADA, config, {}, RCDFile(), {}, vocab_size=126464, context_length=4096)
    assert settings.eos_token_ids == (126081, 126348)


def test_a_tied_head_is_read_and_written_without_a_copy(tmp_path: Path) -> None:
    folder = tmp_path / "tied"
    rcd.Pipeline(toy("qwen3", tokenizer=toy_tokenizer(128))).save(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    state = tensors(folder)
    del state["lm_head.weight"]
    save_file(state, folder / "model.safetensors")
    tied = rcd.load(folder, device="cpu")
    assert tied.model.head.weight.data_ptr() == tied.model.codebook.data_ptr()
    tied.save(tmp_path / "copy")
    assert_same_bytes(folder, tmp_path / "copy")


def causal(family: str, folder: Path, vocab: int, words: int) -> Path:
    """A plain causal checkpoint, its tokenizer without a mask and with `words` tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, **{f"w{k}": k for k in range(1, words)}}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    rcd.Pipeline(toy(family, vocab=vocab, tokenizer=tokenizer)).save(folder)
    (folder / "rcd.json").unlink()
    return folder


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_a_causal_checkpoint_starts_an_adaptation_with_a_mask_on_a_free_row(family: str, tmp_path: Path) -> None:
    pipeline = rcd.load(causal(family, tmp_path / "causal", vocab=128, words=100), device="cpu")
    assert pipeline.settings.mask_token_id == 100
    assert pipeline.settings.vocab_size == 128
    pipeline.save(tmp_path / "adapted")
    assert_same_bytes(tmp_path / "causal", tmp_path / "adapted")
    again = rcd.load(tmp_path / "adapted", device="cpu")
    assert again.settings == pipeline.settings
    assert again.tokenizer is not None and again.tokenizer.convert_tokens_to_ids("<|MASK|>") == 100
    config = rcd.DecodeConfig(max_new_tokens=8, carry="residual")
    assert again.generate("w1 w2 w3", config).sequences == pipeline.generate("w1 w2 w3", config).sequences


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_a_full_vocabulary_grows_by_a_mask_row_that_is_the_mean(family: str, tmp_path: Path) -> None:
    pipeline = rcd.load(causal(family, tmp_path / "causal", vocab=128, words=128), device="cpu")
    assert (pipeline.settings.mask_token_id, pipeline.settings.vocab_size) == (128, 129)
    torch.testing.assert_close(pipeline.model.codebook[128], pipeline.model.codebook[:128].mean(0))
    pipeline.save(tmp_path / "adapted")
    assert rcd.load(tmp_path / "adapted", device="cpu").settings == pipeline.settings


def test_a_causal_checkpoint_can_become_bidirectional_and_its_mask_be_chosen(tmp_path: Path) -> None:
    folder = causal("qwen2", tmp_path / "causal", vocab=128, words=100)
    pipeline = rcd.load(folder, device="cpu", attention="bidirectional", mask_token_id=7)
    assert (pipeline.settings.window, pipeline.settings.mask_token_id) == ("bidirectional", 7)
    pipeline.save(tmp_path / "adapted")
    assert rcd.load(tmp_path / "adapted", device="cpu").settings == pipeline.settings


def write_gguf(path: Path, state: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """A Llama as llama.cpp writes it; its rotary layout interleaves the rows of Q and K."""
    import gguf

    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    parts = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    fixed = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for name, tensor in state.items():
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            ours = f"blk.{layer}.{parts[rest.removesuffix('.weight')]}.weight"
        else:
            ours = fixed.get(name, "output.weight")
        if ours.endswith(("attn_q.weight", "attn_k.weight")):
            groups = heads if "attn_q" in ours else kv
            rows, width = tensor.shape
            tensor = tensor.view(groups, 2, rows // groups // 2, width).transpose(1, 2).reshape(rows, width)
        writer.add_tensor(ours, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_starts_an_adaptation(tmp_path: Path) -> None:
    source = toy("llama", seed=5)
    rcd.Pipeline(source).save(tmp_path / "llama")
    write_gguf(tmp_path / "tiny.gguf", tensors(tmp_path / "llama"), source.config)
    pipeline = rcd.load(tmp_path / "tiny.gguf", device="cpu", mask_token_id=125)
    for name, parameter in source.model.named_parameters():
        assert torch.equal(pipeline.model.get_parameter(name), parameter), name
    pipeline.save(tmp_path / "adapted")
    config = rcd.DecodeConfig(max_new_tokens=8, carry="residual")
    again = rcd.load(tmp_path / "adapted", device="cpu")
    assert again.generate([1, 2, 3], config).sequences == pipeline.generate([1, 2, 3], config).sequences


def test_a_gguf_that_lacks_a_tensor_or_an_end_token_is_not_filled_up(tmp_path: Path) -> None:
    source = toy("llama", seed=5)
    rcd.Pipeline(source).save(tmp_path / "llama")
    state = tensors(tmp_path / "llama")
    write_gguf(tmp_path / "whole.gguf", state, source.config)
    assert rcd.load(tmp_path / "whole.gguf", device="cpu", mask_token_id=125).settings.eos_token_ids == ()
    del state["model.layers.1.mlp.up_proj.weight"]
    write_gguf(tmp_path / "broken.gguf", state, source.config)
    with pytest.raises(rcd.RCDError, match=r"lacks 1 tensor.*layers.1.mlp.up_proj.weight"):
        rcd.load(tmp_path / "broken.gguf", device="cpu", mask_token_id=125)


def test_a_named_family_survives_a_save(tmp_path: Path) -> None:
    folder = causal("qwen3", tmp_path / "causal", vocab=128, words=100)
    pipeline = rcd.load(folder, device="cpu", family="sdar", mask_token_id=125)
    pipeline.save(tmp_path / "copy")
    again = rcd.load(tmp_path / "copy", device="cpu")
    assert again.settings == pipeline.settings
    assert (again.settings.family, again.settings.block_length) == ("sdar", 4)


def test_a_model_loaded_narrower_is_written_as_narrow_as_it_is(tmp_path: Path) -> None:
    pipeline = rcd.load(PARITY / "sdar" / "model", device="cpu", dtype="bfloat16")
    pipeline.save(tmp_path / "copy")
    assert {tensor.dtype for tensor in tensors(tmp_path / "copy").values()} == {torch.bfloat16}


def test_a_checkpoint_of_mixed_dtypes_computes_in_one(tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    rcd.load(PARITY / "sdar" / "model", device="cpu").save(folder)
    state = {k: v if "norm" in k else v.bfloat16() for k, v in tensors(folder).items()}
    save_file(state, folder / "model.safetensors")
    assert rcd.load(folder, device="cpu").generate([1, 2], rcd.DecodeConfig(max_new_tokens=4)).results
    half = rcd.load(folder, device="cpu", dtype="bfloat16")
    assert {p.dtype for p in half.model.parameters()} == {torch.bfloat16}
    assert half.generate([1, 2], rcd.DecodeConfig(max_new_tokens=4, carry="residual")).results


@pytest.mark.parametrize("family", ["sdar", "llada", "dream", "fast_dllm_qwen", "qwen3", "qwen2", "llama"])
def test_a_toy_survives_a_save(family: str, tmp_path: Path) -> None:
    pipeline = rcd.Pipeline(toy(family))
    pipeline.save(tmp_path / "toy", max_shard_size="50KB")
    again = rcd.load(tmp_path / "toy", device="cpu")
    assert again.settings == pipeline.settings
    config = rcd.DecodeConfig(max_new_tokens=6, carry="residual")
    assert again.generate([1, 2, 3], config).sequences == pipeline.generate([1, 2, 3], config).sequences


def test_a_broken_save_leaves_the_old_checkpoint_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = rcd.Pipeline(toy("sdar"))
    pipeline.save(tmp_path / "model")
    before = tensors(tmp_path / "model")

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "save_file", full_disk)
    with pytest.raises((OSError, rcd.RCDError)):
        pipeline.save(tmp_path / "model", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert tensors(tmp_path / "model").keys() == before.keys()


def test_a_saved_checkpoint_has_the_usual_permissions(tmp_path: Path) -> None:
    rcd.Pipeline(toy("sdar")).save(tmp_path / "model")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/file").write_text("")
    assert (tmp_path / "model").stat().st_mode == (tmp_path / "plain").stat().st_mode
    for path in (tmp_path / "model").iterdir():
        assert path.stat().st_mode == (tmp_path / "plain/file").stat().st_mode, path.name


def test_decoding_does_not_change_the_weights(tmp_path: Path) -> None:
    pipeline = rcd.load(PARITY / "sdar" / "model", device="cpu")
    pipeline.generate([1, 2, 3], rcd.DecodeConfig(max_new_tokens=8, carry="residual"))
    pipeline.save(tmp_path / "copy")
    assert_same_bytes(PARITY / "sdar" / "model", tmp_path / "copy")
