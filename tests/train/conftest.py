"""One unbroken run that several tests compare with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.runs import run


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("run") / "unbroken"
    run(output)
    return output
