"""`rcd demo --web`, and its page."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from rcd.data.tasks.base import problem
from tests.browser.conftest import Open
from tests.browser.test_runs import ended


def test_the_demo_opens_the_page_at_a_problem(visit: Open) -> None:
    command = [sys.executable, "-m", "rcd", "demo", "--web", "--set", "sdar", "--seed", "3", "--threshold", "0.97"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "BROWSER": "true"}
    ) as child:
        assert child.stdout is not None
        address = child.stdout.readline().strip()  # what it opens, or nothing if it ends before
        try:
            assert address.startswith("http://127.0.0.1:"), child.communicate()
            page = visit(url=address)
            ended(page)
            assert page.get_by_label("Problem").input_value() == problem("sudoku", "test", 0, 3).question
            assert page.locator(".badge").all_inner_texts() == ["SeqD", "RCD"]
            assert page.locator(".verdict").count() == 2 and page.locator("#set-threshold").input_value() == "0.97"
            page.close()
        finally:
            child.send_signal(signal.SIGINT)
            _, heard = child.communicate()
    assert child.returncode == 0 and "Traceback" not in heard
