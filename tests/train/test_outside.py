"""A carry that is defined outside of the package trains: nothing in training knows one by its class."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rcd import registry
from rcd.carry.base import Carry, describe
from rcd.errors import RCDError
from rcd.models.learnt import CARRY_FILE
from rcd.models.lm import DiffusionLM
from rcd.models.settings import RCDFile
from rcd.recipes.base import find
from rcd.train.config import TrainConfig
from rcd.train.objective import Objective
from rcd.train.plan import plan
from rcd.train.residuals import ResidualSource
from tests.outside import Gated, GatedState, Memory, MemoryState
from tests.train.runs import metrics, run
from tests.train.test_objective import BATCHING, EXAMPLES, B, Batches, batch, loss, model

FAMILIES = ("sdar", "llada", "dream")
SOURCES = {
    "plain": ResidualSource(),
    "dropout": ResidualSource(dropout=0.4, noisier=0.3),
    "recycling": ResidualSource(recycling=3),
    "trajectory": ResidualSource(trajectory=5, trajectory_share=1.0, trajectory_slow=0.5),
}


def target_of(family: str, carry: Carry) -> DiffusionLM:
    target = model(family, spread=6.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        target.hold(carry)
    target.requires_grad_(True)
    return target


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a plug-in registers its carries."""
    monkeypatch.setitem(registry.PARTS["carry"], "memory", "tests.outside:Memory")
    monkeypatch.setitem(registry.PARTS["carry"], "gated", "tests.outside:Gated")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
@pytest.mark.parametrize("carry", [Memory(), Gated(), Gated(share=0.5)], ids=repr)
def test_it_trains(family: str, source: ResidualSource, carry: Carry) -> None:
    target = target_of(family, carry)
    objective = Objective(target, carry=carry, source=source, block_length=B)
    seqd = Objective(target, source=source, block_length=B)
    losses, others = set(), set()
    for seed in range(8):
        target.zero_grad()
        value = loss(objective, seed=seed)
        value.backward()
        assert value.isfinite()
        assert all(parameter.grad is not None for parameter in target.parameters())
        losses.add(value.item())
        others.add(loss(seqd, seed=seed).item())
    assert losses - others  # the state enters


def test_without_a_pass_before_it_is_seqd() -> None:
    target = target_of("sdar", Gated())
    never = loss(Objective(target, carry=Gated(share=0.0)))
    never.backward()
    assert never.item() == loss(Objective(target)).item()
    assert target.carry_parameters is not None
    assert all(p.grad is not None and not p.grad.any() for p in target.carry_parameters.parameters())


def test_a_state_is_made_from_the_one_before() -> None:
    """Three recycled passes leave a count of three at every position, and a mean of three predictions."""
    target, given = target_of("llada", Memory()), batch()
    objective = Objective(target, carry=Memory(), source=ResidualSource(recycling=3), block_length=B)
    counts = set()
    for seed in range(12):
        carried = objective._residual(objective.frame(given), given.masked, torch.Generator().manual_seed(seed))
        if carried is None:
            continue
        assert isinstance(carried[1], MemoryState) and len(carried[1].count) == int(given.masked.sum())
        counts |= set(carried[1].count.tolist())
    assert counts == {1, 2, 3}


def test_a_state_follows_its_positions_through_a_trajectory() -> None:
    target, given = target_of("llada", Memory()), batch()
    source = ResidualSource(trajectory=4, trajectory_share=1.0, trajectory_slow=1.0)
    objective = Objective(target, carry=Memory(), source=source, block_length=B)
    seen = set()
    for seed in range(12):
        masked, _, carried = objective._trajectory(objective.frame(given), torch.Generator().manual_seed(seed))
        if carried is None:
            continue
        number, state = carried
        assert isinstance(state, MemoryState) and bool((number[masked] >= 0).all())
        left = state.count[number[masked]]
        assert len(set(left.tolist())) == 1  # a mask that is left has seen every step
        seen |= set(left.tolist())
    assert seen == {1, 2, 3, 4}


def test_an_everywhere_carry_reads_the_whole_window() -> None:
    target, given = target_of("sdar", Gated()), batch()
    objective = Objective(target, carry=Gated(), block_length=B)
    frame = objective.frame(given)
    carried = objective._residual(frame, given.masked, None)
    assert carried is not None and isinstance(carried[1], GatedState)
    assert len(carried[1].hidden) == len(frame.window[0]) > int(given.masked.sum())


def test_the_loss_reaches_the_codebook_through_a_carry_that_reads_it() -> None:
    def gradient(wanted: bool) -> torch.Tensor:
        target = target_of("sdar", Memory())
        loss(Objective(target, carry=Memory(), source=ResidualSource(codebook_gradient=wanted))).backward()
        assert target.codebook.grad is not None
        return target.codebook.grad

    assert not torch.equal(gradient(True), gradient(False))


def test_a_chunk_at_a_time_is_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for carry in (Memory(), Gated()):
        for source in (ResidualSource(recycling=2), ResidualSource(codebook_gradient=carry.reads_codebook)):
            objective = Objective(target_of("llada", carry), carry=carry, source=source, block_length=B)
            whole = [loss(objective, seed=seed).item() for seed in range(4)]
            with monkeypatch.context() as patched:
                patched.setattr("rcd.train.residuals.chunk_of", lambda head: 3)
                assert [loss(objective, seed=seed).item() for seed in range(4)] == pytest.approx(whole, rel=1e-12)


def test_the_loss_does_not_depend_on_how_a_step_is_split() -> None:
    source = ResidualSource(trajectory=5, trajectory_share=1.0)
    objective = Objective(target_of("llada", Memory()), block_length=B, carry=Memory(), source=source)
    losses = []
    for device, processes in ((6, 1), (1, 1), (4, 4)):
        batches = Batches(EXAMPLES, replace(BATCHING, device=device))
        parts = [part for process in range(processes) for part in batches.step(0, 0, process, processes)]
        losses.append(sum(loss(objective, part).item() for part in parts))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_a_stages_settings_name_it(registered: None) -> None:
    config = find("smoke").target
    assert config is not None
    chosen = config.with_settings({"carry.name": "memory", "carry.decay": 0.25})
    assert chosen.carry == Memory(decay=0.25) and chosen.method == "Memory" and not chosen.needs_reference
    assert TrainConfig.from_json(json.loads(json.dumps(chosen.to_json()))) == chosen
    assert describe(Memory(decay=0.25)) == {"name": "memory", "decay": 0.25}
    with pytest.raises(RCDError, match="unknown setting of carry 'decy'"):
        chosen.with_settings({"carry.decy": 1})
    with pytest.raises(RCDError, match="Gated reads no codebook"):
        config.with_settings({"carry.name": "gated", "residual.codebook_gradient": True})
    with pytest.raises(RCDError, match=r"carry should be Carry \| None, not 3"):
        TrainConfig(carry=3)  # type: ignore[arg-type]
    with pytest.raises(RCDError, match="no model is trained for the carry IterSmooth"):
        TrainConfig(carry=registry.get("carry", "iter_smooth")())
    assert plan("target", replace(config, carry=Gated(share=0.3), max_steps=10))


def test_a_carry_that_is_not_registered_cannot_be_written() -> None:
    with pytest.raises(RCDError, match="unknown carry 'Memory'"):
        TrainConfig(carry=Memory()).to_json()


@pytest.mark.parametrize("name", ["memory", "gated"])
def test_a_run_trains_it_and_resumes(
    name: str, registered: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = (f"carry.name={name}", "max_steps=6")
    run(tmp_path / "whole", *quick)
    assert "alpha" not in capsys.readouterr().out  # these states have none
    assert not (tmp_path / "whole/reference").exists()
    logged = metrics(tmp_path / "whole/target")
    assert len(logged) == 6 and logged[-1]["cross_entropy"] < logged[0]["cross_entropy"]
    held = RCDFile.read(tmp_path / "whole/target/model")
    assert held.carry is not None and held.carry["name"] == name and held.stage == name
    learnt = tmp_path / "whole/target/model" / CARRY_FILE
    assert learnt.exists() == (name == "gated")

    import shutil

    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    shutil.rmtree(tmp_path / "stopped/target/model")
    shutil.rmtree(tmp_path / "stopped/target/checkpoints/step-00000006")
    run(tmp_path / "stopped", *quick, resume=True)
    same: Callable[[Path], dict[str, torch.Tensor]] = lambda folder: load_file(folder)  # noqa: E731
    for file in ("model.safetensors", *([CARRY_FILE] if learnt.exists() else [])):
        ours, theirs = (same(tmp_path / each / "target/model" / file) for each in ("stopped", "whole"))
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.items())


def test_new_parameters_are_a_function_of_the_seed(registered: None, tmp_path: Path) -> None:
    """Whatever was drawn before, and on every process."""
    held = []
    for number in range(2):
        torch.manual_seed(number)
        run(tmp_path / str(number), "carry.name=gated", "max_steps=1", "learning_rate=0")
        held.append(load_file(tmp_path / str(number) / "target/model" / CARRY_FILE))
    assert all(torch.equal(tensor, held[1][key]) for key, tensor in held[0].items())
