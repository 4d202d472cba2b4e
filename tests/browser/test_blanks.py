"""A visitor types a text with blanks, and sees it filled in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.browser.conftest import Open
from tests.browser.serving import cell
from tests.browser.test_runs import COLUMNS, QUESTION, answers, ended

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.browser.serving import Site

CANVAS = "[MASK:5] = 25. [MASK:4]"


def fill_in(page: Page, canvas: str, question: str = QUESTION) -> None:
    page.get_by_label("Problem").fill(question)
    page.get_by_role("button", name="Fill in blanks").click()
    field = page.get_by_label("Answer with blanks")
    assert field.evaluate("(one) => one === document.activeElement")
    field.fill(canvas)
    field.press("Enter")


def test_blanks_are_filled_in_and_what_is_given_is_told_apart(site: Site, visit: Open) -> None:
    page = visit()
    fill_in(page, CANVAS)
    ended(page)
    assert answers(page) == [
        site.ask(name, QUESTION, rcd={"canvas": CANVAS}).strip() for name in ("words-seqd", "words-rcd")
    ]
    for column in COLUMNS:
        given = page.locator(f"{column} .tok.given")
        assert [text.strip() for text in given.all_inner_texts()] == ["=", "2", "5", "."]
        assert (given.first.get_attribute("aria-label") or "").endswith(": =, given")
    assert page.locator("#legend-given").is_visible()
    tokens = page.locator(f"{COLUMNS[1]} [data-count=tokens]").inner_text()
    shown = page.locator(f"{COLUMNS[1]} .tok:not([hidden])").count()
    assert 0 < int(tokens) <= shown - 4 + 1  # one end token may be hidden


def test_without_a_problem_the_words_before_the_first_blank_are_it(site: Site, visit: Open) -> None:
    page, words = visit(), "Leo has 40 marbles. He loses"
    fill_in(page, f"{words} [MASK:2] of them. Answer: [MASK:2]", "")
    ended(page)
    canvas = "[MASK:2] of them. Answer: [MASK:2]"
    assert answers(page) == [
        site.ask(name, words, rcd={"canvas": canvas}).strip() for name in ("words-seqd", "words-rcd")
    ]


def test_the_link_keeps_the_blanks_and_the_closed_field_asks_for_none(site: Site, visit: Open) -> None:
    script = site.script("words-rcd")
    page = visit()
    fill_in(page, CANVAS)
    script.draft(1, [cell(" 4", "given", new=False), cell(" 0", "masked")])
    page.locator(f"{COLUMNS[1]} .tok.given").wait_for()
    assert script.body["rcd"]["canvas"] == CANVAS
    script.text("40")
    script.done(steps=1, tokens=1)
    ended(page)
    again = visit(page.evaluate("location.hash"))
    ended(again)
    assert again.get_by_label("Answer with blanks").input_value() == CANVAS
    again.get_by_role("button", name="Fill in blanks").click()  # which closes it
    plain = site.script("words-rcd")
    again.get_by_role("button", name="Run", exact=True).click()
    plain.text("40")
    plain.done(steps=1, tokens=1)
    ended(again)
    assert "canvas" not in plain.body["rcd"]


def test_blanks_that_are_wrong_are_refused_beside_their_field(visit: Open) -> None:
    page = visit()
    fill_in(page, "[MASK:x] = 25")
    error = page.locator("#canvas-error")
    error.wait_for()
    assert "is no number of masks" in error.inner_text()
    page.get_by_label("Answer with blanks").fill("[MASK]")
    assert error.is_hidden()


def test_an_example_closes_the_blanks(visit: Open) -> None:
    page = visit()
    fill_in(page, CANVAS)
    ended(page)
    page.get_by_role("button", name="Sudoku").click()
    page.get_by_label("Answer with blanks").wait_for(state="hidden")
    ended(page)
