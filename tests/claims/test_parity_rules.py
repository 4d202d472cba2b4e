"""Commit rules, guidance and order against the code that they come from (fixtures/parity/NOTES.md says how it was run).

Every case is decoded twice, by the engine in one batch and by the oracle. Where the original draws, it was given this
project's numbers (`rcd.diffusion.noise.uniform_of`), so drawn tokens and drawn places must be equal as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rcd
from rcd.decode.events import Finished, Step

FIXTURES = Path(__file__).parent.parent / "fixtures" / "parity"
Case = dict[str, Any]


def base(case: Case, **rule: Any) -> rcd.DecodeConfig:
    """To the end, as the families' own code does."""
    new = case.get("gen_length", case.get("max_new_tokens"))
    common = dict(block_length=case.get("block_length"), temperature=case.get("temperature", 0.0))
    return rcd.DecodeConfig(max_new_tokens=new, seed=case.get("seed", 0), eos_early_stop=False, **common, **rule)


def llada(case: Case) -> rcd.DecodeConfig:
    """generate.py: steps are those of all blocks together."""
    suppressed = {"logits_eos_inf": "logits", "confidence_eos_eot_inf": "confidence"}
    return base(
        case,
        commit="random" if case.get("remasking") == "random" else "topm",
        num_inference_steps=case["steps"] // (case["gen_length"] // case["block_length"]),
        guidance=case.get("cfg_scale", 0.0),
        eos_suppression=next((ours for theirs, ours in suppressed.items() if case.get(theirs)), "none"),
    )


def fast_dllm(case: Case) -> rcd.DecodeConfig:
    window = {"none": "bidirectional"}.get(case["cache"], case["cache"])
    return base(case, commit="factor", factor=case["factor"], window=window)


def dream(case: Case) -> rcd.DecodeConfig:
    """diffusion_generate: no blocks, and `alg` is the commit rule's name."""
    return base(
        case,
        commit=case["alg"],
        num_inference_steps=case["steps"],
        alg_temp=case["alg_temp"] or 0.0,
        top_p=case["top_p"] or 1.0,
        top_k=case["top_k"] or 0,
    )


def sdar(case: Case) -> rcd.DecodeConfig:
    """generate.py, whose confidence is the probability after top-k and top-p; `random` is its evaluator's."""
    dynamic = case["threshold"] < 1.0
    return base(
        case,
        commit="threshold" if dynamic else "topm",
        score="random" if case["rule"] == "random" else None,
        confidence="filtered",
        num_inference_steps=case["denoising_steps"],
        threshold=case["threshold"],
        top_k=case["top_k"],
        top_p=case["top_p"],
    )


def d2f(case: Case) -> rcd.DecodeConfig:
    names = {"default": "threshold"}
    return base(
        case,
        window="d2f",
        commit=names.get(case["sampling_strategy"], case["sampling_strategy"]),
        confidence="filtered",
        threshold=case["skip_threshold"],
        block_add_threshold=case["block_add_threshold"],
        decoded_token_threshold=case["decoded_token_threshold"],
        blocks_in_flight=case["gen_length"],  # it has no such bound
        top_k=case["top_k"] or 0,
        top_p=case["top_p"] or 1.0,
    )


def entropy_bound(case: Case) -> rcd.DecodeConfig:
    """Both schedulers divide the logits by the temperature first."""
    return base(case, commit="entropy_bound", entropy_bound=case["entropy_bound"], confidence="tempered")


def klass(case: Case) -> rcd.DecodeConfig:
    """Its Dream has no blocks."""
    return base(
        case,
        commit="klass",
        num_inference_steps=case.get("block_length", case["gen_length"]),
        threshold=case["conf_threshold"],
        kl_threshold=case["kl_threshold"],
        klass_history=case["kl_history_length"],
    )


def joint(case: Case) -> rcd.DecodeConfig:
    """SGLang's last post step replaces nothing; diffusers looks at its bound after a step, so it takes one more."""
    return base(
        case,
        commit="joint_threshold",
        threshold=case["threshold"],
        edit_threshold=case["edit_threshold"],
        max_post_steps=case["max_post_steps"] + (case["code"] == "diffusers"),
    )


MAPPED: dict[str, Callable[[Case], rcd.DecodeConfig]] = {
    "llada_cfg": llada,
    "llada_eos": llada,
    "llada_conf": llada,
    "llada_random": llada,
    "llada_factor": fast_dllm,
    "dream_origin": dream,
    "dream_maskgit_plus": dream,
    "dream_entropy": dream,
    "dream_topk_margin": dream,
    "sdar_low_confidence_static": sdar,
    "sdar_low_confidence_dynamic": sdar,
    "sdar_random": sdar,
    "d2f_llada": d2f,
    "d2f_dream": d2f,
    "entropy_bound": entropy_bound,
    "klass_llada": klass,
    "klass_dream": klass,
    "joint_sglang": joint,
    "joint_diffusers": joint,
}
ENDS = {"llada_eos": [41, 49], "llada_conf": [41, 49]}
"""Where the end tokens matter, two that the tiny model likes: generate.py's EOS and EoT."""


def cases(name: str) -> list[Case]:
    return json.loads((FIXTURES / "rules" / f"{name}.json").read_text())


def model_of(name: str) -> str:
    family = name.split("_")[-1] if name.startswith(("klass", "d2f")) else name.split("_")[0]
    return {"entropy": "llada", "fast": "llada", "joint": "sdar"}.get(family, family)


def until_end(ids: list[int], ends: list[int]) -> list[int]:
    return next((ids[: k + 1] for k, token in enumerate(ids) if token in ends), ids)


def decoded(pipeline: rcd.Pipeline, prompts: list[list[int]], configs: list[rcd.DecodeConfig]) -> list[Case]:
    """Of each prompt the answer and how many tokens each step committed."""
    rows: list[Case] = [{"committed_per_step": []} for _ in prompts]
    for event in pipeline.stream(prompts, configs):
        assert isinstance(event, Step | Finished)
        if isinstance(event, Step):
            rows[event.row]["committed_per_step"].append(int(event.committed.sum()))
        else:
            rows[event.row]["ids"] = event.ids
    return rows


@pytest.mark.parametrize("way", ["engine", "oracle"])
@pytest.mark.parametrize("name", MAPPED)
def test_every_rule_decodes_as_the_code_that_it_comes_from(name: str, way: str) -> None:
    chosen, family = cases(name), model_of(name)
    overrides: Any = {"eos_token_ids": ENDS[name]} if name in ENDS else {}
    pipeline = rcd.load(FIXTURES / family / "model", device="cpu", **overrides)
    pipeline.model.double()
    ends = list(pipeline.model.settings.eos_token_ids)
    configs = [replace(MAPPED[name](case), oracle=way == "oracle") for case in chosen]
    found = decoded(pipeline, [case["prompt"] for case in chosen], configs)
    assert len(chosen) >= 50
    differing = [k for k, (case, ours) in enumerate(zip(chosen, found, strict=True)) if not same(case, ours, ends)]
    assert not differing


def same(case: Case, ours: Case, ends: list[int]) -> bool:
    """Tokens up to the end token, and how many each step committed (ours may have stopped at the end token's block)."""
    new = case.get("gen_length", case.get("max_new_tokens"))
    steps = ours["committed_per_step"]
    ended = any(token in ends for token in case["ids"][:new])
    theirs: Any = case.get("committed_per_step", steps)
    if "masks" in case and case.get("code") != "sglang" and not ended and len(steps) != len(case["masks"]):
        return False  # its forwards; SGLang's last of a block changes nothing where its post steps are used up
    return ours["ids"] == until_end(case["ids"][:new], ends) and steps == (theirs[: len(steps)] if ended else theirs)
