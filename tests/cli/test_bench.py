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
from rcd.bench.shapes import SHAPES, described, random_model
from rcd.cli.main import app
from rcd.errors import RCDError
from rcd.models.toy import toy

DECODE = "bench decode --shape sdar-tiny --prefix 32 --block-length 8 --blocks 2 --repeats 1 --device cpu".split()
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


def test_a_table_of_seqd_and_rcd() -> None:
    done = call(*DECODE)
    lines = done.stdout.splitlines()
    assert lines[2].split() == "batch prefix method steps ms/step tokens/s of limit x SeqD GiB".split()
    assert [" ".join(line.split()[2:-6]) for line in lines[3:]] == ["SeqD", "RCD exact", "RCD kept"]
    assert "say little" in done.stderr


def test_json_has_what_the_table_has(tmp_path: Path) -> None:
    path = tmp_path / "new" / "figures.json"
    done = call(*DECODE, "--json", "--stock", "--output", str(path))
    found = json.loads(done.stdout)
    assert found == json.loads(path.read_text())
    seqd, exact, kept = found["rows"]
    assert (seqd["method"], seqd["over_seqd"], seqd["peak_gib"]) == ("SeqD", 1.0, None)
    # all three are rounded, to 4 digits behind the point; one that was held up may be many times the other
    assert exact["over_seqd"] == pytest.approx(exact["ms_per_step"] / seqd["ms_per_step"], abs=1e-2, rel=1e-2)
    assert kept["tokens_per_second"] > 0
    assert all(row["stock_ms"] > 0 for row in found["rows"])
    assert (found["shape"], found["device"], found["dtype"]) == ("sdar-tiny", "cpu", "float32")
    assert found["bandwidth_gb_per_s"] > 0


def test_methods_can_be_picked() -> None:
    names = [[method.name for method in bench.methods(*given)] for given in (("none",), ("residual", "kept"))]
    assert names == [["SeqD"], ["RCD kept"]]
    (row,) = json.loads(call(*DECODE, "--json", "--carry", "residual", "--delta", "exact").stdout)["rows"]
    assert (row["method"], row["over_seqd"]) == ("RCD exact", None)


@pytest.mark.parametrize(("growth", "values"), [("batch", (1, 3)), ("prefix", (16, 40))])
def test_growth_has_a_row_for_each_size(monkeypatch: pytest.MonkeyPatch, growth: str, values: tuple[int, ...]) -> None:
    monkeypatch.setitem(bench.GROWTH, growth, (*values, 10**6))
    load = bench.Workload(block_length=8, prefix=32, blocks=2)
    settings = described("sdar-tiny")[3]
    # a prefix beyond the context is left out; a batch may be as large as the memory
    assert len(list(load.grown(growth, settings))) == (3 if growth == "batch" else 2)
    monkeypatch.setitem(bench.GROWTH, growth, values)
    rows = json.loads(call(*DECODE, "--json", "--carry", "none", "--growth", growth).stdout)["rows"]
    assert [row[growth] for row in rows] == list(values)


def test_a_point_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench.measure

    def measure(model: Any, load: bench.Workload, *more: Any) -> bench.Figure:
        if load.batch == 2:
            raise RCDError("the cache does not fit.")
        return real(model, load, *more)

    monkeypatch.setitem(bench.GROWTH, "batch", (1, 2, 3))
    monkeypatch.setattr(bench, "measure", measure)
    done = call(*DECODE, "--json", "--carry", "none", "--growth", "batch")
    assert [row["batch"] for row in json.loads(done.stdout)["rows"]] == [1, 3]
    assert "batch 2" in done.stderr
    assert "does not fit" in done.stderr


def test_a_checkpoint_and_the_dual_window(llada: str) -> None:
    place = DECODE.index("sdar-tiny")
    found = json.loads(call(*DECODE[:place], llada, *DECODE[place + 1 :], "--json", "--stock").stdout)
    assert found["window"] == "dual"
    assert [row["method"] for row in found["rows"]] == ["SeqD", "RCD exact", "RCD kept"]


def test_all_methods_take_equally_many_steps() -> None:
    """So that milliseconds of a step compare: 2 blocks of 8, 4 tokens a step, 2 rows; and one step too many."""
    model = random_model("sdar-tiny", torch.device("cpu"), torch.float32).model
    load = bench.Workload(block_length=8, batch=2, prefix=32, blocks=2)
    figures = bench.compare(model, load, bench.methods(), speed=1e10, repeats=1)
    assert len({figure.steps for figure in figures}) == 1
    assert 5 <= figures[0].steps <= 6  # one of them may only store, until the engine knows the pace


@pytest.mark.parametrize(("family", "window"), [("sdar", "d2f"), ("llada", "d2f"), ("llada", "prefix")])
def test_every_window_is_measured(family: str, window: str) -> None:
    """The methods take equally many steps; blocks in flight take fewer, for as many tokens."""
    model = toy(family, seed=2, context=256).model
    load = bench.Workload(block_length=8, prefix=32, blocks=3, tokens_per_step=2, window=window)
    figures = bench.compare(model, load, bench.methods(), speed=1e10, repeats=1)
    assert len({figure.steps for figure in figures}) == 1
    assert all(figure.tokens_per_second > 0 for figure in figures)
    alone = 3 * 4  # steps of three blocks, one after another
    assert figures[0].steps < alone if window == "d2f" else figures[0].steps >= alone


def test_what_a_step_must_read() -> None:
    model = random_model("sdar-tiny", torch.device("cpu"), torch.float32).model
    load = bench.Workload(block_length=8, batch=2, prefix=32, blocks=2)
    weights = sum(p.numel() for p in model.parameters()) - model.codebook.numel()
    cache = 2 * 2 * 8 * 16 * 2 * (32 + 8)  # k and v, layers, heads, dimension, rows, positions
    assert bench.step_bytes(model, load) == 4 * (weights + cache)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--tokens-per-step", "3"], "does not divide the block length 8"),
        (["--shape", "sdar-9b"], "sdar-1.7b, sdar-4b, sdar-8b, sdar-tiny, llada-8b"),
        (["--window", "dual"], "does not fit this checkpoint"),
        (["--window", "prefix"], "does not fit this checkpoint"),
        (["--window", "all"], "unknown window"),
        (["--shape", "llada-8b", "--window", "blockwise"], "does not fit this checkpoint"),
        (["--prefix", "32768"], "but the model has 32768"),
        (["--carry", "soft_mask"], "unknown carry"),
        (["--delta", "some"], "unknown delta"),
        (["--growth", "both"], "unknown growth"),
        (["--batch", "0"], "batch must be"),
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
    assert spec.name == shape.split("-")[0]
    assert settings.eos_token_ids == ()
    assert settings.context_length == backbone["max_position_embeddings"]


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
