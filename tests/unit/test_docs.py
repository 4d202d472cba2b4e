"""The docs name functions, tests, files and flags that exist."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_function_that_a_page_names_exists(page: Path) -> None:
    for module, attributes in re.findall(r"`(rcd(?:\.\w+)+):([\w.]+)`", page.read_text()):
        part = import_module(module)
        for attribute in attributes.split("."):
            part = getattr(part, attribute)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_and_file_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    for file, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)", text):
        assert f"def {test}(" in (ROOT / file).read_text(), f"{file}::{test}"
    for file in re.findall(r"`((?:rcd|tests|docs|scripts)/[\w/.-]+\.\w+)", text):
        assert (ROOT / file).exists(), file
    for link in re.findall(r"\]\(([\w./-]+)\)", text):
        assert (page.parent / link).exists(), link


def test_the_paper_map_has_every_label_of_the_papers_tables_and_figures() -> None:
    text = (ROOT / "docs/paper-map.md").read_text()
    labels = (
        "tab:sdar-main-results tab:llada-main-results tab:combined_inference tab:comparison tab:init-ablation "
        "tab:extra-training tab:combined-hyperparams tab:gsm-contamination-study fig:rcd-main fig:recall "
        "fig:rcd-training-and-inference fig:sdar-accuracy-vs-tokens fig:ablation-on-alpha eqn:residual eqn:formula "
        "eqn:alpha alg:training alg:inference"
    )
    assert [label for label in labels.split() if label not in text] == []


def test_every_flag_that_the_readme_shows_exists() -> None:
    from typer.main import get_command

    from rcd.cli.flags import completed
    from rcd.cli.main import app

    known = {"--version", "--help"}
    commands = [completed(name, command) for name, command in get_command(app).commands.items()]  # type: ignore[attr-defined]
    for command in commands:
        commands.extend(getattr(command, "commands", {}).values())  # `rcd bench` is a group
        for parameter in command.params:
            known.update(parameter.opts + parameter.secondary_opts)
    known.add("--config_file")  # accelerate's
    shown = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]+", (ROOT / "README.md").read_text()))
    assert shown <= known


def test_the_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example is not None
    exec(compile(example.group(1), "README.md", "exec"), {})
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("40 - 15 = 25. Answer: 25") and told[0].endswith("eos")
    assert told[2] == "40 - 15 = 25. Answer: 25"
    assert told[3].startswith("prompt 0, step 1: ") and told[-1].strip() == "40 - 15 = 25."


@pytest.mark.parametrize("page", ["engine.md"])
def test_the_first_example_of_a_page_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    example = re.search(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    assert example is not None
    exec(compile(example.group(1), page, "exec"), {})
    assert "Answer: 25" in capsys.readouterr().out


def test_the_small_checkpoint_of_every_family_can_be_looked_at_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from rcd.cli.main import app

    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs/decoding.md").read_text()
    lines = re.findall(r"^rcd (info tests/fixtures.+)$", page.split("\n## Families\n")[1].split("\n## ")[0], re.M)
    found = [CliRunner().invoke(app, line.split()) for line in lines]
    assert [one.exit_code for one in found] == [0] * len(lines)
    said = {re.findall(r"family +(\w+)", one.stdout)[0] for one in found}
    assert said == {"sdar", "sdar_moe", "llada", "llada2_moe", "dream", "fast_dllm_qwen"}
