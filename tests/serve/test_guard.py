"""What stands before the API: keys, hosts, bounds of bodies, headers, and a log that no request can forge."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from rcd.errors import RCDError
from rcd.serve.guard import loopback
from rcd.serve.keys import read_keys
from rcd.serve.loading import named
from rcd.serve.server import warn_open
from rcd.serve.settings import ServeSettings
from tests.serve.conftest import QUESTION, Api

KEY = {"authorization": "Bearer right"}


def test_who_has_no_key_is_let_in_nowhere_but_to_health(make_api: Any) -> None:
    api: Api = make_api("words-rcd", keys=("other", "right"))
    for headers in ({}, {"authorization": "right"}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer"},
                    {"authorization": "Basic right"}, {"authorization": "Bearer rightx"}):  # fmt: skip
        for path in ("/v1/models", "/metrics", "/rcd/examples", "/openapi.json", "/nowhere"):
            answer = api.get(path, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        assert api.post("/v1/completions", {"prompt": QUESTION}, headers=headers).status_code == 401
        assert api.get("/health", headers=headers).status_code == api.get("/ready", headers=headers).status_code == 200
    for key in ("right", "other"):
        assert api.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
    assert api.get("/v1/models", headers={"authorization": "bearer  right"}).status_code == 200


def test_keys_come_from_the_environment_a_file_and_the_command_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.delenv("RCD_API_KEY", raising=False)
    assert read_keys((), None) == []
    (tmp_path / "keys").write_text("one\n\ntwo \n")
    monkeypatch.setenv("RCD_API_KEY", "three,four")
    assert read_keys(["five"], tmp_path / "keys") == ["three", "four", "one", "two", "five"]
    with pytest.raises(RCDError, match="cannot be read as keys"):
        read_keys((), tmp_path / "none")
    with pytest.raises(RCDError, match="printable"):
        read_keys(["schlüssel"], None)
    monkeypatch.setenv("RCD_API_KEY", " ")
    with pytest.raises(RCDError, match="none was given"):
        read_keys((), None)


def test_a_page_of_another_name_cannot_call_a_server_without_a_key(make_api: Any) -> None:
    api: Api = make_api("words-rcd", allow_host=("rcd.example.org",))
    for host in ("localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "rcd.example.org"):
        assert api.get("/health", headers={"host": host}).status_code == 200
    for host in ("evil.example.org", "localhost.evil.org", "127.0.0.1.evil.org"):
        assert api.get("/v1/models", headers={"host": host}).status_code == 403
    for hosts in (("localhost", "evil.example.org"), ("evil.example.org", "localhost"), ("",)):
        assert api.get("/v1/models", headers=[("host", host) for host in hosts]).status_code == 403
    assert make_api("words-rcd", keys=("k",)).get("/health", headers={"host": "evil.example.org"}).status_code == 200
    assert make_api("words-rcd", host="0.0.0.0").get("/health", headers={"host": "a.org"}).status_code == 200


def test_other_origins_may_not_call_unless_they_are_named(make_api: Any, api: Api) -> None:
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    plain = api.run(lambda client: client.options("/v1/completions", headers=asked))
    assert plain.status_code == 405 and "access-control-allow-origin" not in plain.headers
    named_ = make_api("words-rcd", cors_origin=("https://a.example",), keys=("k",))
    allowed = named_.run(lambda client: client.options("/v1/completions", headers=asked))
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "https://a.example"
    other = named_.run(
        lambda client: client.options("/v1/completions", headers={**asked, "origin": "https://b.example"})
    )
    assert "access-control-allow-origin" not in other.headers


def test_bodies_are_json_and_bounded(make_api: Any) -> None:
    api: Api = make_api("words-rcd", max_body=2048)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        answer = api.post("/v1/completions", content=b"{}", headers={"content-type": kind})
        assert answer.status_code == 415
    for coding, status in (("gzip", 415), ("gzip, identity", 415), ("identity", 400)):
        headers = {"content-type": "application/json", "content-encoding": coding}
        answer = api.post("/v1/completions", content=b"{}", headers=headers)
        assert answer.status_code == status and (status == 400 or "Content-Encoding" in answer.text)
    big = b'{"prompt": "' + b"x" * 10_000_000 + b'"}'
    answer = api.post("/v1/completions", content=big, headers={"content-type": "application/json"})
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"

    async def parts() -> Any:
        for _ in range(100):
            yield b" " * 1000

    answer = api.run(
        lambda client: client.post("/v1/completions", content=parts(), headers={"content-type": "application/json"})
    )
    assert answer.status_code == 413


def test_every_answer_has_its_number_and_safe_headers(api: Api) -> None:
    answers = [api.get("/health"), api.get("/nowhere"), api.post("/v1/completions", {"prompt": 5})]
    answers.append(api.post("/v1/completions", {"prompt": QUESTION, "stream": True}))
    for answer in answers:
        assert len(answer.headers["x-request-id"]) == 16
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
    assert api.get("/health", headers={"x-request-id": "my-1.A_b"}).headers["x-request-id"] == "my-1.A_b"
    for bad in ("a b", "x" * 65, "a/b", "\u00e9"):
        assert api.get("/health", headers={"x-request-id": bad.encode("latin-1")}).headers["x-request-id"] != bad


def test_unknown_paths_and_methods_answer_in_the_same_shape(api: Api) -> None:
    for answer, status in (
        (api.get("/v1/nothing"), 404),
        (api.get("/v1/completions"), 405),
        (api.post("/health"), 405),
    ):
        assert answer.status_code == status
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    assert api.get("/v1/completions").headers["allow"] == "POST"
    for path in ("/v1/completions/", "/health/"):  # a redirect would name the host and the scheme that the client gave
        assert api.get(path).status_code == api.post(path, {"prompt": QUESTION}).status_code == 404


def test_the_log_tells_of_a_request_without_its_prompt_and_cannot_be_forged(
    make_api: Any, caplog: pytest.LogCaptureFixture
) -> None:
    api: Api = make_api("words-rcd")
    with caplog.at_level(logging.INFO, "rcd.access"):
        used = api.complete()["usage"]
        api.get("/a%0A2026 POST /v1/completions 200%1b[2J", headers={"x-request-id": "x y"})
        api.get("/" + "x" * 5000 + "?key=secret")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3 and "Leo" not in lines[0] and "\n" not in "".join(lines) and "\x1b" not in "".join(lines)
    assert lines[0].startswith("POST /v1/completions 200 ")
    assert f'model="words-rcd" tokens={used["completion_tokens"]} steps={used["denoising_steps"]}' in lines[0]
    assert lines[1].count(" 404 ") == 1 and lines[1].split()[1].startswith("/a\\n2026\\u0020POST")
    assert len(lines[2]) < 300 and "secret" not in lines[2]


def test_prompts_are_logged_where_that_is_asked_for(make_api: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rcd.access"):
        make_api("words-rcd", log_prompts=True).complete()
    assert "Leo has 40 marbles" in caplog.text


def test_a_fault_of_ours_is_a_500_without_a_traceback(make_api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    api: Api = make_api("words-rcd")

    def broken(*args: Any, **more: Any) -> Any:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(api.service.models["words-rcd"].pipeline, "submit", broken)
    for body in ({"prompt": QUESTION}, {"prompt": QUESTION, "stream": True}):
        answer = api.post("/v1/completions", body)
        assert answer.status_code == 500 and "secret" not in answer.text and "Traceback" not in answer.text
    assert api.app.state.rcd.running == 0


def test_addresses_of_this_machine_are_known() -> None:
    assert loopback("127.0.0.1") and loopback("127.8.8.8") and loopback("::1") and loopback("localhost")
    assert not loopback("0.0.0.0") and not loopback("192.168.0.1") and not loopback("example.org")


def test_without_a_key_no_other_machine_reaches_it_unless_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert ServeSettings().host == "127.0.0.1"
    for host, keys, warned in (("127.0.0.1", (), 0), ("0.0.0.0", ("k",), 0), ("0.0.0.0", (), 1), ("::", (), 1)):
        warn_open(ServeSettings(host=host), keys)
        assert capsys.readouterr().err.count("anyone who reaches") == warned


def test_no_request_makes_a_label_of_metrics(make_api: Any) -> None:
    api: Api = make_api("words-rcd")
    for model in ("evil", "../evil", 'e"vil\n', "x" * 10_000):
        api.refused(model=model, status=404)
        api.get(f"/v1/models/{model.strip()}")
    labels = {line for line in api.get("/metrics").text.splitlines() if line.startswith("rcd_requests_total")}
    assert labels == {'rcd_requests_total{model="-",outcome="refused"} 4.0'}


def test_models_are_named_by_their_path_or_by_hand(tmp_path: Any) -> None:
    folder = tmp_path / "my=model"
    folder.mkdir()
    assert named(["bundled:words-rcd", "a=bundled:llada-rcd", "JetLM/SDAR-4B-Chat"]) == {
        "words-rcd": "bundled:words-rcd", "a": "bundled:llada-rcd", "JetLM/SDAR-4B-Chat": "JetLM/SDAR-4B-Chat"
    }  # fmt: skip
    assert named([f"b={folder}"]) == {"b": str(folder)}
    with pytest.raises(RCDError, match="two models are named 'a'"):
        named(["a=x", "a=y"])
    with pytest.raises(RCDError, match="NAME=PATH"):
        named(["a="])
    with pytest.raises(RCDError, match="is named by letters"):
        named(["<b>=x"])
