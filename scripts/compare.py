"""Train recipes, sweep thresholds, and state paired differences: the search for the bundled models, as one command.

    python scripts/compare.py --output runs/search --base tasks-sdar-seqd tasks-sdar-rcd tasks-sdar-paper

Every recipe is trained (bases and references once), decoded on the same held-out problems at every threshold, and
compared with `--base`. A recipe may be given as NAME=BASE,key=value,...: a variant of a registered one.
`--trained` sweeps and compares checkpoints that are there. Several run at once on one GPU (`--jobs`); examples that
several runs are trained on are made once and shared.

What --output holds already is used again where it was made with the same settings, and refused where it was not. The
exit code is 1 where a run has failed; the others are reported all the same.

Whoever chooses among recipes by their results chooses luck, too: search with one seed of the problems (`--seed`, 0
unless told), and report the chosen ones on another (`--trained --seed 1`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator

from rcd import api
from rcd.data.examples import Example, Report, encode
from rcd.data.rows import generated_tokenizer, rows_of
from rcd.data.tasks import sudoku
from rcd.data.tasks.base import MIXES, SPLITS, TASKS, problems
from rcd.decode.config import DecodeConfig
from rcd.errors import RCDError, number, one_of, whole
from rcd.evaluate import plots
from rcd.evaluate.sweep import Sweep, compare, lines, run_point, run_sweep
from rcd.evaluate.tables import page
from rcd.models import checkpoint as ckpt
from rcd.models.checkpoint import open_checkpoint
from rcd.models.pairing import check_pair
from rcd.models.settings import read_json
from rcd.models.source import fingerprint
from rcd.recipes.base import Recipe, find
from rcd.train.config import TrainConfig
from rcd.train.export import export_checkpoint
from rcd.train.loop import Trainer
from rcd.train.run import claim
from rcd.train.stage import BASE, REFERENCE, Stage, load_start
from rcd.train.store import Store

THRESHOLDS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.997, 1.0)
STORES = ("float32", "bfloat16")
GENERATED = rf"sums:[1-9][0-9]*|tasks:({'|'.join(MIXES)}):[1-9][0-9]*"
CURVE_THRESHOLD = 0.9


@dataclass(frozen=True)
class Job:
    name: str
    config: TrainConfig
    base: str | None = None
    """The job that trains what this one starts from."""
    reference: str | None = None
    """The job that trains its reference."""
    sweeps: bool = True
    model: str | None = None
    """A checkpoint that is there already: nothing is trained."""

    @property
    def needs(self) -> list[str]:
        return [name for name in (self.base, self.reference) if name is not None]

    def place(self, output: Path) -> str:
        """Where its model is, or will be."""
        return self.model or str(output / self.name / "model")

    def finished(self, output: Path) -> bool:
        """Whether there is nothing to train, or nothing any more."""
        return self.model is not None or (output / self.name / "model" / "config.json").is_file()

    def settled(self, output: Path, snapshots: int) -> TrainConfig:
        """The configuration with everything filled in: it goes to train.json."""
        config, steps = self.config, self.config.max_steps
        if self.base is not None:
            config = replace(config, model=str(output / self.base / "model"))
        if self.reference is not None:
            config = replace(config, reference=str(output / self.reference / "model"))
        every = config.save_every if steps is None else -(-steps // max(1, snapshots))
        return replace(config, save_every=every, keep=max(1, snapshots))


class Source(NamedTuple):
    """What examples are made of: jobs that have this in common share them."""

    data: str
    split: str
    max_length: int
    min_length: int

    @classmethod
    def of(cls, config: TrainConfig) -> Source:
        return cls(config.data, config.split, config.max_length, config.min_length)


def split_outside_brackets(text: str) -> list[str]:
    """The parts between commas; a comma within brackets is part of a JSON value."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    if depth:
        raise RCDError(f"the brackets in {text!r} do not match; write a list as [1,2].")
    return parts


def pair(text: str, form: str = "key=value") -> tuple[str, str]:
    """Both sides of the first equals sign."""
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise RCDError(f"{text!r} should be {form}.")
    return key, value


def setting(text: str) -> tuple[str, Any]:
    """key=value; the value is JSON where it can be, else a text."""
    key, value = pair(text)
    with suppress(json.JSONDecodeError):
        return key, json.loads(value)
    return key, value


def entry(text: str) -> tuple[str, Recipe, dict[str, Any]]:
    """(name, recipe, changes) of NAME, FILE.yaml or NAME=BASE,key=value,..."""
    if "=" not in text:
        return Path(text).stem if text.endswith((".yaml", ".yml")) else text, find(text), {}
    name, rest = pair(text, form := "NAME or NAME=BASE,key=value,...")
    if "," in name:
        raise RCDError(f"{text!r} should be {form}: a variant needs a name of its own.")
    known, *changes = split_outside_brackets(rest)
    return name, find(known), dict(setting(change) for change in changes)


def configured(config: TrainConfig, stage: str, settings: dict[str, Any]) -> TrainConfig:
    """With the settings of all stages, and then those of its own. What is said of all does not give a carry to a stage
    that has none, nor trajectories to what others start from."""
    stages = ("base.", "reference.", "target.")
    plain = () if config.carry is not None else ("carry.",) if stage == "target" else ("carry.", "residual.")
    common = {key: value for key, value in settings.items() if not key.startswith((*stages, *plain))}
    own = {key.removeprefix(f"{stage}."): value for key, value in settings.items() if key.startswith(f"{stage}.")}
    return config.with_settings(common | own)


def jobs_of(entries: Sequence[str], settings: dict[str, Any], base_model: str | None) -> list[Job]:
    """The runs; what several start from or learn from is trained once, before them."""
    shared: dict[str, Job] = {}
    runs: list[Job] = []

    def share(stage: str, config: TrainConfig) -> str:
        config = configured(config, stage, settings)
        digest = hashlib.blake2b(json.dumps(config.to_json()).encode(), digest_size=3).hexdigest()
        shared[f"{stage}-{digest}"] = Job(f"{stage}-{digest}", config, sweeps=False)
        return f"{stage}-{digest}"

    for text in entries:
        name, recipe, changes = entry(text)
        if recipe.target is None:
            assert recipe.reference is not None
            runs.append(Job(name, configured(recipe.reference, "reference", settings).with_settings(changes)))
            continue
        target, base, reference = configured(recipe.target, "target", settings).with_settings(changes), None, None
        if target.model == BASE:
            if base_model:
                target = replace(target, model=base_model)
            elif recipe.base is not None:
                base = share("base", recipe.base)
            else:
                raise RCDError(f"the recipe of {name} has no base; name what it starts from with --base-model.")
        if target.needs_reference and target.reference in (None, REFERENCE):
            if recipe.reference is not None:
                reference = share("reference", recipe.reference)
            elif target.reference or not target.residual.trajectory:
                raise RCDError(f"the recipe of {name} has no reference; name one with {name}=...,reference=CHECKPOINT.")
        runs.append(Job(name, target, base, reference))
    return [*shared.values(), *runs]


def trained_jobs(entries: Sequence[str]) -> list[Job]:
    """Checkpoints that are there: nothing but a sweep."""
    named = (pair(text, "NAME=CHECKPOINT, as --trained is given") for text in entries)
    return [Job(name, TrainConfig(), model=model) for name, model in named]


def check_options(options: argparse.Namespace, entries: Sequence[str]) -> None:
    """What can be refused before any recipe or checkpoint is looked at."""
    if not entries:
        raise RCDError("there is nothing to compare; name at least one recipe (`rcd list recipe` shows them).")
    one_of("--store", options.store, STORES)
    one_of("--mix", options.mix, MIXES)
    for threshold in options.thresholds:
        number("--thresholds", threshold, least=0, most=1)
    for name in ("jobs", "problems", "batch"):
        whole(f"--{name}", getattr(options, name), least=1)
    whole("--snapshots", options.snapshots, least=0)
    tasks = tuple(TASKS) if options.mix == "mixed" else (options.mix,)
    most = sudoku.TEST_BASES * len(tasks)
    if "sudoku" in tasks and options.problems > most:
        raise RCDError(
            f"--problems {options.problems} is too many: the test's sudokus repeat after {sudoku.TEST_BASES}, so ask "
            f"for {most} of the mix {options.mix!r} at most."
        )
    if options.trained and (options.set or options.base_model or options.snapshots):
        raise RCDError("--set, --base-model and --snapshots are for training; leave them out, or leave out --trained.")


def check_jobs(jobs: list[Job], options: argparse.Namespace) -> None:
    """Refuse what cannot be done, and what is there but was made otherwise, before any work."""
    output, named = Path(options.output), dict[str, Job]()
    for job in jobs:
        if not re.fullmatch(r"[^.,/|\s][^,/|\s]*", job.name):
            raise RCDError(f"{job.name!r} is no name for a run's folder; give a plain one, as in NAME=BASE,key=value.")
        if job.name in named:
            raise RCDError(f"two entries are named {job.name!r}; give one another name (NAME=...).")
        named[job.name] = job
    for job in jobs:
        if job.model is None:
            check_training(job, named, options.snapshots)
        elif open_checkpoint(job.model).tokenizer is None:
            raise RCDError(f"{job.model} has no tokenizer, and the problems are texts; name another checkpoint.")
    for job in jobs:
        check_results(job, output, options)


def check_training(job: Job, jobs: dict[str, Job], snapshots: int) -> None:
    """Generated data, batches that come out even, and one tokenizer for examples, start and reference."""
    config = job.config
    if not re.fullmatch(GENERATED, config.data):
        raise RCDError(f"{job.name} is of the data {config.data!r}; only tasks:MIX:N and sums:N can be compared here.")
    one_of("split", config.split, SPLITS)
    if config.total_batch % config.device_batch:
        raise RCDError(
            f"{job.name}: total_batch {config.total_batch} is no multiple of device_batch {config.device_batch}; "
            "change one of them."
        )
    if snapshots and config.max_steps is None:
        raise RCDError(f"{job.name} has no max_steps, which --snapshots needs; set it, or leave out --snapshots.")
    words = generated_tokenizer(config.data)
    for need in job.needs:
        if generated_tokenizer(jobs[need].config.data).get_vocab() != words.get_vocab():
            raise other_tokenizer(job, need)
    paths = [] if job.base or config.model.startswith("toy:") else [config.model]
    paths += [config.reference] if config.needs_reference and config.reference and not job.reference else []
    for path in paths:
        held = open_checkpoint(path)
        if held.tokenizer is None or held.tokenizer.get_vocab() != words.get_vocab():
            raise other_tokenizer(job, path)
        if held.settings.eos_token_ids[:1] != (words.eos_token_id,):
            raise RCDError(f"{path} ends its texts with another token than the examples of {job.name}; name another.")


def other_tokenizer(job: Job, model: str) -> RCDError:
    return RCDError(
        f"{model} has another tokenizer than the examples of {job.name} ({job.config.data}); name a model that was "
        "trained on such data, or change data."
    )


def check_results(job: Job, output: Path, options: argparse.Namespace) -> None:
    """A finished model and a sweep are used again only if they were made as they would be now."""
    folder = output / job.name
    if job.model is None and job.finished(output):
        wanted, held = job.settled(output, options.snapshots).to_json(), record(folder, "train.json", "a model")
        for key, need in (("model", job.base), ("reference", job.reference)):
            if need is not None and Path(held.get(key) or "").parts[-2:] == (need, "model"):
                wanted[key] = held[key]  # the same, also where --output was moved or is written in another way
        check_same(folder, "a model", held, wanted, but=("save_every", "keep"))
    if job.sweeps and (folder / "sweep.jsonl").is_file():
        held = record(folder, "sweep.json", "a sweep")
        check_same(folder, "a sweep", held, sweep_record(job, options))


def record(folder: Path, name: str, what: str) -> dict[str, Any]:
    """How a result was made."""
    if not (folder / name).is_file():
        raise RCDError(f"{folder} holds {what} but no {name} that says how it was made; choose another --output.")
    return read_json(folder / name)


def check_same(folder: Path, what: str, held: dict[str, Any], wanted: dict[str, Any], but: Sequence[str] = ()) -> None:
    differing = [key for key in {**wanted, **held} if key not in but and held.get(key) != wanted.get(key)]
    if differing:
        told = "; ".join(f"{key}: {held.get(key)!r} -> {wanted.get(key)!r}" for key in differing)
        raise RCDError(f"{folder} holds {what} that was made with other settings ({told}); choose another --output.")


def sweep_record(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """What a sweep's results depend on; no model where it is still to be trained."""
    given, output = ("problems", "seed", "mix", "thresholds", "store"), Path(options.output)
    model = fingerprint(job.place(output)) if job.finished(output) else None
    return {**{key: getattr(options, key) for key in given}, "model": model}


def _some(source: Source, first: int, count: int) -> list[Example]:
    mix = source.data.split(":")[1]
    found = problems(mix, source.split, count, first=first)
    rows = ((problem.name, {"prompt": problem.question, "response": problem.solution}) for problem in found)
    with suppress(RCDError):  # every one of these few is too long; there may be others
        return _encoded(rows, source)
    return []


def _encoded(rows: Any, source: Source) -> list[Example]:
    tokenizer = generated_tokenizer(source.data)
    return encode(
        rows, tokenizer, eos_token_id=tokenizer.eos_token_id, max_length=source.max_length, min_length=source.min_length
    )[0]


def examples_of(source: Source) -> list[Example]:
    """What `Stage.of` would make of the generated data, on all cores."""
    if not source.data.startswith("tasks:"):
        return _encoded(rows_of(source.data, source.split), source)
    count, cores = int(source.data.split(":")[2]), os.cpu_count() or 1
    size = -(-count // cores)
    with ProcessPoolExecutor(cores) as pool:
        parts = [pool.submit(_some, source, first, min(size, count - first)) for first in range(0, count, size)]
        examples = [example for part in parts for example in part.result()]
    if not examples:
        raise RCDError(f"no example of {source.data} has {source.min_length} to {source.max_length} tokens.")
    return examples


def examples_for(jobs: list[Job], output: Path) -> dict[Source, list[Example]]:
    """The examples of all jobs that are still to be trained, each set made once."""
    made: dict[Source, list[Example]] = {}
    for job in jobs:
        if job.finished(output):
            continue
        source, began = Source.of(job.config), time.perf_counter()
        if source not in made:
            made[source] = examples_of(source)
            told = f"{len(made[source]):,} examples of {source.data} in {time.perf_counter() - began:.1f} s"
            print(told, flush=True)
        parted(job, made[source])
    return made


def parted(job: Job, examples: list[Example]) -> tuple[list[Example], list[Example]]:
    """(to train on, held out)."""
    cut = len(examples) - job.config.validation
    if cut <= 0:
        raise RCDError(
            f"{job.config.validation} examples of {job.name} are to be held out, but there are only {len(examples)}; "
            "lower validation or ask for more data."
        )
    return examples[:cut], examples[cut:]


def train(job: Job, examples: list[Example], output: Path, device: torch.device, snapshots: int) -> None:
    folder, config, reference = output / job.name, job.settled(output, snapshots), None
    start = load_start(config, device)
    if config.needs_reference and config.reference is not None:
        reference = ckpt.load(config.reference, device=device, block_length=config.block_length)
        check_pair(start, reference)
    room = start.model.settings.context_length
    learnt, held_out = parted(job, [example for example in examples if len(example.ids) <= room])
    clear(folder)
    stage = Stage(config, start, reference, learnt, held_out, Report())
    trainer = Trainer(stage, folder, Accelerator(cpu=device.type == "cpu"), lambda text: print(text, flush=True))
    claim(folder, config)
    trainer.run()


def clear(folder: Path) -> None:
    """What an unfinished run has left: it is not to be taken for the new one's."""
    for path in (folder / "checkpoints", *folder.glob("model-*")):
        shutil.rmtree(path, ignore_errors=True)
    (folder / "snapshots.jsonl").unlink(missing_ok=True)


def evaluate(job: Job, options: argparse.Namespace, device: torch.device) -> None:
    """sweep.jsonl, with sweep.json that says how it was made; snapshots.jsonl, where it is asked for."""
    output = Path(options.output)
    folder, model = output / job.name, job.place(output)
    given = list(problems(options.mix, "test", options.problems, seed=options.seed))
    if not (folder / "sweep.jsonl").is_file():
        (folder / "sweep.json").write_text(json.dumps(sweep_record(job, options)) + "\n")
        (folder / "snapshots.jsonl").unlink(missing_ok=True)
        if options.store != "float32":  # what is measured is what is kept
            small = folder / f"model-{options.store}"
            model = str(api.load(model, device="cpu", dtype=options.store).save(small, overwrite=True))
        sweep = run_sweep(
            api.load(model, device=device, dtype="float32"), given, options.thresholds, DecodeConfig(), name=job.name,
            batch=options.batch, say=lambda text: print(text, flush=True),
        )  # fmt: skip
        sweep.save(folder / "sweep.jsonl")
    if options.snapshots and not (folder / "snapshots.jsonl").is_file():
        curve(job, given[: max(1, options.problems // 2)], options, device)


def curve(job: Job, given: list[Any], options: argparse.Namespace, device: torch.device) -> None:
    """Accuracy over training tokens, at one threshold: snapshots.jsonl."""
    output = Path(options.output)
    folder, content = output / job.name, job.settled(output, options.snapshots).to_json()
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    each, rows = sum(row["tokens"] for row in metrics) / len(metrics), list[dict[str, Any]]()
    for step in Store(folder / "checkpoints", keep=10**6).steps():
        model = folder / f"model-{step}"
        if not model.is_dir():
            export_checkpoint(folder, content, model, step)
        pipeline = api.load(model, device=device, dtype="float32")
        point = run_point(pipeline, given, DecodeConfig(threshold=CURVE_THRESHOLD), batch=options.batch)
        rows.append({"step": step, "tokens": step * each, "accuracy": point.accuracy, "rho": point.tokens_per_step})
        print(f"{job.name}: {rows[-1]}", flush=True)
    (folder / "snapshots.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def work(job: Job, examples: list[Example], options: argparse.Namespace) -> None:
    """One job, in a process of its own."""
    output = Path(options.output)
    folder = output / job.name
    folder.mkdir(parents=True, exist_ok=True)
    log = (folder / "log.txt").open("a", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.jobs))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    began = time.perf_counter()
    if not job.finished(output):
        train(job, examples, output, device, options.snapshots)
    trained = time.perf_counter()
    if job.sweeps:
        evaluate(job, options, device)
    figures = {"train_s": round(trained - began, 1), "sweep_s": round(time.perf_counter() - trained, 1)}
    (folder / "seconds.json").write_text(json.dumps(figures))


def run_all(jobs: list[Job], examples: dict[Source, list[Example]], options: argparse.Namespace) -> list[str]:
    """Up to --jobs at once; a run waits for its base and its reference. Returns what failed, or was skipped because
    something that it needs had."""
    context, began = multiprocessing.get_context("fork"), time.perf_counter()
    waiting, running, done, failed = list(jobs), dict[str, Any](), set[str](), list[str]()

    def say(name: str, text: str) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s] {name}: {text}", flush=True)

    while waiting or running:
        for job in list(waiting):
            lost = [need for need in job.needs if need in failed]
            if lost:
                waiting.remove(job)
                failed.append(job.name)
                say(job.name, f"skipped, as it needs {lost[0]}")
            elif len(running) < options.jobs and done.issuperset(job.needs):
                waiting.remove(job)
                own = examples.get(Source.of(job.config), [])
                running[job.name] = context.Process(target=work, args=(job, own, options))
                running[job.name].start()
        for name, process in list(running.items()):
            if not process.is_alive():
                del running[name]
                if process.exitcode:
                    failed.append(name)
                    say(name, f"FAILED, see {Path(options.output) / name / 'log.txt'}")
                else:
                    done.add(name)
                    say(name, (Path(options.output) / name / "seconds.json").read_text())
        time.sleep(0.1)
    return failed


def report(jobs: list[Job], failed: Sequence[str], options: argparse.Namespace) -> None:
    """Tables and figures of the runs that were swept: report.md, frontier.png, tokens.png."""
    output = Path(options.output)
    swept = [job.name for job in jobs if job.sweeps and job.name not in failed]
    if not swept:
        print("compare: no run was swept, so there is nothing to report", file=sys.stderr)
        return
    sweeps = {name: Sweep.load(output / name / "sweep.jsonl") for name in swept}
    first = next(job.name for job in jobs if job.sweeps)
    base = sweeps.get(first) if options.base else None
    if options.base and base is None:
        print(f"compare: note: {first} has failed, so there is nothing to compare the others with", file=sys.stderr)
    found = {name: compare(base, sweep) for name, sweep in sweeps.items() if base is not None and sweep is not base}
    for name, comparison in found.items():
        (output / name / "compare.json").write_text(json.dumps(comparison, indent=1))
        print("\n".join(lines(comparison)), flush=True)
    title = f"{options.problems:,} problems, {options.mix}, seed {options.seed}"
    (output / "report.md").write_text(page(title, sweeps, list(found.values()), failed))
    try:
        draw(sweeps, output, f"{options.problems} held-out problems")
    except RCDError as error:  # no matplotlib: they can be drawn later, on another machine
        print(f"compare: note: no figures: {error}", file=sys.stderr)


def draw(sweeps: dict[str, Sweep], output: Path, title: str) -> None:
    """Accuracy over tokens per step; and over training tokens, where there are snapshots."""
    plots.frontier(list(sweeps.values()), output / "frontier.png", title)
    series: dict[str, Any] = {}
    for name in sweeps:
        path = output / name / "snapshots.jsonl"
        if path.is_file():
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            series[name] = [(row["tokens"] / 1e6, row["accuracy"]) for row in rows]
    if series:
        at = f"threshold {CURVE_THRESHOLD}"
        plots.curves(series, output / "tokens.png", "training tokens (millions)", "accuracy (%)", at)


def parsed(args: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipes", nargs="*", help="NAME or NAME=BASE,key=value,...")
    parser.add_argument("--base", help="the recipe that the others are compared with")
    parser.add_argument(
        "--base-model", help="a checkpoint that the targets start from; else the recipe's base is trained"
    )
    parser.add_argument("--trained", action="store_true", help="entries are NAME=CHECKPOINT; nothing is trained")
    parser.add_argument("--output", default="runs/compare")
    parser.add_argument("--set", action="append", default=[], help="key=value for every run")
    parser.add_argument("--mix", default="mixed", help=f"the tasks: {', '.join(MIXES)}")
    parser.add_argument("--problems", type=int, default=2000)
    parser.add_argument("--thresholds", type=float, nargs="+", default=list(THRESHOLDS))
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the problems: search with one, report on another")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--store", default="float32", help="float32 or bfloat16: how the models are kept and measured")
    parser.add_argument("--snapshots", type=int, default=0, help="so many points of accuracy over training tokens")
    return parser.parse_args(args)


def run(options: argparse.Namespace) -> int:
    """Everything is checked first; then the work. Returns the exit code."""
    entries = ([options.base] if options.base else []) + options.recipes
    check_options(options, entries)
    options.thresholds = sorted(set(options.thresholds))
    settings = dict(setting(text) for text in options.set)
    jobs = trained_jobs(entries) if options.trained else jobs_of(entries, settings, options.base_model)
    check_jobs(jobs, options)
    failed = run_all(jobs, examples_for(jobs, Path(options.output)), options)
    report(jobs, failed, options)
    return 1 if failed else 0


def main(args: Sequence[str] | None = None) -> int:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the runs are forks
    try:
        return run(parsed(args))
    except RCDError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
