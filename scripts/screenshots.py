"""Pictures of the page of `rcd serve`, for the docs: docs/images/serve-*.png, and a run as docs/images/serve.gif.

    python -m scripts.screenshots [--only sudoku] [--output docs/images]

Needs playwright and a Chromium (RCD_CHROMIUM names another). The same problems are asked every time, so that
the pictures change with the page alone.
"""

from __future__ import annotations

import argparse
import io
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import uvicorn

from rcd.api import load
from rcd.data.tasks.base import problem
from rcd.serve.app import create_app
from rcd.serve.service import LocalService
from rcd.serve.settings import ServeSettings
from tests.browser.conftest import FLAGS, chromium

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from playwright.sync_api import Browser, Page

OUTPUT = Path(__file__).parent.parent / "docs" / "images"
MODELS = ("words-rcd", "words-seqd", "sdar-rcd", "sdar-seqd", "llada-rcd", "llada-seqd")
DESKTOP, PHONE, SMALL = (1280, 800), (390, 844), (320, 640)
PNG_BYTES, GIF_BYTES = 200_000, 1_500_000
WORDS, SUDOKU = problem("words", "test", 5), problem("sudoku", "test", 11)
FRAME, LONG = 1000, 2600
"""Milliseconds of a step in the recording, and of its first and last picture."""


def link(task: Any, models: str, step: int | None = None, **settings: Any) -> str:
    given = {"prompt": task.question, "a": f"{models}-seqd", "b": f"{models}-rcd", "answer": task.answer, **settings}
    return "#" + urlencode(given | ({} if step is None else {"step": step}))


@contextmanager
def site() -> Iterator[str]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        models = {name: load(f"bundled:{name}") for name in MODELS}
        app = create_app(LocalService(models, ServeSettings(drafts_kept=4096)))  # no step is left out
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        server.should_exit = True
        thread.join()


class Studio:
    def __init__(self, browser: Browser, url: str, output: Path):
        self.browser, self.url, self.output = browser, url, output

    def page(self, size: tuple[int, int], fragment: str = "", *, dark: bool = False, scale: int = 1) -> Page:
        """Opened, and its runs shown to their end or to the link's step. Without motion: every picture is still."""
        context = self.browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if dark else "light",
            reduced_motion="reduce", device_scale_factor=scale, has_touch=size != DESKTOP,
        )  # fmt: skip
        page = context.new_page()
        page.goto(self.url + fragment)
        if fragment:
            shown = "[data-shown=end]" if "step=" not in fragment else f"[data-step='{fragment.rpartition('=')[2]}']"
            page.locator(f".column:is([data-state=done], [data-state=cut]){shown}").nth(1).wait_for()
        else:
            page.locator(".card-go").nth(1).wait_for()
        return page

    def keep(self, name: str, page: Page, colours: int = 224) -> None:
        from PIL import Image

        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        path = self.output / f"serve-{name}.png"
        picture.quantize(colours, dither=Image.Dither.NONE).save(path, optimize=True)
        told(path, PNG_BYTES)
        page.context.close()


def told(path: Path, most: int) -> None:
    size = path.stat().st_size
    print(f"{path}: {size:,} bytes")
    if size > most:
        raise SystemExit(f"{path} has more than {most:,} bytes; take fewer colours or pictures.")


def first(studio: Studio) -> None:
    studio.keep("first", studio.page(DESKTOP))


def words(studio: Studio) -> None:
    page = studio.page(DESKTOP, link(WORDS, "words", 4, threshold=0.99))
    page.locator(".column[data-kind=rcd] .tok.masked").nth(3).hover()
    studio.keep("words", page)


def sudoku(studio: Studio) -> None:
    studio.keep("sudoku", studio.page(DESKTOP, link(SUDOKU, "llada", 6, threshold=0.95)))


def dark(studio: Studio) -> None:
    studio.keep("dark", studio.page(DESKTOP, link(SUDOKU, "llada", 6, threshold=0.95), dark=True))


def done(studio: Studio) -> None:
    studio.keep("done", studio.page(DESKTOP, link(SUDOKU, "llada", threshold=0.95)))


def phone(studio: Studio) -> None:
    studio.keep("phone", studio.page(PHONE, link(WORDS, "words", 4, threshold=0.99), scale=2))


def small(studio: Studio) -> None:
    studio.keep("small", studio.page(SMALL, link(SUDOKU, "llada", 6, threshold=0.95), scale=2))


def settings(studio: Studio) -> None:
    page = studio.page(DESKTOP, link(WORDS, "words", threshold=0.99))
    page.locator("#open-settings").click()
    studio.keep("settings", page)


def error(studio: Studio) -> None:
    """The server goes away after some steps: its answer is cut where it is sent on to the page."""
    page = studio.page(DESKTOP)

    def cut(route: Any) -> None:
        answer = route.fetch()
        events = answer.text().split("\n\n")
        drafts = [place for place, event in enumerate(events) if '"draft"' in event]
        route.fulfill(response=answer, body="\n\n".join(events[: drafts[3] + 1]) + "\n\n")

    page.route("**/v1/completions", cut)
    page.get_by_label("Problem").fill(WORDS.question)
    page.locator("#open-settings").click()
    page.get_by_label("Threshold").fill("0.99")
    page.get_by_role("button", name="Close settings").click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.locator(".trouble p", has_text="went away").nth(1).wait_for()
    page.locator(".column[data-step='4']").nth(1).wait_for()
    studio.keep("error", page)


def recording(studio: Studio) -> None:
    """A run step by step, as an animation: the first screen, the sudoku, its end."""
    from PIL import Image

    def picture(page: Page) -> Picture:
        whole = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        return whole.resize((960, 600), Image.Resampling.LANCZOS)

    page = studio.page(DESKTOP)
    frames, lengths = [picture(page)], [LONG]
    page.context.close()
    page = studio.page(DESKTOP, link(SUDOKU, "llada", threshold=0.95))
    last = int(page.get_by_role("slider").get_attribute("max") or 0)
    page.locator("h1").click()  # nothing has the focus, so that keys are the timeline's
    for step in range(last + 1):
        page.keyboard.press("ArrowRight" if step else "Home")
        page.locator("#where", has_text=f"Step {step} of").wait_for()
        frames.append(picture(page))
        lengths.append(LONG if step == last else FRAME)
    palette = frames[len(frames) // 2].quantize(96, dither=Image.Dither.NONE)
    still = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    path = studio.output / "serve.gif"
    still[0].save(path, save_all=True, append_images=still[1:], duration=lengths, loop=0, optimize=True)
    print(f"{path}: {len(frames)} pictures, {sum(lengths) / 1000:.1f} s")
    told(path, GIF_BYTES)
    page.context.close()


PICTURES: dict[str, Callable[[Studio], None]] = {
    one.__name__: one for one in (first, words, sudoku, dark, done, phone, small, settings, error, recording)
}


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PICTURES, action="append", help="by default all of them")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    with site() as url, sync_playwright() as tools:
        studio = Studio(tools.chromium.launch(executable_path=chromium(), args=FLAGS), url, given.output)
        for name in given.only or PICTURES:
            PICTURES[name](studio)


if __name__ == "__main__":
    main()
