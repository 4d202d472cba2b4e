"""Training models with experts: the layout, the load-balancing loss, both stages, two processes, LoRA, export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

import rcd
from rcd.carry.residual import Residual
from rcd.diffusion.noise import generator_of
from rcd.errors import RCDError
from rcd.models.experts import routers
from rcd.models.lm import View
from rcd.train.objective import Objective
from rcd.train.routing import balance, watched
from tests.processes import finish, two_processes
from tests.train.runs import metrics, run, smoke, weights
from tests.train.test_objective import B, batch, behind, loss, model

FAMILIES = ("sdar_moe", "llada2_moe")


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_training_layouts_predictions_equal_decodings(family: str) -> None:
    """No expert ever drops a token for want of room: a block is predicted alike in company and alone."""
    target, given = model(family), batch()
    objective = Objective(target, block_length=B)
    layout = objective.lay_out(objective.frame(given), given.masked)
    hidden = objective._hidden(target, layout, None)
    rows, slots = layout.source.unbind(1)
    for r in range(len(given.ids)):
        size = int((given.document[r] >= 0).sum())
        noisy = given.ids[r].masked_fill(given.masked[r], target.settings.mask_token_id)[None]
        for start in range(0, size, B):
            decoded = behind(target, given.ids[r : r + 1], noisy, start)[0]
            here = (rows == r) & (slots >= start) & (slots < start + B)
            torch.testing.assert_close(hidden[here], decoded[slots[here] - start], atol=1e-9, rtol=0)


def test_the_balance_is_transformers_own_over_what_is_no_padding() -> None:
    target = model("sdar_moe")
    ids = torch.randint(1, 100, (3, 16), generator=generator_of("balance"))
    real = torch.arange(16) < torch.tensor([[16], [9], [12]])
    with watched(target) as routed:
        target(ids, View(torch.arange(16).expand(3, -1)))
    assert len(routed) == len(list(routers(target.backbone))) == 2
    logits = tuple(given[0] for _, given in routed)
    for mask in (torch.ones_like(real), real):
        theirs = load_balancing_loss_func(logits, 8, 2, mask.long())
        torch.testing.assert_close(balance(routed, mask), theirs.double(), atol=1e-6, rtol=0)


def test_the_balance_of_even_and_of_one_sided_routing() -> None:
    """The docstring's example, and K where all are used alike."""
    (router, *_) = routers(model("sdar_moe").backbone)
    real = torch.ones(2, dtype=torch.bool)

    def of(p: list[list[float]], chosen: list[list[int]]) -> float:
        return float(balance([(router, (torch.tensor(p).log(), torch.ones(2, 1), torch.tensor(chosen)))], real))

    assert of([[0.9, 0.1], [0.6, 0.4]], [[0], [0]]) == pytest.approx(1.5)
    assert of([[0.9, 0.1], [0.1, 0.9]], [[0], [1]]) == pytest.approx(1.0)
    assert of([[0.5, 0.5], [0.5, 0.5]], [[0, 1], [0, 1]]) == pytest.approx(2.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_balance_is_added_with_its_weight_and_reaches_the_routers(family: str) -> None:
    target, given = model(family), batch()
    router = next(routers(target.backbone))
    plain, weighed = (Objective(target, block_length=B, router_balance=c)(given) for c in (0.0, 0.25))
    assert plain.balance == 0.0
    torch.testing.assert_close(weighed.total, plain.total + 0.25 * weighed.balance, atol=1e-9, rtol=0)
    (without,), (with_it,) = (torch.autograd.grad(each.total, [router.weight]) for each in (plain, weighed))
    assert not torch.allclose(without, with_it)
    checkpointed = model(family)
    checkpointed.train()
    checkpointed.backbone.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    total = Objective(checkpointed, block_length=B, router_balance=0.25)(given).total
    again = torch.autograd.grad(total, [next(routers(checkpointed.backbone)).weight])[0]
    torch.testing.assert_close(again, with_it, atol=1e-9, rtol=0)


def test_packing_and_both_layouts_give_the_same_loss() -> None:
    target, reference = model("llada2_moe"), model("llada2_moe", seed=9)
    settings: dict[str, Any] = {"carry": Residual(), "reference": reference, "block_length": B}
    losses = [loss(Objective(target, copy=copy, **settings)) for copy in ("full", "answer")]
    torch.testing.assert_close(losses[0], losses[1], atol=1e-12, rtol=0)


@pytest.fixture(scope="module", params=FAMILIES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    output = tmp_path_factory.mktemp("run") / request.param
    run(output, f"model=toy:{request.param}", "router_balance=0.01")
    return request.param, output


def test_both_stages_lower_the_loss_and_export_what_was_trained(trained: tuple[str, Path], tmp_path: Path) -> None:
    family, output = trained
    for stage in ("reference", "target"):
        logged = metrics(output / stage)
        assert logged[-1]["cross_entropy"] < logged[0]["cross_entropy"]
        assert all(row["balance"] > 1.5 for row in logged)
    target = rcd.load(output / "target/model", device="cpu")
    assert target.settings.family == family and target.resolve().carry == Residual()
    assert any(name.endswith("mlp.experts.7.down_proj.weight") for name in weights(output / "target"))
    ids = torch.arange(8)[None]
    target.save(tmp_path / "copy")
    again = rcd.load(tmp_path / "copy", device="cpu")
    with torch.inference_mode():
        view = View(ids)
        assert torch.equal(target.model(ids, view).logits, again.model(ids, view).logits)
    assert target.generate("12+3=?", rcd.DecodeConfig(max_new_tokens=8)).results[0].tokens > 0


def test_an_export_has_the_logits_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rcd.train.loop import Trainer

    ids, seen = torch.arange(12)[None], []
    export = Trainer.export

    def noted(self: Trainer) -> Path:
        self.objective.eval()
        with torch.inference_mode():
            seen.append(self.objective.model(ids, View(ids)).logits)
        return export(self)

    monkeypatch.setattr(Trainer, "export", noted)
    run(tmp_path / "run", "model=toy:llada2_moe", "max_steps=3", stage="reference")
    with torch.inference_mode():
        ours = rcd.load(tmp_path / "run/reference/model", device="cpu").model(ids, View(ids)).logits
    assert torch.equal(ours, seen[0])


def test_two_processes_with_fsdp2_have_the_loss_of_one(tmp_path: Path) -> None:
    """LLaDA2's routers have a bias beside their weights, which is not sharded."""
    done = finish(two_processes("rcd", *smoke(tmp_path / "two", "model=toy:llada2_moe")))
    assert done.returncode == 0, done.stderr[-3000:]
    run(tmp_path / "one", "model=toy:llada2_moe")
    for stage in ("reference", "target"):
        for one, two in zip(metrics(tmp_path / "one" / stage), metrics(tmp_path / "two" / stage), strict=True):
            assert two["loss"] == pytest.approx(one["loss"], abs=1e-3)
    for name, tensor in weights(tmp_path / "two/target").items():
        torch.testing.assert_close(tensor, weights(tmp_path / "one/target")[name], atol=2e-3, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_adapts_attention_and_dense_layers_and_leaves_experts_and_routers(family: str, tmp_path: Path) -> None:
    run(tmp_path / "run", f"model=toy:{family}", "lora_rank=4", "max_steps=4", stage="reference")
    from rcd.recipes.base import find
    from rcd.train.stage import load_start

    recipe = find("smoke").reference
    assert recipe is not None
    before = load_start(recipe.with_settings({"model": f"toy:{family}"}), torch.device("cpu")).model.state_dict()
    after = rcd.load(tmp_path / "run/reference/model", device="cpu").model.state_dict()
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert "backbone.layers.0.self_attn.q_proj.weight" in changed
    assert not any(".experts." in name or ".mlp.gate." in name for name in changed)
    assert any("shared_experts" in name for name in changed) == (family == "llada2_moe")


def test_a_run_with_the_balance_resumes_with_its_own_device_batch(trained: tuple[str, Path]) -> None:
    family, output = trained
    own = [f"model=toy:{family}", "router_balance=0.01"]
    with pytest.raises(RCDError, match="device_batch: 4 -> 2"):
        run(output, *own, "device_batch=2", resume=True)
    run(output, *own, "log_every=2", resume=True)


def test_the_balance_is_refused_where_there_are_no_experts(tmp_path: Path) -> None:
    with pytest.raises(RCDError, match="router_balance is for models with experts, and toy:sdar has none"):
        run(tmp_path / "run", "router_balance=0.01", stage="reference")
    with pytest.raises(RCDError, match="router_balance"):
        run(tmp_path / "run", "router_balance=-1", stage="reference")


def test_compiled_layers_have_the_plain_ones_outputs() -> None:
    """As training on a GPU compiles them; torch's compiler knows grouped products in bf16 alone."""
    layer: Any = model("sdar_moe").float().backbone.layers[0].mlp  # type: ignore[index, union-attr]
    hidden = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(4))
    compiled = torch.compile(layer, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(hidden), layer(hidden))
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(compiled(hidden), layer(hidden), atol=1e-2, rtol=1e-2)
