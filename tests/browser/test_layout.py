"""Phones, themes, contrast, the keyboard alone, and what a screen reader is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.conftest import Open
from tests.browser.serving import cell
from tests.browser.test_runs import COLUMNS, QUESTION, drawn_cards, ended, link, run
from tests.browser.test_sudoku import PAIR, PUZZLE

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.browser.serving import Site

WORDS = link(QUESTION, "words-seqd", "words-rcd", threshold=0.99, answer=25)
SUDOKU = link(PUZZLE.question, *PAIR, step=3)
TOO_WIDE = """() => [...document.querySelectorAll("body *")].filter((one) =>
  one.getClientRects().length && !one.closest(".unseen, .skip") && one.getBoundingClientRect().right > innerWidth + 0.5
).map((one) => one.outerHTML.slice(0, 80))"""
CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (over, under) => {
    canvas.fillStyle = under;
    canvas.fillRect(0, 0, 1, 1);
    canvas.fillStyle = over;
    canvas.fillRect(0, 0, 1, 1);
    return `rgb(${[...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3)})`;
  };
  const ground = (one) =>
    one ? rgb(getComputedStyle(one).backgroundColor, ground(one.parentElement)) : "rgb(255,255,255)";
  const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const light = (colour) => {
    const [r, g, b] = colour.match(/\\d+/g).map((one) => linear(one / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const poor = [];
  let seen = 0;
  for (const one of document.querySelectorAll("body *")) {
    const text = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!text || !one.checkVisibility() || one.closest(":disabled, svg, .unseen, .skip, option")) continue;
    const under = ground(one);
    const pair = [light(under), light(rgb(getComputedStyle(one).color, under))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    seen += 1;
    if (ratio < 4.5) poor.push(`${ratio.toFixed(2)} ${one.outerHTML.slice(0, 120)}`);
  }
  return [seen, poor];
}"""
NAMELESS = """() => [...document.querySelectorAll("button, input, select, textarea, [role=button], a")].filter((one) =>
  one.checkVisibility() && !(one.ariaLabel || one.textContent.trim() || one.labels?.length)
).map((one) => one.outerHTML.slice(0, 80))"""


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_scrolls_down_and_never_sideways(width: int, site: Site, visit: Open) -> None:
    phone: dict[str, Any] = dict(viewport={"width": width, "height": 640}, has_touch=True, is_mobile=True)

    def fits(page: Page, state: str) -> None:
        assert page.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [width, width], state
        assert page.evaluate(TOO_WIDE) == [], state

    page = visit(**phone)
    drawn_cards(page)
    fits(page, "empty")
    for name, fragment in (("words", WORDS), ("sudoku", SUDOKU)):
        page = visit(fragment, **phone)
        page.locator(".column[data-state=done]").nth(1).wait_for()
        fits(page, name)
    site.script("llada-rcd").refuse(429, "the queue is full " + "x" * 200, wait=3)
    page.get_by_role("button", name="Run", exact=True).click()
    page.locator(".trouble p", has_text="the queue is full").wait_for()
    fits(page, "error")
    page.locator("#open-settings").click()
    fits(page, "settings")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_every_state(scheme: str, site: Site, visit: Open) -> None:
    page = visit(color_scheme=scheme)
    drawn_cards(page)
    grounds = set()

    def good(state: str) -> None:
        seen, poor = page.evaluate(CONTRASTS)
        assert poor == [] and seen > 20, state
        grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    good("empty")
    script = site.script("words-rcd")
    run(page, QUESTION)
    pairs = [[[" x", 1 - doubt], [" y", doubt]] for doubt in (0, 0.1, 0.3, 0.5)]
    shades = [cell(" x", "masked", best=best, alpha=best[1][1]) for best in pairs]
    flat = cell(" z", "masked", best=[[str(i), 1 / 7] for i in range(6)], alpha=0.9)
    script.draft(1, [cell("40"), *shades, flat, cell("", "end")])
    page.locator(f"{COLUMNS[1]}[data-step='1'] .tok").first.hover()
    page.get_by_role("tooltip").wait_for()
    good("running")
    script.cut()
    page.locator(f"{COLUMNS[1]} .trouble").wait_for()
    good("cut off")
    page.locator("#open-settings").click()
    good("settings")
    page.get_by_role("button", name="Close settings").click()
    page = visit(SUDOKU, color_scheme=scheme)
    page.locator(".column[data-step='3'][data-state=done]").nth(1).wait_for()
    good("sudoku")
    page.get_by_role("slider").press("End")
    ended(page)
    good("solved")
    (ground,) = grounds
    assert (ground == "rgb(250, 249, 246)") == (scheme == "light")


def test_the_theme_button_overrules_the_system_and_is_remembered(visit: Open) -> None:
    page = visit(color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    button = page.locator("#theme")
    button.click()
    assert page.evaluate(ground) == light and "light" in button.inner_text()
    button.click()
    dark = page.evaluate(ground)
    assert dark != light and "dark" in button.inner_text()
    page.reload()
    assert page.evaluate(ground) == dark
    button.click()
    assert page.evaluate(ground) == light


def tab_to(page: Page, selector: str, key: str = "Tab") -> None:
    for _ in range(60):
        if page.locator(f"{selector}:focus").count():
            return
        page.keyboard.press(key)
    raise AssertionError(f"Tab never comes to {selector}")


def test_all_of_it_works_with_the_keyboard_alone(visit: Open) -> None:
    page = visit()
    tab_to(page, "#prompt")
    page.keyboard.type(QUESTION)
    page.keyboard.press("Enter")
    ended(page)
    tab_to(page, "#scrub")
    outline = page.locator("#scrub").evaluate("one => getComputedStyle(one).outlineStyle")
    assert outline == "solid"
    last = int(page.locator("#scrub").get_attribute("max") or 0)
    page.keyboard.press("Home")
    assert page.locator("#where").inner_text() == f"Step 0 of {last}"
    page.keyboard.press("ArrowRight")
    assert page.locator("#where").inner_text() == f"Step 1 of {last}"
    assert page.locator("#scrub").get_attribute("aria-valuetext") == f"Step 1 of {last}"
    page.keyboard.press("Space")
    ended(page)
    page.keyboard.press("ArrowLeft")
    tab_to(page, f"{COLUMNS[1]} .tok", "Shift+Tab")
    first = page.locator(".tok:focus").get_attribute("data-place")
    page.get_by_role("tooltip").wait_for()
    page.keyboard.press("ArrowRight")
    assert page.locator(".tok:focus").get_attribute("data-place") != first
    assert page.locator("#where").inner_text() == f"Step {last - 1} of {last}"  # arrows in the text move in the text
    page.keyboard.press("Escape")
    page.get_by_role("tooltip").wait_for(state="hidden")
    tab_to(page, "#open-settings", "Shift+Tab")
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="hidden")
    assert page.locator("#open-settings:focus").count() == 1


def test_arrows_and_space_work_wherever_nothing_else_takes_them(visit: Open) -> None:
    page = visit(WORDS)
    ended(page)
    last = int(page.locator("#scrub").get_attribute("max") or 0)
    page.locator("h1").click()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#where").inner_text() == f"Step {last - 1} of {last}"
    page.keyboard.press("Space")
    ended(page)
    page.get_by_label("Problem").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Space")
    assert page.locator("#where").inner_text() == f"Step {last} of {last}"
    assert " " in page.get_by_label("Problem").input_value()


def test_a_screen_reader_is_told_the_beginning_and_the_end(site: Site, visit: Open) -> None:
    script, page = site.script("words-rcd"), visit()
    live = page.get_by_role("status")
    assert live.get_attribute("aria-live") == "polite" and live.inner_text() == ""
    run(page, QUESTION)
    page.locator(f"{COLUMNS[0]}[data-state=done]").wait_for()
    assert live.inner_text() == "Running words-seqd and words-rcd."
    assert page.locator(COLUMNS[1]).get_attribute("aria-busy") == "true"
    script.draft(3, [cell("25")])
    script.text("25")
    script.done(steps=3, tokens=1)
    page.locator("#live", has_text="Right: 3 steps. 25").wait_for()
    assert page.locator(COLUMNS[1]).get_attribute("aria-busy") == "false"


def test_landmarks_and_names(visit: Open) -> None:
    page = visit()
    for role in ("banner", "main", "contentinfo"):
        assert page.get_by_role(role).count() == 1
    assert page.evaluate(NAMELESS) == []
    page = visit(SUDOKU)
    page.locator(".column[data-step='3'][data-state=done]").nth(1).wait_for()
    assert page.evaluate(NAMELESS) == []
    assert page.get_by_role("region", name="Timeline").count() == 1
    assert page.locator("h1").count() == 1 and page.locator("html").get_attribute("lang") == "en"


def test_motion_is_left_out_for_those_who_ask(visit: Open) -> None:
    moving = "document.getAnimations().filter((one) => one.playState === 'running').length"
    page = visit(WORDS)
    ended(page)
    page.get_by_role("slider").fill("1")
    assert page.locator(".tok.new").count() > 0 and page.evaluate(moving) == 0
    assert page.locator("#speed").input_value() == "0"
    other = visit(WORDS, reduced_motion="no-preference")
    assert other.locator("#speed").input_value() != "0"
