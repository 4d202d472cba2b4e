"""What a recipe is, and where it comes from: a registered name or a YAML file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rcd import registry
from rcd.errors import RCDError, one_of
from rcd.train.config import TrainConfig


@dataclass(frozen=True)
class Recipe:
    """Two stages (Algorithm 1), or the second alone with a reference that exists, or a SeqD run (`target` alone); and
    before them the pretraining of the target's start, where no checkpoint can be named."""

    name: str
    target: TrainConfig | None
    reference: TrainConfig | None = None
    base: TrainConfig | None = None
    """What a target of `model: base` starts from."""


def find(name: str, within: tuple[str, ...] = ()) -> Recipe:
    """A registered recipe, or a YAML file: {base: NAME, target: {key: value}, reference: {key: value}}."""
    if not isinstance(name, str) or name in within:
        raise RCDError(f"{name!r} is no base for a recipe.")
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
        raise RCDError(f"{path} should hold a mapping with base, target and reference.")
    for key in content:
        one_of(f"key of {path}", key, ("base", "target", "reference"))
        if key != "base" and not isinstance(content[key] or {}, dict):
            raise RCDError(f"{key} in {path} should be a mapping of settings.")
    base = find(content["base"], within) if "base" in content else Recipe(path.stem, TrainConfig())
    target = base.target
    if content.get("target"):
        target = (target or TrainConfig()).with_settings(content["target"])
    reference = base.reference
    if content.get("reference"):
        reference = (reference or TrainConfig()).with_settings(content["reference"])
    return Recipe(path.stem, target, reference, base.base)
