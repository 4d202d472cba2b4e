"""A cluster that is there: `rcd serve --ray` joins it and leaves nothing on it, a config file's application runs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import rcd
from rcd.serve.service import LocalService
from rcd.serve.settings import ServeSettings
from tests.check.test_ray_serve import LONG, Served, drawn, left_after, until
from tests.processes import FAILSAFE
from tests.serve.conftest import QUESTION, Api, chunks, said

pytest.importorskip("ray.serve")
KEY = {"authorization": "Bearer the-key"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Two CPUs; Ray's proxy on a free port of loopback. Its address."""
    import ray
    from ray import serve

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    found = ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    cluster_address.append(f"http://127.0.0.1:{port}")
    yield found.address_info["gcs_address"]
    serve.shutdown()
    ray.shutdown()


cluster_address: list[str] = []


@pytest.fixture(scope="module")
def deployed(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """The application of a config file, with a key."""
    from ray import serve

    from rcd.serve.ray import app

    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("the-key\n")
    args = {
        "models": ["bundled:words-rcd"], "api_key_file": str(keys), "replicas": 1, "replica_cpus": 0.2, "max_n": 64,
        "max_batch": 2, "health_period": 1, "decode": {"threshold": 0.9, "carry": "trained,t_res=0.95"},
    }  # fmt: skip
    serve.run(app(args), name="deployed", route_prefix="/")
    with httpx.Client(base_url=cluster_address[0], timeout=FAILSAFE, headers=KEY) as client:
        yield client
    serve.delete("deployed")


@pytest.fixture(scope="module")
def local() -> Api:
    from rcd.decode.config import DecodeConfig

    models = {"words-rcd": rcd.load("bundled:words-rcd")}
    settings = ServeSettings(max_n=64, max_batch=2)
    return Api(LocalService(models, settings, DecodeConfig(threshold=0.9, carry="trained,t_res=0.95")), settings)


def test_the_application_answers_behind_rays_proxy(deployed: httpx.Client, local: Api) -> None:
    right = local.complete()["choices"][0]["text"]
    answer = deployed.post("/v1/completions", json={"prompt": QUESTION})
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == right
    body: dict[str, Any] = {"prompt": QUESTION, "stream": True, "rcd": {"drafts": True}}
    events = chunks(deployed.post("/v1/completions", json=body).text)
    assert said(events) == right and drawn(events) == drawn(local.stream(**body))
    assert deployed.get("/v1/models").json() == local.get("/v1/models").json()
    assert deployed.get("/ready").status_code == 200 and "<html" in deployed.get("/").text


def test_keys_are_asked_for_behind_rays_proxy(deployed: httpx.Client) -> None:
    answer = httpx.post(f"{cluster_address[0]}/v1/completions", json={"prompt": QUESTION}, timeout=FAILSAFE)
    assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"


def test_a_client_that_leaves_rays_proxy_frees_the_rows_of_its_replica(deployed: httpx.Client) -> None:
    left_after(deployed, LONG, rows=2)


def test_the_command_joins_a_cluster_and_leaves_nothing_on_it(cluster: str, local: Api) -> None:
    from ray import serve

    served = Served("--replicas", "1", "--threshold", "0.9", "--t-res", "0.95", env={"RAY_ADDRESS": cluster})
    assert served.app in serve.status().applications
    answer = served.client.post("/v1/completions", json={"prompt": QUESTION})
    assert answer.json()["choices"][0]["text"] == local.complete()["choices"][0]["text"]
    assert served.end() == 0
    until(lambda: served.app not in serve.status().applications)
    until(lambda: not served.replicas())


def test_the_application_is_not_reached_without_the_commands_own_front(cluster: str) -> None:
    """What joins a cluster is asked by its own process alone: Ray's proxy, which asks for no key, has no way to it."""
    served = Served("--replicas", "1", env={"RAY_ADDRESS": cluster, "RCD_API_KEY": "the-key"})
    try:
        routes: Any = httpx.get(f"{cluster_address[0]}/-/routes", timeout=FAILSAFE).json()
        assert served.app not in routes.values()
        assert served.client.post("/v1/completions", json={"prompt": QUESTION}).status_code == 401
    finally:
        assert served.end() == 0


def test_a_wrong_argument_of_the_application_is_named(tmp_path: Path) -> None:
    from rcd.errors import RCDError
    from rcd.serve.deployed import read

    with pytest.raises(RCDError, match=r"unknown argument of the application 'replica'.*replicas"):
        read({"replica": 1})


def test_a_model_that_cannot_be_loaded_is_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rcd", "serve", "--ray", "--port", "0", "--model", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=FAILSAFE)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("rcd: ") and str(tmp_path) in line


def test_a_cluster_that_is_not_there_is_one_sentence() -> None:
    command = [sys.executable, "-m", "rcd", "serve", "--ray", "--port", "0", "--ray-address", "127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=FAILSAFE)
    assert done.returncode == 2
    assert done.stderr.startswith("rcd: the Ray cluster at 127.0.0.1:1 cannot be reached (")
