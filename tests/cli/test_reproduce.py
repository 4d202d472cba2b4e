"""The paper's exhibits: all there, with its settings; run on the bundled models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rcd.cli.reproduce import reproduce
from rcd.errors import RCDError
from rcd.evaluate.paper import EXHIBITS

LABELS = [
    "tab:sdar-main-results", "tab:llada-main-results", "tab:combined_inference", "tab:comparison", "tab:init-ablation",
    "tab:extra-training", "tab:gsm-contamination-study", "fig:recall", "fig:sdar-accuracy-vs-tokens",
    "fig:ablation-on-alpha",
]  # fmt: skip


def test_every_table_and_figure_with_numbers_is_there() -> None:
    assert sorted(EXHIBITS) == sorted(LABELS)


def test_the_settings_are_the_papers() -> None:
    sdar = EXHIBITS["tab:sdar-main-results"].cells
    assert len(sdar) == 4 * 3 * 4
    for cell in sdar:
        hard = cell.task.startswith("aime")
        assert cell.decode["threshold"] == 0.85 and cell.decode["block_length"] == int(cell.model[-2:])
        assert cell.decode["max_new_tokens"] == ((1024 if hard else 512) if cell.role == "chat" else 16_384)
        assert (cell.samples, cell.decode.get("temperature", 0)) == ((16, 0.6) if hard else (1, 0))
        assert cell.carry == ("residual,start=zero" if cell.role == "rcd" else "none")
    for cell in EXHIBITS["tab:llada-main-results"].cells:
        assert cell.decode == {"threshold": 1.0, "max_new_tokens": 512}  # one token a step
        assert cell.carry.startswith("residual,start=reference,t_res=0.9") == (cell.role == "rcd")  # warm
    gains = [
        rcd.paper - seqd.paper
        for rcd in sdar
        for seqd in sdar
        if (rcd.role, seqd.role, rcd.model, rcd.task) == ("rcd", "seqd", seqd.model, seqd.task)
        and rcd.paper is not None and seqd.paper is not None
    ]  # fmt: skip
    assert len(gains) == 16 and min(gains) > 2.5 and max(gains) < 12


def test_a_table_on_the_bundled_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reproduce("tab:init-ablation", output=tmp_path, limit=2, as_json=True, device="cpu")
    found = json.loads(capsys.readouterr().out)
    assert [row["row"].removeprefix("SDAR-8B-b64 ") for row in found["rows"]] == [
        "SeqD", "RCD, reference (1.7B)", "RCD, reference (4B)", "RCD, self", "RCD, zero", "RCD, Dirichlet"
    ]  # fmt: skip
    assert not found["skipped"] and {row["items"] for row in found["rows"]} == {2}
    assert [row["paper"] for row in found["paper"]] == [64.2, 74.2, 71.8, 76.4, 75.6, 77.4]
    starts = [row["carry"].get("start") for row in found["rows"]]
    assert starts == [None, "reference", "reference", "self", "zero", "dirichlet"]


def test_what_has_no_checkpoint_is_told_and_the_rest_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import typer

    with pytest.raises(typer.Exit) as stopped:
        reproduce("tab:extra-training", output=tmp_path, limit=1, device="cpu")
    assert stopped.value.exit_code == 1
    shown = capsys.readouterr().out
    assert "not run: no checkpoint is named for it (--checkpoint extended=...)" in shown and "86.05" in shown


@pytest.mark.parametrize(
    ("label", "options", "words"),
    [
        ("tab:int-ablation", {}, "did you mean 'tab:init-ablation'"),
        ("tab:init-ablation", {"output": None}, "--output"),
        ("tab:init-ablation", {"checkpoint": ["teacher=x"]}, "unknown role 'teacher'"),
        ("tab:init-ablation", {"checkpoint": ["rcd"]}, "should be --checkpoint ROLE=CHECKPOINT"),
        ("tab:sdar-main-results", {"checkpoint": ["rcd=x"]}, "say which with --row"),
        ("fig:recall", {"checkpoint": ["rcd=x"]}, "needs --checkpoint seqd"),
    ],
)
def test_bad_input(label: str, options: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(RCDError, match=words):
        reproduce(label, **{"output": tmp_path, **options})  # type: ignore[arg-type]
