"""The OpenAPI description: bodies from their models, every status that a path answers with."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

import rcd
from rcd.serve.schema import IGNORED, NEUTRAL, bodies

JSON_TYPES = {str: "string", dict: "object", bool: "boolean"}
MEANINGS = {
    400: "The request is refused; the error names the field.",
    401: "The key is missing or wrong.",
    403: "The server is not called by that name.",
    404: "There is no such model.",
    405: "Another method is meant.",
    408: "The body did not arrive in time.",
    413: "The body is too long.",
    415: "The body is not sent as JSON.",
    429: "The queue is full; Retry-After says when to come again.",
    500: "The server's own fault.",
    503: "The server is loading or shutting down; Retry-After says when to come again.",
    504: "The deadline was passed.",
}
EVERYWHERE = (401, 403, 405, 500)
ASKED = (400, *EVERYWHERE, 404, 408, 413, 415, 429, 503, 504)
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
MODEL = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by", "rcd"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": {"type": "string"},
        "rcd": {"type": "object", "description": "How the model decodes, and the defaults of its requests."},
    },
}
USAGE = {
    "type": "object",
    "required": [
        "prompt_tokens",
        "completion_tokens",
        "total_tokens",
        "denoising_steps",
        "forwards",
        "tokens_per_step",
    ],
    "properties": {
        "prompt_tokens": {"type": "integer"},
        "completion_tokens": {"type": "integer"},
        "total_tokens": {"type": "integer"},
        "prompt_tokens_details": {"type": "object", "properties": {"cached_tokens": {"type": "integer"}}},
        "denoising_steps": {"type": "integer"},
        "forwards": {"type": "integer"},
        "tokens_per_step": {"type": "number"},
    },
}
ANSWER = {
    "type": "object",
    "required": ["id", "object", "created", "model", "choices", "usage"],
    "properties": {
        "id": {"type": "string"},
        "object": {"enum": ["text_completion", "chat.completion"]},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "choices": {"type": "array", "items": {"type": "object", "required": ["index", "finish_reason"]}},
        "usage": {"$ref": "#/components/schemas/Usage"},
    },
}
EXAMPLE = {
    "type": "object",
    "required": ["model", "prompt", "task", "answer", "grid"],
    "properties": {
        "model": {"type": "string"},
        "prompt": {"type": "string"},
        "task": {"type": ["string", "null"]},
        "answer": {"type": ["string", "null"]},
        "grid": {"type": ["object", "null"]},
    },
}


def description() -> dict[str, Any]:
    """What /openapi.json shows."""
    text = {"text/plain": {"schema": {"type": "string"}}}
    status = _json({"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}}})
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}, "description": "Of a model."}
    asked = [
        {"name": "model", "in": "query", "required": False, "schema": {"type": "string"}},
        {
            "name": "seed", "in": "query", "required": False,
            "schema": {"type": "integer", "minimum": 0, "maximum": 2**53 - 1, "default": 0},
        },
    ]  # fmt: skip
    models = _json(
        {"type": "object", "required": ["data"], "properties": {"data": {"type": "array", "items": _ref("Model")}}}
    )
    paths = {
        "/v1/completions": {"post": _post("CompletionBody", "Continue a prompt.")},
        "/v1/chat/completions": {"post": _post("ChatBody", "Answer a conversation.")},
        "/v1/models": {"get": _get("The models.", models)},
        "/v1/models/{name}": {"get": _get("One model.", _json(_ref("Model")), 404, parameters=[name])},
        "/rcd/examples": {
            "get": _get("A new problem of a model's task.", _json(EXAMPLE), 400, 404, 503, parameters=asked)
        },
        "/health": {"get": _get("Whether the process answers.", status)},
        "/ready": {
            "get": _get(
                "Whether requests are taken: not while loading or draining.",
                status,
                other={503: status},
            )
        },
        "/metrics": {"get": _get("Counts for Prometheus.", text)},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "rcd serve", "version": rcd.__version__},
        "paths": paths,
        "components": {
            "schemas": {"Error": ERROR, "Model": MODEL, "Usage": USAGE, "Answer": ANSWER, **_bodies()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _bodies() -> dict[str, Any]:
    models: Any = [(one, "validation") for one in bodies()]
    found: dict[str, Any] = models_json_schema(models, ref_template="#/components/schemas/{model}")[1]["$defs"]
    for one in bodies():
        fields = found[one.__name__]["properties"]
        fields |= {
            name: {"type": [JSON_TYPES[kinds[0]], "null"], "description": "Ignored."} for name, kinds in IGNORED.items()
        }
        for name, values in NEUTRAL.items():
            if name not in one.model_fields:
                fields[name] = {"enum": [*values, None], "description": "Not supported, but for what changes nothing."}
    return found


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _refusals(*statuses: int) -> dict[str, Any]:
    return {str(one): {"description": MEANINGS[one], "content": _json(_ref("Error"))} for one in statuses}


def _post(body: str, summary: str) -> dict[str, Any]:
    answers = {**_json(_ref("Answer")), "text/event-stream": {"schema": {"type": "string"}}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": _json(_ref(body))},
        "responses": {"200": {"description": "The answer.", "content": answers}, **_refusals(*ASKED)},
    }


def _get(
    summary: str, content: Any, *statuses: int, parameters: Any = (), other: dict[int, Any] | None = None
) -> dict[str, Any]:
    responses = {"200": {"description": "As asked.", "content": content}, **_refusals(*EVERYWHERE, *statuses)}
    responses |= {str(one): {"description": MEANINGS[one], "content": found} for one, found in (other or {}).items()}
    return {"summary": summary, "responses": responses, **({"parameters": list(parameters)} if parameters else {})}
