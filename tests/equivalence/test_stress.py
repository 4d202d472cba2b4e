"""A short run of `python -m tests.equivalence.stress`."""

from __future__ import annotations

import pytest

from tests.equivalence.stress import calls, cancelled


@pytest.mark.parametrize("exact", [True, False], ids=["fp64", "fp32"])
def test_eight_threads_get_the_answers_given_alone(exact: bool) -> None:
    assert calls(threads=8, each=10, exact=exact) == 0


def test_requests_that_are_cancelled_disturb_no_other() -> None:
    wrong, _ = cancelled(requests=120, share=0.2)
    assert wrong == 0
