"""The API without a network: what is answered, plain and streamed, with log probabilities, drafts and usage."""

from __future__ import annotations

from typing import Any

import pytest

from rcd.api import Pipeline
from rcd.decode.config import DecodeConfig
from tests.serve.conftest import OTHER, QUESTION, Api, said

ANSWER = "40 - 15 = 25. Answer: 25"
USER = [{"role": "user", "content": QUESTION}]


def offline(pipeline: Pipeline, prompt: str = QUESTION, **settings: Any) -> Any:
    return pipeline.generate(prompt, DecodeConfig(**settings)).results[0]


def test_a_completion_is_what_the_pipeline_gives(api: Api, pipelines: dict[str, Pipeline]) -> None:
    found, right = api.complete(), offline(pipelines["words-rcd"])
    assert found["object"] == "text_completion" and found["model"] == "words-rcd" and found["id"].startswith("cmpl-")
    assert found["choices"] == [{"index": 0, "text": right.text, "logprobs": None, "finish_reason": "stop"}]
    prompt = len(pipelines["words-rcd"].encode(QUESTION)[0])
    assert found["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": right.tokens,
        "total_tokens": prompt + right.tokens,
        "prompt_tokens_details": {"cached_tokens": found["usage"]["prompt_tokens_details"]["cached_tokens"]},
        "denoising_steps": right.denoising_steps,
        "forwards": right.forwards,
        "tokens_per_step": round(right.tokens_per_step, 4),
    }


def test_what_commit_rules_read_is_a_requests_own(api: Api) -> None:
    """The rule itself is the server's; a setting that it does not read changes nothing."""
    own = {"entropy_bound": 0.3, "kl_threshold": 0.1, "edit_threshold": 0.9, "max_post_steps": 2, "alg_temp": 0.2}
    assert api.complete(rcd=own)["choices"] == api.complete()["choices"]
    for name in own:
        assert api.refused("/v1/completions", prompt=QUESTION, rcd={name: -1})["param"] == f"rcd.{name}"
    assert api.refused("/v1/completions", prompt=QUESTION, rcd={"commit": "klass"})["param"] == "rcd.commit"


def test_a_chat_of_one_user_message_is_its_text(api: Api) -> None:
    for content in (QUESTION, [{"type": "text", "text": QUESTION[:20]}, {"type": "text", "text": QUESTION[20:]}]):
        found = api.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]}).json()
        assert found["object"] == "chat.completion"
        assert found["choices"][0]["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}


def test_a_model_without_a_template_takes_nothing_but_that(api: Api) -> None:
    for messages in (
        [{"role": "system", "content": "Be brief."}, *USER],
        [*USER, *USER],
        [{"role": "assistant", "content": "x"}],
    ):
        error = api.refused("/v1/chat/completions", messages=messages)
        assert error["param"] == "messages" and "/v1/completions" in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("model", ["words-rcd", "llada-rcd"])
def test_a_stream_joined_is_the_plain_answer(api: Api, path: str, model: str) -> None:
    question = api.get("/rcd/examples", params={"model": model, "seed": 3}).json()["prompt"]
    body: Any = {"model": model, "n": 2, "temperature": 0.7, "seed": 5}
    body |= {"prompt": question} if path == "/v1/completions" else {"messages": [{"role": "user", "content": question}]}
    plain = api.post(path, body).json()
    events = api.stream(path, **body, stream_options={"include_usage": True})
    for choice in plain["choices"]:
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert said(events, choice["index"]) == text
    usage = events[-1].pop("usage")
    assert events[-1]["choices"] == [] and all(event["usage"] is None for event in events[:-1])
    for one in (usage, plain["usage"]):
        one.pop("prompt_tokens_details")  # the second request may find the first one's prompt
    assert usage == plain["usage"]
    assert len({event["id"] for event in events}) == 1


def test_n_answers_to_each_of_several_prompts_are_told_apart(api: Api, pipelines: dict[str, Pipeline]) -> None:
    found = api.complete(prompt=[QUESTION, OTHER], n=3, temperature=1.5, seed=7)
    assert [choice["index"] for choice in found["choices"]] == list(range(6))
    for index, choice in enumerate(found["choices"]):
        right = offline(pipelines["words-rcd"], [QUESTION, OTHER][index // 3], temperature=1.5, seed=7 + index)
        assert choice["text"] == right.text
    assert found["usage"]["prompt_tokens"] == sum(len(ids) for ids in pipelines["words-rcd"].encode([QUESTION, OTHER]))


def test_without_a_seed_answers_are_drawn_anew_and_greedy_ones_are_not(api: Api) -> None:
    body: Any = {"model": "llada-rcd", "temperature": 100.0, "prompt": [5, 6, 7], "max_tokens": 24}
    texts = {api.complete(**body)["choices"][0]["text"] for _ in range(3)}
    assert len(texts) > 1
    assert len({api.complete()["choices"][0]["text"] for _ in range(2)}) == 1


def test_prompts_may_be_token_ids(api: Api, pipelines: dict[str, Pipeline]) -> None:
    ids = pipelines["words-rcd"].encode([QUESTION, OTHER])
    texts = [choice["text"] for choice in api.complete(prompt=[QUESTION, OTHER])["choices"]]
    assert [choice["text"] for choice in api.complete(prompt=ids)["choices"]] == texts
    assert api.complete(prompt=ids[0])["choices"][0]["text"] == texts[0]


def test_a_stop_string_ends_the_answer_and_no_part_of_it_is_sent(api: Api) -> None:
    for stop in ("Answer", ["nothing", " Answer: 25"]):
        plain = api.complete(stop=stop)["choices"][0]
        assert plain["text"].rstrip() == "40 - 15 = 25." and plain["finish_reason"] == "stop"
        assert said(api.stream(stop=stop)) == plain["text"]


def test_the_length_is_the_reason_where_it_was(api: Api) -> None:
    for more in ({"max_tokens": 4}, {"max_tokens": 4, "stream": False}):
        found = api.complete(**more)
        assert found["choices"][0]["finish_reason"] == "length" and found["usage"]["completion_tokens"] == 4
    chat = api.post("/v1/chat/completions", {"messages": USER, "max_completion_tokens": 4}).json()
    assert chat["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stop", [None, "Answer"])
def test_log_probabilities_belong_to_the_tokens_of_the_text(api: Api, stop: str | None) -> None:
    found = api.complete(logprobs=2, stop=stop)["choices"][0]
    told = found["logprobs"]
    assert "".join(told["tokens"]).strip().startswith(found["text"].strip())
    assert len(told["tokens"]) == len(told["token_logprobs"]) == len(told["top_logprobs"]) == len(told["text_offset"])
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert found["text"][offset:].lstrip().startswith(token.strip()) or offset + len(token) > len(found["text"])
    assert all(value is None or value <= 0 for value in told["token_logprobs"])
    assert all(len(best) == 2 for best in told["top_logprobs"])
    parts = [choice["logprobs"] for event in api.stream(logprobs=2, stop=stop) for choice in event["choices"]]
    for name, whole in told.items():
        assert [one for part in parts if part for one in part[name]] == whole


def test_log_probabilities_of_a_chat_name_bytes(api: Api) -> None:
    body: Any = {"messages": USER, "logprobs": True, "top_logprobs": 1}
    told = api.post("/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
    assert "".join(bytes(one["bytes"]).decode() for one in told).strip() == ANSWER
    assert all(len(one["top_logprobs"]) == 1 for one in told)
    assert api.post("/v1/chat/completions", {**body, "top_logprobs": None}).json()["choices"][0]["logprobs"]["content"]
    streamed = api.stream("/v1/chat/completions", **body)
    parts = [choice["logprobs"] for event in streamed for choice in event["choices"] if choice["logprobs"]]
    assert [one for part in parts for one in part["content"]] == told


@pytest.mark.parametrize("model", ["words-rcd", "llada-rcd"])
def test_drafts_show_every_step_of_the_canvas(api: Api, pipelines: dict[str, Pipeline], model: str) -> None:
    question = api.get("/rcd/examples", params={"model": model, "seed": 1}).json()["prompt"]
    events = api.stream(model=model, prompt=question, rcd={"drafts": True, "alternatives": 3})
    drafts = [event["rcd"] for event in events if event.get("rcd", {}).get("type") == "draft"]
    right = offline(pipelines[model], question)
    assert [draft["step"] for draft in drafts] == list(range(1, right.denoising_steps + 1))
    canvas: list[Any] = []
    for draft in drafts:
        assert draft["length"] == pipelines[model].resolve().max_new_tokens
        new = sum(cell["new"] for cell in draft["canvas"])
        assert new > 0 or draft is drafts[-1]
        canvas[draft["offset"] :] = draft["canvas"]
        for cell in canvas:
            assert cell["state"] in ("committed", "masked", "end")
            assert len(cell["best"]) in (0, 3)
        masked = [cell for cell in draft["canvas"] if cell["state"] == "masked"]
        assert all(cell["alpha"] is not None and cell["confidence"] is not None for cell in masked)
    ended = next((k for k, cell in enumerate(canvas) if cell["state"] == "end"), len(canvas))
    assert "".join(cell["text"] for cell in canvas[:ended]).strip() == right.text.strip()
    done = next(event["rcd"] for event in events if event.get("rcd", {}).get("type") == "done")
    assert done["denoising_steps"] == right.denoising_steps and done["stop_reason"] == right.stop_reason
    assert 0 <= done["queued_seconds"] <= done["seconds"]


def test_knobs_of_rcd_change_what_they_name(api: Api, pipelines: dict[str, Pipeline]) -> None:
    pipeline = pipelines["words-rcd"]
    sure = api.complete(rcd={"threshold": 1.0})["usage"]["denoising_steps"]
    assert sure == offline(pipeline, threshold=1.0).denoising_steps > api.complete()["usage"]["denoising_steps"]
    plain = api.complete(rcd={"carry": False, "threshold": 0.99})
    assert plain["usage"]["denoising_steps"] == offline(pipeline, residual_scale=0.0, threshold=0.99).denoising_steps
    from dataclasses import replace

    carry = pipeline.resolve().travelling
    cold = replace(carry, t_res=0.5)  # type: ignore[type-var]
    found = api.complete(rcd={"t_res": 0.5, "threshold": 0.99})
    assert found["usage"]["denoising_steps"] == offline(pipeline, carry=cold, threshold=0.99).denoising_steps
    half = api.complete(rcd={"alpha_scale": 0.5, "threshold": 0.99})
    assert half["usage"]["denoising_steps"] == offline(pipeline, residual_scale=0.5, threshold=0.99).denoising_steps
    twice = replace(carry, alpha_scale=8.0)  # type: ignore[type-var]
    found = api.complete(rcd={"alpha_scale": 2.0, "threshold": 0.99})
    assert found["usage"]["denoising_steps"] == offline(pipeline, carry=twice, threshold=0.99).denoising_steps
    guided = api.complete(rcd={"guidance": 2.0, "threshold": 0.99})["usage"]
    alone = offline(pipeline, guidance=2.0, threshold=0.99)
    assert (guided["denoising_steps"], guided["forwards"]) == (alone.denoising_steps, alone.forwards)
    assert alone.forwards == 2 * (alone.forwards - alone.counts.guidance)
    assert api.complete(rcd={"steps": 3})["choices"][0]["text"]
    assert api.complete(model="words-seqd", rcd={"carry": False})["choices"][0]["text"]


def test_what_a_model_does_not_carry_is_refused_by_name(api: Api) -> None:
    for rcd in ({"carry": True}, {"t_res": 0.5}, {"alpha_scale": 0.5}):
        error = api.refused(model="words-seqd", rcd=rcd)
        assert error["param"] == f"rcd.{next(iter(rcd))}"


def test_settings_decoded_apart_are_bounded(make_api: Any) -> None:
    api = make_api("words-rcd", max_engines=1)

    async def ask(client: Any) -> list[int]:
        import asyncio

        bodies = [{"prompt": QUESTION, "rcd": {"t_res": t_res}} for t_res in (0.5, 0.6)]
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
        return sorted(answer.status_code for answer in answers)

    assert api.run(ask) == [200, 429]
    assert api.complete(rcd={"t_res": 0.7})["choices"][0]["text"]


def test_the_models_are_described(api: Api) -> None:
    found = api.get("/v1/models").json()["data"]
    assert [one["id"] for one in found] == ["words-rcd", "words-seqd", "llada-rcd"]
    facts = found[0]["rcd"]
    assert (facts["family"], facts["carry"], facts["window"], facts["task"]) == (
        "sdar",
        "residual",
        "blockwise",
        "words",
    )
    assert facts["max_new_tokens"] == 48 and facts["context_length"] == 256 and facts["chat"] is False
    assert facts["defaults"]["threshold"] == 0.85 and facts["defaults"]["t_res"] == 1.0
    assert found[1]["rcd"]["carry"] == "none"
    assert api.get("/v1/models/llada-rcd").json() == found[2] == api.get("/v1/models/bundled:llada-rcd").json()
    assert api.get("/v1/models/no/such").json()["error"]["code"] == "model_not_found"
    assert api.complete(model="bundled:words-seqd")["model"] == "words-seqd"
    assert api.refused(model="words", status=404)["param"] == "model"


def test_examples_are_problems_of_the_models_task(api: Api) -> None:
    words, again = (api.get("/rcd/examples", params={"model": "words-rcd", "seed": 4}).json() for _ in range(2))
    assert words == again and words["task"] == "words" and words["answer"] and words["grid"] is None
    assert words != api.get("/rcd/examples", params={"seed": 5}).json()
    grid = api.get("/rcd/examples", params={"model": "llada-rcd"}).json()
    assert grid["grid"]["rows"] == grid["grid"]["cols"] == 6 and grid["prompt"].count("/") == 5
    for more in ({"seed": "-1"}, {"seed": "1e9"}, {"seed": "9" * 400}, {"seed": "x"}, {"other": "1"}):
        assert api.get("/rcd/examples", params=more).status_code == 400
    assert api.get("/rcd/examples", params={"model": "x"}).status_code == 404


def test_flags_are_the_defaults_of_requests(make_api: Any, pipelines: dict[str, Pipeline]) -> None:
    api = make_api("words-rcd", config=DecodeConfig(threshold=1.0, max_new_tokens=8))
    found = api.complete()
    assert found["usage"]["completion_tokens"] == 8
    assert (
        found["usage"]["denoising_steps"]
        == offline(pipelines["words-rcd"], threshold=1.0, max_new_tokens=8).denoising_steps
    )
    assert api.complete(rcd={"threshold": 0.5})["usage"]["denoising_steps"] < found["usage"]["denoising_steps"]
    assert api.get("/v1/models").json()["data"][0]["rcd"]["defaults"]["threshold"] == 1.0


def test_metrics_count_by_model(make_api: Any) -> None:
    api = make_api("words-rcd", "llada-rcd")
    used = api.complete()["usage"]
    api.stream(model="words-rcd")
    api.refused(prompt=5)
    text = api.get("/metrics").text
    for line in (
        'rcd_requests_total{model="words-rcd",outcome="done"} 2.0',
        'rcd_requests_total{model="-",outcome="refused"} 1.0',
        f'rcd_denoising_steps_total{{model="words-rcd"}} {2.0 * used["denoising_steps"]}',
        f'rcd_tokens_total{{model="words-rcd"}} {2.0 * used["completion_tokens"]}',
        'rcd_request_seconds_count{model="words-rcd"} 2.0',
        'rcd_first_text_seconds_count{model="words-rcd"} 1.0',
        'rcd_waiting{model="words-rcd"} 0.0',
        'rcd_serving{model="words-rcd"} 0.0',
        'rcd_rows{model="llada-rcd"} 0.0',
        "rcd_requests_running 0.0",
    ):
        assert line in text.splitlines(), line
