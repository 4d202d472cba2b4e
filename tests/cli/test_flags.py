"""Flags of decoding come from the settings: their names, kinds, defaults and words, and what is given twice or gone."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import rcd
from rcd.carry.residual import Residual
from rcd.cli.flags import Given, completed, flag_of
from rcd.cli.main import app
from rcd.decode.config import DecodeConfig
from rcd.errors import RCDError
from rcd.models.toy import toy, toy_tokenizer
from rcd.settings import entries

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("flags") / "model"
    rcd.Pipeline(toy("sdar", seed=2, spread=6.0, tokenizer=toy_tokenizer(128))).save(path)
    return str(path)


def answer(folder: str, *flags: str) -> Any:
    result = CliRunner().invoke(
        app,
        ["generate", "the old fox", "--model", folder, "--device", "cpu", "--max-new-tokens", "24", *flags, "--json"],
    )
    assert result.exit_code == 0, (result.output, result.exception)
    return {key: value for key, value in json.loads(result.stdout).items() if key != "seconds"}


def expected(folder: str, **settings: Any) -> Any:
    pipeline = rcd.load(folder, device="cpu")
    result = pipeline.generate("the old fox", DecodeConfig(max_new_tokens=24, **settings))
    found = json.loads(json.dumps(result.results[0].to_dict(pipeline.token_text)))
    return {key: value for key, value in found.items() if key != "seconds"}


def refused(*args: str) -> str:
    result = CliRunner().invoke(app, list(args))
    assert isinstance(result.exception, RCDError), result.output
    return str(result.exception)


def parameters(name: str) -> dict[str, Any]:
    command = get_command(app).commands[name]  # type: ignore[attr-defined]
    return {parameter.name: parameter for parameter in completed(name, command).params}


def test_generate_has_a_flag_of_every_setting() -> None:
    found = parameters("generate")
    for entry in [*entries(DecodeConfig), *entries(Residual)]:
        flag = found[entry.name]
        assert flag_of(entry.name) in flag.opts
        if entry in entries(DecodeConfig) and isinstance(entry.default, bool | int | float | str):
            assert flag.default == entry.default
    assert (
        "--steps" in found["num_inference_steps"].opts
        and "--no-eos-early-stop" in found["eos_early_stop"].secondary_opts
    )
    assert found["threshold"].help == "Commit what is surer than this, and at least the best one. In [0, 1]."
    assert "By default what rcd.json says" in found["max_new_tokens"].help


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("--threshold 0.5 --steps 3", dict(threshold=0.5, num_inference_steps=3)),
        ("--set threshold=0.5 --set commit=topm --num-inference-steps 3",
         dict(threshold=0.5, commit="topm", num_inference_steps=3)),
        ("--temperature 0.9 --seed 4 --top-k 5 --no-eos-early-stop",
         dict(temperature=0.9, seed=4, top_k=5, eos_early_stop=False)),
        ("--logprobs 2 --stop-id 5 --stop-id 6", dict(logprobs=2, stop_ids=(5, 6))),
        ("--stop fox --set eos_suppression=logits", dict(stop=("fox",), eos_suppression="logits")),
        ("--carry none --residual-scale 0", dict(carry="none", residual_scale=0)),
        ("--carry residual,t_res=0.9,start=self --alpha-scale 2",
         dict(carry=Residual(t_res=0.9, start="self", alpha_scale=2))),
        ("--alpha fixed --t-res-at-start", dict(carry=Residual(alpha="fixed", t_res_at_start=True))),
        ("--oracle --passes stock", dict(oracle=True, passes="stock")),
        ("--batch-invariant --block-length 16", dict(batch_invariant=True, block_length=16)),
    ],
)  # fmt: skip
def test_flags_mean_the_settings(folder: str, flags: str, settings: dict[str, Any]) -> None:
    assert answer(folder, *flags.split()) == expected(folder, **settings)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--set threshold=0.5 --threshold 0.9",
         "threshold is given twice, by --threshold and by --set; leave one of them out."),
        ("--set treshold=0.5", "unknown decoding setting 'treshold' (did you mean 'threshold'?)"),
        ("--set engine=fast", "decoding has no setting 'engine' any more: there is one decoder now; leave it out."),
        ("--set alpha_scale=2", "'alpha_scale' is told by --carry: --carry trained,alpha_scale=2."),
        ("--set carry=none", "'carry' is told by --carry: --carry none."),
        ("--set threshold", "'threshold' should be key=value."),
        ("--set threshold=high", "threshold must be in [0, 1], not 'high'"),
        ("--carry residual,strt=self", "carry 'residual' has no setting 'strt' (did you mean 'start'?)"),
        ("--carry loopholing --alpha one", "carry 'loopholing' has no setting 'alpha'"),
        ("--logprobs 21", "logprobs must be a whole number from 0 to 20, not 21"),
        ("--residual-scale 2", "alpha_scale of the carry goes above 1"),
        ("--threads 0", "--threads must be a whole number of 1 or more"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_one_sentence(folder: str, flags: str, said: str) -> None:
    text = refused("generate", "x", "--model", folder, *flags.split())
    assert said in text and "\n" not in text


def test_other_commands_take_the_same_flags() -> None:
    for name in ("eval", "contamination", "ablate", "recall", "calibrate", "lm-eval"):
        found = parameters(name)
        assert {"threshold", "max_new_tokens", "settings", "threads"} <= set(found), name
        assert found["threshold"].default == DecodeConfig().threshold
    assert parameters("demo")["threshold"].default == 0.95
    assert "threshold" not in parameters("sweep")


def test_what_is_filled_in_gives_way_to_what_is_given() -> None:
    given = Given({"threshold": 0.5}, ("max_new_tokens=9",))
    config = given.config(max_new_tokens=64, seed=None)
    assert (config.threshold, config.max_new_tokens, config.seed) == (0.5, 9, 0)
    assert Given().config(max_new_tokens=64).max_new_tokens == 64


@pytest.mark.parametrize("args", ["--help", "list window", "list carry"])
def test_torch_is_not_imported_where_nothing_is_decoded(args: str) -> None:
    code = f"import sys; sys.argv = ['rcd', *{args.split()}]\nfrom rcd.cli.main import main\n"
    code += "try: main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_tables_of_the_docs_are_what_the_settings_say() -> None:
    spec = spec_from_file_location("settings_tables", ROOT / "scripts" / "settings_tables.py")
    assert spec is not None and spec.loader is not None
    tables: Any = module_from_spec(spec)
    spec.loader.exec_module(tables)
    for path, found in tables.PAGES.items():
        page = path.read_text()
        assert tables.written(page, found()) == page, "run python scripts/settings_tables.py"
