"""What a visitor does first: type or take an example, run, and read both answers."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlencode

from rcd.data.tasks.base import Problem
from rcd.evaluate.grading import grade
from tests.browser.conftest import Open
from tests.browser.serving import cell, serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.browser.serving import Site

QUESTION = "Leo has 40 marbles. He loses 15 of them at the park. How many marbles does he have now?"
COLUMNS = (".column[data-kind=seqd]", ".column[data-kind=rcd]")


def ended(page: Page) -> None:
    """Both columns show the end of their run."""
    page.locator(".column[data-shown=end]").nth(1).wait_for()


def run(page: Page, prompt: str) -> None:
    page.get_by_label("Problem").fill(prompt)
    page.get_by_role("button", name="Run", exact=True).click()


def drawn_cards(page: Page) -> None:
    """The examples of the first screen are there, and no longer asked for."""
    page.locator(".card-go").nth(1).wait_for()


def answers(page: Page) -> list[str]:
    return [page.locator(f"{column} .text").inner_text().strip() for column in COLUMNS]


def link(prompt: str, left: str, right: str, **more: object) -> str:
    return "#" + urlencode({"prompt": prompt, "a": left, "b": right, **more})


def test_a_typed_problem_ends_in_both_columns_with_the_apis_own_answers(site: Site, visit: Open) -> None:
    page = visit()
    page.get_by_label("Problem").press_sequentially(QUESTION)
    page.get_by_label("Problem").press("Enter")
    ended(page)
    assert answers(page) == [site.ask(model, QUESTION).strip() for model in ("words-seqd", "words-rcd")]
    assert page.locator("[data-count=steps]").all_inner_texts() != ["0", "0"]


def test_the_counters_at_the_end_are_those_of_the_server(site: Site, visit: Open) -> None:
    script, page = site.script("words-rcd"), visit()
    run(page, QUESTION)
    script.draft(4, [cell("25")])
    script.text("25")
    script.done(steps=4, tokens=10)
    ended(page)
    assert page.locator(f"{COLUMNS[1]} dd").all_inner_texts() == ["4", "10", "2.50", "5", "0.50 s"]


def test_an_example_runs_and_is_judged_as_the_packages_grader_does(site: Site, visit: Open) -> None:
    page = visit()
    drawn_cards(page)
    for name, models in (("Word problem", "words"), ("Sudoku", "llada")):
        with page.expect_response("**/rcd/examples?*") as drawn:
            page.get_by_role("group", name="Examples").get_by_role("button", name=name).click()
        given = drawn.value.json()
        problem = Problem(given["task"], "", given["prompt"], "", given["answer"])
        page.locator(f".column[data-shown=end]:has(.model option:checked[value={models}-rcd])").wait_for()
        ended(page)
        assert page.get_by_label("Problem").input_value() == given["prompt"]
        for column, kind in zip(COLUMNS, ("seqd", "rcd"), strict=True):
            right = grade(problem, site.ask(f"{models}-{kind}", given["prompt"]))
            assert page.locator(f"{column} .verdict").inner_text() == ("✓ right" if right else "✗ wrong")


def test_examples_differ_from_one_time_to_the_next(visit: Open) -> None:
    page, prompts = visit(), set()
    drawn_cards(page)
    for _ in range(4):
        with page.expect_response("**/rcd/examples?*") as drawn:
            page.get_by_role("button", name="Word problem", exact=True).click()
        prompts.add(drawn.value.json()["prompt"])
        ended(page)
    assert len(prompts) > 1  # four equal draws of some thousands are as good as impossible


def test_an_example_on_the_first_screen_runs_with_one_click(visit: Open) -> None:
    page = visit()
    card = page.locator(".card", has_text="Word problem")
    words = card.locator(".card-text").inner_text()
    card.click()
    ended(page)
    assert page.get_by_label("Problem").input_value() == words
    assert not page.get_by_role("heading", name="Watch an answer take shape").is_visible()


def test_verdicts_agree_with_the_packages_graders(visit: Open) -> None:
    puzzle = "Sudoku: _ _ 1 _ _ _ / _ 5 _ 4 _ _ / _ _ _ 3 _ _ / _ _ 2 _ 5 _ / _ _ 5 _ 2 _ / 6 _ _ _ _ _"
    solved = "4 6 1 2 3 5 / 2 5 3 4 6 1 / 5 1 6 3 4 2 / 3 4 2 1 5 6 / 1 3 5 6 2 4 / 6 2 4 5 1 3"
    words = ["Answer: 5", "Answer: 05.", "5", "Answer: 5 6", "Answer: -5", "= 5. Answer:5", "Answer: 5 Answer: 6", ""]
    others = [solved[:-1] + "4", solved.replace("4 6 1", "6 4 1"), solved + " 1", ""]
    grids = [solved, solved.replace(" / ", "\n"), *others]
    cases = [(Problem("words", "", "q", "", "5"), text) for text in words]
    cases += [(Problem("sudoku", "", puzzle, "", solved), text) for text in grids]
    asked = [{"prompt": one.question, "answer": one.answer, "text": text} for one, text in cases]
    found = visit().evaluate(
        """async (cases) => {
          const [{ judge }, { puzzleIn }] = [await import("/page/verdict.js"), await import("/page/sudoku.js")];
          return cases.map(({ prompt, answer, text }) => judge(text, { answer, puzzle: puzzleIn(prompt) }));
        }""",
        asked,
    )
    assert found == [grade(one, text) for one, text in cases]


def test_the_carry_switch_decodes_the_same_model_without_its_residual(site: Site, visit: Open) -> None:
    page = visit(link(QUESTION, "words-rcd", "words-rcd", **{"a.carry": "off"}))
    ended(page)
    assert page.locator(".badge").all_inner_texts() == ["SeqD", "RCD"]
    plain = site.ask("words-rcd", QUESTION, rcd={"carry": False}).strip()
    assert answers(page) == [plain, site.ask("words-rcd", QUESTION).strip()]


def test_settings_of_the_residual_go_to_those_that_carry_one(site: Site, visit: Open) -> None:
    own = {"t_res": 0.5, "alpha_scale": 0.5}
    page = visit(link(QUESTION, "words-seqd", "words-rcd", **own))
    ended(page)
    expected = [site.ask("words-seqd", QUESTION), site.ask("words-rcd", QUESTION, rcd=own)]
    assert answers(page) == [text.strip() for text in expected]


def test_another_model_takes_the_place_of_what_is_shown(site: Site, visit: Open) -> None:
    page = visit()
    run(page, QUESTION)
    ended(page)
    before = page.url
    page.locator(f"{COLUMNS[1]} .model").select_option("llada-rcd")
    right = page.locator(".column").nth(1)
    assert right.get_attribute("data-state") == "idle" and not right.locator(".text").is_visible()
    assert "llada-rcd waits" in right.inner_text() and page.url == before
    page.get_by_role("button", name="Run", exact=True).click()
    ended(page)
    assert right.locator(".text").inner_text() == site.ask("llada-rcd", QUESTION) and "llada-rcd" in page.url


def test_a_link_reproduces_what_is_seen(visit: Open) -> None:
    first = visit()
    first.locator("#open-settings").click()
    first.get_by_label("Temperature", exact=True).fill("1.5")
    first.get_by_label("Threshold").fill("0.9")
    first.get_by_label("API key").fill("sesame")
    first.get_by_role("button", name="Close settings").click()
    run(first, QUESTION)
    ended(first)
    seen = answers(first)
    first.get_by_role("slider").fill("1")
    first.get_by_role("button", name="Copy link").click()
    shown = first.locator(".text").all_inner_texts()
    fragment = first.url[first.url.index("#") :]
    assert "seed=" in fragment and "sesame" not in fragment
    second = visit(fragment)
    second.locator(".column[data-state=done][data-step='1']").nth(1).wait_for()
    assert second.locator(".text").all_inner_texts() == shown
    second.get_by_role("slider").press("End")
    assert answers(second) == seen
    assert second.get_by_label("Temperature", exact=True).input_value() == "1.5"


def test_the_api_key_is_asked_for_and_kept_in_this_tab_alone(service: object, visit: Open) -> None:
    with serving(service, keys=["sesame"]) as locked:
        page = visit(url=locked.url)
        page.get_by_label("API key").fill("sesame")
        page.get_by_role("button", name="Close settings").click()
        page.get_by_role("button", name="Retry", exact=True).click()
        page.locator("body[data-state=ready]").wait_for()
        run(page, QUESTION)
        ended(page)
        assert page.evaluate("[Object.values(sessionStorage), Object.values(localStorage), document.cookie]") == [
            ["sesame"], [], "",
        ]  # fmt: skip
        assert "sesame" not in page.url
