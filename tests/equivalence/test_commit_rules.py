"""Commit rules in the engine and the oracle: at a degenerate setting each is another one, with every carry."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

import rcd
from rcd.decode import remembered
from rcd.decode.events import Step
from rcd.decode.remembered import remembered_bytes
from tests.equivalence.setups import CARRIES, PROMPTS, WINDOWS, asked, config, ends, engine, looped, same, steps_of

EQUAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "an entropy bound of zero is one token a step": (
        {"commit": "entropy_bound", "entropy_bound": 0.0}, {"commit": "topm", "score": "neg_entropy"},
    ),
    "margin is the threshold of margins": ({"commit": "margin"}, {"commit": "threshold", "score": "margin"}),
    "random is topm of what is drawn": ({"commit": "random"}, {"commit": "topm", "score": "random"}),
    "neg_entropy that is never sure is topm": (
        {"commit": "neg_entropy", "threshold": 1.0},
        {"commit": "topm", "score": "neg_entropy", "confidence": "filtered"},
    ),
    "margin_confidence by confidence is threshold": (
        {"commit": "margin_confidence", "score": "confidence"}, {"commit": "threshold", "confidence": "filtered"},
    ),
    "an edit threshold above one never edits": (
        {"commit": "joint_threshold", "edit_threshold": 1.5}, {"commit": "threshold"},
    ),
    "an unbounded KL divergence is none": (
        {"commit": "klass", "kl_threshold": 1e6, "klass_history": 1},
        {"commit": "threshold", "confidence": "untempered"},
    ),
    "a KL divergence of zero is one token a step": (
        {"commit": "klass", "kl_threshold": 0.0}, {"commit": "topm", "confidence": "untempered"},
    ),
    "maskgit_plus over even steps is topm": (
        {"commit": "maskgit_plus", "schedule": "even", "num_inference_steps": 3},
        {"commit": "topm", "confidence": "filtered", "num_inference_steps": 3},
    ),
    "entropy is topm over the timesteps": (
        {"commit": "entropy"},
        {"commit": "topm", "schedule": "timesteps", "score": "neg_entropy", "confidence": "filtered"},
    ),
    "a confidence after no filter is tempered": (
        {"confidence": "filtered", "temperature": 0.8}, {"confidence": "tempered", "temperature": 0.8},
    ),
    "a factor of zero is one token a step": ({"commit": "factor_strict", "factor": 0.0}, {"commit": "topm"}),
}  # fmt: skip


EDITING = {name: one for name, one in WINDOWS.items() if one[1].get("window") != "sub_blocks"}
"""The windows in which a rule may replace tokens."""


@pytest.fixture(scope="module")
def loops() -> dict[str, rcd.Pipeline]:
    return {family: looped(family) for family in {family for family, _ in WINDOWS.values()}}


@pytest.mark.parametrize("carry", CARRIES)
@pytest.mark.parametrize("claim", EQUAL)
def test_at_a_degenerate_setting_a_rule_is_another(
    claim: str, carry: str, models: dict[str, rcd.Pipeline], loops: dict[str, rcd.Pipeline]
) -> None:
    """Each claim and carry in one of the windows, in the engine and in the oracle."""
    windows = list(EDITING.values())
    family, settings = windows[(list(EQUAL).index(claim) * 4 + list(CARRIES).index(carry)) % len(windows)]
    pipeline = (loops if carry == "loopholing" else models)[family]
    one, other = (config(**{**settings, "carry": CARRIES[carry], **rule}) for rule in EQUAL[claim])
    same(pipeline.generate(PROMPTS, one, seeds=[0] * 4), pipeline.generate(PROMPTS, other, seeds=[0] * 4))
    one, other = (
        config(**{**settings, "carry": CARRIES[carry], **rule, "oracle": True, "max_new_tokens": 9})
        for rule in EQUAL[claim]
    )
    same(pipeline.generate(PROMPTS[:1], one), pipeline.generate(PROMPTS[:1], other))


@pytest.mark.parametrize("window", WINDOWS)
def test_an_entropy_bound_of_zero_commits_one_token_a_step(window: str, models: dict[str, rcd.Pipeline]) -> None:
    family, settings = WINDOWS[window]
    rule = {"carry": "none", "commit": "entropy_bound", "entropy_bound": 0.0, "blocks_in_flight": 1}
    chosen = config(**{**settings, **rule})
    for event in steps_of(list(models[family].stream(PROMPTS, chosen))):
        assert int(event.committed.sum()) == 1


@pytest.mark.parametrize("window", EDITING)
@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_block_without_masks_goes_on_while_it_is_edited(
    window: str, most: int, models: dict[str, rcd.Pipeline]
) -> None:
    """For at most `max_post_steps` steps, and one with nothing to replace is the last; neither the prompt nor a block
    that is finished is touched again."""
    family, settings = EDITING[window]
    rule = {"commit": "joint_threshold", "edit_threshold": 0.05, "max_post_steps": most, "eos_early_stop": False}
    chosen, b = config(**{**settings, "carry": "residual", "temperature": 1.0, **rule, "threshold": 0.2}), 4
    prompt, causal = PROMPTS[0], models[family].settings.attention == "block_causal"
    origin, new = (len(prompt) // b * b - len(prompt), 21) if causal else (0, 20)  # whole blocks
    chosen = rcd.DecodeConfig(**{**vars(chosen), "block_length": b, "blocks_in_flight": 1, "max_new_tokens": new})
    told: dict[int, list[Step]] = defaultdict(list)
    for event in steps_of(list(models[family].stream([prompt], chosen))):
        place = event.offset + int(event.committed.nonzero()[0]) if bool(event.committed.any()) else None
        block = (place - origin) // b if place is not None else max(told)
        told[block].append(event)
        changed = (event.committed.nonzero().flatten() + event.offset).tolist()
        assert all(k >= 0 and (k - origin) // b == block for k in changed)
    assert list(told) == sorted(told) and sum(map(len, told.values())) > len(told)
    edits = 0
    for block, steps in told.items():
        first, last = origin + block * b, origin + (block + 1) * b
        full = [not bool(step.masked[max(0, first - step.offset) : last - step.offset].any()) for step in steps]
        post = steps[full.index(True) + 1 :]
        edits += sum(bool(step.revised.any()) for step in post)
        assert len(post) <= most and all(bool(step.revised.any()) for step in post[:-1])
        assert not post or len(post) == most or not bool(post[-1].revised.any())
        assert post or not most
    assert (edits > 0) == (most > 0)


def test_what_may_still_be_replaced_is_not_final(models: dict[str, rcd.Pipeline]) -> None:
    """Tokens that were told as final never change, and at the end all are."""
    rule = {"commit": "joint_threshold", "edit_threshold": 0.0, "temperature": 1.0, "threshold": 0.2}
    for window in ("blockwise", "d2f", "bidirectional", "dual"):
        family, settings = WINDOWS[window]
        chosen = config(**{**settings, "carry": "none", **rule})
        now, final = dict[int, int](), list[int | None]()
        for event in steps_of(list(models[family].stream(PROMPTS[:1], chosen))):
            now |= {event.offset + int(k): int(event.draft[k]) for k in event.committed.nonzero().flatten()}
            assert [now.get(k) for k in range(len(final))] == final
            final = [now.get(k) for k in range(event.final)]


def test_timesteps_may_commit_nothing_and_end_with_the_last(models: dict[str, rcd.Pipeline]) -> None:
    """Dream's loop: exactly `steps` denoising steps, the first of which commits int(21 / 21 * .999) = 0 tokens."""
    chosen = config(commit="entropy", block_length=None, carry="none", eos_early_stop=False)
    for steps in (21, 40):
        chosen = rcd.DecodeConfig(**{**vars(chosen), "num_inference_steps": steps})
        counts = [int(event.committed.sum()) for event in steps_of(list(models["dream"].stream(PROMPTS[:1], chosen)))]
        assert len(counts) == steps and counts[0] == 0 and sum(counts) == chosen.new_tokens


@pytest.mark.parametrize("window", ["blockwise", "bidirectional"])
def test_a_row_that_is_used_again_remembers_nothing(window: str, models: dict[str, rcd.Pipeline]) -> None:
    family, settings = WINDOWS[window]
    chosen = config(**{**settings, "carry": "none", "commit": "klass"})
    served = engine(models[family], chosen, rows=1)
    ends(served, asked(models[family], chosen, PROMPTS[:1]))
    with torch.inference_mode():
        for each in served.rows.memory:
            each.fill_(0.5)
    assert served.admit(asked(models[family], chosen, PROMPTS[1:2])[0]) is None
    states = served.window.states
    assert len(served.rows.memory) == 2 and not any(bool(each[:states].any()) for each in served.rows.memory)


@pytest.mark.parametrize(
    ("window", "rule"),
    [("blockwise", "joint_threshold"), ("bidirectional", "klass"), ("dream", "maskgit_plus")],
)
def test_a_rules_bookkeeping_asks_nothing_of_the_host(window: str, rule: str, models: dict[str, rcd.Pipeline]) -> None:
    """It is traced as one graph, in which no value is known; and emits the same tokens."""
    family, settings = WINDOWS[window]
    own = {"commit": rule, "temperature": 0.8, "alg_temp": 0.3, "kl_threshold": 5.0, "edit_threshold": 0.2}
    chosen = config(**{**settings, "carry": "residual", "max_new_tokens": 9, **own, "threshold": 0.3})
    served = engine(models[family], chosen)
    served.units.sparse = False  # as on a GPU
    served.units.compile(backend="eager")
    want = models[family].generate(PROMPTS[:2], chosen, seeds=[0] * 2).sequences
    assert ends(served, asked(models[family], chosen, PROMPTS[:2])) == (dict(enumerate(want)), {})


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("scope", ["canvas", "block"])
def test_what_a_rule_remembers_is_known_beforehand(
    window: str, scope: str, models: dict[str, rcd.Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    family, settings = WINDOWS[window]
    pipeline = models[family]
    for rule, some in (("klass", True), ("threshold", False)):
        chosen = config(**{**settings, "carry": "none", "commit": rule, "carry_scope": scope})
        served = engine(pipeline, chosen, rows=3)
        known = remembered_bytes(pipeline.model, served.config, 3, served.capacity)
        assert known == sum(each.nbytes for each in served.rows.memory) and (known > 0) == some
    chosen = config(**{**settings, "carry": "none", "commit": "klass"})
    monkeypatch.setattr(remembered, "free_bytes", lambda device: 1000)
    with pytest.raises(rcd.RCDError, match=r"what the commit rule klass remembers of 3 rows .* serve fewer rows"):
        engine(pipeline, chosen, rows=3)
