"""`rcd bench` as a user meets it, on a shape small enough for a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import rcd
from rcd.bench import decode as bench
from rcd.bench import limits
from rcd.bench import workload as loads
from rcd.bench.shapes import SHAPES, checkpoint_for, described, random_model
from rcd.cli.main import app
from rcd.errors import RCDError
from rcd.models.checkpoint import build
from rcd.models.tensors import active, layout_of, shape_of
from rcd.models.toy import toy

TINY = "bench decode --shape sdar-tiny --prefix 32 --block-length 8 --blocks 2 --device cpu".split()
DECODE = [*TINY, "--repeats", "1"]
STEPS = [*TINY, "--rounds", "3"]
TRAIN = "bench train --shape sdar-tiny --length 32 --batch 2 --block-length 8 --steps 1 --device cpu".split()


def call(*args: str) -> Any:
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == 0, result.exception
    return result


def refused(*args: str) -> str:
    """What `main` prints before it exits with code 2."""
    result = CliRunner().invoke(app, list(args))
    assert isinstance(result.exception, RCDError), result.output
    return str(result.exception)


@pytest.fixture(scope="module")
def llada(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("bench") / "model"
    rcd.Pipeline(toy("llada", seed=2, context=256)).save(path)
    return str(path)


def test_a_table_of_stock_seqd_and_rcd() -> None:
    done = call(*STEPS)
    lines = done.stdout.splitlines()
    head = "batch prefix threads method steps ms/step x stock x SeqD tokens/s of limit alpha GiB"
    assert lines[2].split() == head.split()
    names = ["stock", "stock loop", "SeqD", "RCD exact", "RCD kept"]
    assert [name for name, line in zip(names, lines[3:], strict=True) if f"  {name} " in line] == names


def test_json_has_what_the_table_has(tmp_path: Path) -> None:
    path = tmp_path / "new" / "figures.json"
    done = call(*DECODE, "--json", "--stock", "--output", str(path))
    found = json.loads(done.stdout)
    assert found == json.loads(path.read_text())
    stock, loop, seqd, exact, kept = found["rows"]
    assert (seqd["method"], seqd["over_seqd"], seqd["peak_gib"]) == ("SeqD", 1.0, None)
    # one round: the median of the ratios is the ratio; both values are rounded, to 4 digits behind the point
    assert exact["over_seqd"] == pytest.approx(exact["ms_per_step"] / seqd["ms_per_step"], abs=1e-2, rel=1e-2)
    assert exact["over_stock"] == pytest.approx(exact["ms_per_step"] / stock["ms_per_step"], abs=1e-2, rel=1e-2)
    assert (stock["over_stock"], stock["over_seqd"], loop["tokens_per_second"]) == (1.0, None, None)
    assert kept["tokens_per_second"] > 0
    assert all(row["stock_ms"] == stock["ms_per_step"] and row["cpu_ms"] > 0 for row in found["rows"])
    assert (found["shape"], found["device"][:4], found["dtype"]) == ("sdar-tiny", "cpu ", "float32")
    assert found["bandwidth_gb_per_s"] > 0


def test_rounds_of_steps_leave_out_those_that_store_a_block() -> None:
    rows = json.loads(call(*STEPS, "--json", "--no-stock").stdout)["rows"]
    assert [(row["method"], row["rounds"], row["steps"]) for row in rows] == [
        ("SeqD", 3, 4), ("RCD exact", 3, 4), ("RCD kept", 3, 4),  # two steps a block: the third one stores
    ]  # fmt: skip
    assert all(row["storing_ms"] > 0 and row["stock_ms"] is None for row in rows)


def test_batches_and_threads_are_lists() -> None:
    threads = torch.get_num_threads()
    args = ("--batch", "1,2", "--threads", "1,2", "--carry", "none", "--no-stock", "--cpu-time")
    done = call(*STEPS, *args)
    assert [line.split()[:3] for line in done.stdout.splitlines()[3:]] == [
        ["1", "32", "1"], ["2", "32", "1"], ["1", "32", "2"], ["2", "32", "2"],
    ]  # fmt: skip
    assert "CPU ms" in done.stdout
    assert torch.get_num_threads() == threads


def test_random_weights_are_as_sure_as_a_language_model() -> None:
    rows = json.loads(call(*STEPS, "--json", "--no-stock", "--block-length", "32").stdout)["rows"]
    assert all(0.05 < row["mean_alpha"] < 0.3 for row in rows)


def test_a_canvas_beside_the_whole_forward() -> None:
    model = toy("llada", seed=2, context=256).model
    load = loads.Workload(block_length=8, prefix=8, blocks=1, window="bidirectional")
    figures = bench.compare(model, load, loads.methods(), speed=1e10, rounds=2)
    assert [figure.method for figure in figures] == ["stock", "stock loop", "SeqD", "RCD exact", "RCD kept"]


def test_bundled_models_answer_real_prompts_with_the_carry_of_their_training() -> None:
    found = checkpoint_for("bundled:words-rcd", torch.device("cpu"), "auto")
    load = loads.real_prompts(found, loads.Workload(**loads.usual(found.model.settings, False, False)))
    assert load.block_length == 32 and load.new_tokens >= 48
    assert load.prompts and {len(ids) for ids in load.prompts} == {load.prefix}
    assert loads.methods("residual", None, found.rcd.carry)[0].carry.strongest == 0.3
    rows = json.loads(call("bench", "decode", "--shape", "bundled:words-rcd", "--rounds", "2", "--json").stdout)["rows"]
    assert {row["prefix"] for row in rows} == {load.prefix}


def test_methods_can_be_picked() -> None:
    names = [[method.name for method in loads.methods(*given)] for given in (("none",), ("residual", "kept"))]
    assert names == [["SeqD"], ["RCD kept"]]
    args = ("--no-stock", "--json", "--carry", "residual", "--delta", "exact")
    (row,) = json.loads(call(*DECODE, *args).stdout)["rows"]
    assert (row["method"], row["over_seqd"]) == ("RCD exact", None)


@pytest.mark.parametrize(("growth", "values"), [("batch", (1, 3)), ("prefix", (16, 40))])
def test_growth_has_a_row_for_each_size(monkeypatch: pytest.MonkeyPatch, growth: str, values: tuple[int, ...]) -> None:
    monkeypatch.setitem(loads.GROWTH, growth, (*values, 10**6))
    load = loads.Workload(block_length=8, prefix=32, blocks=2)
    settings = described("sdar-tiny")[3]
    # a prefix beyond the context is left out; a batch may be as large as the memory
    assert len(list(load.grown(growth, settings))) == (3 if growth == "batch" else 2)
    monkeypatch.setitem(loads.GROWTH, growth, values)
    rows = json.loads(call(*DECODE, "--json", "--no-stock", "--carry", "none", "--growth", growth).stdout)["rows"]
    assert [row[growth] for row in rows] == list(values)


def test_a_point_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench.compare

    def compare(model: Any, load: loads.Workload, *more: Any) -> list[bench.Figure]:
        if load.batch == 2:
            raise RCDError("the cache does not fit.")
        return real(model, load, *more)

    monkeypatch.setitem(loads.GROWTH, "batch", (1, 2, 3))
    monkeypatch.setattr(bench, "compare", compare)
    done = call(*DECODE, "--json", "--no-stock", "--carry", "none", "--growth", "batch")
    assert [row["batch"] for row in json.loads(done.stdout)["rows"]] == [1, 3]
    assert "batch 2" in done.stderr
    assert "does not fit" in done.stderr


def test_a_checkpoint_and_the_dual_window(llada: str) -> None:
    place = DECODE.index("sdar-tiny")
    args = (*DECODE[:place], llada, *DECODE[place + 1 :], "--json", "--window", "dual")
    found = json.loads(call(*args).stdout)
    assert found["window"] == "dual"
    assert [row["method"] for row in found["rows"]][2:] == ["SeqD", "RCD exact", "RCD kept"]


def test_all_methods_take_equally_many_steps() -> None:
    """So that milliseconds of a step compare: 2 blocks of 8, 4 tokens a step, 2 rows."""
    model = random_model("sdar-tiny", torch.device("cpu"), torch.float32).model
    load = loads.Workload(block_length=8, batch=2, prefix=32, blocks=2)
    figures = bench.compare(model, load, loads.methods(), speed=1e10, repeats=1, stock=False)
    assert {figure.steps for figure in figures} == {4}


@pytest.mark.parametrize(("family", "window"), [("sdar", "d2f"), ("llada", "d2f"), ("llada", "prefix")])
def test_every_window_is_measured(family: str, window: str) -> None:
    """The methods take equally many steps; blocks in flight take fewer, for as many tokens."""
    model = toy(family, seed=2, context=256).model
    load = loads.Workload(block_length=8, prefix=32, blocks=3, tokens_per_step=2, window=window)
    figures = bench.compare(model, load, loads.methods(), speed=1e10, repeats=1, stock=False)
    assert len({figure.steps for figure in figures}) == 1
    assert all((figure.tokens_per_second or 0) > 0 for figure in figures)
    alone = 3 * 4  # steps of three blocks, one after another
    steps = figures[0].steps or 0
    assert 0 < steps < alone if window == "d2f" else steps >= alone


def test_what_a_step_must_read() -> None:
    model = random_model("sdar-tiny", torch.device("cpu"), torch.float32).model
    load = loads.Workload(block_length=8, batch=2, prefix=32, blocks=2)
    weights = sum(p.numel() for p in (*model.parameters(), *model.buffers())) - model.codebook.numel()
    cache = 2 * 2 * 8 * 16 * 2 * (32 + 8)  # k and v, layers, heads, dimension, rows, positions
    assert limits.step_bytes(model, load) == 4 * (weights + cache)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--tokens-per-step", "3"], "does not divide the block length 8"),
        (["--shape", "words-rcd"], "did you mean 'bundled:words-rcd'?"),
        (
            ["--shape", "sdar-9b"],
            "sdar-0.6b, sdar-1.7b, sdar-4b, sdar-8b, sdar-tiny, sdar-30b-a3b, llada-0.3b, llada-8b, llada2-mini",
        ),
        (["--window", "dual"], "does not fit this checkpoint"),
        (["--window", "prefix"], "does not fit this checkpoint"),
        (["--window", "all"], "unknown window"),
        (["--shape", "llada-8b", "--window", "blockwise"], "does not fit this checkpoint"),
        (["--prefix", "32768"], "but the model has 32768"),
        (["--carry", "soft_mask"], "unknown carry"),
        (["--delta", "some"], "unknown delta"),
        (["--growth", "both"], "unknown growth"),
        (["--batch", "0"], "batch must be"),
        (["--batch", "1,many"], "--batch should be a whole number, not 'many'"),
        (["--threads", "0"], "threads must be"),
        (["--rounds", "3"], "either --rounds or --repeats"),
        (["--repeats", "0"], "repeats must be"),
        (["--dtype", "int8"], "unknown dtype"),
    ],
)
def test_bad_input_is_one_sentence(args: list[str], words: str) -> None:
    assert words in refused(*DECODE, *args)


def test_a_device_that_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert "cannot be used here" in refused(*DECODE, "--device", "cuda")
    assert "cannot be used here" in refused(*TRAIN, "--device", "cuda")


def test_figures_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "give another file" in refused(*DECODE, "--carry", "none", "--output", str(tmp_path / "file" / "figures"))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_described(shape: str) -> None:
    spec, _, backbone, settings = described(shape)
    assert spec.name == SHAPES[shape][0]
    assert settings.eos_token_ids == ()
    assert settings.context_length == backbone["max_position_embeddings"]


@pytest.mark.parametrize(
    ("shape", "billions", "used"),
    [("llada2-mini", 16.26, 1.44), ("sdar-30b-a3b", 30.53, 3.35), ("llada2-flash", 102.9, 6.1)],
)
def test_shapes_with_experts_have_the_published_sizes(shape: str, billions: float, used: float) -> None:
    spec, config, backbone, settings = described(shape)
    model = build(spec, settings, backbone)
    layout = layout_of(spec, {name: tuple(each.shape) for name, each in model.named_parameters()})
    tensors = [(name, shape_of(pieces)) for name, pieces in layout.items()]
    assert model.size == pytest.approx(billions * 1e9, rel=0.01)
    assert active(spec, config, tensors) == pytest.approx(used * 1e9, rel=0.03)


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    """Of 32 experts a token goes to 8; those that none of n tokens goes to are 0.75^n of all."""
    model = random_model("llada2-tiny", torch.device("cpu"), torch.float32).model
    experts = 4 * 32 * 3 * 64 * 128
    assert limits.unread_bytes(model, 0) == experts
    assert limits.unread_bytes(model, 2) == int(experts * 0.75**2)
    dense = random_model("sdar-tiny", torch.device("cpu"), torch.float32).model
    assert limits.unread_bytes(dense, 1) == 0
    load = loads.Workload(batch=1, prefix=64, block_length=8, blocks=2)
    whole = limits.weight_bytes(model) - limits.unread_bytes(model, 8)
    assert whole < limits.step_bytes(model, load) < limits.weight_bytes(model)


def test_a_model_with_experts_is_measured_like_any_other() -> None:
    rows = json.loads(call(*(part.replace("sdar-tiny", "llada2-tiny") for part in STEPS), "--json").stdout)["rows"]
    assert [row["method"] for row in rows] == ["stock", "stock loop", "SeqD", "RCD exact", "RCD kept"]


def test_training_tells_both_objectives() -> None:
    done = call(*TRAIN)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["method", "seqd", "rcd"]
    assert "say little" in done.stderr


def test_training_figures_as_json(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    found = json.loads(call(*TRAIN, "--json", "-o", str(path)).stdout)
    assert found == json.loads(path.read_text())
    seqd, rcd_ = found["rows"]
    assert (seqd["method"], seqd["over_seqd"], rcd_["method"]) == ("seqd", 1.0, "rcd")
    assert rcd_["over_seqd"] > 0
    assert 0 < seqd["loss"] < 100
    (alone,) = json.loads(call(*TRAIN, "--json", "--method", "rcd").stdout)["rows"]
    assert alone["over_seqd"] is None


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--method", "all"], "unknown method"),
        (["--shape", "sdar-9b"], "take one of"),
        (["--reference", "llada-8b"], "does not have the tokens"),
        (["--length", "100000"], "longer than sdar-tiny's context"),
        (["--steps", "0"], "steps must be"),
    ],
)
def test_bad_training_input_is_one_sentence(args: list[str], words: str) -> None:
    assert words in refused(*TRAIN, *args)
