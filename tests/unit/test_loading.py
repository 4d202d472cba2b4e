"""Loading as users of transformers do: objects, device maps, moving what is loaded."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import rcd
from rcd.models.toy import toy
from tests.conftest import exact

PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]
CONFIG = rcd.DecodeConfig(max_new_tokens=16, carry="residual")
ORACLE = rcd.DecodeConfig(max_new_tokens=16, carry="residual", oracle=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rcd.Pipeline(toy("sdar", seed=3, spread=6.0, layers=3)).save(tmp_path / "model")
    return tmp_path / "model"


def stock(name: str = "Qwen3", **config: Any) -> Any:
    import transformers

    torch.manual_seed(5)
    shape = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    made = getattr(transformers, f"{name}Config")(**shape, num_key_value_heads=2, **config)
    return getattr(transformers, f"{name}ForCausalLM")(made)


# -- objects -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Qwen3", "Qwen2", "Llama"])
def test_a_model_of_transformers_decodes_like_its_folder(name: str, tmp_path: Path) -> None:
    model = stock(name)
    model.save_pretrained(tmp_path / "saved")
    held = rcd.load(model, mask_token_id=125, eos_token_ids=[127])
    read = rcd.load(tmp_path / "saved", device="cpu", mask_token_id=125, eos_token_ids=[127])
    assert held.settings == read.settings
    assert held.generate(PROMPTS, CONFIG).sequences == read.generate(PROMPTS, CONFIG).sequences
    held.save(tmp_path / "copy")
    again = rcd.load(tmp_path / "copy", device="cpu")
    assert again.generate(PROMPTS, CONFIG).sequences == read.generate(PROMPTS, CONFIG).sequences


def test_an_objects_weights_are_not_copied_and_keep_their_dtype() -> None:
    model = stock().bfloat16()
    held = rcd.load(model, mask_token_id=125)
    assert held.model.codebook.dtype == torch.bfloat16
    assert held.model.codebook.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert rcd.load(model, mask_token_id=125, dtype="float32").model.codebook.dtype == torch.float32
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16 and model.model.embed_tokens.weight.requires_grad


def test_an_object_takes_a_family_a_tokenizer_and_bits() -> None:
    from rcd.models.toy import toy_tokenizer

    words = toy_tokenizer(128)
    held = rcd.load(stock(tie_word_embeddings=True), family="sdar", tokenizer=words, quantize="int8")
    assert (held.settings.family, held.settings.mask_token_id, held.model.quantised) == ("sdar", 125, "int8")
    assert held.tokenizer is words and held.encode("the cat")[0]


def test_a_diffusion_lm_is_taken_as_it_is(tmp_path: Path) -> None:
    source = toy("llada", seed=3)
    held = rcd.load(source.model)
    assert held.model is source.model
    assert held.generate(PROMPTS, CONFIG).sequences == rcd.Pipeline(source).generate(PROMPTS, CONFIG).sequences
    with pytest.raises(rcd.RCDError, match=r"without its config\.json"):
        held.save(tmp_path / "copy")
    with pytest.raises(rcd.RCDError, match=r"has its settings .*change them there"):
        rcd.load(source.model, mask_token_id=5)


@pytest.mark.parametrize("given", [3, None, [1], object(), {"a": 1}, torch.nn.Linear(2, 2), b"path"])
def test_other_objects_are_refused(given: Any) -> None:
    with pytest.raises(rcd.RCDError, match="load takes a folder, a hub name, a GGUF file or a model of transformers"):
        rcd.load(given)


def test_objects_without_weights_or_with_what_only_files_have_are_refused() -> None:
    with pytest.raises(rcd.RCDError, match="weights on the meta device"):
        rcd.load(stock().to("meta"), mask_token_id=125)
    with pytest.raises(rcd.RCDError, match="device_map is for checkpoints that are read"):
        rcd.load(stock(), mask_token_id=125, device_map="cpu")


# -- device maps -------------------------------------------------------------------------------------------------------

PARTS = {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
NO_PARTS = (
    "model.layers.00 model.layers.² model.layers.-1 model.layers. model.layers.1.mlp model.nope model. models head.x.y "
    "lm_head.weight lm_headx"
).split()


@pytest.mark.parametrize("given", ["cpu", "auto", torch.device("cpu"), {"": "cpu"}, PARTS])
def test_a_map_to_one_device_is_an_ordinary_load(given: Any, folder: Path) -> None:
    pipeline = rcd.load(folder, device_map=given)
    assert not pipeline.model.spread and pipeline.model.device.type == "cpu"


@pytest.mark.parametrize("family", ["sdar", "llada", "dream"])
def test_layers_on_disk_decode_to_the_same_tokens(family: str, tmp_path: Path) -> None:
    rcd.Pipeline(toy(family, seed=3, spread=6.0, layers=3)).save(tmp_path / "model")
    want = rcd.load(tmp_path / "model", device="cpu").generate(PROMPTS, CONFIG).sequences
    given = {**PARTS, "model.layers.1": "disk", "model.layers.2": "disk"}
    pipeline = rcd.load(tmp_path / "model", device_map=given, offload_folder=tmp_path / "disk")
    assert {p.device.type for p in pipeline.model.backbone.layers[1].parameters()} == {"meta"}  # type: ignore[index, union-attr]
    assert pipeline.generate(PROMPTS, CONFIG).sequences == want
    assert pipeline.generate(PROMPTS, ORACLE).sequences == want
    with pytest.raises(rcd.RCDError, match="on several devices, or on disk; load it on one to save it"):
        pipeline.save(tmp_path / "copy")
    with pytest.raises(rcd.RCDError, match="load it again to move it"):
        pipeline.to(torch.bfloat16)


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"": "cpu", "model.layers": "disk", "model.layers.0": "cpu"}, ["cpu", "meta", "meta"]),
        ({"model.layers.1": "cpu", "model.layers": "disk", "": "cpu"}, ["meta", "cpu", "meta"]),
        ({**PARTS, "model.layers.2": "disk"}, ["cpu", "cpu", "meta"]),
        ({"": "disk", **{name: "cpu" for name in PARTS if "layers" not in name}, "model.rotary_emb": "cpu",
          "model.layers.2": "cpu"}, ["meta", "meta", "cpu"]),
    ],
)  # fmt: skip
def test_the_most_specific_entry_of_a_map_wins(given: Any, where: list[str], tmp_path: Path) -> None:
    rcd.Pipeline(toy("sdar", seed=3, spread=6.0, layers=3)).save(tmp_path / "model")
    pipeline = rcd.load(tmp_path / "model", device_map=given, offload_folder=tmp_path / "disk")
    layers: Any = pipeline.model.backbone.layers
    assert [next(layer.parameters()).device.type for layer in layers] == where
    want = rcd.load(tmp_path / "model", device="cpu").generate(PROMPTS, CONFIG).sequences
    assert pipeline.generate(PROMPTS, CONFIG).sequences == want


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({**PARTS, "lm_head": "meta"}, "belong on one device together.*cpu, meta"),
        ({"": "disk"}, "is not the disk"),
        ({**PARTS, "model.layers.1": "disk"}, "needs a folder.*offload_folder"),
        (
            {"": "cpu", "model.layers.9": "meta"},
            r"names 'model\.layers\.9', and the model has .*layers\.0 to model\.layers\.2",
        ),
        ({"": "cpu", "model.layers.99": "cpu"}, r"names 'model\.layers\.99', and the model has .*model\.layers\.2"),
        *(
            ({"": "cpu", name: "cpu"}, "names '.*; the parts are .*model.layers.N.*, each as a whole")
            for name in NO_PARTS
        ),
        ({"": "cpu", "model.layers.1": "cpu", "backbone.layers.1": "meta"}, "names the part .* twice"),
        ({"": "cpu", "model": "meta"}, "belong on one device together.*cpu, meta"),
        ({"": True}, "says True, which is no device"),
        ({"": 10**30}, "which is no device"),
        ({"transformer": "cpu"}, "names 'transformer'; the parts are"),
        ({3: "cpu"}, "names parts by texts"),
        ({"": "gpu"}, "says 'gpu', which is no device"),
        ({"": None}, "says None, which is no device"),
        ({}, "device_map is a device"),
        (True, "device_map is a device"),
        (2.5, "device_map is a device"),
        ("gpu", "'gpu', which is no device"),
    ],
)
def test_maps_that_cannot_be_are_one_sentence(given: Any, match: str, folder: Path) -> None:
    with pytest.raises(rcd.RCDError, match=match):
        rcd.load(folder, device_map=given)


def test_a_map_stands_alone(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(rcd.RCDError, match="give one of them"):
        rcd.load(folder, device="cpu", device_map="cpu")
    given = {**PARTS, "model.layers.1": "disk"}
    with pytest.raises(rcd.RCDError, match="a quantised model stays on one device"):
        rcd.load(folder, device_map=given, offload_folder=tmp_path / "disk", quantize="int8")


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"offload_folder": 5}, "offload_folder is the path of a folder, not 5"),
        ({"eos_token_ids": 5}, r"eos_token_ids is a list of token ids, such as \[127\], not 5"),
        ({"eos_token_ids": "5"}, "eos_token_ids is a list of token ids"),
        ({"tokenizer": "gpt2"}, "tokenizer is an object, .*, not 'gpt2'"), ({"tokenizer": 5}, "tokenizer is an object"),
        ({"dtype": torch.int8}, "unknown dtype 'torch.int8'.*; choose from: torch.bfloat16, torch.float16, torch.f"),
        ({"dtype": torch.float8_e4m3fn}, "unknown dtype 'torch.float8_e4m3fn'"), ({"dtype": [1]}, "unknown dtype"),
    ],
    ids=str,
)  # fmt: skip
def test_arguments_of_other_kinds_are_one_sentence(given: dict[str, Any], match: str, folder: Path) -> None:
    with pytest.raises(rcd.RCDError, match=match):
        rcd.load(folder, **given)
    if "tokenizer" in given:
        with pytest.raises(rcd.RCDError, match=match):
            rcd.load(toy("sdar").model, **given)


# -- moving ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["sdar", "sdar_moe", "llada2_moe"])
def test_to_casts_weights_and_leaves_tables_and_what_is_wide(family: str) -> None:
    pipeline = rcd.Pipeline(toy(family, seed=3))
    rotary = pipeline.model.get_buffer("backbone.rotary_emb.inv_freq").clone()
    pipeline.generate(PROMPTS, CONFIG)
    assert pipeline.to("bfloat16") is pipeline and pipeline.loop.engines == []
    assert {p.dtype for p in pipeline.model.parameters()} == {torch.bfloat16}
    assert torch.equal(pipeline.model.get_buffer("backbone.rotary_emb.inv_freq"), rotary)
    wide = [b.dtype for name, b in pipeline.model.named_buffers() if name.endswith(pipeline.model.spec.wide)]
    assert set(wide) <= {torch.float32} and (family != "llada2_moe" or wide)
    assert all(result.tokens for result in pipeline.generate(PROMPTS, CONFIG).results)


def test_to_gives_what_a_model_of_that_dtype_gives() -> None:
    pipeline = rcd.Pipeline(toy("sdar", seed=3, spread=6.0))
    pipeline.generate(PROMPTS, CONFIG)
    pipeline.to("cpu", torch.float64)
    assert pipeline.generate(PROMPTS, CONFIG).sequences == exact("sdar").generate(PROMPTS, CONFIG).sequences


def test_a_quantised_model_is_not_cast(folder: Path) -> None:
    pipeline = rcd.load(folder, device="cpu", quantize="int8")
    assert pipeline.to("cpu", torch.float32) is pipeline  # as it is
    with pytest.raises(rcd.RCDError, match=r"quantised \(int8\) .*load it again with another device or dtype"):
        pipeline.to(torch.bfloat16)


@pytest.mark.parametrize(
    "given",
    [
        (),
        ("cpu", "cpu"),
        (3,),
        (None,),
        (torch.int8,),
        (torch.float8_e4m3fn,),
        ("float16", "bf16"),
        ("cpu", "float32", "cpu"),
    ],
)
def test_to_takes_a_device_a_dtype_or_one_of_each(given: Any) -> None:
    with pytest.raises(rcd.RCDError, match="`to` takes a device"):
        rcd.Pipeline(toy("sdar")).to(*given)
    with pytest.raises(rcd.RCDError, match="device 'gpu9' cannot be used here"):
        rcd.Pipeline(toy("sdar")).to("gpu9")


def test_a_model_that_decodes_is_not_moved() -> None:
    pipeline, reached, go = rcd.Pipeline(toy("sdar", seed=3)), threading.Event(), threading.Event()

    def hold(_: Any) -> None:
        reached.set()
        go.wait()

    found: list[Any] = []
    caller = threading.Thread(target=lambda: found.append(pipeline.generate(PROMPTS, CONFIG, probe=hold)))
    caller.start()
    reached.wait()
    with pytest.raises(rcd.RCDError, match="requests are being decoded with this model; wait for them"):
        pipeline.to(torch.bfloat16)
    assert pipeline.model.codebook.dtype == torch.float32
    go.set()
    caller.join()
    want = rcd.Pipeline(toy("sdar", seed=3)).generate(PROMPTS, CONFIG).sequences
    assert found[0].sequences == want


def test_requests_that_come_while_a_model_moves_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    from rcd import api

    pipeline, moving, go, move = rcd.Pipeline(toy("sdar", seed=3)), threading.Event(), threading.Event(), api.move

    def slowly(*args: Any) -> None:
        moving.set()
        go.wait()
        move(*args)

    monkeypatch.setattr(api, "move", slowly)
    mover = threading.Thread(target=lambda: pipeline.to(torch.float64))
    mover.start()
    moving.wait()
    found: list[Any] = []
    caller = threading.Thread(target=lambda: found.append(pipeline.generate(PROMPTS, CONFIG)))
    caller.start()
    assert not found and pipeline.loop.serving == 0
    go.set()
    mover.join()
    caller.join()
    wide = rcd.Pipeline(toy("sdar", seed=3))
    wide.model.double()
    assert found[0].sequences == wide.generate(PROMPTS, CONFIG).sequences
