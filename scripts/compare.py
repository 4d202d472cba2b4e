"""Train recipes, sweep thresholds, and state paired differences: the search for the bundled models, as one command.

    python scripts/compare.py --output runs/search --base tasks-sdar-seqd tasks-sdar-rcd tasks-sdar-paper

Every recipe is trained (bases and references once), decoded on the same held-out problems at every threshold, and
compared with `--base`. A recipe may be given as NAME=BASE,key=value,...: a variant of a registered one.
`--trained` sweeps and compares checkpoints that are there. Several run at once on one GPU (`--jobs`), with the examples
made once and shared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rcd.data.examples import Example, Report, encode
from rcd.data.rows import generated_tokenizer, rows_of
from rcd.data.tasks.base import problems
from rcd.decode.config import DecodeConfig
from rcd.errors import RCDError
from rcd.evaluate import plots
from rcd.evaluate.sweep import Sweep, compare, lines, run_point, run_sweep
from rcd.recipes.base import find
from rcd.train.config import TrainConfig
from rcd.train.run import BASE

if TYPE_CHECKING:
    from rcd.api import Pipeline

NEW_TOKENS = 48
"""The longest answer of the tasks, where the model does not say."""
THRESHOLDS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.997, 1.0)


@dataclass(frozen=True)
class Job:
    name: str
    config: TrainConfig
    needs: tuple[str, ...] = ()
    """The names of the jobs that train its base and its reference."""
    sweeps: bool = True
    model: str | None = None
    """A checkpoint that is there already: nothing is trained."""


def jobs_of(entries: list[str], settings: dict[str, Any], base_model: str | None) -> list[Job]:
    """The runs; what several start from or learn from is trained once, before them."""
    shared: dict[str, Job] = {}

    def add(stage: str, config: TrainConfig, common: dict[str, Any]) -> str:
        own = {key.removeprefix(f"{stage}."): value for key, value in settings.items() if key.startswith(f"{stage}.")}
        config = config.with_settings({**common, **own})
        digest = hashlib.blake2b(json.dumps(config.to_json()).encode(), digest_size=3).hexdigest()
        shared[f"{stage}-{digest}"] = Job(f"{stage}-{digest}", config, sweeps=False)
        return f"{stage}-{digest}"

    runs: list[Job] = []
    common = {key: value for key, value in settings.items() if not key.startswith(("base.", "reference.", "target."))}
    aimed = {key.removeprefix("target."): value for key, value in settings.items() if key.startswith("target.")}
    for entry in entries:
        name, _, rest = entry.partition("=")
        known, *changes = rest.split(",") if rest else [name]
        own = {key: _value(text) for key, text in (change.split("=", 1) for change in changes)}
        recipe = find(known)
        needs: list[str] = []
        if recipe.target is None:
            assert recipe.reference is not None
            runs.append(Job(name, recipe.reference.with_settings(common | own)))
            continue
        target = recipe.target.with_settings(common | aimed | own)
        if recipe.base is not None and target.model == BASE:
            if base_model:
                target = replace(target, model=base_model)
            else:
                needs.append(add("base", recipe.base, common))
        wanted = target.carry is not None and not target.residual.recycling
        wanted = wanted and (not target.residual.trajectory or target.residual.trajectory_share < 1)
        if wanted and recipe.reference is not None:
            needs.append(add("reference", recipe.reference, common))
        runs.append(Job(name, target, tuple(needs)))
    return [*shared.values(), *runs]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _some(config: TrainConfig, first: int, count: int) -> tuple[list[Example], Report]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _, mix, _ = config.data.split(":")
    found = problems(mix, config.split, count, first=first)
    rows = ((problem.name, {"prompt": problem.question, "response": problem.solution}) for problem in found)
    tokenizer = generated_tokenizer(config.data)
    return encode(rows, tokenizer, eos_token_id=tokenizer.eos_token_id, max_length=config.max_length)


def examples_of(config: TrainConfig) -> list[Example]:
    """What `Stage.of` would make of the generated data, on all cores."""
    if not config.data.startswith("tasks:"):
        tokenizer = generated_tokenizer(config.data)
        rows = rows_of(config.data, config.split)
        return encode(rows, tokenizer, eos_token_id=tokenizer.eos_token_id, max_length=config.max_length)[0]
    count, cores = int(config.data.split(":")[2]), os.cpu_count() or 1
    size = -(-count // cores // 2) * 2
    with ProcessPoolExecutor(cores) as pool:
        parts = [pool.submit(_some, config, first, min(size, count - first)) for first in range(0, count, size)]
        return [example for part in parts for example in part.result()[0]]


def train(job: Job, examples: list[Example], output: Path, device: torch.device, snapshots: int) -> Path:
    from accelerate import Accelerator

    from rcd.models import checkpoint as ckpt
    from rcd.train.loop import Trainer
    from rcd.train.run import claim
    from rcd.train.stage import Stage, load_start

    folder = output / job.name
    if (folder / "model" / "config.json").is_file():
        return folder / "model"
    config, reference = job.config, None
    for need in job.needs:
        path = str(output / need / "model")
        config = replace(config, model=path) if need.startswith("base-") else replace(config, reference=path)
    if config.reference is not None:
        reference = ckpt.load(config.reference, device=device, block_length=config.block_length)
    steps = config.max_steps or 1
    config = replace(config, save_every=max(1, steps // snapshots) if snapshots else steps, keep=max(1, snapshots))
    cut = len(examples) - config.validation
    stage = Stage(config, load_start(config, device), reference, examples[:cut], examples[cut:], Report())
    trainer = Trainer(stage, folder, Accelerator(cpu=device.type == "cpu"), lambda text: print(text, flush=True))
    claim(folder, config)
    return trainer.run()


def evaluate(job: Job, model: Path | str, options: argparse.Namespace, device: torch.device) -> None:
    from rcd import api

    folder = Path(options.output) / job.name
    if options.store != "float32":  # what is measured is what is kept
        small = folder / f"model-{options.store}"
        api.load(model, device="cpu", dtype=options.store).save(small, overwrite=True)
        model = small
    given = list(problems(options.mix, "test", options.problems, seed=options.seed))
    pipeline = api.load(model, device=device, dtype="float32")
    config = _decoding(pipeline)
    sweep = run_sweep(
        pipeline, given, options.thresholds, config, name=job.name, batch=options.batch,
        say=lambda text: print(text, flush=True),
    )  # fmt: skip
    sweep.save(folder / "sweep.jsonl")
    if options.snapshots:
        curve(job, folder, given[: options.problems // 2], options, device)


def _decoding(pipeline: Pipeline, threshold: float = 1.0) -> DecodeConfig:
    return DecodeConfig(max_new_tokens=pipeline.settings.max_new_tokens or NEW_TOKENS, threshold=threshold)


def curve(job: Job, folder: Path, given: list[Any], options: argparse.Namespace, device: torch.device) -> None:
    """Accuracy over training tokens, at one threshold: snapshots.jsonl."""
    from rcd import api
    from rcd.train.export import export_checkpoint
    from rcd.train.store import Store

    content = json.loads((folder / "train.json").read_text())
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    each = sum(row["tokens"] for row in metrics) / len(metrics)
    with (folder / "snapshots.jsonl").open("w") as file:
        for step in Store(folder / "checkpoints", keep=10**6).steps():
            model = folder / f"model-{step}"
            if not model.is_dir():
                export_checkpoint(folder, content, model, step)
            pipeline = api.load(model, device=device, dtype="float32")
            point = run_point(pipeline, given, _decoding(pipeline, 0.9), batch=options.batch)
            row = {"step": step, "tokens": step * each, "accuracy": point.accuracy, "rho": point.tokens_per_step}
            file.write(json.dumps(row) + "\n")
            print(f"{job.name}: {row}", flush=True)


def work(job: Job, examples: list[Example], options: argparse.Namespace) -> None:
    output = Path(options.output)
    folder = output / job.name
    folder.mkdir(parents=True, exist_ok=True)
    log = (folder / "log.txt").open("a", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.jobs))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    began = time.perf_counter()
    model = train(job, examples, output, device, options.snapshots) if job.model is None else job.model
    trained = time.perf_counter()
    if job.sweeps and not (folder / "sweep.jsonl").is_file():
        evaluate(job, model, options, device)
    figures = {"train_s": round(trained - began, 1), "sweep_s": round(time.perf_counter() - trained, 1)}
    (folder / "seconds.json").write_text(json.dumps(figures))


def run_all(jobs: list[Job], examples: list[Example], options: argparse.Namespace) -> None:
    """Up to --jobs at once; a run waits for its reference."""
    context = multiprocessing.get_context("fork")
    waiting, running, done = list(jobs), dict[str, Any](), set[str]()
    began = time.perf_counter()
    while waiting or running:
        for job in list(waiting):
            if len(running) < options.jobs and done.issuperset(job.needs):
                waiting.remove(job)
                running[job.name] = context.Process(target=work, args=(job, examples, options))
                running[job.name].start()
        for name, process in list(running.items()):
            if not process.is_alive():
                del running[name]
                done.add(name)
                seconds = Path(options.output) / name / "seconds.json"
                told = seconds.read_text() if seconds.is_file() and not process.exitcode else "FAILED, see its log.txt"
                print(f"[{time.perf_counter() - began:6.1f} s] {name}: {told}", flush=True)
        time.sleep(0.2)


def table(sweeps: dict[str, Sweep]) -> list[str]:
    """Markdown: accuracy (tokens per step) of every sweep at every threshold."""
    thresholds = sorted({point.threshold for sweep in sweeps.values() for point in sweep.points})
    out = [f"| threshold | {' | '.join(sweeps)} |", "|---" * (len(sweeps) + 1) + "|"]
    for threshold in thresholds:
        cells = []
        for sweep in sweeps.values():
            point = next((point for point in sweep.points if point.threshold == threshold), None)
            cells.append("" if point is None else f"{point.accuracy:.1f} ({point.tokens_per_step:.2f})")
        out.append(f"| {threshold:g} | {' | '.join(cells)} |")
    return out


def report(jobs: list[Job], options: argparse.Namespace) -> None:
    """Tables and figures of the runs that have a sweep: report.md, frontier.png, tokens.png."""
    output, sweeps = Path(options.output), dict[str, Sweep]()
    for job in jobs:
        with suppress(RCDError, FileNotFoundError):
            sweeps[job.name] = Sweep.load(output / job.name / "sweep.jsonl")
    if not sweeps:
        raise SystemExit("no run has a sweep")
    with suppress(ImportError):  # matplotlib: the figures can be drawn later, on another machine
        plots.frontier(list(sweeps.values()), output / "frontier.png", f"{options.problems} held-out problems")
    page = [f"# {options.problems:,} problems, {options.mix}, seed {options.seed}", "", *table(sweeps)]
    for task in sorted({task for sweep in sweeps.values() for task in sweep.tasks}):
        page += ["", f"{task}:", "", *table({name: sweep.only(task) for name, sweep in sweeps.items()})]
    name = options.base.partition("=")[0] if options.base else None
    if name in sweeps:
        for other, sweep in sweeps.items():
            if other != name:
                found = compare(sweeps[name], sweep)
                (output / other / "compare.json").write_text(json.dumps(found, indent=1))
                page += ["", "```", *lines(found), "```"]
                print("\n".join(lines(found)), flush=True)
    (output / "report.md").write_text("\n".join(page) + "\n")
    series: dict[str, Any] = {}
    for job in jobs:
        path = output / job.name / "snapshots.jsonl"
        if path.is_file():
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            series[job.name] = [(row["tokens"] / 1e6, row["accuracy"]) for row in rows]
    with suppress(ImportError, RCDError):
        plots.curves(series, output / "tokens.png", "training tokens (millions)", "accuracy (%)", "threshold 0.9")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipes", nargs="*", help="NAME or NAME=BASE,key=value,...")
    parser.add_argument("--base", help="the recipe that the others are compared with")
    parser.add_argument(
        "--base-model", help="a checkpoint that the targets start from; else the recipe's base is trained"
    )
    parser.add_argument("--trained", action="store_true", help="entries are NAME=CHECKPOINT; nothing is trained")
    parser.add_argument("--output", default="runs/compare")
    parser.add_argument("--set", action="append", default=[], help="key=value for every run")
    parser.add_argument("--mix", default="mixed")
    parser.add_argument("--problems", type=int, default=2000)
    parser.add_argument("--thresholds", type=float, nargs="+", default=list(THRESHOLDS))
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--store", default="float32", help="float32 or bfloat16: how the models are kept and measured")
    parser.add_argument("--snapshots", type=int, default=0, help="so many points of accuracy over training tokens")
    options = parser.parse_args()
    settings = {key: _value(value) for key, value in (text.split("=", 1) for text in options.set)}
    entries = ([options.base] if options.base else []) + options.recipes
    examples: list[Example] = []
    if options.trained:
        jobs = [Job(name, TrainConfig(), model=path) for name, path in (entry.split("=", 1) for entry in entries)]
    else:
        jobs = jobs_of(entries, settings, options.base_model)
        began = time.perf_counter()
        examples = examples_of(jobs[-1].config)
        print(f"{len(examples):,} examples in {time.perf_counter() - began:.1f} s", flush=True)
    run_all(jobs, examples, options)
    report(jobs, options)


if __name__ == "__main__":
    try:
        main()
    except RCDError as error:
        print(f"compare: {error}", file=sys.stderr)
        sys.exit(2)
