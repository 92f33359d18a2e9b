"""A real browser for tests: Debian's Chromium without a user interface, driven by Playwright."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, sync_playwright

from .needs import missing

CHROMIUM = "chromium-headless-shell"
# No sandbox, since tests may run as root; no feature of the browser itself uses the network.
_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--process-per-site",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# In milliseconds; generous, since machines that run tests are busy.
TIMEOUT_MS = 120_000


@contextmanager
def chromium() -> Iterator[Browser]:
    """Chromium without a window; skips the test where it is not installed."""
    path = shutil.which(CHROMIUM)
    if path is None:
        missing(f"{CHROMIUM}: make system-packages")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def kept_context(browser: Browser, url: str) -> Iterator[BrowserContext]:
    """Keeps a page of the server open, so that the tests' pages are drawn by one process.

    Animations are reduced: without a GPU, drawing every frame would take a core.
    """
    context = browser.new_context(reduced_motion="reduce")
    context.new_page().goto(f"{url}/console/icon.svg")
    yield context
    context.close()


class WatchedPage:
    """A page with all messages of its console."""

    def __init__(self, context: BrowserContext) -> None:
        self._context = context
        context.set_default_timeout(TIMEOUT_MS)
        self.page: Page = context.new_page()
        self.faults: list[str] = []
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))

    def another(self) -> Page:
        """One more page of the same context, whose console is not watched."""
        return self._context.new_page()

    def close(self) -> None:
        self.page.close()

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"{message.type}: {message.text} ({message.location.get('url')})")
