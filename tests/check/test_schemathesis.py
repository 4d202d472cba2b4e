"""Requests generated from the API's own description: no 500, no status that it does not name. Part of `make check`."""

from __future__ import annotations

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

import rcd
from rcd.serve.app import create_app
from rcd.serve.service import LocalService
from rcd.serve.settings import ServeSettings

ASKED = ServeSettings(allow_host=("*",), max_n=2, max_prompts=3, most_tokens=64, timeout=60.0)
SERVED = LocalService({name: rcd.load(f"bundled:{name}") for name in ("words-rcd", "llada-rcd")}, ASKED)
schema = schemathesis.openapi.from_asgi("/openapi.json", create_app(SERVED, ASKED))
CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance,
    negative_data_rejection,
]  # fmt: skip


@schema.parametrize()
@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_the_api_keeps_to_its_description(case: schemathesis.Case) -> None:
    case.call_and_validate(checks=CHECKS)
