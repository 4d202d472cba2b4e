"""The answers of the version before the single decoder: text, ids, tokens, steps and forward passes stay as they were.

Some cases of each kind and all commands run here; `python tests/fixtures/golden/make.py --check` runs all cases.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.fixtures.golden import make

CONTENT = make.read(make.DECODE)
QUICK = [case for case in CONTENT["cases"] if case.get("quick")]
COMMANDS = make.read(make.COMMANDS)["commands"]


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case["name"])
def test_a_case_is_decoded_as_before(case: dict[str, Any]) -> None:
    found = make.differences(case["result"], make.answer(case, CONTENT["prompts"]))
    assert not found, f"{case['name']}: {'; '.join(found)}"


@pytest.mark.parametrize("entry", COMMANDS, ids=lambda entry: entry["line"][0])
def test_a_command_prints_what_it_printed_before(entry: dict[str, Any]) -> None:
    wanted = {key: entry[key] for key in ("printed", "records")}
    found = make.differences(wanted, make.command(entry["line"]))
    assert not found, f"rcd {' '.join(entry['line'])}: {'; '.join(found)}"


def test_another_answer_is_noticed() -> None:
    """A threshold that is off by 0.05 changes some of the cases, and a count, an id and a missing figure are named."""
    changed = 0
    for case in QUICK[:12]:
        decode = case.get("decode", {})
        other = {**case, "decode": {**decode, "threshold": decode.get("threshold", 0.85) - 0.05}}
        changed += bool(make.differences(case["result"], make.answer(other, CONTENT["prompts"])))
    assert changed >= 3
    assert make.differences({"ids": [1, 2], "a": [{"b": 1.5}]}, {"ids": [1, 3], "a": [{}]}) == [
        "ids is [1, 3], was [1, 2]",
        "a[0].b is '(missing)', was 1.5",
    ]
