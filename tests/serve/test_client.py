"""The official client against a server behind a socket."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.processes import FAILSAFE
from tests.serve.conftest import QUESTION, Running

ANSWER = "40 - 15 = 25. Answer: 25"
USER: Any = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def client(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", timeout=FAILSAFE, max_retries=0)


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["words-rcd", "words-seqd", "llada-rcd"]
    assert client.models.retrieve("llada-rcd").id == "llada-rcd"


def test_completions_plain_and_streamed(client: openai.OpenAI) -> None:
    plain = client.completions.create(model="words-rcd", prompt=QUESTION, n=2, logprobs=2, stop="Answer")
    assert [choice.text for choice in plain.choices] == ["40 - 15 = 25. "] * 2
    assert plain.choices[0].finish_reason == "stop" and plain.choices[0].logprobs is not None
    assert plain.usage is not None and plain.usage.model_extra is not None
    assert plain.usage.model_extra["denoising_steps"] > 0
    streamed = list(client.completions.create(model="words-rcd", prompt=QUESTION, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == ANSWER
    assert streamed[-1].choices[0].finish_reason == "stop"


def test_chats_plain_and_streamed(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(
        model="words-rcd", messages=USER, temperature=0, seed=3, logprobs=True, top_logprobs=2, user="me"
    )
    assert plain.choices[0].message.content == ANSWER and plain.choices[0].logprobs is not None
    assert plain.choices[0].logprobs.content and len(plain.choices[0].logprobs.content[0].top_logprobs) == 2
    streamed = list(
        client.chat.completions.create(
            model="words-rcd", messages=USER, stream=True, stream_options={"include_usage": True},
            extra_body={"rcd": {"threshold": 0.95, "drafts": True}},
        )
    )  # fmt: skip
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices) == ANSWER
    assert streamed[-1].usage is not None and streamed[-1].usage.completion_tokens > 0
    drafts = [chunk.model_extra["rcd"] for chunk in streamed if chunk.model_extra and "rcd" in chunk.model_extra]
    assert [draft["type"] for draft in drafts] == ["draft"] * (len(drafts) - 1) + ["done"]


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="response_format is not supported") as raised:
        client.chat.completions.create(model="words-rcd", messages=USER, response_format={"type": "json_object"})
    assert raised.value.param == "response_format"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="words-rcd", prompt=QUESTION, max_tokens=1000)
    assert long.value.code == "context_length_exceeded"


def test_a_key_is_asked_for(run_server: Any) -> None:
    running = run_server("words-rcd", keys=("right",))
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="wrong", timeout=FAILSAFE).models.list()
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="right", timeout=FAILSAFE)
    assert client.completions.create(model="words-rcd", prompt=QUESTION).choices[0].text == ANSWER


def test_the_example_for_openais_client_runs(running: Running, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parent.parent.parent / "docs/serving.md").read_text()
    example = next(text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "import OpenAI" in text)
    exec(compile(example.replace("http://127.0.0.1:8000", running.url), "serving.md", "exec"), {})
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("12 - 5 = 7") and told[1].startswith("step 1: ") and "7" in told[-1]
