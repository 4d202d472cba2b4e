"""Commit rules as `rcd sweep` takes them: `NAME` or `NAME,setting=value,...`, several with commas.

    threshold,klass,kl_threshold=0.01,entropy_bound,entropy_bound=0.05/0.1/0.5

is three lines: `threshold` over the thresholds, `klass` over them with a bound of its own, and `entropy_bound` at three
bounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rcd.errors import RCDError

if TYPE_CHECKING:
    from rcd.decode.config import DecodeConfig


@dataclass(frozen=True)
class RuleLine:
    """A line of a sweep."""

    text: str
    """The rule and its settings, but for the one that has several values."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of decoding, the rule's name among them."""
    setting: str = "threshold"
    values: tuple[float | None, ...] | None = None
    """As `rcd.evaluate.campaign.Entry` has them."""


def rule_lines(texts: Iterable[str], common: DecodeConfig) -> list[RuleLine]:
    """The lines that --commit asks for, each once; `common` is what holds for all."""
    found: list[list[str]] = []
    for piece in (each.strip() for text in texts for each in text.split(",")):
        if not piece:
            raise RCDError("--commit names no rule; take NAME or NAME,setting=value (rcd list commit).")
        if "=" not in piece:
            found.append([piece])
        elif not found:
            raise RCDError(f"{piece!r} stands before any rule; write --commit NAME,{piece}.")
        else:
            found[-1].append(piece)
    lines = [_line(name, pairs, common) for name, *pairs in found]
    twice = [line.text for number, line in enumerate(lines) if line.text in [other.text for other in lines[:number]]]
    if twice:
        raise RCDError(f"{twice[0]!r} is there twice; leave one out, or give its values together (setting=0.1/0.5).")
    return lines


def _line(name: str, pairs: list[str], common: DecodeConfig) -> RuleLine:
    from rcd import registry
    from rcd.decode.config import DecodeConfig
    from rcd.diffusion.rule import Rule
    from rcd.settings import parse_pairs

    plain = [pair for pair in pairs if "/" not in pair]
    rule, text = Rule.of(registry.get("commit", name)), ",".join([name, *plain])
    several = [pair.partition("=")[::2] for pair in pairs if "/" in pair]
    if len(several) > 1:
        raise RCDError(f"{several[0][0]} and {several[1][0]} of {name} have several values; leave them to one setting.")
    settings = parse_pairs(DecodeConfig, plain)
    if "commit" in settings:
        raise RCDError(f"{text!r} names its rule twice; write --commit {settings['commit']}.")
    if "carry" in settings:
        raise RCDError(f"the carry is no setting of {name}; name it with --carry.")
    settings |= {"commit": name}
    if several:
        key, given = several[0]
        values = [parse_pairs(DecodeConfig, [f"{key}={one}"])[key] for one in given.split("/")]
    elif "threshold" in rule.reads:
        if "threshold" not in settings:
            return RuleLine(text, settings)
        key, values = "threshold", [settings.pop("threshold")]
    else:
        key = next(iter(rule.reads), "num_inference_steps")
        values = [settings.pop(key, getattr(common, key))]
    if any(isinstance(value, bool) or not isinstance(value, int | float | None) for value in values):
        raise RCDError(f"{key} is no number, so that {name} cannot have several of it; name a rule for each.")
    for value in values:  # each by itself, before any work
        one: dict[str, Any] = {**settings, key: value}
        DecodeConfig(**one)
    return RuleLine(text, settings, key, tuple(dict.fromkeys(values)))
