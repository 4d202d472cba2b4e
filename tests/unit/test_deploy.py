"""The files of deploy/ agree with the settings that they stand beside. What programs say of them: tests/check."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from rcd.serve.settings import ServeSettings

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
DEFAULT = ServeSettings()


def config_files() -> dict[str, Any]:
    """What Ray Serve is given, by the file."""
    service = yaml.safe_load((DEPLOY / "rayservice.yaml").read_text())
    return {
        "ray-serve.yaml": yaml.safe_load((DEPLOY / "ray-serve.yaml").read_text()),
        "rayservice.yaml": yaml.safe_load(service["spec"]["serveConfigV2"]),
    }


@pytest.mark.parametrize("name", config_files())
def test_the_arguments_of_a_config_file_are_settings(name: str) -> None:
    from rcd.serve.deployed import read

    (application,) = config_files()[name]["applications"]
    models, _, placing = read(application["args"])
    assert models.sources and placing.count is None
    module, _, attribute = application["import_path"].partition(":")
    assert (module, attribute) == ("rcd.serve.ray", "app")
    assert f"\ndef {attribute}(" in (ROOT / "rcd/serve/ray.py").read_text()
    assert application["args"]["api_key_file"]  # whoever listens to the network asks for a key


def test_both_config_files_deploy_the_same_application() -> None:
    plain, kubernetes = config_files().values()
    assert plain["applications"] == kubernetes["applications"]


def test_the_cluster_of_kubernetes_has_what_its_pods_mount() -> None:
    config = yaml.safe_load((DEPLOY / "rayservice.yaml").read_text())["spec"]["rayClusterConfig"]
    for group in (config["headGroupSpec"], *config["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for one in pod["containers"] for mount in one["volumeMounts"]} <= volumes


def test_the_image_pins_what_the_makefile_pins_and_holds_no_secret() -> None:
    image = (DEPLOY / "Dockerfile").read_text()
    pinned = re.search(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert pinned is not None and f"ARG TORCH={pinned.group(1)}\n" in image
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in re.findall(r"EXTRAS=([\w,]+)", image):
        assert set(name.split(",")) <= extras.keys()
    assert re.findall(r"^USER (.*)$", image, re.MULTILINE) == ["10001"]
    assert not re.search(r"^(ENV|ARG).*(KEY|TOKEN|PASSWORD)", image, re.MULTILINE)
    let_in = (ROOT / ".dockerignore").read_text().split()
    copied = [name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", image, re.MULTILINE) for name in line.split()]
    assert "*" in let_in and all(f"!{name}" in let_in and (ROOT / name).exists() for name in copied)


def test_the_proxy_waits_longer_than_the_server_and_lets_the_same_bodies_in() -> None:
    text = (DEPLOY / "nginx.conf").read_text()
    waits = re.findall(r"proxy_read_timeout (\d+)s;", text)
    assert waits and all(float(seconds) > DEFAULT.timeout for seconds in waits)
    assert DEFAULT.max_body == 1 << 20 and "client_max_body_size 1m;" in text
    assert "proxy_buffering off;" in text and f"server 127.0.0.1:{DEFAULT.port};" in text


def test_systemd_waits_longer_than_the_server_drains() -> None:
    text = (DEPLOY / "rcd.service").read_text()
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert float(seconds) > DEFAULT.drain + 10
    assert f"--host {DEFAULT.host} --port {DEFAULT.port} " in text
