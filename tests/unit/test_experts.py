"""Families with experts: their names and bytes, their routers and products against the stock ones, their decoding."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import rcd
from rcd import registry
from rcd.cli.main import app
from rcd.errors import RCDError
from rcd.models import checkpoint as ckpt
from rcd.models import writing
from rcd.models.experts import ROUTERS, Router, SigmoidRouter, by_expert, routers
from rcd.models.toy import toy, toy_config
from tests.conftest import exact
from tests.equivalence.setups import CARRIES, FLYING, PROMPTS, config, same
from tests.unit.test_checkpoint import assert_same_bytes, tensors

FAMILIES = ("sdar_moe", "llada2_moe")


def saved(family: str, folder: Path, **changes: Any) -> Path:
    """A checkpoint as they are published: bf16, LLaDA2's router bias fp32."""
    rcd.Pipeline(toy(family)).save(folder)
    state = load_file(folder / "model.safetensors")
    kept = {name: t if name.endswith("expert_bias") else t.bfloat16() for name, t in state.items()}
    save_file(kept, folder / "model.safetensors")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **changes}))
    return folder


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_one_tensor_here_and_written_one_by_one_with_the_same_bytes(
    family: str, dtype: str, tmp_path: Path
) -> None:
    original = saved(family, tmp_path / "original")
    checkpoint = ckpt.load(original, device="cpu", dtype=dtype)
    layer: Any = checkpoint.model.backbone.layers[1]  # type: ignore[index]
    assert layer.mlp.experts.gate_up_proj.shape == (8, 64, 64)
    theirs = tensors(original)
    expert = [theirs[f"model.layers.1.mlp.experts.5.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(layer.mlp.experts.gate_up_proj[5], torch.cat(expert).to(checkpoint.model.codebook.dtype))
    writing.save(checkpoint, tmp_path / "copy")
    assert_same_bytes(original, tmp_path / "copy")
    writing.save(checkpoint, tmp_path / "sharded", max_shard_size="40KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    assert_same_bytes(original, tmp_path / "sharded")
    again = ckpt.load(tmp_path / "sharded", device="cpu", dtype=dtype).model.state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in checkpoint.model.state_dict().items())


def test_a_routers_bias_stays_fp32_in_a_bf16_model(tmp_path: Path) -> None:
    model = ckpt.load(saved("llada2_moe", tmp_path / "a"), device="cpu", dtype="bfloat16").model
    (router,) = routers(model.backbone)
    assert isinstance(router, SigmoidRouter)
    assert (router.e_score_correction_bias.dtype, router.weight.dtype) == (torch.float32, torch.bfloat16)


def test_a_missing_expert_and_one_of_another_shape_are_refused(tmp_path: Path) -> None:
    folder = saved("sdar_moe", tmp_path / "a")
    state = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    save_file({k: v for k, v in state.items() if k != name}, folder / "model.safetensors")
    with pytest.raises(
        RCDError, match=r"lacks 1 tensor\(s\) of the family sdar_moe, first " + name.replace(".", r"\.")
    ):
        ckpt.load(folder, device="cpu")
    save_file({**state, name: state[name][:, :5].contiguous()}, folder / "model.safetensors")
    with pytest.raises(RCDError, match=r"has shape \[64, 5\], but its config.json means \[64, 32\]"):
        ckpt.load(folder, device="cpu")
    save_file({**state, name.replace("3", "8"): state[name].clone()}, folder / "model.safetensors")
    with pytest.raises(RCDError, match=r"said to have 8 experts in a layer, and holds the tensors of 9; .*num_experts"):
        ckpt.load(folder, device="cpu")


@pytest.mark.parametrize("family", ["sdar_moe", "llada2_moe"])
@pytest.mark.parametrize("count", [16, 200_000, 10**12])
def test_another_number_of_experts_than_the_files_is_refused_before_they_are_laid_out(
    family: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(family, tmp_path / "a", num_experts=count)
    for laid_out in ("fill", "check_room"):
        monkeypatch.delattr(ckpt, laid_out)
    with pytest.raises(RCDError, match=f"said to have {count} experts in a layer, and holds the tensors of 8; correct"):
        ckpt.load(folder, device="cpu")


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("sdar_moe", {"num_experts": 0}, "num_experts"),
        ("sdar_moe", {"num_experts": "many"}, "num_experts"),
        ("sdar_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("sdar_moe", {"moe_intermediate_size": None}, "moe_intermediate_size"),
        ("sdar_moe", {"mlp_only_layers": 3}, "mlp_only_layers"),
        ("sdar_moe", {"mlp_only_layers": ["a"]}, "mlp_only_layers"),
        ("sdar_moe", {"decoder_sparse_step": -1}, "decoder_sparse_step"),
        ("llada2_moe", {"n_group": 3}, "8 experts in 3 groups"),
        ("llada2_moe", {"n_group": 8}, "of two experts or more"),
        ("llada2_moe", {"topk_group": 5}, "topk_group"),
        ("llada2_moe", {"topk_group": 1, "num_experts_per_tok": 3}, "hold enough experts"),
        ("llada2_moe", {"num_shared_experts": None}, "num_shared_experts"),
        ("llada2_moe", {"use_bias": True}, "bias on the attention's output"),
        ("llada2_moe", {"score_function": "softmax"}, "only 'sigmoid' is supported"),
        ("llada2_moe", {"norm_topk_prob": False}, "only True is supported"),
        ("llada2_moe", {"partial_rotary_factor": "half"}, "partial_rotary_factor"),
        ("llada2_moe", {"routed_scaling_factor": []}, "routed_scaling_factor"),
        ("llada2_moe", {"first_k_dense_replace": 1.5}, "first_k_dense_replace"),
    ],
)
def test_what_the_backbone_cannot_express_is_refused_in_one_sentence(
    family: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(RCDError, match=says):
        ckpt.open_checkpoint(saved(family, tmp_path / "a", **changes))


def test_biases_of_q_k_and_v_are_one_tensor_in_llada2s_files(tmp_path: Path) -> None:
    folder = saved("llada2_moe", tmp_path / "a", use_qkv_bias=True)
    biases = {f"model.layers.{n}.attention.query_key_value.bias": torch.arange(128.0) + n for n in (0, 1)}
    save_file({**tensors(folder), **biases}, folder / "model.safetensors")
    checkpoint = ckpt.load(folder, device="cpu")
    attention: Any = checkpoint.model.backbone.layers[1].self_attn  # type: ignore[index, union-attr]
    assert torch.equal(attention.k_proj.bias, torch.arange(64.0, 96.0) + 1)
    writing.save(checkpoint, tmp_path / "copy")
    assert_same_bytes(folder, tmp_path / "copy")


def test_layers_without_experts_are_dense_where_sdar_moes_configuration_says_so(tmp_path: Path) -> None:
    """Every second layer, counted from 1, has experts, unless it is named."""
    config = {**toy_config("sdar_moe", layers=5), "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    spec = registry.get("family", "sdar_moe")
    backbone = spec.backbone_config(config)
    settings = toy("sdar_moe").model.settings
    model = ckpt.build(spec, settings, backbone, device="cpu")
    layers: Any = model.backbone.layers
    assert [hasattr(layer.mlp, "experts") for layer in layers] == [False, True, False, False, False]
    checkpoint = ckpt.Checkpoint(model, config, None)
    writing.save(checkpoint, tmp_path / "a")
    names = tensors(tmp_path / "a").keys()
    assert "model.layers.3.mlp.gate_proj.weight" in names and "model.layers.1.mlp.experts.7.up_proj.weight" in names
    again = ckpt.load(tmp_path / "a", device="cpu").model.state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())


def stock(family: str) -> Any:
    """The stock backbone with the toy's weights, its routers and experts as transformers has them."""
    model = toy(family).model
    plain = getattr(transformers, f"{model.spec.backbone}Model")
    backbone = plain(replace_implementation(model.backbone.config))
    backbone.load_state_dict(model.backbone.state_dict())
    return backbone


def replace_implementation(config: Any) -> Any:
    config = type(config)(**config.to_dict())
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    return config


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_and_products_equal_the_stock_ones(family: str) -> None:
    backbone = stock(family)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 64, generator=generator)
    for layer in backbone.layers:
        if not hasattr(layer.mlp, "experts"):
            continue
        theirs, ours = layer.mlp.gate(hidden), ROUTERS[type(layer.mlp.gate).__name__](layer.mlp.gate)(hidden)
        torch.testing.assert_close(ours[0], theirs[0])
        order = [which[2].argsort(-1) for which in (ours, theirs)]
        for a, b in zip(ours[1:], theirs[1:], strict=True):
            torch.testing.assert_close(a.gather(1, order[0]), b.gather(1, order[1]))
        _, weights, chosen = theirs
        torch.testing.assert_close(
            by_expert(layer.mlp.experts, hidden, chosen, weights), layer.mlp.experts(hidden, chosen, weights)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["grouped", "one by one"])
def test_products_have_the_stock_ones_gradients(dtype: torch.dtype) -> None:
    experts = stock("sdar_moe").to(dtype).layers[0].mlp.experts
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(9, 64, generator=generator).to(dtype).requires_grad_()
    weights = torch.rand(9, 2, generator=generator).to(dtype).requires_grad_()
    chosen = torch.stack([torch.randperm(7, generator=generator)[:2] for _ in range(9)])  # the last expert has no token
    leaves = (hidden, weights, experts.gate_up_proj, experts.down_proj)
    ours, theirs = (
        torch.autograd.grad(product(hidden, chosen, weights).square().sum(), leaves)
        for product in (lambda *args: by_expert(experts, *args), experts)
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4 if dtype == torch.float32 else 1e-12, rtol=1e-5)


def test_products_of_any_width_are_computed() -> None:
    """Torch's grouped products want rows of 16 bytes."""
    narrow = toy("sdar_moe", width=36, heads=2).model
    hidden = torch.randn(3, 36, generator=torch.Generator().manual_seed(2))
    experts: Any = narrow.backbone.layers[0].mlp.experts  # type: ignore[index, union-attr]
    chosen, weights = torch.tensor([[0, 7], [3, 2], [0, 1]]), torch.full((3, 2), 0.5)
    found = by_expert(experts.double(), hidden.double(), chosen, weights.double())
    torch.testing.assert_close(by_expert(experts.float(), hidden, chosen, weights), found.float())


def test_under_autocast_products_are_bf16_and_a_sigmoid_router_is_not() -> None:
    layer: Any = toy("llada2_moe").model.backbone.layers[1]  # type: ignore[index]
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(3))
    plain = layer.mlp.gate(hidden)
    with torch.autocast("cpu", torch.bfloat16):
        logits, weights, chosen = layer.mlp.gate(hidden)
        assert torch.equal(logits, plain[0]) and torch.equal(chosen, plain[2])
        half = by_expert(layer.mlp.experts, hidden, chosen, weights)
    whole = by_expert(layer.mlp.experts, hidden, chosen, weights)
    assert 0 < float((half - whole).abs().max()) < 0.05 * float(whole.abs().max())


def test_every_router_of_a_model_is_ours_and_computes_in_fp64_where_the_model_does() -> None:
    for family in FAMILIES:
        model = toy(family).model.double()
        found = list(routers(model.backbone))
        assert found and not any(type(module).__name__ in ROUTERS for module in model.backbone.modules())
        for router in found:
            assert isinstance(router, Router)
            logits, weights, _ = router(torch.randn(1, 3, 64, dtype=torch.float64))
            assert logits.dtype == weights.dtype == router.probabilities(logits).dtype == torch.float64
            torch.testing.assert_close(router.probabilities(logits).sum(-1), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("carry", CARRIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_engine_equals_oracle(family: str, carry: str) -> None:
    pipeline = exact(family)
    pipeline.model.hold(CARRIES[carry])
    for settings in ({}, FLYING):
        chosen = config(carry=CARRIES[carry], **{"batch_invariant": bool(settings), **settings})
        same(pipeline.generate(PROMPTS, chosen), pipeline.generate(PROMPTS, replace(chosen, oracle=True)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_changes_no_bit_of_a_row_where_that_is_asked_for(family: str) -> None:
    """In fp32, where a product of more tokens of an expert is another number."""
    pipeline = rcd.Pipeline(toy(family, spread=6.0))
    chosen = config(carry="residual", batch_invariant=True, logprobs=3)
    together, alone = (
        [r for group in groups for r in pipeline.generate(group, chosen).results]
        for groups in ([PROMPTS], [[prompt] for prompt in PROMPTS])
    )
    for a, b in zip(together, alone, strict=True):
        assert a.ids == b.ids
        assert a.logprobs == b.logprobs


def test_the_settings_are_the_familys() -> None:
    from rcd.models.moe_families import LLADA2_MOE, SDAR_MOE

    assert (LLADA2_MOE.block_length, LLADA2_MOE.mask_token_id, LLADA2_MOE.eos_token_ids) == (32, 156895, (156892,))
    assert (SDAR_MOE.block_length, SDAR_MOE.mask_token_id, SDAR_MOE.eos_token_ids) == (4, 151669, (151645, 151643))
    assert (LLADA2_MOE.shift, SDAR_MOE.shift) == (0, 0)


def test_info_tells_what_a_token_meets(tmp_path: Path) -> None:
    """Of 8 experts a token goes to 2, so that three quarters of the experts' numbers are idle."""
    done = CliRunner().invoke(app, ["info", str(saved("sdar_moe", tmp_path / "a")), "--json", "--check"])
    facts = json.loads(done.stdout)
    experts = 2 * 8 * 3 * 64 * 32
    assert facts["parameters"] == sum(t.numel() for t in tensors(tmp_path / "a").values())
    assert facts["active_parameters"] == facts["parameters"] - experts * 3 // 4


def test_matrices_that_one_tensor_held_count_once(tmp_path: Path) -> None:
    """LLaDA2's q, k and v are one tensor in its files."""
    model = ckpt.load(saved("llada2_moe", tmp_path / "a"), device="cpu").model
    assert model.bytes == toy("llada2_moe").model.bytes
