"""Bad settings, prompts and references get one clear sentence that names the cause and the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rcd
from rcd.models.toy import toy, toy_tokenizer


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"block_length": 0}, "block_length must be a whole number of 1 or more, not 0"),
        ({"block_length": 2.5}, "block_length must be a whole number"),
        ({"max_new_tokens": 0}, "max_new_tokens must be"),
        ({"num_inference_steps": -1}, "num_inference_steps must be"),
        ({"threshold": 1.5}, r"threshold must be in \[0, 1\], not 1.5"),
        ({"threshold": -0.1}, r"threshold must be in \[0, 1\]"),
        ({"threshold": float("nan")}, r"threshold must be in \[0, 1\]"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"temperature": float("inf")}, "temperature must be"),
        ({"temperature": 1e-40}, "temperature of 1e-40 overflows"),
        ({"temperature": "warm"}, "temperature must be a number"),
        ({"seed": 2**64}, "seed must be"),
        ({"seed": -1}, "seed must be"),
        ({"top_k": 2.5}, "top_k must be"),
        ({"carry": 3}, "carry must be a name or a carry"),
        ({"carry": rcd.Residual}, "carry must be a name or a carry"),
        ({"top_p": 0.0}, "top_p must be"),
        ({"top_k": -2}, "top_k must be"),
        ({"factor": -1.0}, "factor must be"),
        ({"carry": "residul"}, "unknown carry 'residul' .did you mean 'residual'..; choose from: .*none, residual"),
        ({"commit": "all"}, "unknown commit 'all'; choose from: entropy, entropy_bound, factor, factor_strict"),
        ({"score": "best"}, "unknown score 'best'; choose from: confidence, margin, neg_entropy, random"),
        ({"schedule": "late"}, "unknown schedule 'late'; choose from: even, timesteps"),
        ({"entropy_bound": -0.1}, "entropy_bound must be a number of 0 or more"),
        ({"alg_temp": 1e-4}, "an alg_temp of 0.0001 overflows"),
        ({"edit_threshold": 1e308}, "edit_threshold is 1e.308 and 2147483647 is the most"),
        ({"kl_threshold": 1e39}, "kl_threshold is 1e.39 and 2147483647 is the most"),
        ({"max_post_steps": 10**25}, "max_post_steps must be a whole number from 0 to 256, not 1000"),
        ({"max_post_steps": 10**5000}, "from 0 to 256, not a number of thousands of digits; edits may go round"),
        ({"threshold": 10**5000}, r"threshold must be in \[0, 1\], not a number of thousands of digits"),
        ({"logprobs": 10**400}, r"logprobs must be a whole number from 0 to 20, not 10{99}\.\.\."),
        ({"confidence": "best"}, "unknown confidence"),
        ({"window": "d3f"}, "unknown window"),
        ({"carry_scope": "page"}, "unknown carry_scope"),
        ({"eos_suppression": "yes"}, "unknown eos_suppression"),
        ({"confidence": "high"}, "unknown confidence"),
        ({"engine": "fast"}, "DecodeConfig has no setting 'engine' any more: there is one decoder now; leave it out"),
        ({"thresold": 0.5}, "DecodeConfig has no setting 'thresold' .did you mean 'threshold'"),
        (
            {"residual_scale": 1.5},
            r"residual_scale must be in \[0, 1\], not 1.5; alpha_scale of the carry goes above 1",
        ),
        ({"logprobs": 21}, "logprobs must be a whole number from 0 to 20, not 21"),
        ({"passes": "quick"}, "unknown passes"),
        ({"stop": ("",)}, "a stop string is empty"),
        ({"stop": 5}, "stop must be"),
    ],
)
def test_bad_decode_settings(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(rcd.RCDError, match=match):
        rcd.DecodeConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"alpha": "entrpy"}, "unknown alpha 'entrpy' .did you mean 'entropy'"),
        ({"start": "hot"}, "unknown start 'hot'; choose from: dirichlet, reference, self, zero"),
        ({"t_res": 0.0}, r"t_res must be in \[0.001, 1e\+06\], not 0.0"),
        ({"t_res": float("nan")}, "t_res must be"),
        ({"t_res": "hot"}, "t_res must be in .*, not 'hot'"),
        ({"t_res_on": "delta"}, "unknown t_res_on"),
        ({"source": "other"}, "unknown source"),
        ({"concentration": 0.0}, "concentration must be"),
        ({"alpha_scale": -1.0}, "alpha_scale must be"),
        ({"alpha_value": 1.5}, "alpha_value must be"),
    ],
)
def test_bad_residual_settings(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(rcd.RCDError, match=match):
        rcd.Residual(**settings)


@pytest.mark.parametrize("family", ["sdar", "llada"])
def test_a_prompt_longer_than_the_context_is_refused_before_work(family: str) -> None:
    pipeline = rcd.Pipeline(toy(family, context=64))
    with pytest.raises(rcd.RCDError, match=r"prompt 1 has 70 tokens.*shorten the prompt"):
        pipeline.generate([[1, 2], [3] * 70], rcd.DecodeConfig(max_new_tokens=8))
    with pytest.raises(rcd.RCDError, match=r"the prompt has 40 tokens.*lower max_new_tokens to 24"):
        pipeline.generate([3] * 40, rcd.DecodeConfig(max_new_tokens=30))
    assert pipeline.generate([3] * 40, rcd.DecodeConfig(max_new_tokens=24)).results[0].tokens <= 24


@pytest.mark.parametrize("family", ["sdar", "llada"])
def test_without_a_length_as_much_is_decoded_as_fits(family: str) -> None:
    pipeline = rcd.Pipeline(toy(family, context=64))
    result = pipeline.generate([[3] * 40, [3] * 5], rcd.DecodeConfig(eos_suppression="logits")).results
    assert [r.tokens for r in result] == [24, 24]


def test_prompts_that_cannot_be_decoded(models: dict[str, rcd.Pipeline]) -> None:
    sdar = models["sdar"]
    cases: list[tuple[Any, str]] = [
        ([], "there is no prompt"),
        ([[], [1]], "prompt 0 is empty"),
        ([[1], [500]], "prompt 1 has the token id 500, outside the vocabulary"),
        ([[125, 1]], "the prompt is empty"),
        ("text", "has no tokenizer"),
        (torch.tensor([1.5]), "token ids are whole numbers, not 1.5"),
        ([[1, None]], "token ids"),
        ([3.5], "token ids are whole numbers, not 3.5"),
    ]
    for prompts, match in cases:
        with pytest.raises(rcd.RCDError, match=match):
            sdar.generate(prompts)


def test_chat_without_a_template() -> None:
    pipeline = rcd.Pipeline(toy("sdar", tokenizer=toy_tokenizer(128)))
    with pytest.raises(rcd.RCDError, match="no chat template"):
        pipeline.generate("the fox", chat=True)


def test_a_window_that_does_not_fit_the_model(models: dict[str, rcd.Pipeline]) -> None:
    with pytest.raises(rcd.RCDError, match=r"window 'bidirectional' does not fit.*take 'blockwise'"):
        models["sdar"].generate([1], rcd.DecodeConfig(window="bidirectional"))


def test_references_that_do_not_fit(tmp_path: Path, models: dict[str, rcd.Pipeline]) -> None:
    warm = rcd.DecodeConfig(carry=rcd.Residual(start="reference"), max_new_tokens=4)
    with pytest.raises(rcd.RCDError, match="needs a reference model"):
        models["sdar"].generate([1, 2], warm)
    with pytest.raises(rcd.RCDError, match="reference's attention is bidirectional"):
        models["sdar"].generate([1, 2], warm, reference=models["llada"])
    target = rcd.Pipeline(toy("sdar", tokenizer=toy_tokenizer(128)))
    other = toy_tokenizer(128)
    other.add_tokens(["extra"])
    with pytest.raises(rcd.RCDError, match="tokenizer does not match the target's"):
        target.generate([1, 2], warm, reference=rcd.Pipeline(toy("sdar", tokenizer=other, vocab=160)))


def test_a_reference_must_be_able_to_read_what_the_target_writes(models: dict[str, rcd.Pipeline]) -> None:
    warm = rcd.DecodeConfig(carry=rcd.Residual(start="reference"), max_new_tokens=8)
    small = rcd.Pipeline(toy("sdar", vocab=64))
    with pytest.raises(rcd.RCDError, match="the reference knows 64 tokens and the target 128"):
        models["sdar"].generate([1, 2], warm, reference=small)
    short = rcd.Pipeline(toy("sdar", context=16))
    with pytest.raises(rcd.RCDError, match=r"the reference cannot read this: the prompt has 30 tokens"):
        models["sdar"].generate([1] * 30, warm, reference=short)


def test_nan_logits_of_a_reference_are_not_blamed_on_the_target(models: dict[str, rcd.Pipeline]) -> None:
    broken = toy("sdar")
    with torch.no_grad():
        broken.model.head.weight[5] = float("nan")
    warm = rcd.DecodeConfig(carry=rcd.Residual(start="reference"))
    with pytest.raises(rcd.RCDError, match="logits of the reference are NaN or inf"):
        models["sdar"].generate([1, 2], warm, reference=rcd.Pipeline(broken))


def test_masks_that_are_written_differently_but_have_one_id_match() -> None:
    ours, theirs = toy_tokenizer(128), toy_tokenizer(128, mask="<MASK>")
    target, reference = (rcd.Pipeline(toy("sdar", tokenizer=words)) for words in (ours, theirs))
    warm = rcd.DecodeConfig(carry=rcd.Residual(start="reference"), max_new_tokens=4)
    assert target.generate([1, 2], warm, reference=reference).results


@pytest.mark.parametrize("name", ["top_k", "num_inference_steps", "temperature", "factor", "blocks_in_flight"])
def test_numbers_that_no_tensor_holds(name: str) -> None:
    with pytest.raises(rcd.RCDError, match=f"{name} is 1000+ and 2147483647 is the most; lower it"):
        rcd.DecodeConfig(**dict[str, Any]([(name, 10**30)]))


def test_stops_that_no_answer_holds() -> None:
    pipeline = rcd.Pipeline(toy("sdar", tokenizer=toy_tokenizer(128)))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"stop_ids": (125,)}, "token 125 of stop_ids is the mask"),
        ({"stop_ids": (128,)}, "token 128 of stop_ids is outside the vocabulary of 128"),
        ({"stop": (pipeline.tokenizer.decode([125]),)}, "a stop string is the mask"),  # type: ignore[union-attr]
    ]
    for settings, match in cases:
        with pytest.raises(rcd.RCDError, match=match):
            pipeline.generate([1, 2], rcd.DecodeConfig(**settings))


@pytest.mark.parametrize("window", ["bidirectional", "dual"])
def test_a_canvas_of_the_whole_context(window: str) -> None:
    pipeline = rcd.Pipeline(toy("llada"))
    assert len(pipeline.generate([3] * 4095, rcd.DecodeConfig(max_new_tokens=1, window=window)).sequences[0]) == 1


def test_every_prompt_is_checked_by_its_own_configuration() -> None:
    pipeline = rcd.Pipeline(toy("sdar", context=64))
    short, long = (rcd.DecodeConfig(max_new_tokens=n) for n in (8, 40))
    assert len(pipeline.generate([[1] * 50, [2]], [short, long]).sequences) == 2
    with pytest.raises(rcd.RCDError, match="prompt 1 has 50 tokens and with 40 new ones"):
        pipeline.generate([[1] * 50, [1] * 50, [2]], [short, long, long])


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"seeds": 5}, "seeds are a list of whole numbers"), ({"generator": 5}, "generator is a torch.Generator"),
        ({"reference": "a"}, "the reference is a Pipeline"), ({"probe": 5}, "a probe is a function"),
        ({"probe": print, "config": rcd.DecodeConfig(oracle=True)}, "the oracle shows its steps to no probe"),
    ],
    ids=str,
)  # fmt: skip
def test_arguments_of_other_kinds(models: dict[str, rcd.Pipeline], given: dict[str, Any], match: str) -> None:
    with pytest.raises(rcd.RCDError, match=match):
        models["sdar"].generate([1, 2], **given)


def test_a_model_that_takes_anothers_place_is_the_one_that_decodes() -> None:
    ours, other = (rcd.Pipeline(toy("sdar", seed=seed)) for seed in (0, 1))
    chosen = rcd.DecodeConfig(max_new_tokens=8)
    before = ours.generate([1, 2], chosen).sequences
    ours.checkpoint.model = other.model
    assert ours.generate([1, 2], chosen).sequences == other.generate([1, 2], chosen).sequences != before
