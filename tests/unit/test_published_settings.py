"""The table of published settings in docs/decoding.md: every line's flags exist, and fit a checkpoint of its family."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import rcd
from rcd import registry
from rcd.cli.flags import completed
from rcd.cli.main import app
from rcd.decode.config import DecodeConfig

ROOT = Path(__file__).parent.parent.parent
MODELS = {"SDAR": "sdar", "LLaDA": "llada", "Dream": "dream", "LLaDA2": "llada2_moe", "Fast-dLLM v2": "fast_dllm"}


class Enough(Exception):
    """The command is as far as this test goes."""


def lines() -> list[Any]:
    page = (ROOT / "docs" / "decoding.md").read_text()
    table = page.split("<!-- published: begin -->")[1].split("<!-- published: end -->")[0]
    rows = [line.strip("| \n").split(" | ") for line in table.strip().splitlines()[2:]]
    assert all(len(row) == 4 for row in rows)
    return [pytest.param(model, flags.strip("`"), id=f"{k}") for k, (_, _, model, flags) in enumerate(rows)]


@pytest.fixture(scope="module")
def pipelines() -> dict[str, rcd.Pipeline]:
    folder = ROOT / "tests" / "fixtures" / "parity"
    # the published ids are larger than the vocabulary
    mask: dict[str, Any] = {
        "LLaDA2": {"mask_token_id": 93, "eos_token_ids": [94]}, "Fast-dLLM v2": {"mask_token_id": 93}
    }  # fmt: skip
    return {
        name: rcd.load(folder / family / "model", device="cpu", **mask.get(name, {})) for name, family in MODELS.items()
    }


@pytest.mark.parametrize(("model", "flags"), lines())
def test_the_flags_of_every_published_setting_fit_its_family(
    model: str, flags: str, pipelines: dict[str, rcd.Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rcd generate` runs up to where it would decode: flags parsed, values checked, the configuration resolved."""
    seen: list[DecodeConfig] = []

    def resolve(*given: Any) -> DecodeConfig:
        seen.append(plain(*given))
        raise Enough

    plain = rcd.Pipeline.resolve
    words = shlex.split(flags)
    command = "generate" if words[0].startswith("--") else words[1]
    if command != "generate":  # `rcd score`: its parser alone
        found = completed(command, get_command(app).commands[command])  # type: ignore[attr-defined]
        found.make_context(command, [*words[2:], "a text"])
        return
    monkeypatch.setattr("rcd.api.load", lambda *_, **__: pipelines[model])
    monkeypatch.setattr(rcd.Pipeline, "resolve", resolve)
    generate = completed("generate", get_command(app).commands["generate"])  # type: ignore[attr-defined]
    with pytest.raises(Enough):
        generate.main(["1 2 3", "--ids", "--model", "anything", *words], standalone_mode=False)
    assert seen and seen[0] != plain(pipelines[model])  # a line whose flags change nothing says nothing


def test_every_commit_rule_that_was_published_has_a_line() -> None:
    ours = {"threshold", "factor_strict", "margin", "sequential"}  # the default, and rules of no published setting
    named = {name for param in lines() for name in re.findall(r"--commit (\w+)", param.values[1])}
    assert set(registry.names("commit")) - ours == named
