"""The files of deploy/, as the programs that read them see them: hadolint, systemd, nginx, Ray."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

import rcd
from rcd.decode.config import DecodeConfig
from rcd.decode.engine import Engine
from rcd.serve.service import LocalService
from rcd.serve.settings import ServeSettings
from tests.check.test_ray_serve import LONG, until
from tests.processes import FAILSAFE
from tests.serve.conftest import QUESTION, Running, chunks, said
from tests.unit.test_deploy import DEPLOY, config_files


def program(name: str) -> str:
    """Of the environment that runs this, or of the system. `make check` installs them and sets RCD_CHECKS."""
    found = shutil.which(
        name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"])
    )
    if found is None and os.environ.get("RCD_CHECKS") == "required":
        pytest.fail(f"{name} is not here; make check installs it")
    if found is None:
        pytest.skip(f"{name} is not here")
    return found


def said_by(*command: str) -> tuple[int, str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=FAILSAFE)
    return done.returncode, done.stdout + done.stderr


def test_hadolint_has_nothing_to_say_of_the_dockerfile() -> None:
    assert said_by(program("hadolint"), "--no-color", str(DEPLOY / "Dockerfile")) == (0, "")


def test_systemd_has_nothing_to_say_of_the_unit(tmp_path: Path) -> None:
    verify = program("systemd-analyze")
    unit = tmp_path / "rcd.service"
    unit.write_text((DEPLOY / "rcd.service").read_text().replace("/opt/rcd/bin/rcd", "/bin/true"))  # it must be there
    code, told = said_by(verify, "verify", str(unit))
    assert code == 0 and "rcd.service" not in told, told


@pytest.mark.parametrize("name", config_files())
def test_ray_takes_the_config_file(name: str) -> None:
    pytest.importorskip("ray.serve")
    from ray.serve.schema import ServeDeploySchema

    assert ServeDeploySchema.model_validate(config_files()[name]).applications[0].name == "rcd"


def test_kubernetes_is_told_of_one_service() -> None:
    (found,) = yaml.safe_load_all((DEPLOY / "rayservice.yaml").read_text())
    assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", "RayService")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def behind() -> Iterator[Running]:
    """A server that decodes every token that it is asked for, also behind the end of an answer."""
    settings = ServeSettings(port=0)
    service = LocalService({"words-rcd": rcd.load("bundled:words-rcd")}, settings, DecodeConfig(eos_early_stop=False))
    found = Running(service, settings)
    yield found
    found.end()


@pytest.fixture
def proxy(behind: Running, tmp_path: Path) -> Iterator[httpx.Client]:
    """nginx with the file of deploy/ and a certificate of its own, in front of a server of this process."""
    nginx = program("nginx")
    for name in ("crt", "key"):
        (tmp_path / f"rcd.{name}").touch()
    subprocess.run(
        [program("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-keyout", str(tmp_path / "rcd.key"), "-out",
         str(tmp_path / "rcd.crt")],
        check=True, capture_output=True, timeout=FAILSAFE,
    )  # fmt: skip
    plain, secure = free_port(), free_port()
    site = (DEPLOY / "nginx.conf").read_text()
    for old, new in (
        ("127.0.0.1:8000", f"127.0.0.1:{behind.port}"), ("/etc/nginx/tls", str(tmp_path)),
        ("rcd.example.org", "localhost"), ("listen 80;", f"listen 127.0.0.1:{plain};"),
        ("listen 443", f"listen 127.0.0.1:{secure}"),
    ):  # fmt: skip
        assert old in site
        site = site.replace(old, new)
    (tmp_path / "site.conf").write_text(site)
    paths = "".join(
        f"{name}_temp_path {tmp_path}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    main = tmp_path / "nginx.conf"
    main.write_text(
        f"daemon off; pid {tmp_path}/pid; error_log stderr; worker_processes 1;\n"
        f"events {{}}\nhttp {{ access_log off; {paths} include {tmp_path}/site.conf; }}\n"
    )
    code, told = said_by(nginx, "-t", "-p", str(tmp_path), "-e", "stderr", "-c", str(main))
    assert code == 0 and "warn" not in told, told
    command = [nginx, "-p", str(tmp_path), "-e", "stderr", "-c", str(main)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        trusted = ssl.create_default_context(cafile=str(tmp_path / "rcd.crt"))
        with httpx.Client(base_url=f"https://localhost:{secure}", verify=trusted, timeout=FAILSAFE) as client:
            client.headers["host"] = "localhost"
            end = time.monotonic() + FAILSAFE
            while time.monotonic() < end:
                try:
                    client.get("/health")
                    break
                except httpx.ConnectError:
                    time.sleep(0.05)
            client.plain = plain  # type: ignore[attr-defined]
            yield client
        process.terminate()
        process.wait(FAILSAFE)


def test_nginx_passes_answers_and_streams_on(proxy: httpx.Client, behind: Running) -> None:
    plain = httpx.get(f"http://localhost:{proxy.plain}/", timeout=FAILSAFE)  # type: ignore[attr-defined]
    assert plain.status_code == 301 and plain.headers["location"] == "https://localhost/"
    answer = proxy.post("/v1/completions", json={"prompt": QUESTION})
    assert answer.status_code == 200 and answer.headers["strict-transport-security"]
    stream = proxy.post("/v1/completions", json={"prompt": QUESTION, "stream": True})
    assert said(chunks(stream.text)) == answer.json()["choices"][0]["text"]
    assert proxy.post("/v1/completions", content=b"x" * (1 << 20) + b"y").status_code == 413


def test_a_client_that_leaves_nginx_frees_its_row(
    proxy: httpx.Client, behind: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first text comes while the rest is held back: of some 40 steps, a token each, 20 are made."""
    left, turn = threading.Event(), Engine.turn
    turns = itertools.count()

    def held(engine: Engine) -> Any:
        if next(turns) >= 20:
            assert left.wait(FAILSAFE)
        return turn(engine)

    monkeypatch.setattr(Engine, "turn", held)
    try:
        with proxy.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
            lines = answer.iter_lines()  # kept: an iterator that goes closes the connection
            next(line for line in lines if '"text"' in line)
            assert behind.service._open
        until(lambda: not behind.service._open)
    finally:
        left.set()
