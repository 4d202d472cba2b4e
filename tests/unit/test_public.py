"""The Python API as one meets it in a shell: names, help, signatures, keywords, streamers, what `print` shows."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import pydoc
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import rcd
from rcd.decode import names
from rcd.decode.config import DecodeConfig
from rcd.errors import RCDError
from rcd.models.toy import toy, toy_tokenizer
from rcd.settings import entries

PROMPT = "the old fox"


@pytest.fixture(scope="module")
def pipeline() -> rcd.Pipeline:
    return rcd.Pipeline(toy("sdar", seed=2, spread=6.0, vocab=128, tokenizer=toy_tokenizer(128)))


def public() -> list[str]:
    return [name for name in rcd.__all__ if name != "__version__"]


@pytest.mark.parametrize("name", public())
def test_every_public_name_has_help_that_names_its_fields(name: str) -> None:
    thing = getattr(rcd, name)
    shown = pydoc.plain(pydoc.render_doc(thing))
    assert len(inspect.getdoc(thing) or "") > 20
    if dataclasses.is_dataclass(thing):
        for field in dataclasses.fields(thing):
            assert f"    {field.name}: " in shown, field.name


def test_tab_completion_shows_the_public_names() -> None:
    assert set(dir(rcd)) == set(rcd.__all__)
    methods = [name for name in dir(rcd.Pipeline) if not name.startswith("_")]
    assert {"generate", "stream", "submit", "encode", "decode", "resolve", "save"} <= set(methods)
    for name in methods:
        member = inspect.getattr_static(rcd.Pipeline, name)
        assert inspect.getdoc(member.fget if isinstance(member, property) else member), name


@pytest.mark.parametrize("name", ["generate", "stream", "submit", "__call__"])
def test_signatures_name_every_setting_with_its_default(name: str) -> None:
    method = getattr(rcd.Pipeline, name)
    parameters = inspect.signature(method).parameters
    assert not [one for one in parameters.values() if one.kind is inspect.Parameter.VAR_KEYWORD]
    for entry in entries(DecodeConfig):
        assert parameters[entry.name].default == entry.default
        assert f"    {entry.name}: " in (inspect.getdoc(method) or "")


def test_settings_are_keywords_beside_or_instead_of_a_configuration(pipeline: rcd.Pipeline) -> None:
    chosen = DecodeConfig(max_new_tokens=9, threshold=0.6)
    right = pipeline.generate(PROMPT, chosen).sequences
    assert pipeline.generate(PROMPT, max_new_tokens=9, threshold=0.6).sequences == right
    assert pipeline(PROMPT, DecodeConfig(threshold=0.6), max_new_tokens=9).sequences == right
    several = [DecodeConfig(threshold=0.6), DecodeConfig(threshold=0.6, seed=1)]
    assert pipeline([PROMPT, PROMPT], several, max_new_tokens=9).sequences[0] == right[0]
    (*_, last) = pipeline.stream(PROMPT, max_new_tokens=9, threshold=0.6)
    assert isinstance(last, rcd.Finished) and last.ids == right[0]
    ids = pipeline.encode(PROMPT)[0]
    assert pipeline.submit(ids, max_new_tokens=9, threshold=0.6).result().ids == right[0]


@pytest.mark.parametrize("call", ["generate", "stream", "submit", "__call__"])
def test_wrong_keywords_are_one_sentence(pipeline: rcd.Pipeline, call: str) -> None:
    prompt: Any = pipeline.encode(PROMPT)[0] if call == "submit" else PROMPT

    def refusal(*given: Any, **named: Any) -> str:
        with pytest.raises(RCDError) as refused:
            list(getattr(pipeline, call)(prompt, *given, **named))
        return str(refused.value)

    assert "(did you mean 'threshold'?)" in refusal(treshold=1)
    assert refusal(DecodeConfig(threshold=0.9), threshold=0.8).startswith("threshold stands in the configuration (0.9)")
    assert "threshold must be in [0, 1]" in refusal(threshold=2)
    assert "a configuration is a DecodeConfig, not a dict" in refusal({"threshold": 1}, seed=1)


def test_transformers_streamers_hear_the_prompt_and_then_settled_tokens(pipeline: rcd.Pipeline) -> None:
    from transformers import TextIteratorStreamer, TextStreamer

    given: dict[str, Any] = dict(max_new_tokens=12, threshold=0.9)
    right = pipeline.generate(PROMPT, **given).results[0]
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        found = pipeline.generate(PROMPT, streamer=TextStreamer(pipeline.tokenizer, skip_prompt=True), **given)
    assert found.sequences[0] == right.ids
    assert told.getvalue().split() == str(pipeline.tokenizer.decode(right.ids)).split()  # type: ignore[union-attr]
    streamer = TextIteratorStreamer(pipeline.tokenizer, skip_prompt=True, timeout=60)
    thread = threading.Thread(target=pipeline.generate, args=(PROMPT,), kwargs={"streamer": streamer, **given})
    thread.start()
    assert "".join(streamer).split() == told.getvalue().split()
    thread.join()


class Heard:
    """A streamer with drafts."""

    def __init__(self) -> None:
        self.told: list[tuple[str, list[int]]] = []

    def put(self, value: torch.Tensor) -> None:
        self.told.append(("put", value.flatten().tolist()))

    def put_draft(self, value: torch.Tensor, **_: Any) -> None:
        self.told.append(("draft", value.tolist()))

    def end(self) -> None:
        self.told.append(("end", []))


def test_drafts_go_to_put_draft_and_only_settled_tokens_to_put(pipeline: rcd.Pipeline) -> None:
    streamer, canvas = Heard(), "[MASK:3] sees a [MASK:9] red fox runs to the old house and the sea [MASK:3]"
    found = pipeline.generate(PROMPT, canvas=canvas, streamer=streamer, threshold=1.0, block_length=4).results[0]
    kinds = [kind for kind, _ in streamer.told]
    assert kinds[0] == "put" and kinds[-1] == "end" and kinds.count("end") == 1
    assert kinds.count("draft") == found.denoising_steps
    first, *rest = [ids for kind, ids in streamer.told if kind == "put"]
    assert first == pipeline.encode(PROMPT)[0] and [token for ids in rest for token in ids] == found.ids


@pytest.mark.parametrize("threshold", [0.3, 1.0])
def test_nothing_of_a_stop_is_put(threshold: float) -> None:
    """Neither of a stop string that two tokens make, nor what the same step decides behind it."""
    from transformers import TextStreamer

    pipeline = rcd.load("bundled:words-rcd")
    question = "Leo has 40 marbles. He loses 15 of them at the park. How many marbles does he have now?"
    whole = pipeline.generate(question, threshold=threshold).results[0]
    for stop in ({"stop": "Answer"}, {"stop": ("Answer:",)}, {"stop_ids": (whole.ids[6],)}, {"stop": "no such text"}):
        told, given = io.StringIO(), dict[str, Any](threshold=threshold, **stop)
        right = pipeline.generate(question, **given).results[0]
        with contextlib.redirect_stdout(told):
            streamer = TextStreamer(pipeline.tokenizer, skip_prompt=True, skip_special_tokens=True)
            found = pipeline.generate(question, streamer=streamer, **given).results[0]
        assert found.text == right.text and told.getvalue().strip() == right.text.strip()
        heard = Heard()
        pipeline.generate(question, streamer=heard, **given)
        _, *rest = [ids for kind, ids in heard.told if kind == "put"]
        assert pipeline.decode([token for ids in rest for token in ids]).strip() == right.text.strip()


def test_what_a_canvas_gives_is_put_although_it_looks_like_a_stop(pipeline: rcd.Pipeline) -> None:
    heard, canvas = Heard(), "[MASK:3] sees a [MASK:3]"
    given: dict[str, Any] = dict(canvas=canvas, stop="sees", threshold=1.0, eos_suppression="logits_all")
    found = pipeline.generate(PROMPT, streamer=heard, **given).results[0]
    assert [token for kind, ids in heard.told[1:] if kind == "put" for token in ids] == found.ids


def test_filler_is_neither_put_nor_printed() -> None:
    pipeline, heard = rcd.load("bundled:words-rcd"), Heard()
    question = "Mia has 12 pens. She gives 5 of them away. How many pens does she have now?"
    ends = set(pipeline.settings.eos_token_ids)
    found = pipeline.generate(question, streamer=heard).results[0]
    for kind, ids in heard.told:
        assert kind != "draft" or not ends & set(ids[:-1])  # at most the last one is
    steps = [one for one in pipeline.stream(question) if isinstance(one, rcd.Step)]
    counted = [int(str(one).split(": ")[1].split()[0]) for one in steps]
    assert sum(counted) == found.tokens < sum(int(one.committed.sum()) for one in steps)


def test_transformers_own_streamer_of_drafts_takes_them(pipeline: rcd.Pipeline) -> None:
    from transformers import TextDiffusionStreamer

    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        found = pipeline.generate(PROMPT, max_new_tokens=8, streamer=TextDiffusionStreamer(pipeline.tokenizer))
    assert found.texts[0].split()[-1] in told.getvalue()


def test_a_streamer_is_told_the_end_whatever_happens(pipeline: rcd.Pipeline) -> None:
    streamer = Heard()
    with pytest.raises(RCDError):
        pipeline.generate(PROMPT, streamer=streamer, max_new_tokens=10**6)
    assert streamer.told[-1] == ("end", [])

    class Broken(Heard):
        def put(self, value: Any) -> None:
            raise RuntimeError("what went wrong first")

        def end(self) -> None:
            raise ValueError("and then")

    with pytest.raises(RuntimeError, match="what went wrong first"):
        pipeline.generate(PROMPT, streamer=Broken(), max_new_tokens=4)
    for wrong, prompts in ((object(), PROMPT), (Heard(), [PROMPT, PROMPT])):
        with pytest.raises(RCDError, match="streamer"):
            pipeline.generate(prompts, streamer=wrong)


def test_a_canvas_without_a_prompt_needs_a_mask(pipeline: rcd.Pipeline) -> None:
    for given in (None, ""):
        with pytest.raises(RCDError, match="the canvas has no mask"):
            pipeline.generate(given, canvas="[mask]")


def test_print_shows_what_a_person_can_read(pipeline: rcd.Pipeline) -> None:
    *steps, last = pipeline.stream(PROMPT, canvas="[MASK:4] sees", threshold=1.0, eos_suppression="logits_all")
    first = steps[0]
    assert isinstance(first, rcd.Step) and isinstance(last, rcd.Finished)
    (token,) = first.draft[first.committed].tolist()
    assert str(first).startswith(f"prompt 0, step 1: 1 token committed ({token}), 3 masks in sight, ")
    assert "tensor" not in repr(first) and len(repr(first)) < 120
    assert str(last) == f"prompt 0: {last.text} [4 tokens in 4 steps, 1.00 a step, 1 given, length]"
    assert str(rcd.Failed(2, "it is too long; shorten it.")) == "prompt 2 failed: it is too long; shorten it."
    found = pipeline.generate([PROMPT, PROMPT], max_new_tokens=4, eos_suppression="logits_all")
    assert str(found) == "\n".join(found.texts) and str(found.results[0]) == found.texts[0]
    assert repr(found.results[0]).startswith(f"Generation({found.texts[0]!r}, 4 tokens in ")
    assert repr(found).startswith("Output([\n  Generation(") and repr(found).endswith(",\n])")


def test_prompts_of_every_sort_are_taken(pipeline: rcd.Pipeline) -> None:
    ids = pipeline.encode(PROMPT)[0]
    right = pipeline.generate(ids, max_new_tokens=5).sequences
    batch = pipeline.tokenizer([PROMPT], return_tensors="pt")  # type: ignore[misc]
    for prompts in (
        PROMPT,
        [PROMPT],
        [ids],
        torch.tensor(ids),
        torch.tensor([ids]),
        (one for one in [PROMPT]),
        batch.input_ids,
    ):
        assert pipeline.generate(prompts, max_new_tokens=5).sequences == right


def test_names_of_other_projects_are_answered_with_ours() -> None:
    """The table of docs/decoding.md and the sentences have the same names, each with a setting that there is."""
    page = (Path(rcd.__file__).parent.parent / "docs" / "decoding.md").read_text()
    table = page.split("The same settings under other names:")[1].split("\n\n")[1].splitlines()[2:]
    settings, told = {field.name for field in dataclasses.fields(DecodeConfig)}, set[str]()
    for ours, theirs in (line.strip("| ").split(" | ") for line in table):
        own = re.findall(r"(?:^|`)(\w+)", ours)
        for name in {*re.findall(r"`(\w+)", theirs)} - settings if '="t' not in ours else ():  # rules are values
            told.add(name)
            assert any(each in names.ELSEWHERE[name] for each in own), name
    assert told == {*names.ELSEWHERE}
    calls: list[tuple[dict[str, Any], str]] = [
        ({"cfg_scale": 1.0}, "decoding has no setting 'cfg_scale'; here it is guidance."),
        ({"t_res": 0.9}, "decoding has no setting 't_res'; it is the carry's: carry=\"trained,t_res=...\"."),
    ]
    for call, sentence in calls:
        with pytest.raises(RCDError) as refused:
            rcd.DecodeConfig(**call)
        assert str(refused.value) == sentence.replace("decoding", "DecodeConfig")


def test_a_score_takes_its_settings_as_keywords_and_can_be_read(pipeline: rcd.Pipeline) -> None:
    found = pipeline.score(PROMPT, " a red fox", draws=2, seed=3)
    assert found == pipeline.score(PROMPT, " a red fox", rcd.ScoreConfig(draws=2, seed=3))
    assert str(found).startswith(f"{found.log_likelihood:.3f}, ") and str(found).endswith("a token of 3 tokens")
    text = inspect.getdoc(pipeline.score) or ""
    assert "    draws: a whole number" in text and "    log_likelihood: float" in text
    calls: list[tuple[dict[str, Any], str]] = [
        ({"mc_num": 4}, "a likelihood has no setting 'mc_num'; here it is draws"),
        ({"drws": 4}, "did you mean 'draws'"),
    ]
    for wrong, sentence in calls:
        with pytest.raises(RCDError, match=sentence):
            pipeline.score(PROMPT, " a red fox", **wrong)
    with pytest.raises(RCDError, match="of several texts, score each by itself"):
        pipeline.score(PROMPT, [" a red fox", " a fox"])


def test_an_output_is_a_sequence_of_answers(pipeline: rcd.Pipeline) -> None:
    one, two = (pipeline.generate(prompts, max_new_tokens=3) for prompts in (PROMPT, [PROMPT, PROMPT]))
    assert one.text == one[0].text == str(one) and list(two) == two.results == two[:] and len(two) == 2
    with pytest.raises(RCDError, match="there are 2 answers"):
        _ = two.text


def test_a_handle_tells_how_far_it_is(pipeline: rcd.Pipeline) -> None:
    handle = pipeline.submit(ids := pipeline.encode(PROMPT)[0], max_new_tokens=3)
    handle.result()
    assert repr(handle).endswith(f"{len(ids)} prompt tokens, done)")
