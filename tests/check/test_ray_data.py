"""`rcd generate --ray` on a cluster of this machine: the answers of one process, byte for byte."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.batches import save_model, write_lines
from tests.processes import GatedChild, finish

pytest.importorskip("ray")
SETTINGS = ["--max-new-tokens", "12", "--device", "cpu", "--batch", "2"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two CPUs, on loopback; the commands find it by RAY_ADDRESS."""
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    found = ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    os.environ["RAY_ADDRESS"] = found.address_info["gcs_address"]
    yield
    del os.environ["RAY_ADDRESS"]
    ray.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ray")
    save_model(path / "model")
    write_lines(path / "in.jsonl")
    assert finish(rcd(folder_command(path, path / "whole.jsonl"))).returncode == 2
    return path


def folder_command(folder: Path, output: Path) -> list[str]:
    files = ["--input", str(folder / "in.jsonl"), "--output", str(output)]
    return ["generate", "--model", str(folder / "model"), *files, *SETTINGS]


def rcd(command: list[str]) -> list[str]:
    return [sys.executable, "-m", "rcd.cli.main", *command]


@pytest.mark.usefixtures("cluster")
def test_a_cluster_gives_the_answers_of_one_process(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    done = finish(rcd([*folder_command(folder, output), "--ray", "--actors", "2"]))
    assert done.returncode == 2, done.stderr
    assert done.stdout == "" and "rcd: 6 lines of 30 could not be answered" in done.stderr
    assert output.read_bytes() == (folder / "whole.jsonl").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.run.json"]


@pytest.mark.usefixtures("cluster")
def test_a_killed_run_on_a_cluster_goes_on_also_without_it(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    command = [*folder_command(folder, output), "--ray", "--actors", "1"]
    with GatedChild(command, "rcd.evaluate.journal:Journal.append", call=7, after=True) as child:
        child.arrive()
        child.send(signal.SIGKILL, group=True)
        child.process.wait()
    assert len((tmp_path / "out.jsonl.part-0").read_text().splitlines()) == 7
    done = finish(rcd(folder_command(folder, output)))
    assert done.returncode == 2 and "note: 7 lines of 30 answered before" in done.stderr
    assert output.read_bytes() == (folder / "whole.jsonl").read_bytes()


@pytest.mark.usefixtures("cluster")
def test_a_mistake_is_one_sentence_on_a_cluster_too(folder: Path, tmp_path: Path) -> None:
    command = [*folder_command(folder, tmp_path / "out.jsonl"), "--ray", "--start", "reference"]
    done = finish(rcd(command))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip().splitlines()[-1].startswith("rcd: this carry needs a reference model")
    assert "Traceback" not in done.stderr
