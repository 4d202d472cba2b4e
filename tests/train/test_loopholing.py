"""Loopholing's training: two passes, the model's own trajectories, whole runs with resume and export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rcd
from rcd.carry.loopholing import HiddenState, Loopholing
from rcd.errors import RCDError
from rcd.models.learnt import CARRY_FILE
from rcd.models.lm import DiffusionLM, View
from rcd.recipes.base import find
from rcd.train.batches import Batches
from rcd.train.config import TrainConfig
from rcd.train.objective import Objective
from rcd.train.plan import plan
from rcd.train.residuals import ResidualSource
from tests.conftest import FAMILIES
from tests.processes import finish, two_processes
from tests.train.runs import metrics, run, smoke, weights
from tests.train.test_objective import BATCHING, CAUSAL, EXAMPLES, B, batch, behind, loss, model

ALWAYS, NEVER = Loopholing(two_passes=1.0), Loopholing(two_passes=0.0)


def looped(family: str, **shape: Any) -> DiffusionLM:
    built = model(family, **shape)
    built.hold(Loopholing())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in learnt(built):
            parameter.normal_(generator=generator)
    return built


def learnt(target: DiffusionLM) -> list[torch.nn.Parameter]:
    assert target.carry_parameters is not None
    return list(target.carry_parameters.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_with_one_pass_it_is_seqds_loss_exactly(family: str) -> None:
    target = looped(family)
    seqd, once, twice = (loss(Objective(target, carry=carry, block_length=B)) for carry in (None, NEVER, ALWAYS))
    assert once.item() == seqd.item()
    assert twice.item() != seqd.item()


def test_the_share_of_two_passes_is_a_draw_of_the_step() -> None:
    target = looped("sdar")
    objective = Objective(target, carry=Loopholing(two_passes=0.75))
    both = {loss(Objective(target, carry=carry)).item() for carry in (NEVER, ALWAYS)}
    drawn = [loss(objective, seed=seed).item() for seed in range(40)]
    assert set(drawn) == both
    assert sum(value == loss(Objective(target, carry=ALWAYS)).item() for value in drawn) in range(22, 38)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_recycling_pass_is_the_two_passes(family: str) -> None:
    target = looped(family)
    own = Objective(target, carry=NEVER, source=ResidualSource(recycling=1), block_length=B)
    drawn = {loss(own, seed=seed).item() for seed in range(8)}
    assert drawn == {loss(Objective(target, carry=carry, block_length=B)).item() for carry in (NEVER, ALWAYS)}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_reaches_the_norm_and_not_the_first_pass(family: str) -> None:
    """It is that of the second pass alone, with the first's hidden states as constants."""
    target, given = looped(family), batch()
    objective = Objective(target, carry=ALWAYS, block_length=B)
    loss(objective, given).backward()
    grads = {name: p.grad.clone() for name, p in target.named_parameters() if p.grad is not None}
    assert set(grads) == {name for name, _ in target.named_parameters()}
    assert all(p.grad is not None and bool(p.grad.any()) for p in learnt(target))
    target.zero_grad()

    frame = objective.frame(given)
    layout = objective.lay_out(frame, given.masked)
    with torch.no_grad():
        encoded = objective._encode(target, layout, None)
        constant = layout.outputs(encoded, layout.window[0], target.settings.shift).clone()
    hidden = objective._hidden(target, layout, HiddenState(constant))
    rows, slots = layout.source.unbind(1)
    plain = torch.nn.functional.cross_entropy(hidden @ target.head.weight.t(), given.ids[rows, slots], reduction="none")
    (plain * given.weight[rows, slots]).sum().backward()
    for name, parameter in target.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, grads[name], atol=1e-5, rtol=1e-4)


def test_a_step_of_one_pass_gives_the_norm_a_gradient_of_zero() -> None:
    target = looped("sdar")
    loss(Objective(target, carry=NEVER)).backward()
    assert all(p.grad is not None and not bool(p.grad.any()) for p in learnt(target))


@pytest.mark.parametrize("family", CAUSAL)
@torch.no_grad()
def test_what_is_trained_is_what_is_decoded_block_by_block(family: str) -> None:
    """The second pass of the training layout against a second step behind the finished blocks."""
    target, given = looped(family), batch()
    objective = Objective(target, carry=ALWAYS)
    frame = objective.frame(given)
    carried = objective._residual(frame, given.masked, None)
    layout = objective.lay_out(frame, given.masked)
    assert carried is not None
    trained = objective._hidden(target, layout, carried[1])
    rows, slots = layout.source.unbind(1)
    for r in range(len(given.ids)):
        size = int((given.document[r] >= 0).sum())
        noisy = given.ids[r].masked_fill(given.masked[r], target.settings.mask_token_id)[None]
        for start in range(0, size, B):
            cold = HiddenState(torch.zeros(1, B, 64).double())
            first = behind(target, given.ids[r : r + 1], noisy, start, ALWAYS, cold)
            second = behind(target, given.ids[r : r + 1], noisy, start, ALWAYS, HiddenState(first))[0]
            here = (rows == r) & (slots >= start) & (slots < start + B)
            torch.testing.assert_close(trained[here], second[slots[here] - start], atol=1e-9, rtol=0)


@pytest.mark.parametrize("family", ["llada", "dream"])
@torch.no_grad()
def test_what_is_trained_is_what_is_decoded_on_a_canvas(family: str) -> None:
    """h enters in the answer alone: a canvas's prompt has none."""
    target, given = looped(family), batch(label_padding="row")
    objective = Objective(target, carry=ALWAYS, block_length=B)
    frame = objective.frame(given)
    carried = objective._residual(frame, given.masked, None)
    layout = objective.lay_out(frame, given.masked)
    assert carried is not None
    trained = objective._hidden(target, layout, carried[1])
    rows, slots = layout.source.unbind(1)
    for r in range(len(given.ids)):
        begin = int(given.answer[r].nonzero()[0])
        view = View(given.position[r : r + 1], None, None, slice(begin, given.ids.shape[1]))
        first = target(layout.ids[r : r + 1], view)
        second = target(layout.ids[r : r + 1], view, ALWAYS, HiddenState(first.hidden)).hidden[0]
        here = rows == r
        torch.testing.assert_close(trained[here], second[slots[here] - begin], atol=1e-9, rtol=0)


def test_both_block_layouts_give_the_same_loss() -> None:
    target = looped("sdar")
    losses = [loss(Objective(target, carry=ALWAYS, copy=copy)) for copy in ("full", "answer")]
    torch.testing.assert_close(losses[0], losses[1], atol=1e-12, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_learns_on_its_own_trajectories_as_rcd_does(family: str) -> None:
    target, given = looped(family, spread=6.0), batch()
    source = ResidualSource(trajectory=4, trajectory_share=1.0, trajectory_slow=0.5)
    objective = Objective(target, carry=NEVER, source=source, block_length=B)
    left = set()
    for seed in range(8):
        masked, _, state = objective._trajectory(objective.frame(given), torch.Generator().manual_seed(seed))
        left.add(int(masked.sum()))
        if state is not None:
            window = objective.frame(given).window[1]
            assert isinstance(state[1], HiddenState) and len(state[1].hidden) == len(window)
            assert bool(state[1].hidden.any(-1).all())
    assert len(left) > 1
    loss(objective, given, seed=1).backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in learnt(target))


def test_dropping_every_hidden_state_is_seqd() -> None:
    target = looped("llada")
    dropped = Objective(target, carry=ALWAYS, source=ResidualSource(dropout=1.0), block_length=B)
    assert loss(dropped).item() == loss(Objective(target, block_length=B)).item()


@pytest.mark.parametrize(
    "source", [ResidualSource(dropout=0.5, noisier=0.3), ResidualSource(trajectory=5, trajectory_share=1.0)]
)
def test_the_loss_does_not_depend_on_how_a_step_is_split(source: ResidualSource) -> None:
    objective = Objective(looped("llada", spread=6.0), block_length=B, carry=ALWAYS, source=source)
    losses = []
    for device, processes in ((6, 1), (1, 1), (4, 4)):
        batches = Batches(EXAMPLES, replace(BATCHING, device=device))
        parts = [part for process in range(processes) for part in batches.step(0, 0, process, processes)]
        losses.append(sum(loss(objective, part).item() for part in parts))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_the_carry_of_a_stage_is_chosen_by_name() -> None:
    config = find("smoke").target
    assert config is not None
    loop = config.with_settings({"carry.two_passes": 0.9, "carry.name": "loopholing"})
    assert loop.carry == Loopholing(two_passes=0.9) and not loop.needs_reference and loop.method == "Loopholing"
    assert TrainConfig.from_json(loop.to_json()) == loop
    assert TrainConfig.from_json(config.to_json()) == config and "name" not in config.to_json()["carry"]
    assert config.with_settings({"carry.name": "none"}).carry is None
    same = config.with_settings({"carry.alpha_scale": 0.5}).with_settings({"carry.name": "residual"})
    assert same.carry == rcd.Residual(alpha_scale=0.5)
    for settings, match in (
        ({"carry.name": "iter_smooth"}, "unknown carry to train 'iter_smooth'.*choose from: loopholing"),
        ({"carry.name": "loopholing", "carry.t_res": 1}, "unknown setting of carry 't_res'"),
        ({"carry.name": "none", "carry.t_res": 1}, "carry 'none' has no settings"),
        ({"carry.name": "loopholing", "residual.codebook_gradient": True}, "codebook_gradient is for"),
    ):
        with pytest.raises(RCDError, match=match):
            config.with_settings(settings)


@pytest.mark.parametrize("models", ["sdar", "llada"])
def test_the_tasks_have_a_recipe_that_differs_from_rcds_by_the_carry(models: str) -> None:
    ours, theirs = find(f"tasks-{models}-loopholing"), find(f"tasks-{models}-rcd")
    assert ours.target is not None and theirs.target is not None
    assert replace(ours.target, carry=theirs.target.carry) == theirs.target
    assert ours.base == theirs.base and ours.reference is None


def test_the_plan_counts_the_second_pass() -> None:
    """A forward pass is a third of a step's computation, which is a forward and a backward pass."""
    plain = TrainConfig(model="toy:llada", data="tasks:sudoku:2000", max_steps=10**10)
    loop, tracks = replace(plain, carry=Loopholing(two_passes=0.6)), {"trajectory": 4, "trajectory_share": 0.5}

    def hours(config: TrainConfig) -> float:
        (line,) = [line for line in plan("target", config) if "hours" in line]
        return float(line.split()[1])

    def driven(config: TrainConfig) -> TrainConfig:
        return replace(config, residual=ResidualSource(**tracks))  # type: ignore[arg-type]

    assert hours(loop) / hours(plain) == pytest.approx(1 + 0.6 / 3, rel=0.02)
    assert hours(driven(plain)) / hours(plain) == pytest.approx(1 + 0.5 * 2 / 3, rel=0.02)
    assert hours(driven(loop)) / hours(plain) == pytest.approx(1 + (0.5 * 2 + 0.5 * 0.6) / 3, rel=0.02)
    recycled = replace(loop, residual=ResidualSource(recycling=3))
    assert hours(recycled) / hours(plain) == pytest.approx(1 + 1.5 / 3, rel=0.02)


LOOP = ("carry.name=loopholing", "carry.init=0.1")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("loop") / "whole"
    run(output, *LOOP)
    return output


def test_a_run_trains_the_norm_and_exports_it(whole: Path, tmp_path: Path) -> None:
    from rcd.cli.export import export

    assert not (whole / "reference").exists()
    logged = metrics(whole / "target")
    assert logged[-1]["cross_entropy"] < logged[0]["cross_entropy"]
    held = load_file(whole / "target/model" / CARRY_FILE)
    assert len(held["weight"].unique()) > 1 and bool(held["bias"].any())
    pipeline = rcd.load(whole / "target/model", device="cpu")
    assert pipeline.resolve().carry == Loopholing(init=0.1) and pipeline.checkpoint.rcd.stage == "loopholing"
    assert pipeline.generate("12+3=?", rcd.DecodeConfig(max_new_tokens=8)).results[0].tokens > 0
    export(whole / "target", tmp_path / "last", None)
    for file in ("model.safetensors", CARRY_FILE):
        assert (tmp_path / "last" / file).read_bytes() == (whole / "target/model" / file).read_bytes()


def test_a_run_that_was_stopped_ends_with_the_same_parameters(whole: Path, tmp_path: Path) -> None:
    import shutil

    output = tmp_path / "stopped"
    shutil.copytree(whole, output)
    shutil.rmtree(output / "target/model")
    shutil.rmtree(output / "target/checkpoints/step-00000012")
    run(output, *LOOP, resume=True)
    assert all(
        torch.equal(tensor, weights(whole / "target")[name]) for name, tensor in weights(output / "target").items()
    )
    ours, theirs = (load_file(folder / "target/model" / CARRY_FILE) for folder in (output, whole))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_training_goes_on_from_a_trained_norm_and_seqd_drops_it(whole: Path, tmp_path: Path) -> None:
    start = f"model={whole / 'target/model'}"
    run(tmp_path / "on", *LOOP, start, "learning_rate=0")
    ours, theirs = (load_file(f / "target/model" / CARRY_FILE) for f in (tmp_path / "on", whole))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    run(tmp_path / "plain", "carry.name=none", start, "max_steps=1")
    assert not (tmp_path / "plain/target/model" / CARRY_FILE).exists()


def test_lora_trains_the_norm_too(tmp_path: Path) -> None:
    run(tmp_path / "lora", *LOOP, "lora_rank=4", "carry.two_passes=1")
    held = load_file(tmp_path / "lora/target/model" / CARRY_FILE)
    assert len(held["weight"].unique()) > 1


def test_two_processes_with_fsdp2_have_the_loss_of_one(whole: Path, tmp_path: Path) -> None:
    done = finish(two_processes("rcd", *smoke(tmp_path / "two", *LOOP)))
    assert done.returncode == 0, done.stderr[-3000:]
    for one, two in zip(metrics(whole / "target"), metrics(tmp_path / "two/target"), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], abs=1e-3)
    ours, theirs = (load_file(f / "target/model" / CARRY_FILE) for f in (tmp_path / "two", whole))
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-3, rtol=0)
