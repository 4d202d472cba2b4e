"""The command `rcd serve`: its flags are the settings, and what is missing is told in a sentence."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rcd.api import Pipeline, load
from rcd.cli import serve
from rcd.cli.flags import Given
from rcd.cli.main import app
from rcd.decode.config import DecodeConfig
from rcd.errors import RCDError
from rcd.serve.loading import Models
from rcd.serve.service import LocalService
from rcd.serve.settings import RaySettings, ServeSettings
from rcd.settings import entries


def test_every_setting_of_the_server_is_a_flag() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).output
    for entry in (*entries(ServeSettings), *entries(RaySettings)):
        assert f"--{entry.name.replace('_', '-')}" in shown, entry.name


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--port", "70000"], "port must be a whole number from 0 to 65535"),
        (["--max-batch", "0"], "max_batch must be a whole number from 1 to 128"),
        (["--threshold", "2"], "threshold must be in"),
        (["--model", "a=x", "--model", "a=y"], "two models are named"),
        (["--replicas", "2"], "--replicas is of a cluster; say --ray as well"),
        (["--ray", "--replicas", "none"], "replicas must be a whole number of 1 or more, or auto, not 'none'"),
        (["--ray", "--replicas", "0"], "replicas must be a whole number of 1 or more"),
        (["--ray", "--ray-app", "a b"], "ray_app must be letters, digits"),
        (["--ray", "--min-replicas", "4", "--max-replicas", "2"], "max_replicas is 2 and min_replicas 4"),
        (["--ray", "--replica-gpus", "1.5"], "replica_gpus above 1 is a whole number"),
        (["--ray", "--ray-address", "ray://head:10001"], "name the head as HOST:PORT"),
    ],
)
def test_what_a_flag_cannot_be_is_refused_before_a_model_is_read(args: list[str], message: str) -> None:
    found = CliRunner().invoke(app, ["serve", *args])
    assert isinstance(found.exception, RCDError) and message in str(found.exception)


def test_without_the_extra_the_command_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "NEEDS", ("fastapi", "no_such_package"))
    with pytest.raises(RCDError, match=r"needs no_such_package; install the extra: pip install .*\[serve\]"):
        serve.check_extra()


def test_without_ray_the_command_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == "ray" else find_spec(name))
    found = CliRunner().invoke(app, ["serve", "--ray"])
    assert isinstance(found.exception, RCDError)
    assert "--ray needs Ray: pip install 'residual-context-diffusion[ray,serve]'" in str(found.exception)


def test_what_replicas_are_told_travels() -> None:
    """The models of a command line, pickled: a replica in another folder makes the same defaults of it."""
    given = Given({"threshold": 0.5}, carry={"t_res": 0.5})
    models = Models({"a": ".", "b": "org/name"}, serve.Configured(given.config(), given, None))
    there = pickle.loads(pickle.dumps(models.elsewhere()))
    assert there.sources == {"a": os.getcwd(), "b": "org/name"}
    assert there.configured.base.threshold == 0.5 and there.configured.decoding.carry == {"t_res": 0.5}


def test_flags_of_the_carry_leave_models_without_one_as_they_are() -> None:
    base, given = DecodeConfig(), Given(carry={"t_res": 0.5})
    assert serve.config_of(base, given, None, None) == base
    changed = serve.config_of(base, given, None, {"name": "residual", "alpha_scale": 4})
    assert changed.travelling.t_res == 0.5 and changed.travelling.alpha_scale == 4  # type: ignore[attr-defined]
    assert serve.config_of(base, given, "residual", None).travelling.t_res == 0.5  # type: ignore[attr-defined]


def test_bundled_models_are_served_at_the_threshold_they_are_shown_with(tmp_path: Path) -> None:
    bundled = load("bundled:words-rcd")
    copied = Pipeline(replace(bundled.checkpoint, folder=tmp_path))
    for given, pipeline, threshold in (({}, bundled, 0.95), ({"threshold": 0.5}, bundled, 0.5), ({}, copied, 0.85)):
        flags = Given(dict(given))
        assert serve.Configured(flags.config(), flags, None)(pipeline).threshold == threshold


def test_a_model_has_its_engine_before_the_first_request() -> None:
    service = LocalService({"words-rcd": load("bundled:words-rcd")}, ServeSettings(max_batch=4))
    service.warm("words-rcd")
    loop = service.models["words-rcd"].pipeline.loop
    assert [engine.rows_most for engine in loop.engines] == [4] and loop.made == 1
