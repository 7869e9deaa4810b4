"""A real headless browser for tests, and a page that notes what it asks and complains about."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Error, Request, sync_playwright

from scripts import browsers

WAIT_MS = 30_000


@contextlib.contextmanager
def opened() -> Iterator[Browser]:
    """A browser of this machine. While it is open, asyncio.run does not work in this thread.

    Raises NoBrowserError.
    """
    path = browsers.find()
    args = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=args)
        try:
            yield browser
        finally:
            browser.close()


class Dashboard:
    """The page, opened in a tab of its own."""

    def __init__(
        self, browser: Browser, url: str, *, width: int = 1280, dark: bool = False
    ) -> None:
        self.url = url
        self.complaints: list[str] = []  # of the page's code, and of the browser about it
        self.asked: list[str] = []  # URLs
        self.page = browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light"
        )
        self.page.set_default_timeout(WAIT_MS)
        self.page.on("console", self._note_console)
        self.page.on("pageerror", self._note_error)
        self.page.on("request", self._note_request)

    def _note_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _note_error(self, error: Error) -> None:
        self.complaints.append(str(error))

    def _note_request(self, request: Request) -> None:
        self.asked.append(request.url)

    def open(self) -> Dashboard:
        """Load, or load again."""
        self.page.goto(f"{self.url}/dashboard")
        return self

    def use_key(self, key: str) -> None:
        """Type a key as a user does."""
        self.page.fill("#key", key)
        self.page.press("#key", "Enter")

    def text(self, selector: str) -> str:
        """What the first such element says now."""
        return self.page.locator(selector).first.inner_text()

    def count(self, selector: str) -> int:
        return self.page.locator(selector).count()

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait for something to become true."""
        for _ in range(WAIT_MS // 100):
            if is_so():
                return
            self.page.wait_for_timeout(100)
        raise AssertionError(f"{what}\n{self.page.locator('main').inner_text()}")

    def until_text(self, selector: str, words: str) -> None:
        """Wait until an element says these words."""
        shown = self.page.locator(selector).first
        self.until(lambda: words in (shown.text_content() or ""), f"{selector}: no {words!r}")

    def hosts_asked(self) -> set[str]:
        return {urlsplit(url).netloc for url in self.asked}
