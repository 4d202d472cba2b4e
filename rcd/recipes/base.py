"""What a recipe is, and where it comes from: a registered name or a YAML file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rcd import registry
from rcd.errors import RCDError, one_of
from rcd.train.config import TrainConfig

STAGES = ("base", "reference", "target")


@dataclass(frozen=True)
class Recipe:
    """Two stages (Algorithm 1), or the second alone with a reference that exists, or a SeqD run (`target` alone); and
    before them the pretraining of the target's start, where no checkpoint can be named."""

    name: str
    target: TrainConfig | None
    reference: TrainConfig | None = None
    base: TrainConfig | None = None
    """What a target of `model: base` starts from."""
    about: str = ""
    """For `rcd list recipe`; else the words of the function that returns it."""


def find(name: str, within: tuple[str, ...] = ()) -> Recipe:
    """A registered recipe, or a YAML file: {extends: NAME, target: {key: value}, reference: ..., base: ...}."""
    if not isinstance(name, str) or name in within:
        raise RCDError(f"a recipe cannot extend {name!r}.")
    if name.endswith((".yaml", ".yml")):
        return _from_yaml(Path(name), (*within, name))
    recipe: Recipe = registry.get("recipe", name)()
    return recipe


def _from_yaml(path: Path, within: tuple[str, ...]) -> Recipe:
    import yaml

    try:
        content: Any = yaml.safe_load(path.read_text())
    except OSError as error:
        raise RCDError(f"there is no recipe file {path}; `rcd list recipe` names the built-in ones.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RCDError(f"{path} is not valid YAML ({str(error).splitlines()[0]}).") from error
    if not isinstance(content, dict):
        raise RCDError(f"{path} should hold a mapping with extends, target, reference and base.")
    for key, value in content.items():
        one_of(f"key of {path}", key, ("extends", *STAGES))
        if key in STAGES and not isinstance(value or {}, dict):
            raise RCDError(f"{key} in {path} should be a mapping of settings; the recipe it builds on is `extends`.")
    parent = find(content["extends"], within) if "extends" in content else Recipe(path.stem, TrainConfig())
    changed: dict[str, Any] = {}
    for stage in STAGES:
        if content.get(stage):
            changed[stage] = (getattr(parent, stage) or TrainConfig()).with_settings(content[stage])
    return replace(parent, name=path.stem, about="", **changed)
