"""`rcd lm-eval`: lm-eval's tasks with a diffusion model, and what answering cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from rcd.cli import options as opt
from rcd.cli.flags import Given, decoding
from rcd.errors import RCDError, whole
from rcd.terminal import show


@decoding(
    "threshold", "block_length", "max_new_tokens", "temperature", "seed",
    max_new_tokens="the task's, else the model's", temperature="the task's",
)  # fmt: skip
def lm_eval(
    tasks: Annotated[str, typer.Option("--tasks", "-t", help="lm-eval's names, parted by commas; or YAML files.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of the results, a new one.")],
    model: opt.Model = opt.DEFAULT_MODEL,
    carry: opt.CarryOf = opt.TRAINED,
    reference: opt.Reference = None,
    *,
    decoding: Given,
    num_fewshot: Annotated[int | None, typer.Option(help="Worked examples; by default the task's.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many documents of each task.")] = None,
    include_path: Annotated[list[Path] | None, typer.Option(help="A folder of YAML tasks; may be repeated.")] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Ask in the tokenizer's chat template.")
    ] = False,
    draws: Annotated[
        int | None, typer.Option(help="Of likelihoods: sets of masks drawn for a text (docs/evaluation.md); else 128.")
    ] = None,
    recursions: Annotated[int | None, typer.Option(help="Of likelihoods: passes that hand on a carry; else 0.")] = None,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Of likelihoods: also whether greedy decoding gives the text.")
    ] = False,
    batch: Annotated[int, typer.Option(help="Rows at once, on a GPU.")] = 32,
    as_json: opt.Json = False,
    device: opt.Device = "auto",
    dtype: opt.DType = "auto",
    quantize: opt.Quantize = None,
    threads: opt.Threads = None,
) -> None:
    """Run lm-eval's tasks, generation and likelihoods; what every request took goes to OUTPUT/requests.jsonl."""
    whole("batch", batch, least=1)
    for name, value, least in (("limit", limit, 1), ("num-fewshot", num_fewshot, 0)):
        if value is not None:
            whole(name, value, least=least)
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise RCDError("name at least one task with --tasks.")
    from rcd.likelihood.settings import ScoreConfig

    decoding.config()
    given = dict(decoding.values)
    named = {"draws": draws, "recursions": recursions, "greedy": greedy or None}
    scores: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    ScoreConfig(**scores)
    asked: dict[str, Any] = {}
    if "max_new_tokens" in decoding.flags:
        asked["max_gen_toks"] = given.pop("max_new_tokens")
    if "temperature" in decoding.flags:
        temperature = given.pop("temperature")
        asked |= {"temperature": temperature, "do_sample": temperature > 0}

    from rcd.evaluate import harness
    from rcd.evaluate.requests import REQUESTS
    from rcd.models.threads import limit_threads

    harness.library()
    folders = include_path or []
    manager = harness.task_manager(names, folders)
    instance = harness.model_class()(
        model, carry=carry, reference=reference, batch_size=batch, device=device, dtype=dtype,
        quantize=quantize, requests=output / REQUESTS, **given, **scores,
    )  # fmt: skip
    limit_threads([instance.answerer.pipeline], threads, rows=batch)
    with opt.keeping(f"the requests answered so far are told in {output / REQUESTS}"):
        results = harness.run(
            instance, names, output, name=model, num_fewshot=num_fewshot, limit=limit,
            apply_chat_template=apply_chat_template, gen_kwargs=asked, manager=manager,
        )  # fmt: skip
    if not results:  # one of several processes, and not the first
        return
    config = {key: results["config"][key] for key in ("carry", "decode", "cost", "likelihood")}
    if as_json:
        shown = {
            key: results[key] for key in ("results", "groups", "n-shot", "n-samples", "versions") if key in results
        }
        print(json.dumps({"model": model, **config, **shown, "output": str(output)}, default=str))
        return
    from lm_eval.utils import make_table

    show(heading(model, config))
    print(make_table(results))
    if results.get("groups"):
        print(make_table(results, "groups"))
    parts = [cost(config["cost"])] if config["cost"]["tasks"] else []
    parts += [scored(config["likelihood"])] if config["likelihood"]["tasks"] else []
    show("\n".join([*(line for part in parts for line in [*part, ""]), f"in {output}"]))


def heading(model: str, config: dict[str, Any]) -> str:
    """The model, and the settings of what was asked of it: of answers, of likelihoods, or of both."""
    parts, scores = [model, f"carry {config['carry']['name']}"], config["likelihood"]
    if config["cost"]["tasks"]:
        parts.append(f"threshold {config['decode']['threshold']:g}")
    if scores["tasks"]:
        parts.append(f"{scores['draws']} draws")
    guidance = max(config["decode"]["guidance"], scores["guidance"] if scores["tasks"] else 0)
    return ", ".join([*parts, f"guidance {guidance:g}"] if guidance else parts)


def scored(summary: dict[str, Any]) -> list[str]:
    """What likelihoods cost, and how well they are known."""
    out = [
        f"likelihoods: lower bounds, {summary['draws']} draws at most",
        "",
        "|Tasks|Texts|Tokens|Forwards|Mean standard error|Seconds|",
        "|-----|----:|-----:|-------:|------------------:|------:|",
    ]
    for name, row in summary["tasks"].items():
        error = "" if row["standard_error"] is None else f"{row['standard_error']:.3f}"
        out.append(f"|{name}|{row['requests']}|{row['tokens']}|{row['forwards']}|{error}|{row['seconds']:.1f}|")
    return out


def cost(summary: dict[str, Any]) -> list[str]:
    """What answering cost, as a table like lm-eval's."""
    rows = dict(summary["tasks"])
    if len(rows) > 1:
        rows["all"] = summary["all"]
    out = [
        "|Tasks|Requests|Tokens per step|Tokens per second|Mean latency (s)|Tokens|Before a stop|Cut off|",
        "|-----|-------:|--------------:|----------------:|---------------:|-----:|------------:|------:|",
    ]
    for name, row in rows.items():
        rate = "" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:.1f}"
        kept = row["kept_tokens"] / max(1, row["tokens"])
        out.append(
            f"|{name}|{row['requests']}|{row['tokens_per_step']:.2f}|{rate}|{row['latency']:.3f}|{row['tokens']}|"
            f"{kept:.1%}|{row['cut_off']:.1%}|"
        )
    return out
