"""lm-eval's likelihood requests, as its library makes them: figures, records, cache, refusals before any work."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rcd
from rcd.carry.residual import Residual
from rcd.decode.config import DecodeConfig
from rcd.errors import RCDError
from rcd.evaluate.likelihoods import Scorer
from rcd.evaluate.requests import Answerer
from rcd.models.toy import toy, toy_tokenizer
from rcd.scoring import windows

WORDS = "the old fox runs and the dog sleeps far"


@pytest.fixture(scope="module", params=["sdar", "llada"])
def pipeline(request: pytest.FixtureRequest) -> rcd.Pipeline:
    shape: dict[str, Any] = {"context": 24, "spread": 3.0}
    if request.param == "sdar":
        shape["block_length"] = 4
    return rcd.Pipeline(toy(request.param, seed=1, tokenizer=toy_tokenizer(128), **shape))


def request(*args: str, doc: int = 0, task: str = "choice") -> Any:
    return SimpleNamespace(args=args, task_name=task, doc_id=doc, idx=0, repeats=1)


def scorer(pipeline: rcd.Pipeline, file: Path | None = None, **settings: Any) -> Scorer:
    return Scorer(Answerer(pipeline, DecodeConfig(), requests=file), rcd.ScoreConfig(**settings))


class Cache:
    def __init__(self) -> None:
        self.held: list[Any] = []

    def add_partial(self, *given: Any) -> None:
        self.held.append(given)


def test_a_pair_has_the_figure_of_the_pipelines_score(pipeline: rcd.Pipeline, tmp_path: Path) -> None:
    pairs = [("the old", " fox runs"), ("the old ", "dog"), ("", "the fox")]
    cache, asked = Cache(), scorer(pipeline, tmp_path / "requests.jsonl", draws=9, greedy=True)
    found = asked.pairs([request(*pair, doc=k) for k, pair in enumerate(pairs)], cache)
    chosen = rcd.ScoreConfig(draws=9)
    want = [pipeline.score(*pair, chosen) for pair in pairs]
    assert [value for value, _ in found] == [one.log_likelihood for one in want]
    assert cache.held == [("loglikelihood", pair, value) for pair, value in zip(pairs, found, strict=True)]
    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert [(row["doc_id"], row["tokens"], row["patterns"]) for row in rows] == [
        (k, len(one.ids), one.patterns) for k, one in enumerate(want)
    ]
    assert [row["greedy"] for row in rows] == [False, False, None], "an empty context cannot be decoded from"
    cost = asked.summary()
    assert cost["tasks"]["choice"]["forwards"] == sum(one.forwards for one in want) and cost["greedy"] is True


def test_what_greedy_decoding_gives_is_told(pipeline: rcd.Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = DecodeConfig(max_new_tokens=4, threshold=1.0, block_length=4, eos_early_stop=False, carry="none")
    text = pipeline.generate("the old fox", chosen).texts[0]
    asked = scorer(pipeline, greedy=True, draws=1)
    greedy = pipeline.score("the old fox", f" {text}", rcd.ScoreConfig(greedy=True)).greedy
    told = asked.pairs([request("the old fox", f" {text}"), request("the old fox", " far far far far")])
    assert [each for _, each in told] == [greedy, False] and not capsys.readouterr().err.startswith("rcd: note")
    plain = scorer(pipeline, draws=1)
    assert plain.pairs([request("the", " fox", doc=1)])[0][1] is False
    plain.pairs([request("the", " fox", doc=2)])
    assert capsys.readouterr().err.count("not checked") == 1
    scorer(pipeline, draws=1).pairs([request("the", " fox"), request("the", " dog")])
    assert "not checked" not in capsys.readouterr().err, "of several choices nobody asks"


def test_a_whole_text_is_the_sum_of_its_parts(pipeline: rcd.Pipeline) -> None:
    text, cache = " ".join([WORDS] * 5), Cache()
    asked = scorer(pipeline, draws=16)
    short, long, none = asked.texts([request(WORDS), request(text, doc=1), request("", doc=2)], cache)
    chosen = rcd.ScoreConfig(draws=16)
    assert short == pipeline.score("", WORDS, chosen).log_likelihood and none == 0
    parts = windows(pipeline, pipeline.encode(text)[0], chosen)
    scores = [pipeline.score(*part, chosen) for part in parts]
    assert len(parts) == 3 and long == sum(one.log_likelihood for one in scores)
    row = asked.told[1]
    assert row.kind == "loglikelihood_rolling" and row.tokens == len(pipeline.encode(text)[0])
    if all(one.standard_error is not None for one in scores):
        error = math.sqrt(sum((one.standard_error or 0) ** 2 for one in scores))
        assert row.standard_error == pytest.approx(error)
    assert [each[0] for each in cache.held] == ["loglikelihood_rolling"] * 3


def test_requests_that_several_processes_repeat_are_scored_once(pipeline: rcd.Pipeline) -> None:
    one, last = request("the", " fox"), request("the", " dog", doc=1)
    asked = scorer(pipeline)
    found = asked.pairs([one, last, last, last])
    assert found[1] == found[2] == found[3] != found[0] and len(asked.told) == 2


def test_what_cannot_be_scored_is_refused_before_anything_is(pipeline: rcd.Pipeline) -> None:
    asked = scorer(pipeline)
    with pytest.raises(RCDError, match=r"document 1 of choice: .* more than the 24 .*--num-fewshot"):
        asked.pairs([request("the", " fox"), request("the fox " * 20, " dog", doc=1)])
    with pytest.raises(RCDError, match="document 0 of choice: the continuation is empty"):
        asked.pairs([request("the", " ")])
    assert asked.told == []
    with pytest.raises(RCDError, match="without a reference"):
        scorer(pipeline, carry=Residual(start="reference"), greedy=True)
