"""A real browser for tests of the page: Debian's Chromium, and whoever looks at a page in it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

SWITCHES = (
    "--no-sandbox",  # tests may run as root, and open pages of their own alone
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


def find_chromium() -> str | None:
    """Return the path of Chromium; None: it is not installed."""
    return shutil.which("chromium")


@contextmanager
def open_chromium() -> Iterator[Browser]:
    """Start Chromium for the duration of the context."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=[*SWITCHES])
        try:
            yield browser
        finally:
            browser.close()


class Visitor:
    """Looks at a page in a window of its own; notes every error that the browser's console has."""

    def __init__(self, page: Page, origin: str) -> None:
        self.page, self.origin = page, origin
        self.faults: list[str] = []
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.faults.append(f"uncaught: {error}"))

    def _note(self, message: ConsoleMessage) -> None:
        # What the policy (CSP) forbids is an error of the console, too.
        if message.type in ("error", "warning", "assert"):
            self.faults.append(f"{message.text} ({message.location.get('url', '')})")

    def open(self, part: str = "") -> None:
        """Load the page."""
        self.page.goto(f"{self.origin}/{part}")

    def sign_in(self, token: str) -> None:
        """Sign in as a person does."""
        self.open()
        self.page.get_by_label("Token").fill(token)
        self.page.get_by_role("button", name="Sign in").click()
        self.page.get_by_role("heading", name="Runs").wait_for()

    def go(self, part: str) -> None:
        """Follow a link inside the page."""
        self.page.evaluate("part => { location.hash = part }", part)

    def wait_for(self, condition: str, argument: Any = None) -> None:
        """Wait until an expression of JavaScript holds."""
        self.page.wait_for_function(condition, arg=argument)

    def forgive(self, pattern: str) -> None:
        """Take out faults that the test provoked; there must be one."""
        provoked = [fault for fault in self.faults if re.search(pattern, fault)]
        assert provoked, (pattern, self.faults)
        self.faults = [fault for fault in self.faults if fault not in provoked]


@contextmanager
def visiting(browser: Browser, origin: str, **options: Any) -> Iterator[Visitor]:
    """Open a window; at the end of the context, the console must be without errors."""
    from tests.waiting import HANGS_S

    options = {"viewport": {"width": 1280, "height": 800}, **options}
    context = browser.new_context(**options)
    context.set_default_timeout(HANGS_S * 1000)
    try:
        visitor = Visitor(context.new_page(), origin)
        yield visitor
        assert visitor.faults == []
    finally:
        context.close()
