"""What is answered does not depend on who else asks, nor on what is kept of prompts."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
import torch

import rcd
from rcd.data.tasks.base import problems
from rcd.decode.config import DecodeConfig
from rcd.serve.service import LocalService
from rcd.serve.settings import ServeSettings
from tests.batches import save_model
from tests.serve.conftest import Api, chunks, said

KNOBS: list[dict[str, Any]] = [
    {}, {"rcd": {"carry": False}}, {"rcd": {"threshold": 0.6}}, {"max_tokens": 20}, {"model": "words-seqd"},
    {"logprobs": 3}, {"stop": ["Answer", "9"]}, {"rcd": {"alpha_scale": 0.5, "steps": 2}},
]  # fmt: skip


def test_greedy_answers_are_those_given_alone_among_64_others(make_api: Any) -> None:
    """Of each setting eight problems, with and without a stream, beside as many that draw."""
    api: Api = make_api("words-rcd", "words-seqd", config=DecodeConfig(batch_invariant=True))
    asked = [problem.question for problem in problems("words", "test", 64, seed=3)]
    greedy = [{"prompt": asked[k], **KNOBS[k % len(KNOBS)]} for k in range(64)]
    drawn = [
        {**body, "temperature": 0.3 + k / 40, "seed": k, "n": 1 + k % 3, "top_p": 0.9} for k, body in enumerate(greedy)
    ]
    alone = [api.complete(**body)["choices"][0]["text"] for body in greedy]

    async def together(client: httpx.AsyncClient) -> list[str]:
        async def one(number: int) -> str:
            stream: dict[str, Any] = {"stream": True} if number % 2 else {}
            if number % 4 == 3:
                stream["rcd"] = {**greedy[number].get("rcd", {}), "drafts": True}
            answer = await client.post("/v1/completions", json={**greedy[number], **stream})
            return said(chunks(answer.text)) if stream else str(answer.json()["choices"][0]["text"])

        others = [asyncio.ensure_future(client.post("/v1/completions", json=body)) for body in drawn]
        found = await asyncio.gather(*(one(number) for number in range(64)))
        assert {answer.status_code for answer in await asyncio.gather(*others)} == {200}
        return list(found)

    assert api.run(together) == alone


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("talker") / "model")


def test_turns_of_a_chat_are_the_same_with_and_without_kept_prompts(talker: str) -> None:
    def talk(kept: int) -> tuple[list[str], list[int]]:
        settings = ServeSettings(prefix_cache=kept)
        config = DecodeConfig(block_length=8, max_new_tokens=12, carry="residual")  # batch_invariant keeps no prompts
        pipeline = rcd.load(talker, device="cpu", dtype=torch.float64)
        api = Api(LocalService({"talker": pipeline}, settings, config), settings)
        messages, texts, cached = [{"role": "system", "content": "the old river"}], list[str](), list[int]()
        for number in range(5):
            messages.append({"role": "user", "content": "the old fox runs to a red river " * (1 + number % 2)})
            body: Any = {"messages": messages, "temperature": number % 2 * 0.8, "seed": 3}
            answer = api.post("/v1/chat/completions", body).json()
            texts.append(answer["choices"][0]["message"]["content"])
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            messages.append({"role": "assistant", "content": texts[-1]})
        return texts, cached

    (texts, cached), (plain, none) = talk(1 << 20), talk(0)
    assert texts == plain
    assert none == [0] * 5 and cached[0] == 0 < cached[1] < cached[2] < cached[3] < cached[4]
