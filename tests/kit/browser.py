"""Opens pages in Chromium by playwright: `make tools` fetches it, $PACECAR_CHROMIUM names another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.kit.tools import find_tool

__all__ = ["chromium", "offline_page"]


@contextmanager
def chromium() -> Iterator[Any]:
    """Start Chromium; yield it.  Skips or fails without it as `find_tool` does."""
    from playwright import sync_api

    program = os.environ.get("PACECAR_CHROMIUM") or find_tool("chromium-headless-shell")
    with sync_api.sync_playwright() as driver:
        # Chromium's own sandbox needs a user namespace, which containers and root do not have.
        opened = driver.chromium.launch(executable_path=program, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        yield opened
        opened.close()


@contextmanager
def offline_page(file: Path, scheme: str) -> Iterator[Any]:
    """Open a file, light or dark (`scheme`), and yield its page, 1280 by 900.

    At the end it must not have asked for anything else, and the browser must not have complained.
    """
    with chromium() as browser:
        context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True, color_scheme=scheme)
        opened = context.new_page()
        asked: list[str] = []
        complaints: list[str] = []
        opened.on("request", lambda request: asked.append(request.url))
        opened.on("console", lambda said: complaints.append(said.text))
        opened.on("pageerror", lambda error: complaints.append(str(error)))
        opened.goto(file.as_uri())
        yield opened
        assert asked == [file.as_uri()]
        assert complaints == []
