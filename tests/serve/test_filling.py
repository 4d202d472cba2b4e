"""Filling in over the API: `rcd.canvas`, prompts with masks, and OpenAI's `suffix`."""

from __future__ import annotations

from typing import Any

import pytest

import rcd
from tests.serve.conftest import QUESTION, Api, said

CANVAS = "[MASK:5] = 25. [MASK:4]"
BOTH = ("words-rcd", "llada-rcd")


def test_a_canvas_is_filled_in_as_by_the_pipeline(api: Api, pipelines: dict[str, rcd.Pipeline]) -> None:
    right = pipelines["words-rcd"].generate(QUESTION, canvas=CANVAS).results[0]
    found = api.complete(rcd={"canvas": CANVAS})
    assert found["choices"][0]["text"] == right.text and right.given
    prompt = len(pipelines["words-rcd"].encode(QUESTION)[0])
    assert found["usage"]["prompt_tokens"] == prompt + right.given
    assert found["usage"]["completion_tokens"] == right.tokens
    assert found["usage"]["tokens_per_step"] == round(right.tokens_per_step, 4)
    ids = pipelines["words-rcd"].canvas_ids(CANVAS)
    assert api.complete(rcd={"canvas": ids})["choices"] == found["choices"]
    chat = api.post("/v1/chat/completions", {"messages": [{"role": "user", "content": QUESTION}],
                                             "rcd": {"canvas": CANVAS}}).json()  # fmt: skip
    assert chat["choices"][0]["message"]["content"] == right.text


@pytest.mark.parametrize("model", BOTH)
@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"stop": ["5", "Answer"]}, {"rcd": {"threshold": 1}}])
def test_a_stream_tells_the_same_text(api: Api, model: str, more: dict[str, Any]) -> None:
    """Given tokens are told when all before them is settled; a stop string among them ends nothing."""
    own = {**more.get("rcd", {}), "canvas": "[MASK:3] 2 5 [MASK:3] 7 [MASK:3]"}
    body = {**more, "model": model, "rcd": own, "max_tokens": 16}
    whole = api.complete(**body)["choices"][0]
    events = api.stream(**body)
    assert said(events) == whole["text"]
    assert events[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]
    if "logprobs" in more:
        told = [one for event in events for choice in event["choices"]
                for one in (choice["logprobs"] or {}).get("tokens", ())]  # fmt: skip
        assert told == whole["logprobs"]["tokens"]
        assert None in whole["logprobs"]["token_logprobs"]


@pytest.mark.parametrize("model", BOTH)
def test_drafts_tell_given_tokens_apart(api: Api, model: str) -> None:
    events = api.stream(model=model, rcd={"canvas": "[MASK:3] 2 [MASK:3]", "drafts": True, "threshold": 1})
    drafts = [event["rcd"] for event in events if event.get("rcd", {}).get("type") == "draft"]
    assert drafts[0]["length"] == 7
    cells: dict[int, Any] = {}
    for draft in drafts:
        cells |= {draft["offset"] + j: cell for j, cell in enumerate(draft["canvas"])}
        assert cells[3]["state"] == "given" and not cells[3]["new"]
    assert [place for place, cell in cells.items() if cell["state"] == "given"] == [3]
    (done,) = [event["rcd"] for event in events if event.get("rcd", {}).get("type") == "done"]
    assert done["tokens"] <= 6


def test_a_suffix_is_the_text_behind_a_gap(api: Api, pipelines: dict[str, rcd.Pipeline]) -> None:
    pipeline, suffix = pipelines["llada-rcd"], " 5 6 1"
    right = pipeline.generate(QUESTION, canvas=f"[MASK:9]{suffix}").results[0]
    body: Any = {"model": "llada-rcd", "suffix": suffix, "max_tokens": 9}
    whole = api.complete(**body)
    assert whole["choices"][0]["text"] == pipeline.decode(right.ids[:9])
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 9
    assert said(api.stream(**body)) == whole["choices"][0]["text"]
    with_logprobs = api.complete(**body, logprobs=0)["choices"][0]["logprobs"]
    assert len(with_logprobs["tokens"]) <= 9 and None not in with_logprobs["token_logprobs"]
    stop = whole["choices"][0]["text"].split()[1]
    cut = api.complete(**body, stop=stop)["choices"][0]
    assert whole["choices"][0]["text"].startswith(cut["text"]) and stop not in cut["text"]
    assert cut["finish_reason"] == "stop" and said(api.stream(**body, stop=stop)) == cut["text"]
    assert api.complete(suffix="")["choices"] == api.complete()["choices"]  # which is none


def test_a_suffix_is_refused_where_it_cannot_be_seen(api: Api) -> None:
    for model, body, what in (
        ("words-rcd", {"suffix": " 5", "max_tokens": 4}, "attention is bidirectional"),
        ("llada-rcd", {"suffix": " 5"}, "needs max_tokens"),
        ("llada-rcd", {"suffix": "<|MASK|>", "max_tokens": 4}, "holds the mask"),
        ("llada-rcd", {"suffix": " 5", "max_tokens": 4, "rcd": {"canvas": "[MASK]"}}, "both say"),
    ):
        error = api.refused(model=model, **body)
        assert what in error["message"] and error["param"] == "suffix"
    chat = api.refused("/v1/chat/completions", messages=[{"role": "user", "content": "a"}], suffix=" 5")
    assert chat["param"] == "suffix"


@pytest.mark.parametrize(
    ("canvas", "more", "what"),
    [
        ("[MASK:0]", {}, "is no number of masks"), ("a b", {}, "has no mask"), ([1, 2], {}, "has no mask"),
        ([5, 10**6], {}, "outside the vocabulary"), ("[MASK:9]", {"max_tokens": 4}, "max_tokens is 4"),
        ("[MASK:999999999]", {}, "has more than"), ("[MASK:60000]" * 999, {}, "has more than"),
        ("a [MASK] <|endoftext|>[MASK]", {"max_tokens": 2}, "has 4 tokens"),
        ("<|endoftext|>[MASK]", {}, "no mask before its end"), (5, {}, "is a text with"), ([1.5], {}, "is a text with"),
        ([-1], {}, "no vocabulary has"), ({"a": 1}, {}, "is a text with"), ([True], {}, "is a text with"),
        ("\x00" * 9000 + "[MASK]", {"max_tokens": 4}, "has more than 256"),
    ],
)  # fmt: skip
def test_a_canvas_that_cannot_be_filled_in_is_refused_by_name(api: Api, canvas: Any, more: Any, what: str) -> None:
    error = api.refused(rcd={"canvas": canvas}, **more)
    assert what in error["message"] and error["param"] == "rcd.canvas" and len(error["message"]) < 500


def test_a_canvas_longer_than_the_context_is_refused_by_its_own_name(api: Api) -> None:
    error = api.refused(rcd={"canvas": [5] * 300 + [1021]})
    assert "more than the 256 that the model reads" in error["message"] and error["param"] == "rcd.canvas"
    error = api.refused(prompt="", rcd={"canvas": "no mask"})
    assert "has no mask" in error["message"] and error["param"] == "rcd.canvas"


def test_a_canvas_is_bounded_like_max_tokens(make_api: Any) -> None:
    small = make_api("words-rcd", most_tokens=8)
    assert small.refused(rcd={"canvas": "[MASK:9]"})["param"] == "rcd.canvas"
    assert small.complete(rcd={"canvas": "[MASK:8]"})["usage"]["completion_tokens"] <= 8


def test_a_prompt_with_masks_is_a_prompt_and_a_canvas(api: Api, pipelines: dict[str, rcd.Pipeline]) -> None:
    mask = pipelines["llada-rcd"].settings.mask_token_id
    found = api.complete(model="llada-rcd", prompt=[5, 6, mask, 7, mask], rcd={"threshold": 1})
    right = pipelines["llada-rcd"].generate([5, 6], canvas=[mask, 7, mask], threshold=1.0).results[0]
    assert found["choices"][0]["text"] == right.text and found["usage"]["completion_tokens"] == 2
    error = api.refused("/v1/chat/completions", messages=[{"role": "user", "content": "a <|MASK|> b"}])
    assert "mask" in error["message"]


def test_the_description_says_what_may_be_given(api: Api) -> None:
    schemas = api.get("/openapi.json").json()["components"]["schemas"]
    assert "bidirectional" in schemas["CompletionBody"]["properties"]["suffix"]["description"]
    assert "enum" in schemas["ChatBody"]["properties"]["suffix"]
    assert "[MASK:12]" in schemas["RCD"]["properties"]["canvas"]["description"]


@pytest.mark.parametrize("prompt", [{"prompt": None}, {"prompt": ""}, {"prompt": []}])
def test_a_canvas_alone_begins_with_the_prompt(api: Api, pipelines: dict[str, rcd.Pipeline], prompt: Any) -> None:
    text = "Leo has 40 marbles. He loses [MASK:2]. Answer: [MASK:2]"
    right = pipelines["words-rcd"].generate(canvas=text).results[0]
    assert api.complete(**prompt, rcd={"canvas": text})["choices"][0]["text"] == right.text
    assert api.refused(**prompt)["param"] == "prompt"
    assert "empty" in api.refused(**prompt, rcd={"canvas": "[MASK:2] 5"})["message"]
