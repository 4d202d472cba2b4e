"""Settings objects: one place for the default, the bound and the help text of every setting.

A class of settings is a frozen dataclass that pydantic checks when it is made. Flags, `--set`, tables in the docs and
JSON schemas are generated from its `entries`; whatever is wrong with a value becomes one `RCDError`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, WrapValidator
from pydantic.dataclasses import dataclass as pydantic_dataclass

from rcd import registry
from rcd.documented import Doc, listed, texts_below
from rcd.errors import RCDError, no_setting, told, unknown_name
from rcd.jsons import guessed

T = TypeVar("T")
Choices = tuple[Any, ...] | str | None
"""The values allowed, or the registry kind whose names they are."""
BARE = {"None": None, "none": None, "null": None}


@dataclasses.dataclass(frozen=True)
class _More:
    """What pydantic's Field has no room for; called with a JSON schema, it completes it."""

    choices: Choices
    why: str
    must: str
    flag: str | None

    @property
    def allowed(self) -> tuple[Any, ...] | None:
        return tuple(registry.names(self.choices)) if isinstance(self.choices, str) else self.choices

    def __call__(self, schema: dict[str, Any]) -> None:
        if self.allowed is not None:
            schema["enum"] = [*self.allowed, *([None] if {"type": "null"} in schema.get("anyOf", []) else [])]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One setting, as flags, docs and schemas are generated from it."""

    name: str
    type: Any
    """Without None."""
    default: Any
    """`dataclasses.MISSING`: it must be given."""
    help: str
    ge: float | None
    gt: float | None
    le: float | None
    choices: tuple[Any, ...] | None
    kind: str
    """What an unknown choice is called: the registry's kind, else the name."""
    optional: bool
    """Whether it may be None."""
    flag: str | None
    why: str
    must: str

    @property
    def bounds(self) -> str:
        """What a value must be, as part of a sentence."""
        if self.must:
            return self.must
        if self.type is int:
            return _whole_bounds(self.ge if self.gt is None else self.gt + 1, self.le)
        if self.type is float:
            return _number_bounds(self.ge, self.gt, self.le)
        return {bool: "true or false", str: "a text"}.get(self.type, f"of the kind {_plain(self.type)}")

    def wrong(self, value: Any) -> RCDError:
        """Why this value is refused."""
        if self.choices is not None and (self.type is str or isinstance(value, str) or not self.must):
            return unknown_name(self.kind, value, map(str, self.choices))
        return RCDError(f"{self.name} must be {self.bounds}, not {told(value)}{'; ' + self.why if self.why else ''}.")


def _whole_bounds(least: float | None, most: float | None) -> str:
    if least is None and most is None:
        return "a whole number"
    if most is None:
        return f"a whole number of {least:g} or more"
    return f"a whole number from {least or 0:g} to {int(most)}"


def _number_bounds(ge: float | None, gt: float | None, le: float | None) -> str:
    if le is not None and (ge is not None or gt is not None):
        return f"in [{ge:g}, {le:g}]" if gt is None else f"in ({gt:g}, {le:g}]"
    if gt is not None:
        return f"a number above {gt:g}"
    if le is not None:
        return f"a number of {le:g} or less"
    return "a finite number" if ge is None else f"a number of {ge:g} or more"


def setting(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    default_factory: Callable[[], Any] | None = None,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    choices: Choices = None,
    why: str = "",
    must: str = "",
    flag: str | None = None,
    allow_inf_nan: bool = False,
) -> Any:
    """A field of a class of settings. Write `default=`: type checkers read that keyword alone.

    The text below the field, like this one, is its help, if not `help`. `choices` are the values allowed, or a kind of
    the registry, looked up when a value is checked. `why` ends the sentence that refuses a value, `must` replaces what
    it says the value must be. `flag` is the command line's name.
    """
    given: Any = dict(ge=ge, gt=gt, le=le, allow_inf_nan=True if allow_inf_nan else None)
    return _Setting(default, default_factory, help, _More(choices, why, must, flag), given)


@dataclasses.dataclass(frozen=True)
class _Setting:
    """A field as it stands in the class before `settings` has read it."""

    default: Any
    factory: Callable[[], Any] | None
    help: str
    more: _More
    given: Mapping[str, Any]

    def about(self, below: str) -> Any:
        """As pydantic has it."""
        help = " ".join((self.help or below).split()) or None
        return Field(description=help, json_schema_extra=self.more, **self.given)


@dataclass_transform(frozen_default=True, field_specifiers=(setting,))
def settings(cls: type[T]) -> type[T]:
    """A frozen dataclass whose values are checked when it is made. Nothing is converted: a value is kept as given."""
    hints = get_type_hints(cls, include_extras=True)
    below = texts_below(cls)
    cls.__annotations__ = {
        name: _checked(cls, name, hints[name], below.get(name, "")) for name in inspect.get_annotations(cls)
    }
    config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)
    made: Any = pydantic_dataclass(frozen=True, config=config)(cls)
    init = made.__init__

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except ValidationError as error:
            raise _refusal(made, error, args) from None

    made.__init__ = __init__
    doc = Doc(cls.__doc__, functools.partial(described, made))
    made.__doc__ = doc if type(made) is type else doc.__get__(None, made)  # pydoc asks other metaclasses for the text
    made.__signature__ = _plain_signature(made)
    checked: type[T] = made
    return checked


def _plain_signature(cls: Any) -> inspect.Signature:
    """Without the checks that stand in the annotations."""
    found = inspect.signature(cls)
    plain = [
        one.replace(annotation=get_args(one.annotation)[0]) if get_origin(one.annotation) is Annotated else one
        for one in found.parameters.values()
    ]
    return found.replace(parameters=plain)


def _checked(cls: Any, name: str, hint: Any, below: str) -> Any:
    """The annotation with its bounds and with the checks that pydantic's own do not make: what a subclass inherits. The
    plain default takes its place in the class."""
    if get_origin(hint) is ClassVar or hint is ClassVar:
        return hint
    checks: list[Any] = []
    found = cls.__dict__.get(name)
    if isinstance(found, _Setting):
        checks.append(found.about(below))
        if found.factory is not None:
            setattr(cls, name, dataclasses.field(default_factory=found.factory))
        elif found.default is dataclasses.MISSING:
            delattr(cls, name)
        else:
            setattr(cls, name, found.default)
    if float in _members(hint):
        checks.append(WrapValidator(_as_given))
    if get_origin(hint) is tuple:
        checks.append(BeforeValidator(functools.partial(_as_tuple, str in get_args(hint))))
    more = found.more if isinstance(found, _Setting) else None
    if more is not None and more.choices is not None:
        checks.append(AfterValidator(functools.partial(_one_of, name, more)))
    return Annotated[(hint, *checks)] if checks else hint


def _as_tuple(of_texts: bool, value: Any) -> Any:
    """A list will do where a tuple is meant, and one text where several may stand."""
    if of_texts and isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _as_given(value: Any, handler: Callable[[Any], Any]) -> Any:
    """A whole number stays one where any number is allowed: it is written to files as it was given."""
    valid = handler(value)
    return value if type(value) is int and type(valid) is float else valid


def _one_of(name: str, more: _More, value: Any) -> Any:
    choices = more.allowed
    assert choices is not None
    texts = isinstance(more.choices, str)
    if value is None or (texts and not isinstance(value, str)) or value in choices:
        return value
    raise unknown_name(more.choices if isinstance(more.choices, str) else name, value, map(str, choices))


def _members(hint: Any) -> tuple[Any, ...]:
    """The kinds of a union; of anything else, itself."""
    origin = get_origin(hint)
    if origin is Annotated:
        return _members(get_args(hint)[0])
    return get_args(hint) if origin in (Union, types.UnionType) else (hint,)


def _plain(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind)) if get_origin(kind) is None else str(kind)


def _refusal(cls: Any, error: ValidationError, args: tuple[Any, ...]) -> RCDError:
    """pydantic's first complaint as one of ours."""
    first = error.errors()[0]
    raised = first.get("ctx", {}).get("error")
    if isinstance(raised, RCDError):
        return raised
    by_name = {entry.name: entry for entry in entries(cls)}
    name = first["loc"][0] if first["loc"] else ""
    if isinstance(name, int) and name < len(args):  # given by its place
        name = list(by_name)[name] if name < len(by_name) else ""
    if first["type"] == "unexpected_keyword_argument":
        return unknown_setting(cls, str(name))
    if first["type"] in ("missing", "missing_argument"):
        return RCDError(f"{cls.__name__} needs the setting {name!r}.")
    if name not in by_name:
        return RCDError(f"{cls.__name__} cannot be made ({first['msg']}).")
    return by_name[str(name)].wrong(first["input"])


def entries(cls: Any) -> list[Entry]:
    """Every setting of a class, in its order."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    found = []
    for name, info in cls.__pydantic_fields__.items():
        kinds = _members(info.annotation)
        wanted = tuple(kind for kind in kinds if kind is not type(None))
        more = info.json_schema_extra if isinstance(info.json_schema_extra, _More) else _More(None, "", "", None)
        default, factory = fields[name].default, fields[name].default_factory
        if callable(factory):
            default = factory()
        found.append(
            Entry(
                name=name, type=wanted[0] if len(wanted) == 1 else Union[wanted],  # noqa: UP007
                default=default, help=info.description or "", ge=_bound(info, "ge"), gt=_bound(info, "gt"),
                le=_bound(info, "le"), choices=more.allowed,
                kind=more.choices if isinstance(more.choices, str) else name,
                optional=type(None) in kinds, flag=more.flag, why=more.why, must=more.must,
            )
        )  # fmt: skip
    return found


def described(cls: Any) -> str:
    """Every setting with its default, what it must be and what it means, as `help` shows it."""
    lines = []
    for entry in entries(cls):
        must = f"one of {', '.join(map(repr, entry.choices))}" if entry.choices is not None else entry.bounds
        default = "" if entry.default is dataclasses.MISSING else f", by default {entry.default!r}"
        lines.append(listed(entry.name, f"{must}{default}", entry.help))
    return "Settings:\n" + "\n".join(lines)


def _bound(info: Any, name: str) -> float | None:
    return next((getattr(one, name) for one in info.metadata if getattr(one, name, None) is not None), None)


def parse_pairs(cls: Any, pairs: Iterable[str], owner: str | None = None) -> dict[str, Any]:
    """key=value, ... as keyword arguments of the class; `owner` is what a refusal calls it."""
    by_name = {entry.name: entry for entry in entries(cls)}
    out: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = (part.strip() for part in pair.partition("="))
        if not (key and equals):
            raise RCDError(f"{pair!r} should be key=value.")
        if key not in by_name:
            raise unknown_setting(cls, key, owner)
        out[key] = _parsed(text, by_name[key])
    return out


def unknown_setting(cls: Any, name: str, owner: str | None = None) -> RCDError:
    """Why there is no such setting: `cls._instead` may know what to write in its place."""
    owner, names = owner or cls.__name__, [entry.name for entry in entries(cls)]
    instead: Callable[[str], str | None] = getattr(cls, "_instead", lambda _: None)
    told = instead(name)
    if told is not None:
        return RCDError(f"{owner} has no setting {name!r}{told}.")
    return no_setting(owner, name, names) if names else RCDError(f"{owner} has no settings.")


def _parsed(text: str, entry: Entry) -> Any:
    if entry.optional and text in BARE:
        return None
    if entry.type is str:
        return guessed(text) if len(text) > 1 and text[0] == text[-1] == '"' else text
    value = guessed(text)
    if get_origin(entry.type) is tuple:
        return tuple(value) if isinstance(value, list) else (value,)
    return value


def json_schema(cls: Any) -> Mapping[str, Any]:
    """The class's JSON schema: defaults, bounds, choices and help included."""
    return TypeAdapter(cls).json_schema()
