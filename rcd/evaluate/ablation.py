"""The paper's ablations, each a table of evaluations: the weight, the start, the residual temperature; and the norms of
what a carry could bring into a step.

Every row is an evaluation in FOLDER/WHAT/ROW. A row that fails is told, and the others stay.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rcd import registry
from rcd.carry.base import Carry, describe, make
from rcd.decode.config import DecodeConfig
from rcd.errors import RCDError, one_of, unknown_name, unwritable
from rcd.evaluate.answering import answers
from rcd.evaluate.evaluation import Say, compare_runs, evaluate
from rcd.evaluate.recall import StepsOfWindow, of_whole_canvas
from rcd.evaluate.wording import counted

if TYPE_CHECKING:
    from rcd.api import Pipeline
    from rcd.carry.residual import Residual
    from rcd.data.tasks.base import Problem
    from rcd.decode.probe import Look

TABLES = ("alpha", "alpha-reference", "start", "t_res")
GRID = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0)
SEQD, REFERENCE = "seqd", "reference"
SCALED = ("entropy", "top1")
"""top1 is the entropy's weight on another vector: one scale serves both."""


@dataclass(frozen=True)
class Row:
    name: str
    carry: Carry
    reference: str | None = None
    """The checkpoint that it asks."""
    seqd: bool = False
    """Decoded by another model, which was trained without residuals (the first row of tab:init-ablation)."""


@dataclass(frozen=True)
class Table:
    what: str
    rows: list[Row]
    default: str
    """The row that the others are compared with: the model as it was trained."""


def table(
    what: str,
    base: Carry,
    *,
    references: Sequence[str] = (),
    seqd: bool = False,
    grid: Sequence[float] = GRID,
    rows: Sequence[str] | None = None,
    keep_cap: bool = False,
) -> Table:
    """The rows of one ablation. `base` is the carry of the model's training, of which all settings but the one in
    question stay (one without a residual: the paper's `Residual()`). `rows` picks some; the default row stays."""
    one_of("ablation", what, TABLES)
    names = reference_rows(references)
    own = base.for_ablation()
    if what == "start":
        if not names and (REFERENCE in (rows or ()) or own.start == REFERENCE):
            raise RCDError("the start 'reference' needs a reference model; name one or more with --reference.")
        made = [Row(name, replace(own, start=name)) for name in registry.names("start") if name != REFERENCE]
        made += [Row(name, replace(own, start=REFERENCE), each) for name, each in names.items()]
        default = next(iter(names)) if own.start == REFERENCE else own.start
    elif what == "t_res":
        first = next(iter(names.values()), None)
        made = [Row(f"{t:g}", replace(own, t_res=t), first) for t in sorted({*grid, own.t_res})]
        default = f"{own.t_res:g}"
    else:
        if what == "alpha-reference":
            own = replace(own, source="reference")
        if own.needs_reference and not names:
            raise RCDError(f"{what} asks a second model at its steps here; name it with --reference.")
        made, default = _alphas(own, keep_cap, next(iter(names.values()), None)), own.alpha
    if seqd:
        made = [Row(SEQD, make("none"), seqd=True), *made]
    for name in rows or ():
        if not any(_meant(row.name, name) for row in made):
            raise unknown_name(f"row of {what}", name, [row.name for row in made])
    kept = [row for row in made if rows is None or row.name == default or any(_meant(row.name, name) for name in rows)]
    return Table(what, kept, default)


def reference_rows(references: Sequence[str]) -> dict[str, str]:
    """Row -> checkpoint. A row has the last part of the checkpoint's name, or all of it where two share that."""
    ends = [Path(name.split(":")[-1]).name for name in references]
    whole = [re.sub(r"[^\w.]+", "-", name).strip("-") for name in references]
    chosen = ends if len(set(ends)) == len(set(references)) else whole
    return {
        f"{REFERENCE}-{name.removeprefix(REFERENCE + '-')}": each for name, each in zip(chosen, references, strict=True)
    }


def _meant(row: str, name: str) -> bool:
    """`reference` means the rows of all references."""
    return row == name or (name == REFERENCE and row.startswith(f"{REFERENCE}-"))


def _alphas(base: Residual, keep_cap: bool, reference: str | None) -> list[Row]:
    """The eight of fig:ablation-on-alpha. alpha_scale and alpha_most belong to the weight that was trained with them:
    the others are the paper's formulas as they stand (`keep_cap`: but under alpha_most). `none` is SeqD's decoding."""
    rows = []
    for name in registry.names("alpha"):
        own = name == base.alpha or {name, base.alpha} <= set(SCALED)
        scale, most = (base.alpha_scale, base.alpha_most) if own else (1.0, base.alpha_most if keep_cap else 1.0)
        carry = replace(base, alpha=name, alpha_scale=scale, alpha_most=most)
        rows.append(Row(name, make("none")) if name == "none" else Row(name, carry, reference))
    return rows


def ablate(
    table: Table,
    pipeline: Pipeline,
    problems: Sequence[Problem],
    config: DecodeConfig,
    folder: str | Path,
    *,
    model: str,
    task: str,
    references: Mapping[str, Pipeline] | None = None,
    seqd: tuple[str, Pipeline] | None = None,
    batch: int = 32,
    say: Callable[[str], Say | None] = lambda row: None,
    done: dict[str, Path] | None = None,
) -> dict[str, Any]:
    """Run every row and compare it with the default; what is returned is also in FOLDER/WHAT/table.json. `references`:
    by checkpoint; `say` makes a listener for a row; `done` is filled with the folders of rows, for other tables that
    have the same row."""
    done = {} if done is None else done
    place, results = Path(folder) / table.what, list[dict[str, Any]]()
    for row in table.rows:
        found: dict[str, Any] = {"row": row.name, "carry": describe(row.carry), "difference": None}
        results.append(found)
        name, target = seqd if row.seqd and seqd is not None else (model, pipeline)
        asked = row.reference if row.carry.needs_reference else None
        same = json.dumps([name, asked, found["carry"]])
        if same in done and not (place / row.name).exists():
            shutil.copytree(done[same], place / row.name)
        try:
            figures = evaluate(
                target, problems, replace(config, carry=row.carry), place / row.name, model=name, task=task,
                reference=None if asked is None else (asked, (references or {})[asked]), batch=batch,
                say=say(row.name),
            )  # fmt: skip
        except (RCDError, RuntimeError) as error:  # RuntimeError: out of memory
            found["error"] = str(error).splitlines()[0]
            continue
        done[same] = place / row.name
        found |= {key: figures[key] for key in ("accuracy", "low", "high", "tokens_per_step", "tokens", "seconds")}
        at_every_step = row.carry.step_pass == "reference"
        found["tokens_per_target_step"] = found["tokens_per_step"] * (2 if at_every_step else 1)
    good = [row["row"] for row in results if "error" not in row]
    if not good:
        raise RCDError(f"every row of {table.what} failed; the first: {results[0]['error']}")
    for found in results if table.default in good else ():
        if found["row"] in good and found["row"] != table.default:
            pair = compare_runs(place / table.default, place / found["row"])
            found["difference"] = {key: pair[key] for key in ("difference", "low", "high", "p", "gained", "lost")}
    out = {
        "what": table.what, "model": model, "task": task, "items": len(problems), "threshold": config.threshold,
        "default": table.default, "rows": results,
    }  # fmt: skip
    try:
        (place / "table.json").write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise unwritable("the table", place, error) from error
    return out


def lines(found: dict[str, Any]) -> list[str]:
    """The table as text. Where a reference is asked at every step, its passes are counted in tokens/step, and not in
    tokens/target step."""
    rows = found["rows"]
    apart = any(row.get("tokens_per_target_step") != row.get("tokens_per_step") for row in rows)
    wide = max(len(row["row"]) for row in rows) + 1
    text = [
        f"{found['what']} of {found['model']}: {counted(found['items'], 'item')} of {found['task']}, threshold "
        f"{found['threshold']:g} (95% intervals; differences to *)",
        f"{'':{wide}}  {'accuracy':<20} {'tokens/step':>11}{'  tokens/target step' if apart else ''}  difference",
    ]
    for row in rows:
        name = row["row"] + ("*" if row["row"] == found["default"] else "")
        if "error" in row:
            text.append(f"{name:{wide}}  failed: {row['error']}")
            continue
        share = f"{100 * row['accuracy']:5.1f}% [{100 * row['low']:.1f}, {100 * row['high']:.1f}]"
        fast = f"{row['tokens_per_step']:11.2f}" + (f"{row['tokens_per_target_step']:20.2f}" if apart else "")
        pair = row["difference"]
        told = f"{pair['difference']:+6.1f} [{pair['low']:+.1f}, {pair['high']:+.1f}]" if pair else ""
        text.append(f"{name:{wide}}  {share:<20} {fast}  {told}".rstrip())
    return text


NORMS = {
    "token": "token embeddings",
    "mask": "the mask's embedding",
    "delta": "residual vectors delta",
    "input": "inputs at masks",
    "hidden": "hidden states, as the head reads them",
    "raw": "hidden states, before the final norm",
}


def norms(
    pipeline: Pipeline,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig | None = None,
    *,
    reference: Pipeline | None = None,
    batch: int = 32,
) -> dict[str, Any]:
    """Mean Euclidean norms over the masks of every decoding step, and of the embeddings of prompts and answers. The
    paper's argument against Loopholing: hidden states are larger than embeddings. A delta of zero (the cold start's)
    is not counted."""
    model = pipeline.model
    tokens = [token for prompt in prompts for token in prompt]
    sums: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))
    config = replace(of_whole_canvas(pipeline, prompts, config), passes="stock")  # a fused pass has no `raw`
    carries = config.residual_scale > 0 and config.travelling.carries
    window = StepsOfWindow()

    def probe(look: Look) -> None:
        assert look.raw is not None
        vectors = {"input": look.inputs, "hidden": look.hidden, "raw": look.raw}
        if carries and look.before.delta is not None:
            vectors["delta"] = look.before.delta[0]
        found = sums[window.number(look)]
        for name, each in vectors.items():
            size = each.float().norm(dim=-1)[look.masked]
            some = size[size > 0]
            found[name][0] += float(some.sum())
            found[name][1] += len(some)

    # not exact: slot by slot, a pass tells `raw` in the order of its slots' positions, and not of the slots
    for answer in answers(pipeline, prompts, config, reference=reference, batch=batch, exact=False, probe=probe):
        tokens += answer.generation.ids
    mask, embeddings = model.settings.mask_token_id, model.codebook.float().norm(dim=-1)
    return {
        "mean": {
            "token": float(embeddings[tokens].mean()), "mask": float(embeddings[mask]),
            **{name: _mean([each[name] for each in sums.values()]) for name in ("delta", "input", "hidden", "raw")},
        },
        "steps": [
            {"step": step, "masks": int(each["input"][1]), **{name: _mean([pair]) for name, pair in each.items()}}
            for step, each in sorted(sums.items())
        ],
    }  # fmt: skip


def _mean(pairs: Sequence[Sequence[float]]) -> float | None:
    total, count = (sum(column) for column in zip(*pairs, strict=True))
    return total / count if count else None


def norm_lines(found: dict[str, Any]) -> list[str]:
    """The means as text, each as a multiple of a token embedding's."""
    mean = found["mean"]
    wide = max(map(len, NORMS.values()))
    return [f"{'mean norm over the masks of all decoding steps':{wide}}"] + [
        f"{words:{wide}}  {mean[name]:9.3f}  x {mean[name] / mean['token']:.2f}" if mean[name] is not None
        else f"{words:{wide}}  none"
        for name, words in NORMS.items()
    ]  # fmt: skip
