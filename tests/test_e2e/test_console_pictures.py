"""Takes the documents' pictures of the console from real processes: `make console-pictures`.

The animation shows a chat and the engines: one of them is killed while it streams, and the answer
equals that of an undisturbed stream.
"""

import base64
import io
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, ViewportSize, expect

from drawings import Group, draw_number, draw_shapes
from headrace_common.text.checkpoint import DEMO_VISION
from headrace_testing.browser import TIMEOUT_MS, WatchedPage, chromium
from headrace_testing.console import STORY, UP_FLAGS, Console, undisturbed, until_calm
from headrace_testing.headrace_up import UpProcess

FOLDER = os.environ.get("CONSOLE_PICTURES")
SIZE: ViewportSize = {"width": 1280, "height": 800}
# The animation: its two pages, one above the other.
PICTURE: ViewportSize = {"width": 1280, "height": 900}
CHAT: ViewportSize = {"width": 1220, "height": 500}
LIVE: ViewportSize = {"width": 1220, "height": 540}
WIDTH, GAP = 900, 8
COLOURS = 64
FRAMES_A_SECOND = 5
LAST_FRAME_MS = 4000
MAX_BYTES = 2_000_000
SEED = 5
SCENE = (Group(2, "red", "circle"), Group(1, "blue", "square"))
# Requests that run beside the chat, so that its stream takes some seconds.
LOAD = 32
TOKENS = 115

pytestmark = pytest.mark.skipif(not FOLDER, reason="make console-pictures draws these")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def folder() -> Path:
    folder = Path(FOLDER or "").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def up(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    with UpProcess(tmp_path_factory.mktemp("up"), *UP_FLAGS) as up:
        up.until_served()
        until_calm(up.url)
        yield up


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_views(
    browser: Browser, up: UpProcess, folder: Path, scheme: Literal["light", "dark"]
) -> None:
    until_calm(up.url)
    watched = WatchedPage(browser.new_context(viewport=SIZE, color_scheme=scheme))
    page = watched.page
    console = Console(page, up.url)

    def take(name: str) -> None:
        page.screenshot(path=folder / f"{name}-{scheme}.png")

    console.open()
    page.check("#p-logprobs")
    console.set(temperature=1, seed=SEED, max_tokens=160)
    console.ask("What is Headrace?")
    console.ask(STORY)
    page.locator(".answer").last.locator(".token").nth(6).hover()
    take("chat")

    console.open("live")
    page.fill("#load-count", "24")
    page.click("#load-send")
    expect(page.locator(".model dd").nth(1)).to_have_text("24", timeout=TIMEOUT_MS)
    page.locator("#load-send").evaluate("() => document.activeElement.blur()")
    kill(page, "engine-0")
    expect(page.locator("#happened")).to_contain_text("moved from", timeout=TIMEOUT_MS)
    expect(page.locator("#toast")).to_be_hidden(timeout=TIMEOUT_MS)
    take("live")

    console.open("requests")
    expect(page.locator("#request-rows tr").nth(20)).to_be_visible(timeout=TIMEOUT_MS)
    take("requests")
    until_calm(up.url)
    watched.close()
    assert watched.faults == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_picture(
    browser: Browser, tmp_path: Path, folder: Path, scheme: Literal["light", "dark"]
) -> None:
    watched = WatchedPage(browser.new_context(viewport=PICTURE, color_scheme=scheme))
    page = watched.page
    with UpProcess(tmp_path, "--model", DEMO_VISION) as up:
        up.until_served(DEMO_VISION)
        console = Console(page, up.url, DEMO_VISION)
        console.open()
        console.set(temperature=0)
        for name, asked, picture in (
            ("shapes.png", "What do you see?", draw_shapes(random.Random(SEED), SCENE)),
            ("number.png", "Which number is this?", draw_number(random.Random(SEED), "47")),
        ):
            file = io.BytesIO()
            picture.image.save(file, "PNG")
            given: Any = {"name": name, "mimeType": "image/png", "buffer": file.getvalue()}
            page.set_input_files("#picture-file", given)
            expect(page.locator("#pictures img")).to_be_visible()
            assert console.ask(asked) == f"I see {picture}."
        page.screenshot(path=folder / f"picture-{scheme}.png")
    watched.close()
    assert watched.faults == []


def test_kill_while_streaming(browser: Browser, up: UpProcess, folder: Path) -> None:
    until_calm(up.url)
    watched = WatchedPage(browser.new_context(viewport=CHAT, color_scheme="light"))
    chat, live = Console(watched.page, up.url), Console(watched.another(), up.url)
    chat.open()
    body = chat.long_story(TOKENS)
    live.page.set_viewport_size(LIVE)
    expected = undisturbed(up.url, body)
    live.open("live")
    live.page.fill("#load-count", str(LOAD))
    live.page.click("#load-send")
    expect(live.page.locator(".model dd").nth(1)).to_have_text(str(LOAD), timeout=TIMEOUT_MS)
    expect(live.page.locator("#toast")).to_be_hidden(timeout=TIMEOUT_MS)
    live.page.locator("#engines").evaluate("part => part.scrollIntoView()")
    film = Film(chat.page, live.page)
    chat.send(STORY)
    # At once: Playwright's own clicks wait until nothing moves, and the stream ends meanwhile.
    chat.page.locator(".whereabouts button:not([hidden])").dispatch_event("click")
    chat.page.locator("#kill-dialog[open] #kill-confirm").dispatch_event("click")
    chat.until_answered()
    film.end()
    assert chat.text == expected
    assert "no token was lost" in chat.figures
    film.write(folder / "kill.gif")
    assert (folder / "kill.gif").stat().st_size < MAX_BYTES
    watched.close()
    assert watched.faults == []


def kill(page: Page, name: str) -> None:
    page.get_by_role("button", name=f"Kill {name}").click()
    page.click("#kill-confirm")


def _palette(frame: Image.Image) -> Image.Image:
    """The frame's most frequent colours, which fill its areas, and other colours that cover the
    rest."""
    counted = frame.getcolors(frame.width * frame.height) or []
    often = sorted(counted, key=lambda pair: pair[0], reverse=True)[: COLOURS // 2]
    areas = [cast(tuple[int, int, int], colour) for _, colour in often]
    rest = frame.quantize(COLOURS - len(areas), Image.Quantize.MAXCOVERAGE).getpalette() or []
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for colour in areas for part in colour] + rest)
    return palette


class Film:
    """Two pages, one above the other, as an animated GIF at the recorded speed.

    Chromium sends a picture of a page whenever it has drawn it.
    """

    def __init__(self, *pages: Page) -> None:
        self._pages = pages
        self._ended = False
        self._shots: list[list[tuple[float, bytes]]] = [[] for _ in pages]
        for page, shots in zip(pages, self._shots, strict=True):
            self._record(page, shots)

    def _record(self, page: Page, shots: list[tuple[float, bytes]]) -> None:
        session = page.context.new_cdp_session(page)

        def take(frame: dict[str, Any]) -> None:
            if self._ended:
                return
            shots.append((frame["metadata"]["timestamp"], base64.b64decode(frame["data"])))
            session.send("Page.screencastFrameAck", {"sessionId": frame["sessionId"]})

        session.on("Page.screencastFrame", take)
        session.send("Page.startScreencast", {"format": "png", "everyNthFrame": 3})

    def end(self) -> None:
        """Takes the last frame."""
        self._ended = True
        for page, shots in zip(self._pages, self._shots, strict=True):
            shots.append((time.time(), page.screenshot()))

    def write(self, path: Path) -> None:
        """Writes all frames with the colours of a frame in the middle."""
        start = max(shots[0][0] for shots in self._shots)
        end = max(shots[-1][0] for shots in self._shots)
        times = [
            start + number / FRAMES_A_SECOND
            for number in range(int((end - start) * FRAMES_A_SECOND))
        ]
        frames = [self._frame(moment) for moment in [*times, end]]
        palette = _palette(frames[len(frames) // 2])
        drawn = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
        shown = round(1000 / FRAMES_A_SECOND)
        drawn[0].save(
            path,
            save_all=True,
            append_images=drawn[1:],
            duration=[*[shown] * len(times), LAST_FRAME_MS],
            loop=0,
            optimize=True,
        )

    def _frame(self, moment: float) -> Image.Image:
        """The contents of both pages at one moment."""
        pictures = []
        for shots in self._shots:
            content = next(data for at, data in reversed(shots) if at <= moment)
            pictures.append(Image.open(io.BytesIO(content)).convert("RGB"))
        height = sum(picture.height for picture in pictures) + GAP
        whole = Image.new("RGB", (pictures[0].width, height), "#8592a1")
        top = 0
        for picture in pictures:
            whole.paste(picture, (0, top))
            top += picture.height + GAP
        size = (WIDTH, round(height * WIDTH / whole.width))
        return whole.resize(size, Image.Resampling.LANCZOS)
