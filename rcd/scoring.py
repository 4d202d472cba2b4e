"""Likelihoods as a pipeline gives them: a prompt and a continuation as token ids, the bound, and the greedy check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rcd.carry.base import Carry
from rcd.decode.config import DecodeConfig
from rcd.decode.events import Failed, Step
from rcd.errors import RCDError
from rcd.likelihood.estimate import Score, check, estimate, resolved, room
from rcd.likelihood.settings import ScoreConfig
from rcd.models.learnt import check_held

if TYPE_CHECKING:
    from rcd.api import Pipeline


def pair(
    pipeline: Pipeline, prompt: Any, continuation: Any, chat: bool | None = None
) -> tuple[list[int], list[int]]:  # fmt: skip
    """Prompt and continuation as token ids; texts, or given as ids. Two plain texts are read as one, as lm-eval does:
    the continuation begins where their tokens differ from those of the prompt alone, whose spaces at the end belong to
    the continuation. Behind a chat template or ids it is read by itself."""

    def plain(text: str) -> list[int]:
        return pipeline.encode([text], False)[0]

    prompt, continuation = (each.tolist() if hasattr(each, "tolist") else each for each in (prompt, continuation))
    for each in (prompt, continuation):
        if not isinstance(each, (str, list, tuple)):
            raise RCDError(f"a prompt and its continuation are texts or lists of token ids, not {type(each).__name__}.")
    if not isinstance(continuation, str) and any(isinstance(each, str) for each in continuation):
        raise RCDError("a score is of one continuation; of several texts, score each by itself.")
    texts, template = isinstance(prompt, str), bool(getattr(pipeline.tokenizer, "chat_template", None))
    if not isinstance(continuation, str):
        end = pipeline.encode([continuation])[0]
        return (pipeline.encode([prompt], chat)[0] if len(prompt) else []), end
    if texts and not (prompt and (template if chat is None else chat)):
        return together(plain, prompt, continuation)
    return pipeline.encode([prompt], chat)[0], _parted(plain(""), plain(continuation))[1]


def together(encode: Callable[[str], list[int]], prompt: str, continuation: str) -> tuple[list[int], list[int]]:
    """Two texts that are read as one."""
    start, end = _parted(encode(prompt.rstrip()), encode(prompt + continuation))
    if continuation.strip() and not end:
        raise RCDError("the continuation is part of the prompt's last token; begin it with a space, or give token ids.")
    return start, end


def _parted(own: list[int], whole: list[int]) -> tuple[list[int], list[int]]:
    same = next((k for k, (a, b) in enumerate(zip(own, whole, strict=False)) if a != b), min(len(own), len(whole)))
    return whole[:same], whole[same:]


def score(pipeline: Pipeline, prompt: Sequence[int], continuation: Sequence[int], config: ScoreConfig) -> Score:
    """Of token ids."""
    chosen = resolved(config, pipeline.settings, pipeline.checkpoint.rcd.carry)
    check(prompt, continuation, pipeline.settings, chosen.block_length)
    if chosen.recursions or chosen.greedy:
        assert isinstance(chosen.carry, Carry)
        check_held(pipeline.model, chosen.carry)
    if chosen.greedy and not len(prompt):
        raise RCDError("greedy decoding begins with a prompt, and this one is empty; leave greedy out.")
    found = estimate(pipeline.model, prompt, continuation, chosen)
    return replace(found, greedy=is_greedy(pipeline, prompt, continuation, chosen)) if chosen.greedy else found


def is_greedy(pipeline: Pipeline, prompt: Sequence[int], continuation: Sequence[int], config: ScoreConfig) -> bool:
    """Whether decoding one token a step, the surest first, gives exactly this continuation: over a canvas as long as it
    (LLaDA's `suffix_greedy_prediction`), or block by block. It stops at the first token that is another."""
    causal = pipeline.settings.attention == "block_causal"
    asked = DecodeConfig(
        max_new_tokens=len(continuation), threshold=1.0, carry=config.carry, guidance=config.guidance,
        block_length=config.block_length if causal else len(continuation), eos_early_stop=causal,
    )  # fmt: skip
    agreed = 0
    with closing(pipeline.stream(list(prompt), asked)) as events:  # type: ignore[type-var]
        for event in events:
            if isinstance(event, Failed):
                raise RCDError(event.message) from event.cause
            if isinstance(event, Step):
                same = [token == continuation[place] for place, token in _committed(event, len(continuation))]
                agreed += sum(same)
                if not all(same):
                    return False
    return agreed == len(continuation)


def _committed(event: Step, count: int) -> list[tuple[int, int]]:
    """(place, token) of the answer's first `count` tokens."""
    places = range(event.offset, event.offset + len(event.draft))
    told = zip(places, event.draft.tolist(), event.committed.tolist(), strict=True)
    return [(place, token) for place, token, committed in told if committed and 0 <= place < count]


def windows(pipeline: Pipeline, ids: Sequence[int], config: ScoreConfig) -> list[tuple[list[int], list[int]]]:
    """(prompt, continuation) of the parts that together are a text of any length: the first as long as the model reads,
    without a prompt; each other one half as long, behind as much text as there is room for.

    room 8, 15 tokens    0..7 | 8..11 behind 4..7 | 12..14 behind 7..11
    """
    chosen = resolved(config, pipeline.settings, pipeline.checkpoint.rcd.carry)
    most = room(pipeline.settings, chosen.block_length)
    parts: list[tuple[list[int], list[int]]] = [([], list(ids[:most]))] if len(ids) else []
    for start in range(most, len(ids), half := max(1, most // 2)):
        own = list(ids[start : start + half])
        parts.append((list(ids[start - (most - len(own)) : start]), own))
    return parts


def ranked(scores: Sequence[Score], per_token: bool = False) -> list[int]:
    """The places of the scores, the likeliest first; `per_token`: by the mean over each one's tokens."""
    return sorted(range(len(scores)), key=lambda k: -(scores[k].per_token if per_token else scores[k].log_likelihood))
