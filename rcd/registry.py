"""Every named part of the project: kind -> name -> "module:attribute", imported when first asked for.

Adding a part is one function (or class) and one line here; `rcd list` prints this table.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rcd.errors import unknown_name

TASK_SETS = ("sdar", "llada", "words")
TASK_PARTS = ("base", "reference", "seqd", "seqd-plain", "seqd-longer", "rcd", "paper", "loopholing")

PARTS: dict[str, dict[str, str]] = {
    # what travels from one denoising step to the next
    "carry": {
        "none": "rcd.carry.none:NoCarry",
        "residual": "rcd.carry.residual:Residual",
        "loopholing": "rcd.carry.loopholing:Loopholing",
        "iter_smooth": "rcd.carry.iter_smooth:IterSmooth",
        "token_merge": "rcd.carry.token_merge:TokenMerge",
        "soft_mask": "rcd.carry.soft_mask:SoftMask",
        "latent_refinement": "rcd.carry.latent_refinement:LatentRefinement",
    },
    # the weight of a residual (Eq. 3 and the other seven of fig:ablation-on-alpha)
    "alpha": {
        "entropy": "rcd.residual.alpha:entropy",
        "confidence": "rcd.residual.alpha:confidence",
        "fixed": "rcd.residual.alpha:fixed",
        "one": "rcd.residual.alpha:one",
        "top1": "rcd.residual.alpha:top1",
        "inverse_entropy": "rcd.residual.alpha:inverse_entropy",
        "inverse_confidence": "rcd.residual.alpha:inverse_confidence",
        "none": "rcd.residual.alpha:zero",
    },
    # the residual of the first step (tab:init-ablation)
    "start": {
        "zero": "rcd.residual.start:zero",
        "dirichlet": "rcd.residual.start:dirichlet",
        "self": "rcd.residual.start:own_pass",
        "reference": "rcd.residual.start:reference_pass",
    },
    # which predictions become tokens
    "commit": {
        "threshold": "rcd.diffusion.commit:by_threshold",
        "topm": "rcd.diffusion.commit:by_topm",
        "factor": "rcd.diffusion.commit:by_factor",
        "factor_strict": "rcd.diffusion.commit:by_factor_strict",
        "sequential": "rcd.diffusion.commit:sequential",
        "random": "rcd.diffusion.commit:at_random",
        "margin": "rcd.diffusion.commit:by_margin",
        "neg_entropy": "rcd.diffusion.commit:by_neg_entropy",
        "margin_confidence": "rcd.diffusion.commit:by_margin_confidence",
        "origin": "rcd.diffusion.commit:origin",
        "maskgit_plus": "rcd.diffusion.commit:maskgit_plus",
        "entropy": "rcd.diffusion.commit:entropy",
        "topk_margin": "rcd.diffusion.commit:topk_margin",
        "entropy_bound": "rcd.diffusion.commit:entropy_bound",
        "klass": "rcd.diffusion.commit:klass",
        "joint_threshold": "rcd.diffusion.commit:joint_threshold",
    },
    # what predictions are ranked by
    "score": {
        "confidence": "rcd.diffusion.score:confidence",
        "margin": "rcd.diffusion.score:margin",
        "neg_entropy": "rcd.diffusion.score:neg_entropy",
        "random": "rcd.diffusion.score:random",
    },
    # how many of them a step commits at least
    "schedule": {
        "even": "rcd.diffusion.schedule:even",
        "timesteps": "rcd.diffusion.schedule:timesteps",
    },
    # which positions are computed again at a step
    "window": {
        "blockwise": "rcd.decode.blocks:blockwise",
        "sub_blocks": "rcd.decode.sub_blocks:sub_blocks",
        "d2f": "rcd.decode.blocks:d2f",
        "bidirectional": "rcd.decode.canvas:bidirectional",
        "prefix": "rcd.decode.canvas:prefix",
        "dual": "rcd.decode.canvas:dual",
    },
    # model families, by the `model_type` of their config.json (lower case)
    "family": {
        "sdar": "rcd.models.families:SDAR",
        "llada": "rcd.models.families:LLADA",
        "dream": "rcd.models.families:DREAM",
        "sdar_moe": "rcd.models.moe_families:SDAR_MOE",
        "llada2_moe": "rcd.models.moe_families:LLADA2_MOE",
        "fast_dllm_qwen": "rcd.models.families:FAST_DLLM",
        "qwen3": "rcd.models.families:QWEN3",
        "qwen2": "rcd.models.families:QWEN2",
        "llama": "rcd.models.families:LLAMA",
    },
    # training runs: functions that return a Recipe
    "recipe": {
        "smoke": "rcd.recipes.smoke:smoke",
        **{
            f"tasks-{models}-{part}": f"rcd.recipes.tasks:{models}_{part}"
            for models in TASK_SETS
            for part in TASK_PARTS
        },
        "paper-sdar-1.7b-reference": "rcd.recipes.paper:reference_only",
        "paper-sdar-4b-b32": "rcd.recipes.paper:rcd_4b_b32",
        "paper-sdar-4b-b64": "rcd.recipes.paper:rcd_4b_b64",
        "paper-sdar-8b-b32": "rcd.recipes.paper:rcd_8b_b32",
        "paper-sdar-8b-b64": "rcd.recipes.paper:rcd_8b_b64",
        "paper-llada-8b": "rcd.recipes.paper:llada_8b",
        "seqd-sdar-4b-b32": "rcd.recipes.paper:seqd_4b_b32",
        "seqd-sdar-4b-b64": "rcd.recipes.paper:seqd_4b_b64",
        "seqd-sdar-8b-b32": "rcd.recipes.paper:seqd_8b_b32",
        "seqd-sdar-8b-b64": "rcd.recipes.paper:seqd_8b_b64",
        "seqd-sdar-8b-b64-extended": "rcd.recipes.paper:seqd_8b_b64_extended",
        "seqd-llada-8b": "rcd.recipes.paper:seqd_llada_8b",
    },
    # what a model is asked; any JSONL file is one too
    "task": {
        "gsm8k": "rcd.evaluate.tasks:GSM8K",
        "math500": "rcd.evaluate.tasks:MATH500",
        "minerva_math": "rcd.evaluate.tasks:MINERVA_MATH",
        "aime24": "rcd.evaluate.tasks:AIME24",
        "aime25": "rcd.evaluate.tasks:AIME25",
        "gsm1k": "rcd.evaluate.tasks:GSM1K",
        "gsm-plus": "rcd.evaluate.tasks:GSM_PLUS",
        "words": "rcd.evaluate.tasks:WORDS",
        "sudoku": "rcd.evaluate.tasks:SUDOKU",
        "mixed": "rcd.evaluate.tasks:MIXED",
    },
}


def names(kind: str) -> list[str]:
    return list(PARTS[kind])


def get(kind: str, name: str) -> Any:
    """The part of that name; an unknown name is an error that lists the choices."""
    parts = PARTS[kind]
    if not isinstance(name, str) or name not in parts:  # a list has no hash
        raise unknown_name(kind, name, parts)
    module, attribute = parts[name].split(":")
    return getattr(import_module(module), attribute)
