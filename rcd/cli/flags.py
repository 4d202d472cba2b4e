"""Flags of decoding, generated from the settings themselves: names, kinds, defaults, bounds and words are theirs.

Reading the settings imports torch, so a command gets these flags when it is asked for, and `rcd --help` stays quick.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer

from rcd.cli import options as opt
from rcd.errors import RCDError, unknown_name

if TYPE_CHECKING:
    from rcd.carry.base import Carry
    from rcd.decode.config import DecodeConfig
    from rcd.settings import Entry

ALL = "all"
OTHER_NAMES = {"num_inference_steps": ("--steps",)}
SHORTER = {"stop_ids": "--stop-id"}
"""Of a flag that may be repeated, and names one each time."""
PANELS: dict[str | None, tuple[str, ...]] = {
    None: ("max_new_tokens", "stop", "stop_ids", "logprobs"),
    opt.CARRY: ("carry_scope", "residual_scale"),
    opt.COMMIT: (
        "commit", "threshold", "factor", "entropy_bound", "kl_threshold", "klass_history", "edit_threshold",
        "max_post_steps", "alg_temp", "score", "schedule", "num_inference_steps", "block_length", "window",
        "refresh_every", "block_add_threshold", "decoded_token_threshold", "blocks_in_flight",
    ),
    opt.SAMPLING: (
        "temperature", "top_k", "top_p", "seed", "guidance", "eos_suppression", "eos_early_stop", "confidence",
    ),
}  # fmt: skip
"""Where `--help` shows a setting; any other is shown with how passes are computed."""


@dataclass(frozen=True)
class Given:
    """What a command line says of decoding."""

    flags: dict[str, Any] = field(default_factory=dict)
    texts: Sequence[str] = ()
    """Of --set."""
    carry: dict[str, Any] = field(default_factory=dict)
    """Settings of the residual carry."""

    @functools.cached_property
    def values(self) -> dict[str, Any]:
        """By name, those of `--set` too; the carry's apart."""
        from rcd.decode.config import DecodeConfig
        from rcd.settings import parse_pairs

        _check_names(self.texts)
        pairs = parse_pairs(DecodeConfig, self.texts)
        twice = [name for name in pairs if name in self.flags]
        if twice:
            raise RCDError(f"{twice[0]} is given twice, by {flag_of(twice[0])} and by --set; leave one of them out.")
        return {**self.flags, **pairs}

    def config(self, **fill: Any) -> DecodeConfig:
        """The configuration, checked; `fill` is for what is not given, and a None says nothing."""
        from rcd.decode.config import DecodeConfig

        return DecodeConfig(**{key: value for key, value in fill.items() if value is not None} | self.values)

    def chosen(self, spec: str | None, trained: dict[str, Any] | None) -> tuple[Carry | None, list[str]]:
        """The carry that --carry and the flags of its settings mean, and those of them that have no effect with it.

        Settings of the residual carry mean that carry when none is named; over a checkpoint that was trained with one
        they change only what they name.
        """
        from rcd.carry.base import describe, make
        from rcd.carry.parse import parse_carry

        if spec is None:
            return (parse_carry({"name": "residual", **self.carry}, trained) if self.carry else None), []
        carry = parse_carry(spec, trained)
        if carry is None or not carry.carries:
            return carry, sorted(self.carry)
        own = describe(carry)
        return make(own.pop("name"), {**own, **self.carry}), []


def decoding(
    *names: str, carry: bool = False, pairs: bool = True, also: Mapping[str, str] | None = None, **words: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command flags of these settings (`ALL`: of every one): what was given comes as `decoding`.

    `carry`: flags of the residual carry's settings as well; `pairs`: `--set`, too. `also`: other classes of settings
    (panel -> module:Class), whose flags that were given come as `also`, a dict for each panel. `words`, by a setting's
    name: what it is by default in this command, told in words, or a default of the command's own.
    """

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def command(*args: Any, **kwargs: Any) -> Any:
            context: Any = kwargs.pop("ctx", None)
            found = {entry.name: entry for entry in _entries(names, carry)}
            read = {name: kwargs.pop(name) for name in [*kwargs] if name in found}
            if context is not None:
                read = {name: value for name, value in read.items() if _typed(context, name)}
            if also:
                kwargs["also"] = {panel: _given(context, kwargs, found) for panel, found in _others(also).items()}
            fixed = {name: value for name, value in words.items() if not isinstance(value, str)}
            read = fixed | {name: value for name, value in read.items() if value is not None}
            own = _carry_names() if carry else set[str]()
            flags = {name: _value(found[name], value) for name, value in read.items()}
            given = Given(
                {name: value for name, value in flags.items() if name not in own},
                tuple(kwargs.pop("settings", None) or ()),
                {name: value for name, value in flags.items() if name in own},
            )
            return function(*args, decoding=given, **kwargs)

        def complete() -> Callable[..., Any]:
            """The command with all of its flags."""
            command.__signature__ = _signature(function, _entries(names, carry), words, pairs, _others(also))  # type: ignore[attr-defined]
            return command

        command.__signature__ = _signature(function, [], words, pairs)  # type: ignore[attr-defined]
        command.complete = complete  # type: ignore[attr-defined]
        return command

    return wrap


def completed(name: str, command: Any) -> Any:
    """A command of typer's, with the flags of decoding if it takes any."""
    complete = getattr(command.callback, "complete", None)
    if complete is None:
        return command
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(name)(complete())
    return typer.main.get_command(app)


def flag_of(name: str) -> str:
    return SHORTER.get(name, "--" + name.replace("_", "-"))


def _entries(names: Sequence[str], carry: bool) -> list[Entry]:
    """In the order of `--help`. What --carry says is no setting of these."""
    from rcd.decode.config import DecodeConfig
    from rcd.settings import entries

    settings = [entry for entry in entries(DecodeConfig) if entry.name != "carry"]
    wanted = [entry for entry in settings if names == (ALL,) or entry.name in names]
    panels = [*PANELS, opt.PASSES]
    own = {name: number for number, name in enumerate(name for names in PANELS.values() for name in names)}
    found = [*(_residual() if carry else []), *wanted]
    return sorted(found, key=lambda entry: (panels.index(_panel(entry.name)), own.get(entry.name, -1)))


def _others(also: Mapping[str, str] | None) -> dict[str, list[Entry]]:
    """The settings of other classes, by panel; a carry is --carry's."""
    from importlib import import_module

    from rcd.settings import entries

    named = {panel: path.partition(":") for panel, path in (also or {}).items()}
    found = {panel: entries(getattr(import_module(module), name)) for panel, (module, _, name) in named.items()}
    return {panel: [entry for entry in each if entry.name != "carry"] for panel, each in found.items()}


def _given(context: Any, kwargs: dict[str, Any], entries: Sequence[Entry]) -> dict[str, Any]:
    """Of these settings, what stands on the command line; all are taken out of `kwargs`."""
    found = {entry.name: (entry, kwargs.pop(entry.name)) for entry in entries if entry.name in kwargs}
    return {name: _value(*one) for name, one in found.items() if context and _typed(context, name)}


def _residual() -> list[Entry]:
    from rcd import registry
    from rcd.settings import entries

    return entries(registry.get("carry", "residual"))


def _carry_names() -> set[str]:
    return {entry.name for entry in _residual()}


def _panel(name: str) -> str | None:
    for panel, names in PANELS.items():
        if name in names:
            return panel
    return opt.CARRY if name in _carry_names() else opt.PASSES


def _signature(
    function: Callable[..., Any],
    entries: Sequence[Entry],
    words: dict[str, Any],
    pairs: bool,
    others: Mapping[str, Sequence[Entry]] | None = None,
) -> inspect.Signature:
    """The function's own, with the flags in place of `decoding`."""
    own = inspect.signature(function, eval_str=True)
    kind, carry = inspect.Parameter.KEYWORD_ONLY, _carry_names() if entries else set[str]()
    new = [
        _parameter(entry, words.get(entry.name), True, panel)
        for panel, found in (others or {}).items()
        for entry in found
    ]
    new += [_parameter(entry, words.get(entry.name), entry.name not in carry) for entry in entries]
    new += [inspect.Parameter("settings", kind, default=None, annotation=opt.Settings)] if pairs else []
    new += [inspect.Parameter("ctx", kind, annotation=typer.Context)]
    parameters = [parameter.replace(kind=kind) for parameter in own.parameters.values() if parameter.name != "also"]
    place = next(number for number, parameter in enumerate(parameters) if parameter.name == "decoding")
    return own.replace(parameters=[*parameters[:place], *new, *parameters[place + 1 :]])


def _parameter(entry: Entry, said: Any, shown: bool, panel: str | None = None) -> inspect.Parameter:
    """A flag; its default is shown unless the carry of the checkpoint decides."""
    name = entry.flag or flag_of(entry.name)
    names = [name, *OTHER_NAMES.get(entry.name, ())]
    if entry.type is bool:
        names = [f"{name}/--no-{name[2:]}"]
    many = get_origin(entry.type) is tuple
    kind: Any = list[get_args(entry.type)[0]] if many else entry.type  # type: ignore[misc]
    default = None if many or not shown or isinstance(said, str) else entry.default if said is None else said
    option = typer.Option(*names, help=_help(entry, said), rich_help_panel=panel or _panel(entry.name))
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(entry.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _help(entry: Entry, said: Any) -> str:
    """The setting's words in short: their beginning, the bounds, and what None means."""
    sentences = re.split(r"(?<=\.)\s+(?=[A-Z`])", entry.help)
    default = next((text for text in sentences if text.startswith("None: ")), "")
    first = "" if sentences[0] == default else sentences[0]
    default = f"By default {said}." if isinstance(said, str) else default.replace("None: ", "By default ", 1)
    bounds = ""
    if entry.le is not None and entry.le < 2**31:
        bounds = entry.bounds.removeprefix("a whole number ")
        bounds = bounds[0].upper() + bounds[1:] + "."
    elif entry.choices is not None and not all(str(choice) in first for choice in entry.choices):
        bounds = f"One of {', '.join(map(str, entry.choices))}." if len(entry.choices) < 5 else ""
    many = "May be repeated." if get_origin(entry.type) is tuple else ""
    return " ".join(part for part in (first, bounds, default, many) if part).replace("`", "")


def _typed(context: Any, name: str) -> bool:
    """Whether a flag stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _value(entry: Entry, value: Any) -> Any:
    return tuple(value) if get_origin(entry.type) is tuple else value


def _check_names(texts: Iterable[str]) -> None:
    """--set names settings of decoding."""
    from rcd.decode.config import DecodeConfig
    from rcd.decode.names import instead
    from rcd.settings import entries, unknown_setting

    names = [entry.name for entry in entries(DecodeConfig) if entry.name != "carry"]
    for text in texts:
        key = text.partition("=")[0].strip()
        if "=" not in text or not key or key in names:
            continue
        if key == "carry" or key in _carry_names():
            value = text.partition("=")[2]
            write = value if key == "carry" else f"trained,{text}"
            raise RCDError(f"{key!r} is told by --carry: --carry {write}.")
        if instead(key) is not None:
            raise unknown_setting(DecodeConfig, key, "decoding")
        raise unknown_name("decoding setting", key, names)
