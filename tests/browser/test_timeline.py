"""What is shown at a step, forth and back: drafts as the server's contract says, playback, alternatives."""

from __future__ import annotations

import json
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tests.browser.conftest import Open
from tests.browser.serving import cell
from tests.browser.test_runs import COLUMNS, QUESTION, ended, link, run

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.browser.serving import Site

RCD = COLUMNS[1]
SURE = {"threshold": 0.99}
"""More steps to look at."""


def folded(drafts: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """The canvas after every step: each draft is written where it says."""
    canvas: list[dict[str, Any]] = []
    found = {}
    for draft in drafts:
        canvas = canvas[: draft["offset"]] + draft["canvas"]
        found[draft["step"]] = canvas
    return found


def states(page: Page, column: str = RCD) -> list[str]:
    """Of every place that a step has told of: masked or not, and its text; the end as it is drawn."""
    chips = page.locator(f"{column} .tok:not(.blank):not([hidden])")
    told = "(one) => (one.classList.contains('masked') ? '?' : '') + one.textContent"
    return list(chips.evaluate_all(f"all => all.map({told})"))


def expected(canvas: list[dict[str, Any]]) -> list[str]:
    shown: list[str] = []
    for one in canvas:
        text = "∎" if one["state"] == "end" or one["text"].startswith("<|") else one["text"].strip()
        if one["state"] == "end" and any(before == "∎" for before in shown):
            continue
        shown.append(("?" if one["state"] == "masked" else "") + text)
    return shown


def test_every_step_is_shown_as_the_drafts_say_forth_and_back(site: Site, visit: Open) -> None:
    page = visit(link(QUESTION, "words-seqd", "words-rcd", **SURE))
    ended(page)
    steps = folded(site.drafts("words-rcd", QUESTION, **SURE))
    last = max(steps)
    slider = page.get_by_role("slider")
    assert last > 2
    for step in [*range(last - 1, 0, -1), *range(1, last)]:
        slider.fill(str(step))
        assert page.locator("#where").inner_text().startswith(f"Step {step} of ")
        assert states(page) == expected(steps[step]), step
    slider.fill("0")
    assert states(page) == []


def test_thinned_drafts_are_written_at_their_offset(site: Site, visit: Open) -> None:
    script, page = site.script("words-rcd"), visit()
    run(page, QUESTION)
    script.draft(0, [])
    script.draft(1, [cell("a"), cell(" b", "masked"), cell(" c", "masked")])
    script.draft(4, [cell(" B"), cell(" C")], offset=1)
    script.draft(6, [cell(" D"), cell("", "end")], offset=3)
    script.text("a B C D")
    script.done(steps=6, tokens=5)
    ended(page)
    seen = {}
    for step in range(7):
        page.get_by_role("slider").fill(str(step))
        seen[step] = states(page)
    assert seen[1] == seen[2] == seen[3] == ["a", "?b", "?c"]
    assert seen[4] == seen[5] == ["a", "B", "C"] and seen[0] == []
    assert page.locator(f"{RCD} .text").inner_text() == "a B C D"


def test_a_column_that_is_done_waits_for_the_other_at_the_same_step(site: Site, visit: Open) -> None:
    left, right, page = site.script("words-seqd"), site.script("words-rcd"), visit()
    run(page, QUESTION)
    for script, steps in ((left, 5), (right, 2)):
        for step in range(1, steps + 1):
            script.draft(step, [cell(str(step))], offset=step - 1)
        script.text("".join(map(str, range(1, steps + 1))))
        script.done(steps=steps, tokens=steps)
    ended(page)
    page.get_by_role("slider").fill("3")
    assert page.locator(".column").evaluate_all("all => all.map((one) => [one.dataset.step, one.dataset.shown])") == [
        ["3", "step"], ["2", "end"],
    ]  # fmt: skip


def test_playback_passes_every_step_and_can_be_paused(site: Site, visit: Open) -> None:
    page = visit(link(QUESTION, "words-seqd", "words-rcd", **SURE), reduced_motion="no-preference")
    page.evaluate("""() => {
      window.seen = [];
      new MutationObserver(() => window.seen.push(document.querySelector('.column[data-kind=rcd]').dataset.step))
        .observe(document.querySelector('.column[data-kind=rcd]'), { attributeFilter: ['data-step'] });
    }""")
    ended(page)
    page.get_by_role("button", name="Play", exact=True).click()  # from the beginning again
    page.get_by_role("button", name="Pause", exact=True).wait_for()
    page.locator(".column[data-shown=step]").first.wait_for()
    ended(page)
    page.get_by_role("button", name="Play", exact=True).wait_for()
    steps = [int(step) for step, _ in groupby(page.evaluate("window.seen"))]
    again = steps[len(steps) - 1 - steps[::-1].index(0) :]
    assert again == list(range(again[-1] + 1)) and again[-1] > 2
    page.keyboard.press("Space")  # the button has the focus: it is pressed
    page.get_by_role("button", name="Pause", exact=True).click()
    page.get_by_role("button", name="Play", exact=True).wait_for()


def test_new_tokens_are_marked_at_their_step_alone(site: Site, visit: Open) -> None:
    page = visit(link(QUESTION, "words-seqd", "words-rcd", **SURE))
    ended(page)
    page.get_by_role("slider").fill("2")
    drafts = folded(site.drafts("words-rcd", QUESTION, **SURE))
    new = [one["text"].strip() for one in drafts[2] if one["new"] and one["state"] == "committed"]
    assert page.locator(f"{RCD} .tok.new:not(.end)").all_inner_texts() == new != []
    assert page.locator(f"{RCD} .tok.new").first.evaluate("one => getComputedStyle(one).boxShadow") != "none"


def test_doubt_is_the_shade_and_alpha_the_bar(site: Site, visit: Open) -> None:
    script, page = site.script("words-rcd"), visit()
    run(page, QUESTION)
    sure, unsure = [[" a", 0.97], [" b", 0.01]], [[" a", 0.3], [" b", 0.28]]
    script.draft(1, [
        cell(" a", "masked", alpha=0.1, confidence=0.97, best=sure),
        cell(" a", "masked", alpha=0.3, confidence=0.3, best=unsure),
    ])  # fmt: skip
    chips = page.locator(f"{RCD} .tok.masked")
    chips.nth(1).wait_for()
    read = "one => ['--unsure', '--alpha'].map((name) => Number(one.style.getPropertyValue(name)))"
    (doubt, alpha), (more_doubt, more_alpha) = chips.nth(0).evaluate(read), chips.nth(1).evaluate(read)
    assert 0 < doubt < 0.3 < 0.9 < more_doubt <= 1 and (round(alpha, 2), more_alpha) == (0.33, 1)
    colours = chips.evaluate_all("all => all.map((one) => getComputedStyle(one).backgroundColor)")
    assert colours[0] != colours[1]


def test_alternatives_are_shown_to_the_mouse_the_keyboard_and_a_finger(site: Site, visit: Open) -> None:
    for touch in (False, True):
        script, page = site.script("words-rcd"), visit(has_touch=touch)
        run(page, QUESTION)
        best = [[" 25", 0.8], [" 24", 0.15], ["\n", 0.01]]
        script.draft(1, [cell(" 25", "masked", confidence=0.8, best=best, alpha=0.2), cell(" x")])
        chip, peek = page.locator(f"{RCD} .tok").first, page.get_by_role("tooltip")
        chip.wait_for()
        chip.tap() if touch else chip.hover()
        peek.wait_for()
        assert peek.locator("li").all_inner_texts() == ["␣25\n80%", "␣24\n15%", "↵\n1%"]
        assert "alpha 0.20" in peek.inner_text()
        page.locator("h1").tap() if touch else page.locator("h1").hover()
        peek.wait_for(state="hidden")
        chip.focus()
        peek.wait_for()
        assert chip.get_attribute("aria-describedby") == peek.get_attribute("id")
        page.keyboard.press("Escape")
        peek.wait_for(state="hidden")
        script.done(steps=1, tokens=2)


def test_a_long_run_is_kept_within_a_bound_and_from_its_first_to_its_last_step(visit: Open) -> None:
    kept, most = visit().evaluate("""async () => {
      const { Recording } = await import("/page/recording.js");
      const recording = new Recording(5000);
      for (let step = 1; step <= 2000; step++) {
        const canvas = Array.from({ length: 50 }, () => ({ text: String(step), state: "masked", best: [] }));
        recording.add({ step, offset: 0, length: 50, canvas }, step);
      }
      const told = [1, 700, 1999, 2000].map((step) => recording.at(step)?.step ?? null);
      return [[told, recording.frames.length, recording.kept, recording.at(700).cells[0].text], recording.most];
    }""")
    (told, frames, cells, text), first = kept, kept[0][1]
    assert cells <= most and 40 <= frames <= 101
    assert told[3] == 2000 and 600 < first <= 700 and text == str(first)


def test_events_are_the_same_wherever_the_network_cuts_them(visit: Open) -> None:
    sent = ': still here\r\n\r\ndata: {"a": "ü∎"}\n\ndata: one\ndata: two\r\n\r\nevent: x\ndata:three\n\ndata: cut off'
    found = visit().evaluate(
        """async (sent) => {
          const { messages } = await import("/page/sse.js");
          const bytes = new TextEncoder().encode(sent);
          const read = async (size) => {
            const body = new ReadableStream({
              start(controller) {
                for (let i = 0; i < bytes.length; i += size) controller.enqueue(bytes.slice(i, i + size));
                controller.close();
              },
            });
            const all = [];
            for await (const message of messages(body)) all.push(message);
            return JSON.stringify(all);
          };
          return [...new Set(await Promise.all([1, 2, 3, 5, 7, 1000].map(read)))];
        }""",
        sent,
    )
    assert [json.loads(one) for one in found] == [['{"a": "ü∎"}', "one\ntwo", "three"]]
