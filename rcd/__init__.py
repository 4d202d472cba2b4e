"""Residual Context Diffusion: decode masked diffusion language models with the predictions they would throw away."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rcd.api import Generation as Generation
    from rcd.api import Output as Output
    from rcd.api import Pipeline as Pipeline
    from rcd.api import Score as Score
    from rcd.api import ScoreConfig as ScoreConfig
    from rcd.api import load as load
    from rcd.carry.none import NoCarry as NoCarry
    from rcd.carry.residual import Residual as Residual
    from rcd.decode.config import DecodeConfig as DecodeConfig
    from rcd.decode.events import Failed as Failed
    from rcd.decode.events import Finished as Finished
    from rcd.decode.events import Step as Step
    from rcd.errors import RCDError as RCDError

__version__ = "0.1.0"

# name -> module; imported on first use, so that `import rcd` and `rcd --help` stay quick
_EXPORTS = {
    "load": "rcd.api",
    "Pipeline": "rcd.api",
    "Output": "rcd.api",
    "Generation": "rcd.api",
    "Score": "rcd.likelihood.estimate",
    "ScoreConfig": "rcd.likelihood.settings",
    "DecodeConfig": "rcd.decode.config",
    "Residual": "rcd.carry.residual",
    "NoCarry": "rcd.carry.none",
    "Step": "rcd.decode.events",
    "Finished": "rcd.decode.events",
    "Failed": "rcd.decode.events",
    "RCDError": "rcd.errors",
}
__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'rcd' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    """The public names, those that are not imported yet as well."""
    return sorted(__all__)
