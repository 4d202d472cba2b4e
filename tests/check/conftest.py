"""Fixtures of tests/serve, for tests that stand a server behind something else."""

from __future__ import annotations

from tests.serve.conftest import pipelines, run_server, running

__all__ = ["pipelines", "run_server", "running"]
