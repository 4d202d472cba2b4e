"""What a visitor sees when something does not work."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from tests.browser.conftest import Open, Watch
from tests.browser.serving import cell
from tests.browser.test_runs import COLUMNS, QUESTION, ended, run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from tests.browser.serving import Script, Site

RCD = COLUMNS[1]
HTML = '<img src=x onerror="document.title=1"><b>bold</b><script>alert(1)</script>'


def held(page: Page, site: Site) -> Script:
    """A run whose right column stands after its first step."""
    script = site.script("words-rcd")
    run(page, QUESTION)
    script.draft(0, [])
    script.draft(1, [cell("40"), cell(" - ", "masked")])
    script.text("40")
    page.locator(f"{RCD}[data-step='1']").wait_for()
    return script


def test_when_the_server_goes_away_what_came_stays_and_retry_runs_again(site: Site, visit: Open) -> None:
    page = visit()
    held(page, site).cut()
    trouble = page.locator(f"{RCD} .trouble")
    trouble.wait_for()
    assert trouble.get_attribute("role") == "alert"
    assert "The server went away" in trouble.inner_text() and "step 1 is kept" in trouble.inner_text()
    assert page.locator(f"{RCD} .tok.committed").inner_text() == "40"
    page.locator(f"{COLUMNS[0]}[data-state=done]").wait_for()  # the other one is not touched
    trouble.get_by_role("button", name="Retry", exact=True).click()
    ended(page)
    assert not trouble.is_visible()
    assert page.locator(f"{RCD} .text").inner_text().strip() == site.ask("words-rcd", QUESTION).strip()


def test_a_stream_that_ends_too_soon_is_no_answer(site: Site, visit: Open) -> None:
    page = visit()
    held(page, site).end()
    page.locator(f"{RCD}[data-state=cut] .trouble", has_text="The server went away").wait_for()
    assert page.locator(f"{RCD} .tok.committed").inner_text() == "40"


def test_an_error_in_mid_stream_is_told_in_the_servers_words(site: Site, visit: Open) -> None:
    page = visit()
    script = held(page, site)
    script.send({"error": {"message": "the server is shutting down; ask another one.", "type": "x"}})
    page.locator(f"{RCD}[data-state=cut] .trouble", has_text="the server is shutting down; ask another one.").wait_for()
    assert page.locator(f"{RCD} .tok.committed").inner_text() == "40"


def test_a_server_that_is_gone_is_told_and_asked_again(site: Site, visit: Open) -> None:
    page = visit()
    page.route("**/v1/completions", lambda route: route.abort("connectionrefused"))
    run(page, QUESTION)
    page.locator(".trouble", has_text="The server cannot be reached.").nth(1).wait_for()
    page.unroute("**/v1/completions")
    for column in COLUMNS:
        page.locator(column).get_by_role("button", name="Retry", exact=True).click()
    ended(page)


def test_a_page_without_its_server_says_so_and_starts_when_it_is_back(site: Site, visit: Open) -> None:
    page = visit()
    page.route("**/v1/models", lambda route: route.abort("connectionrefused"))
    page.reload()
    page.locator("body[data-state=down]").wait_for()
    assert "cannot be reached" in page.locator("#notice").inner_text()
    page.unroute("**/v1/models")
    page.get_by_role("button", name="Retry", exact=True).click()
    page.locator("body[data-state=ready]").wait_for()
    assert not page.locator("#notice").is_visible()


def test_a_server_that_loads_its_models_is_waited_for(site: Site, visit: Open) -> None:
    page = visit()
    page.route("**/ready", lambda route: route.fulfill(status=503, json={"status": "loading"}))
    page.reload()
    page.locator("#notice", has_text="loading its models").wait_for()
    page.unroute("**/ready")
    page.locator("body[data-state=ready]").wait_for()


def test_a_full_queue_is_told_with_its_wait_and_can_be_tried_again(site: Site, visit: Open) -> None:
    script, page = site.script("words-rcd"), visit()
    script.refuse(429, "the queue is full (1024 wait); try again later.", wait=3)
    run(page, QUESTION)
    trouble = page.locator(f"{RCD}[data-state=refused] .trouble")
    trouble.wait_for()
    assert "the queue is full" in trouble.inner_text() and "3 seconds" in trouble.inner_text()
    trouble.get_by_role("button", name="Retry", exact=True).click()
    ended(page)


def test_a_setting_that_is_refused_is_told_beside_its_field(visit: Open) -> None:
    page = visit()
    page.locator("#open-settings").click()
    field = page.get_by_label("Threshold")
    field.fill("3")
    page.get_by_role("button", name="Close settings").click()
    run(page, QUESTION)
    error = page.locator("#set-threshold-error")
    error.wait_for()
    assert "threshold" in error.inner_text() and field.get_attribute("aria-invalid") == "true"
    assert "set-threshold-error" in (field.get_attribute("aria-describedby") or "")
    field.fill("0.9")
    error.wait_for(state="hidden")
    page.get_by_role("button", name="Close settings").click()
    page.get_by_role("button", name="Run", exact=True).click()
    ended(page)


def test_a_prompt_that_is_refused_is_told_beside_it(site: Site, visit: Open) -> None:
    page = visit()
    page.get_by_role("button", name="Run", exact=True).click()
    error = page.locator("#prompt-error", has_text="Type a problem first")
    error.wait_for()
    for model in ("words-rcd", "words-seqd"):
        site.script(model).refuse(400, "the prompt is too long.", param="prompt")
    run(page, QUESTION)
    page.locator("#prompt-error", has_text="the prompt is too long.").wait_for()


def test_stop_ends_the_request_and_keeps_the_text(site: Site, visit: Open) -> None:
    page = visit()
    script = held(page, site)
    page.get_by_role("button", name="Stop", exact=True).click()
    page.locator(f"{RCD}[data-state=stopped]").wait_for()
    assert page.locator(f"{RCD} .tok.committed").inner_text() == "40"
    page.get_by_role("button", name="Run", exact=True).wait_for()
    assert script.left.wait(60)  # the server is told


def test_a_new_run_takes_the_place_of_the_one_before(site: Site, visit: Open) -> None:
    page = visit()
    first = held(page, site)
    page.get_by_label("Problem").press("Enter")
    ended(page)
    assert first.left.wait(60)
    assert page.locator(f"{RCD} .text").inner_text().strip() == site.ask("words-rcd", QUESTION).strip()


def test_text_that_looks_like_html_is_text_wherever_it_comes_from(site: Site, visit: Open) -> None:
    script, other, page = site.script("words-rcd"), site.script("words-seqd"), visit()
    images = page.locator("img, b b, .column script").count()
    run(page, HTML)
    script.draft(1, [cell(HTML, "masked", best=[[HTML, 0.5], ["<i>", 0.2]]), cell(HTML)])
    chip = page.locator(f"{RCD} .tok").first
    chip.hover()
    assert page.get_by_role("tooltip").locator(".peek-token").first.inner_text() == HTML
    script.draft(2, [cell(HTML), cell(HTML)])
    script.text(HTML * 2)
    script.done(steps=2, tokens=2)
    other.refuse(400, HTML)
    page.locator(f"{RCD}[data-shown=end]").wait_for()
    assert page.locator(f"{RCD} .text").inner_text() == HTML * 2
    page.locator(f"{COLUMNS[0]} .trouble", has_text=HTML).wait_for()
    assert page.get_by_label("Problem").input_value() == HTML
    assert script.body["prompt"] == HTML
    assert page.locator("img, b b, .column script").count() == images == 0
    page.locator("#live", has_text=HTML).wait_for()
    assert page.title() == "Residual Context Diffusion"


def test_a_link_with_html_is_text_too(visit: Open) -> None:
    evil = quote(HTML)
    page = visit(f"#prompt={evil}&a={evil}&b=%00&seed={evil}&answer={evil}")
    ended(page)
    assert page.get_by_label("Problem").input_value() == HTML
    assert page.locator(".model").evaluate_all("all => all.map((one) => one.value)") == ["words-seqd", "words-rcd"]


def test_the_watch_sees_what_the_policy_refuses(browser: Browser, site: Site) -> None:
    """The check of the checks that every other test ends with."""
    watch, context = Watch(), browser.new_context()
    watch.over(context)
    page = context.new_page()
    page.goto(site.url)
    page.evaluate("""() => {
      const script = document.createElement("script");
      script.textContent = "window.ran = true";
      document.head.append(script);
      document.body.setAttribute("style", "color: red");
      return fetch("http://other.invalid/").catch(() => {});
    }""")
    assert page.evaluate("window.ran") is None
    told = " ".join(watch.wrong)
    assert "script-src" in told and "style-src" in told and "connect-src" in told
    context.close()
