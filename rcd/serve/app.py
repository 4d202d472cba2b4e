"""The HTTP application: OpenAI's paths, health, metrics and the page."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

import rcd
from rcd.errors import RCDError
from rcd.serve import openai
from rcd.serve.answering import Answering
from rcd.serve.describe import description
from rcd.serve.guard import Guard, State
from rcd.serve.metrics import CONTENT_TYPE, Metrics
from rcd.serve.pieces import Refusal, Refused
from rcd.serve.service import Service, refused
from rcd.serve.settings import ServeSettings

PAGE = Path(__file__).parent / "page"
SEEDS = 2**53
"""Seeds of examples: whole numbers that JavaScript has."""


def create_app(
    service: Service, settings: ServeSettings | None = None, keys: Sequence[str] = (), state: State | None = None
) -> FastAPI:
    """`keys`: those that are let in; none: everybody is."""
    asked, state = settings or ServeSettings(), state or State()
    metrics = Metrics(lambda: state.running)
    app = FastAPI(
        title="rcd serve", version=rcd.__version__, docs_url=None, redoc_url=None, redirect_slashes=False
    )  # fmt: skip
    app.state.rcd, app.state.service, app.state.metrics = state, service, metrics
    for path, chat in (("/v1/completions", False), ("/v1/chat/completions", True)):
        app.router.add_route(path, _endpoint(Answering(service, asked, metrics, state, chat)), methods=["POST"])
    _models(app, service)
    _health(app, service, state, metrics)
    if PAGE.is_dir():
        _page(app)
    app.openapi = functools.cache(description)  # type: ignore[method-assign]
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RCDError, _refusal)
    if asked.cors_origin:
        from starlette.middleware.cors import CORSMiddleware

        app.add_middleware(
            CORSMiddleware, allow_origins=list(asked.cors_origin), allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id"], expose_headers=["x-request-id"],
        )  # fmt: skip
    app.add_middleware(Guard, settings=asked, keys=keys, state=state)
    return app


def _endpoint(answering: Answering) -> Any:
    async def endpoint(request: Request) -> Any:
        return answering

    return endpoint


def _models(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": await service.cards()})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        for card in await service.cards():
            if name.removeprefix("bundled:") == card["id"] or name == card["id"]:
                return JSONResponse(card)
        raise Refusal(f"there is no model {name[:200]!r}; /v1/models lists them.", "model", "model_not_found", 404)

    app.router.add_route("/v1/models/{name:path}", model, methods=["GET"])

    async def example(request: Request) -> Response:
        unknown = set(request.query_params) - {"model", "seed"}
        if unknown:
            name = min(unknown)[:64]
            raise Refusal(f"an example has no parameter {name!r}; give model and seed.", name)
        seed = request.query_params.get("seed", "0")
        if not (seed.isascii() and seed.isdigit() and len(seed) < 17 and int(seed) < SEEDS):
            raise Refusal(f"seed must be a whole number from 0 to {SEEDS - 1}.", "seed")
        return JSONResponse(await service.example(request.query_params.get("model"), int(seed)))

    app.router.add_route("/rcd/examples", example, methods=["GET"])


def _health(app: FastAPI, service: Service, state: State, metrics: Metrics) -> None:
    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        if state.ready and not state.draining and await service.ready():
            return JSONResponse({"status": "ready"})
        what = "draining" if state.draining else "no replica" if state.ready else "loading"
        return JSONResponse({"status": what}, 503, {"retry-after": "5"})

    @app.get("/metrics")
    async def shown() -> Response:
        return Response(metrics.text(await service.load()), media_type=CONTENT_TYPE)


class _Files(StaticFiles):
    """A browser asks whether its copies are still good, so that no page is mixed from two versions."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["cache-control"] = "no-cache"
        return response


def _page(app: FastAPI) -> None:
    async def index(request: Request) -> Response:
        return Response((PAGE / "index.html").read_bytes(), 200, {"cache-control": "no-cache"}, "text/html")

    app.router.add_route("/", index, methods=["GET"])
    app.mount("/page", _Files(directory=PAGE), name="page")


async def _http_error(request: Request, error: Any) -> Response:
    """Unknown paths and methods, in OpenAI's shape."""
    path = request.scope["path"][:200]
    message = {
        404: f"there is no {path} here; /v1/models, /v1/completions and /v1/chat/completions are.",
        405: f"{request.method[:16]} is not allowed here; use {(error.headers or {}).get('Allow', 'another method')}.",
    }.get(error.status_code, str(error.detail))
    return _json(Refused(error.status_code, message), dict(error.headers or {}))


async def _refusal(request: Request, error: Any) -> Response:
    return _json(refused(error), {})


def _json(refused: Refused, headers: dict[str, str]) -> Response:
    if refused.retry_after is not None:
        headers = {**headers, "retry-after": str(refused.retry_after)}
    return JSONResponse(openai.error(refused), refused.status, headers)
