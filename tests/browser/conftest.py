"""A headless Chromium in front of a real server. Every page of every test is watched: no error in its console, nothing
that the Content-Security-Policy refuses, no request to another host."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

    from tests.browser.serving import Site

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
PATIENCE = 60_000
"""Milliseconds until a state that never comes fails a test; no outcome hangs on it."""


def missing() -> str | None:
    """Why there is no browser."""
    try:
        import fastapi  # noqa: F401
        import playwright  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        return f"{error.name} is not installed"
    if not chromium():
        return f"no {NAMES[0]} is installed; name one with RCD_CHROMIUM"
    return None


def chromium() -> str | None:
    return os.environ.get("RCD_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    reason = missing()
    if reason is not None:
        if os.environ.get("RCD_BROWSER") == "required":
            pytest.fail(f"browser tests are required, and {reason}.")
        pytest.skip(f"no browser test: {reason}.")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as tools:  # a module's, not the session's: it keeps an event loop running in this thread
        yield tools.chromium.launch(executable_path=chromium(), args=FLAGS)


@pytest.fixture(scope="session")
def service() -> Any:
    from tests.browser.serving import models

    return models()


@pytest.fixture
def site(browser: Browser, service: Any) -> Iterator[Site]:
    from tests.browser.serving import serving

    with serving(service) as made:
        yield made


class Watch:
    """What must not happen while a page is open."""

    def __init__(self) -> None:
        self.wrong: list[str] = []

    def over(self, context: BrowserContext) -> None:
        context.on("request", lambda request: self._asked(request.url))
        context.on("console", lambda message: self._told(message.type, message.text))
        context.on("weberror", lambda error: self.wrong.append(f"error: {error.error}"))
        context.on("dialog", lambda dialog: self.wrong.append(f"dialog: {dialog.message}"))

    def _asked(self, url: str) -> None:
        if not url.startswith("http://127.0.0.1:"):
            self.wrong.append(f"request: {url}")

    def _told(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and not text.startswith("Failed to load resource"):  # a status is no mistake
            self.wrong.append(f"{kind}: {text}")


Open = Callable[..., "Page"]


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def visit(browser: Browser, site: Site, watch: Watch) -> Iterator[Open]:
    """Opens the page as somebody new, ready to be used. Without motion steps are shown as they come."""
    contexts = []

    def opened(fragment: str = "", url: str = "", **options: Any) -> Page:
        context = browser.new_context(**{"reduced_motion": "reduce", **options})
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        watch.over(context)
        page = context.new_page()
        page.goto((url or site.url) + fragment)
        page.locator("body:is([data-state=ready], [data-state=run], [data-state=down])").wait_for()
        return page

    yield opened
    for context in contexts:
        context.close()
    assert watch.wrong == []
