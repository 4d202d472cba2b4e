"""A sudoku is drawn as its grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rcd.data.tasks.base import problem
from tests.browser.conftest import Open
from tests.browser.serving import cell
from tests.browser.test_runs import COLUMNS, ended, link, run

if TYPE_CHECKING:
    from tests.browser.serving import Site

PUZZLE = problem("sudoku", "test", 5)
CLUES = [one for one in PUZZLE.question.rpartition(":")[2].split() if one != "/"]
SOLVED = [one for one in PUZZLE.answer.split() if one != "/"]
PAIR = ("llada-seqd", "llada-rcd")


def test_clues_stand_in_their_cells_and_the_answer_fills_the_others(site: Site, visit: Open) -> None:
    page = visit(link(PUZZLE.question, *PAIR))
    ended(page)
    for column, model in zip(COLUMNS, PAIR, strict=True):
        cells = page.locator(f"{column} .cell")
        answer = [one for one in site.ask(model, PUZZLE.question).split() if one != "/"]
        assert cells.all_inner_texts() == answer
        clues = cells.evaluate_all("all => all.map((one) => one.classList.contains('clue'))")
        assert clues == [clue != "_" for clue in CLUES]


def test_places_of_the_answer_are_cells_and_doubt_is_pencilled_in(site: Site, visit: Open) -> None:
    script, page = site.script("llada-rcd"), visit(link(PUZZLE.question, *PAIR))
    canvas = [cell(" /") if place % 7 == 6 else cell(" 3", "masked", best=[[" 3", 0.6], [" 4", 0.3], [" 6", 0.02]])
              for place in range(41)]  # fmt: skip
    canvas[8] = cell(" " + SOLVED[7])  # row 2, column 2
    script.draft(1, canvas)
    cells = page.locator(f"{COLUMNS[1]} .cell")
    page.locator(f"{COLUMNS[1]}[data-step='1']").wait_for()
    marks_of = "(one) => [...one.querySelectorAll('.mark-digit')].map((mark) => mark.textContent)"
    shown = cells.evaluate_all(f"all => all.map({marks_of})")
    for place, (marks, clue) in enumerate(zip(shown, CLUES, strict=True)):
        assert marks == ([] if clue != "_" or place == 7 else ["", "", "3", "4", "", ""]), place
    assert cells.nth(7).inner_text() == SOLVED[7]
    assert cells.nth(7).get_attribute("aria-label") == f"row 2, column 2: {SOLVED[7]}, new"
    open_cell = CLUES.index("_")
    cells.nth(open_cell).hover()
    assert page.get_by_role("tooltip").locator("li").first.inner_text() == "␣3\n60%"


def test_cells_that_break_a_rule_are_marked_and_only_at_the_end(site: Site, visit: Open) -> None:
    script, page = site.script("llada-rcd"), visit()
    page.locator(".model").nth(1).select_option("llada-rcd")
    run(page, PUZZLE.question)
    wrong = list(SOLVED)
    place = next(i for i in range(36) if CLUES[i] == "_")
    wrong[place] = next(d for d in "123456" if d != SOLVED[place] and d not in wrong[place // 6 * 6 : place])
    text = " / ".join(" ".join(wrong[row * 6 : row * 6 + 6]) for row in range(6))
    script.draft(1, [cell(f" {one}") for one in text.split()])
    page.locator(f"{COLUMNS[1]}[data-step='1']").wait_for()
    assert page.locator(".cell.wrong").count() == 0
    script.text(text)
    script.done(steps=1, tokens=42)
    page.locator(f"{COLUMNS[1]}[data-shown=end]").wait_for()
    assert page.locator(f"{COLUMNS[1]} .cell").nth(place).evaluate("one => one.classList.contains('wrong')")
    assert page.locator(f"{COLUMNS[1]} .verdict").inner_text() == "✗ wrong"


def test_the_grid_can_be_read_as_text(site: Site, visit: Open) -> None:
    page = visit(link(PUZZLE.question, *PAIR))
    ended(page)
    page.locator(f"{COLUMNS[1]}").get_by_role("button", name="As text").click()
    assert page.locator(f"{COLUMNS[1]} .text").inner_text() == site.ask("llada-rcd", PUZZLE.question)
    assert not page.locator(f"{COLUMNS[1]} .grid").is_visible()


def test_other_prompts_and_other_models_get_no_grid(visit: Open) -> None:
    page = visit(link(PUZZLE.question, "words-seqd", "llada-rcd"))
    ended(page)
    assert [page.locator(f"{column} .grid").is_visible() for column in COLUMNS] == [False, True]
    run(page, "Fill in: 1 2 3 / 4 5 6")
    page.locator(f"{COLUMNS[1]} .text").wait_for()
    assert not page.locator(f"{COLUMNS[1]} .grid").is_visible()


def test_what_is_typed_goes_to_models_that_know_its_kind(site: Site, visit: Open) -> None:
    page = visit()
    for place, model in enumerate(PAIR):
        page.locator(".model").nth(place).select_option(model)
    run(page, "Leo has 40 marbles. He loses 15 of them at the park. How many marbles does he have now?")
    ended(page)
    assert [page.locator(".model").nth(place).input_value() for place in (0, 1)] == ["words-seqd", "words-rcd"]
    run(page, PUZZLE.question)
    ended(page)
    assert "words" not in page.locator(".model").nth(0).input_value()
