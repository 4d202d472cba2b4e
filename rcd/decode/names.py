"""Names that are no settings of decoding, and what to write instead: those of other projects (the table "The same
settings under other names" in docs/decoding.md), the carry's own, and what there was before."""

from __future__ import annotations

from rcd import registry
from rcd.settings import entries

STEPS = "num_inference_steps, which counts the steps of one block"
WINDOW = 'window="prefix" or "dual"'
ELSEWHERE = {
    "gen_length": "max_new_tokens", "max_length": "max_new_tokens, without the prompt's tokens",
    "block_size": "block_length", "dllm_block_length": "block_length", "bd_size": "block_length",
    "steps": STEPS, "diffusion_steps": STEPS, "denoising_steps": STEPS, "max_denoising_steps": STEPS,
    "confidence_threshold": "threshold", "dynamic_threshold": "threshold", "skip_threshold": "threshold",
    "conf_threshold": "threshold", "remasking": "commit", "alg": "commit", "remasking_strategy": "commit",
    "sampling_strategy": "commit", "dllm_algorithm": "commit", "dllm_unmasking_strategy": "commit",
    "editing_threshold": "edit_threshold", "max_post_edit_steps": "max_post_steps",
    "kl_history_length": "klass_history", "cfg_scale": "guidance", "cfg": "guidance",
    "classifier_free_guidance": "guidance", "logits_eos_inf": 'eos_suppression="logits"',
    "confidence_eos_eot_inf": 'eos_suppression="confidence"', "use_cache": WINDOW, "dual_cache": 'window="dual"',
    "small_block_size": "sub_block_length", "sub_block_size": "sub_block_length",
    "use_block_cache": 'window="sub_blocks"', "latent_logits_temperature": 'carry="trained,t_res=..."',
    "do_sample": "temperature, where 0 is greedy",
}  # fmt: skip
REMOVED = {"engine": "there is one decoder now; leave it out"}


def instead(name: str) -> str | None:
    """What to write in the place of this name, as the end of a sentence that refuses it."""
    if name in REMOVED:
        return f" any more: {REMOVED[name]}"
    if name in ELSEWHERE:
        return f"; here it is {ELSEWHERE[name]}"
    if name in {entry.name for entry in entries(registry.get("carry", "residual"))}:
        return f'; it is the carry\'s: carry="trained,{name}=..."'
    return None
