"""The lm-eval model: stop strings, lengths and sampling as the task says; every request's cost; clear refusals."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import rcd
from rcd.carry.base import Carry
from rcd.carry.none import NoCarry
from rcd.carry.parse import parse_carry
from rcd.carry.residual import Residual
from rcd.cli.lm_eval import heading
from rcd.cli.main import app
from rcd.data.tasks.base import problems
from rcd.decode.config import DecodeConfig
from rcd.errors import RCDError
from rcd.evaluate import harness
from rcd.evaluate.evaluation import evaluate
from rcd.evaluate.requests import Answerer
from rcd.models.toy import toy, toy_tokenizer
from tests.processes import finish, two_processes

NAME = "bundled:words-rcd"
ITEMS = list(problems("words", "test", 6))
TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {folder}/words.jsonl}}
  cache_dir: {folder}/cache
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
"""
GENERATES = """doc_to_target: "{{answer}}"
num_fewshot: 0
generation_kwargs: {until: ["\\n\\n"], do_sample: false, max_gen_toks: 48}
filter_list:
  - name: number
    filter:
      - {function: regex, regex_pattern: "Answer: (-?[0-9]+)"}
      - {function: take_first}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""
CHOOSES = """doc_to_target: 0
doc_to_choice: "{{choices}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
ROLLS = """doc_to_target: "{{question}}"
metric_list:
  - {metric: word_perplexity}
"""


def choices(item: Any) -> list[str]:
    return [f"Answer: {item.answer}", "Answer: 1"]


@pytest.fixture(scope="module")
def pipeline() -> rcd.Pipeline:
    return rcd.load(NAME, device="cpu")


def request(number: int, text: str | None = None, sample_of: int = 1, **settings: Any) -> Any:
    """As lm-eval makes one."""
    args = (ITEMS[number].question if text is None else text, settings)
    return SimpleNamespace(args=args, task_name="words", doc_id=number, idx=0, repeats=sample_of)


def test_a_text_ends_before_the_first_of_the_stop_strings(pipeline: rcd.Pipeline) -> None:
    asked = Answerer(pipeline, DecodeConfig())
    whole, stopped, other, none = asked.answer(
        [
            request(0),
            request(0, until=["absent", "Answer", "="]),
            request(0, until="Answer"),
            request(0, until=["", "~"]),
        ]
    )
    assert "Answer: " in whole and whole == none
    assert stopped == whole[: whole.index("=")] and other == whole[: whole.index("Answer")]
    told = sorted(asked.told, key=lambda row: row.sample)  # they are told as they end
    assert [row.stop_reason for row in told] == ["eos", "stop", "stop", "eos"]
    full, first, second, _ = told
    assert full.kept_tokens == full.tokens and 0 < first.kept_tokens < first.tokens < full.tokens
    assert first.steps < full.steps and first.kept_tokens < second.kept_tokens < full.tokens, "decoding stopped, too"
    assert (
        full.steps <= full.forwards and full.seconds > 0 and full.prompt_tokens == len(asked.encode(ITEMS[0].question))
    )


def test_a_stop_string_that_is_a_special_token_stops_although_the_text_hides_it(pipeline: rcd.Pipeline) -> None:
    asked = Answerer(pipeline, DecodeConfig())
    ids = [*asked.encode("18 + 52"), *asked.encode("<|im_end|>"), *asked.encode("= 70")]
    found = SimpleNamespace(ids=ids, text=pipeline.decode(ids), stop_reason="length")
    assert asked.cut(found, ["<|im_end|>"]) == ("18 + 52", 5, "stop")  # type: ignore[arg-type]
    assert asked.cut(found, ["no such"])[2] == "length"  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["sdar", "llada"])
@pytest.mark.parametrize("carry", [NoCarry(), Residual(start="self"), Residual(start="reference")])
def test_an_answer_that_a_stop_string_ends_is_the_beginning_of_the_whole_one(family: str, carry: Carry) -> None:
    """With the counts that the engine gives, and the figures of its tokens."""
    shape = {"spread": 6.0, "tokenizer": toy_tokenizer(128), "block_length": 4}
    model, second = (rcd.Pipeline(toy(family, seed=seed, **shape)) for seed in (1, 2))
    config = DecodeConfig(max_new_tokens=16, block_length=4, threshold=1.0, carry=carry)
    asked = Answerer(model, config, reference=second)
    texts = ["the old fox runs", "one two three four five six"]
    whole = asked.answer([request(number, text) for number, text in enumerate(texts)])
    words = [text.split() for text in whole]
    stops = [f" {parts[len(parts) // 2]}" for parts in words]
    pairs = list(zip(texts, stops, strict=True))
    cut = asked.answer([request(number, text, until=[stop]) for number, (text, stop) in enumerate(pairs)])
    rows = {(row.doc_id, k): row for k, part in enumerate((asked.told[:2], asked.told[2:])) for row in part}
    for number, stop in enumerate(stops):
        full, short = rows[number, 0], rows[number, 1]
        assert cut[number] == whole[number][: whole[number].index(stop)]
        assert short.stop_reason == "stop" and short.kept_tokens < short.tokens <= full.tokens
        assert short.steps <= full.steps and short.forwards <= full.forwards


def test_more_and_longer_stop_strings_than_a_request_may_have_cut_the_text_as_well(pipeline: rcd.Pipeline) -> None:
    asked = Answerer(pipeline, DecodeConfig(stop=("=",)))
    many = [f"absent {number}" for number in range(20)]
    texts = asked.answer([request(0, until=[*many, "-"]), request(0, until=["x" * 300]), request(0, stop=["Answer"])])
    assert texts[0] == texts[1] == texts[2] and "=" not in texts[0]
    assert {row.stop_reason for row in asked.told} == {"stop"}


def test_padding_of_several_processes_is_answered_without_decoding(pipeline: rcd.Pipeline) -> None:
    """lm-eval repeats the last request so that all processes have equally many."""
    one, last = request(0), request(1)
    asked = Answerer(pipeline, DecodeConfig())
    texts = asked.answer([one, last, last, last])
    assert texts[1] == texts[2] == texts[3] != texts[0] and len(asked.told) == 2


def test_two_processes_share_the_requests(tasks: Path, tmp_path: Path) -> None:
    """The same results as one has; every request's cost is told once."""
    given = ["lm-eval", "--model", NAME, "--tasks", "own_words", "--include-path", str(tasks), "--limit", "5"]
    given += ["--device", "cpu", "--threshold", "0.9", "--json", "--output"]
    two = finish(two_processes("rcd", *given, str(tmp_path / "two")))
    assert two.returncode == 0, two.stderr
    one = CliRunner().invoke(app, [*given, str(tmp_path / "one")])
    first, second = json.loads(one.stdout), json.loads(two.stdout)
    assert first["results"] == second["results"] and second["cost"]["all"]["requests"] == 5
    assert first["cost"]["all"]["tokens_per_step"] == second["cost"]["all"]["tokens_per_step"]
    rows = [[json.loads(row) for row in (tmp_path / name / "requests.jsonl").open()] for name in ("one", "two")]
    told = [sorted((row["doc_id"], row["tokens"], row["steps"]) for row in each) for each in rows]
    assert told[0] == told[1] and len(told[0]) == 5


@pytest.mark.parametrize("name", ["bundled:words-rcd", "bundled:llada-rcd"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_answer_does_not_depend_on_what_else_is_asked(name: str, temperature: float) -> None:
    model = rcd.load(name, device="cpu")
    given: dict[str, Any] = dict(temperature=temperature, do_sample=temperature > 0)
    items = list(problems("sudoku" if "llada" in name else "words", "test", 3))
    asked = [
        request(number, items[number].question, max_gen_toks=length, **given)
        for number, length in ((0, 40), (1, 5000), (2, 5000))
    ]
    together = Answerer(model, DecodeConfig(), batch=4).answer(asked)
    alone = [Answerer(model, DecodeConfig(), batch=1).answer([each])[0] for each in reversed(asked)]
    assert together == alone[::-1]


def test_repeats_of_a_document_are_samples_of_their_own(pipeline: rcd.Pipeline) -> None:
    asked = Answerer(pipeline, DecodeConfig(threshold=1.0))
    one = request(0, sample_of=4, do_sample=True, temperature=3.0)
    assert len(set(asked.answer([one] * 4))) > 1
    assert sorted(row.sample for row in asked.told) == [0, 1, 2, 3]


def test_a_length_beyond_the_context_is_capped_with_one_note(
    pipeline: rcd.Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = Answerer(pipeline, DecodeConfig())
    asked.answer([request(number, max_gen_toks=5000) for number in range(3)])
    noted = [line for line in capsys.readouterr().err.splitlines() if line.startswith("rcd: note")]
    assert len(noted) == 1 and "256 positions: 3 of 3 requests" in noted[0]
    config, fits = asked.fitted(DecodeConfig(max_new_tokens=5000), 40)
    assert config.new_tokens == 256 - 40 and not fits
    assert asked.fitted(DecodeConfig(max_new_tokens=7), 40)[0].new_tokens == 7


def test_the_tasks_settings_come_before_the_models(pipeline: rcd.Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    asked = Answerer(pipeline, DecodeConfig(threshold=0.7, max_new_tokens=31))
    warm = Answerer(pipeline, DecodeConfig(temperature=0.4))
    assert asked.settings({}) == ((), asked.config)
    assert asked.settings({"until": "x", "max_gen_toks": 9})[1].new_tokens == 9
    assert asked.settings({"do_sample": False, "temperature": 0.6})[1].temperature == 0
    assert asked.settings({"temperature": 0.6, "top_p": 0.9})[1] == DecodeConfig(
        threshold=0.7, max_new_tokens=31, temperature=0.6, top_p=0.9
    )
    assert asked.settings({"do_sample": True})[1].temperature == 1
    assert warm.settings({"do_sample": True})[1].temperature == 0.4 == warm.settings({})[1].temperature
    assert warm.settings({"do_sample": False})[1].temperature == 0
    capsys.readouterr()
    assert asked.settings({"num_beams": 4}) == asked.settings({"num_beams": 4}) == ((), asked.config)
    assert capsys.readouterr().err.count("num_beams=4") == 1


def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_decoded(pipeline: rcd.Pipeline) -> None:
    asked = Answerer(pipeline, DecodeConfig())
    with pytest.raises(RCDError, match=r"document 1 of words: .* 256; shorten the prompt .*--num-fewshot"):
        asked.answer([request(0), request(1, "how many " * 300)])
    assert asked.told == []


def test_a_carry_is_named_with_colons_or_commas_or_as_a_dict(pipeline: rcd.Pipeline) -> None:
    trained = pipeline.checkpoint.rcd.carry
    assert parse_carry(None, trained) is None
    own: Any = parse_carry("trained", trained)
    changed: Any = parse_carry("residual:t_res=0.9:start=self", trained)
    assert changed == parse_carry("trained,t_res=0.9,start=self", trained)
    assert changed == parse_carry({"name": "residual", "t_res": 0.9, "start": "self"}, trained)
    assert (own.alpha_scale, changed.alpha_scale, changed.t_res, changed.start) == (4, 4, 0.9, "self")
    assert parse_carry(changed, None) is changed and type(parse_carry("none", trained)).__name__ == "NoCarry"
    with pytest.raises(RCDError, match="'start' should be key=value"):
        parse_carry("residual:start", trained)


def test_without_lm_eval_the_module_is_imported_and_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['lm_eval'] = None\n"
        "import rcd.evaluate.harness as h\n"
        "try:\n    h.RCDModel\nexcept h.RCDError as error:\n    print(error)"
    )
    done = finish([sys.executable, "-c", code])
    assert done.stdout.strip() == harness.MISSING, done.stderr


def test_without_lm_eval_the_verb_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    result = CliRunner().invoke(app, ["lm-eval", "--tasks", "gsm8k", "--output", str(tmp_path / "out")])
    assert isinstance(result.exception, RCDError) and "pip install lm-eval" in str(result.exception)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tasks over the same words: that generate, compare likelihoods, or take those of whole texts."""
    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        json.dumps({"question": item.question, "answer": item.answer, "choices": choices(item)}) + "\n"
        for item in ITEMS
    ]
    (folder / "words.jsonl").write_text("".join(rows))
    kinds = {
        "own_words": ("generate_until", GENERATES), "own_choice": ("multiple_choice", CHOOSES),
        "own_texts": ("loglikelihood_rolling", ROLLS),
    }  # fmt: skip
    for name, (kind, rest) in kinds.items():
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, kind=kind, folder=folder) + rest)
    return folder


def verb(tasks: Path, output: Path, *more: str, names: str = "own_words") -> Any:
    given = ["lm-eval", "--model", NAME, "--tasks", names, "--include-path", str(tasks), "--output", str(output)]
    return CliRunner().invoke(app, [*given, "--device", "cpu", *more])


def test_the_verb_gives_lm_evals_results_and_every_requests_cost(
    tasks: Path, tmp_path: Path, pipeline: rcd.Pipeline
) -> None:
    result = verb(tasks, tmp_path / "out", "--threshold", "0.9", "--limit", "5", "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    told = json.loads(result.stdout)
    config = DecodeConfig(threshold=0.9, max_new_tokens=48)
    own = evaluate(pipeline, ITEMS[:5], config, tmp_path / "own", model=NAME, task="words")
    assert told["results"]["own_words"]["exact_match,number"] == pytest.approx(own["accuracy"])
    rows = [json.loads(line) for line in (tmp_path / "out/requests.jsonl").read_text().splitlines()]
    assert sorted(row["doc_id"] for row in rows) == [0, 1, 2, 3, 4] and {row["task"] for row in rows} == {"own_words"}
    cost = told["cost"]["all"]
    assert cost == told["cost"]["tasks"]["own_words"]
    assert cost["tokens_per_step"] == pytest.approx(own["tokens_per_step"])
    assert cost["tokens_per_step"] == sum(row["tokens"] for row in rows) / sum(row["steps"] for row in rows)
    assert cost["latency"] == pytest.approx(sum(row["seconds"] for row in rows) / 5) and cost["tokens_per_second"] > 0
    samples = [json.loads(line) for path in (tmp_path / "out").rglob("samples_*") for line in path.open()]
    answers = [record["output"] for record in map(json.loads, (tmp_path / "own/records.jsonl").open())]
    assert [sample["resps"][0][0] for sample in samples] == answers
    (written,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(written.read_text())["config"]["cost"]["all"] == cost
    assert isinstance(verb(tasks, tmp_path / "out").exception, RCDError)  # another run's folder


def test_the_table_has_the_cost_below_lm_evals(tasks: Path, tmp_path: Path) -> None:
    result = verb(tasks, tmp_path / "out", "--limit", "2", "--max-new-tokens", "4", "--carry", "residual,t_res=0.9")
    assert result.exit_code == 0, (result.output, result.exception)
    assert "|exact_match|" in result.stdout and "Tokens per second" in result.stdout
    assert (
        "carry residual, threshold 0.85\n" in result.stdout and "100.0%|\n" in result.stdout
    )  # all cut off at 4 tokens


def test_likelihoods_are_headed_by_their_own_settings() -> None:
    config: dict[str, Any] = {
        "carry": {"name": "none"}, "decode": {"threshold": 0.85, "guidance": 0.0}, "cost": {"tasks": {}},
        "likelihood": {"tasks": {"choice": {}}, "draws": 32, "guidance": 0.5},
    }  # fmt: skip
    assert heading("m", config) == "m, carry none, 32 draws, guidance 0.5"
    config |= {"cost": {"tasks": {"words": {}}}, "likelihood": {**config["likelihood"], "tasks": {}}}
    assert heading("m", config) == "m, carry none, threshold 0.85"


def test_a_task_that_compares_likelihoods_is_scored(tasks: Path, tmp_path: Path, pipeline: rcd.Pipeline) -> None:
    """Beside one that generates; the likeliest choice is the answer, by the figures of `Pipeline.score`."""
    result = verb(tasks, tmp_path / "out", "--limit", "3", "--draws", "24", "--json", names="own_words,own_choice")
    assert result.exit_code == 0, (result.output, result.exception)
    told = json.loads(result.stdout)
    rows = [json.loads(line) for line in (tmp_path / "out/requests.jsonl").read_text().splitlines()]
    scored = [row for row in rows if row["task"] == "own_choice"]
    assert [(row["doc_id"], row["kind"]) for row in scored] == [(k // 2, "loglikelihood") for k in range(6)]
    asked = rcd.ScoreConfig(draws=24, batch_size=32)
    want = [pipeline.score(ITEMS[k].question, f" {choice}", asked) for k in range(3) for choice in choices(ITEMS[k])]
    assert [row["log_likelihood"] for row in scored] == pytest.approx([one.log_likelihood for one in want])
    right = [one.log_likelihood > other.log_likelihood for one, other in zip(want[::2], want[1::2], strict=True)]
    assert told["results"]["own_choice"]["acc,none"] == pytest.approx(sum(right) / 3)
    cost = told["likelihood"]["tasks"]["own_choice"]
    assert (cost["requests"], cost["tokens"]) == (6, sum(len(one.ids) for one in want))
    assert cost["forwards"] == sum(one.forwards for one in want) and told["likelihood"]["draws"] == 24
    assert told["cost"]["all"]["requests"] == 3, "likelihoods have no steps, and are counted apart"
    table = verb(tasks, tmp_path / "two", "--limit", "1", "--draws", "4", names="own_choice")
    assert "lower bounds, 4 draws" in table.stdout and "Tokens per step" not in table.stdout, table.output


def test_a_whole_text_has_a_likelihood_and_a_perplexity(tasks: Path, tmp_path: Path, pipeline: rcd.Pipeline) -> None:
    result = verb(tasks, tmp_path / "out", "--limit", "2", "--draws", "16", "--json", names="own_texts")
    assert result.exit_code == 0, (result.output, result.exception)
    told = json.loads(result.stdout)["results"]["own_texts"]
    asked = rcd.ScoreConfig(draws=16)
    total = sum(pipeline.score("", item.question, asked).log_likelihood for item in ITEMS[:2])
    words = sum(len(item.question.split()) for item in ITEMS[:2])
    assert told["word_perplexity,none"] == pytest.approx(math.exp(-total / words), rel=1e-4)


def test_two_processes_share_the_likelihoods(tasks: Path, tmp_path: Path) -> None:
    given = ["lm-eval", "--model", NAME, "--tasks", "own_choice", "--include-path", str(tasks), "--limit", "3"]
    given += ["--device", "cpu", "--draws", "4", "--json", "--output"]
    two = finish(two_processes("rcd", *given, str(tmp_path / "two")))
    assert two.returncode == 0, two.stderr
    one = CliRunner().invoke(app, [*given, str(tmp_path / "one")])
    first, second = json.loads(one.stdout), json.loads(two.stdout)
    assert first["results"] == second["results"] and second["likelihood"]["tasks"]["own_choice"]["requests"] == 6
    assert len((tmp_path / "two/requests.jsonl").read_text().splitlines()) == 6


def test_lm_eval_finds_the_model_by_its_name(tasks: Path, tmp_path: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.api.registry import get_model

    assert get_model("rcd") is harness.RCDModel and get_model("dummy") is not None
    file = tmp_path / "requests.jsonl"
    found = simple_evaluate(
        model="rcd",
        model_args=f"pretrained={NAME},carry=residual:t_res=0.9,threshold=0.85,max_new_tokens=512,requests={file}",
        tasks=["own_words"], limit=2, device="cuda:0", batch_size=1,
        task_manager=harness.task_manager(["own_words"], [tasks]),
    )  # fmt: skip
    assert found["config"]["carry"]["t_res"] == 0.9 and found["config"]["decode"]["max_new_tokens"] == 512
    assert len(file.read_text().splitlines()) == 2 == found["config"]["cost"]["all"]["requests"]
    with pytest.raises(RCDError, match="did you mean 'threshold'"):
        harness.model_class()(NAME, device="cpu", thresold=0.9)


def test_the_chat_template_is_applied_once(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = harness.model_class()(NAME, device="cpu")
    with pytest.raises(RCDError, match="no chat template"):
        model.apply_chat_template([{"role": "user", "content": "x"}])
    model.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    plain = request(0)
    model.generate_until([plain])
    assert "chat template and it is not applied" in capsys.readouterr().err
    text = model.apply_chat_template([{"role": "user", "content": "how many"}])
    assert text == "how many<|im_end|>" == model.tokenizer.decode(model.answerer.encode(text))
    model.generate_until([plain])
    assert "template" not in capsys.readouterr().err and model.chat_template(True) == model.tokenizer.chat_template
