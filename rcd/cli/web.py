"""`rcd demo --web`: the page of `rcd serve` with a pair of bundled models, open at a problem."""

from __future__ import annotations

import webbrowser
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from rcd.cli.serve import check_extra

if TYPE_CHECKING:
    from rcd.data.tasks.base import Problem


def link(problem: Problem, models: tuple[str, str], **settings: float) -> str:
    """The fragment of the page's address that shows two models at a problem (rcd/serve/page/link.js reads it)."""
    left, right = models
    return "#" + urlencode({"prompt": problem.question, "a": left, "b": right, **settings, "answer": problem.answer})


def show(models: Mapping[str, str], problem: Problem, threshold: float) -> None:
    """Serve two models (name -> where they are) on a free port of this machine until Ctrl-C, and open the page."""
    check_extra()
    from rcd.api import load
    from rcd.models.threads import limit_threads
    from rcd.serve.server import run
    from rcd.serve.service import LocalService
    from rcd.serve.settings import ServeSettings

    settings = ServeSettings(port=0, access_log=False)
    service = LocalService(settings=settings)
    left, right = models

    def loading() -> None:
        pipelines = {name: load(source) for name, source in models.items()}
        limit_threads(pipelines.values())
        for name, pipeline in pipelines.items():
            service.add(name, pipeline)

    def ready(address: str) -> None:
        url = address + link(problem, (left, right), threshold=threshold)
        print(url, flush=True)
        webbrowser.open(url)

    run(service, settings, load=loading, ready=ready)
