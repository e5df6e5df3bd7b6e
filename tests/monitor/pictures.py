"""Makes the pictures of the page and of `pacecar top` in docs/images, of the made-up node of `showcase`.

make tools && python -m tests.monitor.pictures docs/images
"""

from __future__ import annotations

import argparse
import io
import tempfile
import threading
from pathlib import Path

from rich.console import Console

from pacecar.commands.top.daemon_poller import fetch
from pacecar.commands.top.screen import ScreenView, compose
from pacecar.records.status_document import StatusDocument
from tests.kit.browser import chromium
from tests.monitor.showcase import ShowJob, show_daemon

STEPS, STEP_SECONDS = 120, 0.4
PAGES = {"page-dark": (1280, "dark", True), "page-light": (1280, "light", True), "page-narrow": (420, "dark", False)}


def draw_page(port: int, folder: Path) -> None:
    with chromium() as browser:
        for name, (width, theme, is_whole) in PAGES.items():
            page = browser.new_page(viewport={"width": width, "height": 1500}, color_scheme=theme)
            page.goto(f"http://127.0.0.1:{port}/")
            page.wait_for_selector("figure canvas")
            page.wait_for_timeout(1500)
            page.screenshot(path=folder / f"{name}.png", full_page=is_whole)
            page.close()


def draw_top(document: StatusDocument, folder: Path) -> None:
    for width, height in ((80, 24), (200, 60)):
        console = Console(
            file=io.StringIO(), record=True, width=width, height=height, force_terminal=True, highlight=False
        )
        for line in compose(document, ScreenView(), width, height, console):
            console.print(line, soft_wrap=True)
        console.save_svg(str(folder / f"top-{width}x{height}.svg"), title="pacecar top")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("folder", type=Path)
    folder = arguments.parse_args().folder
    with tempfile.TemporaryDirectory() as place:
        daemon = show_daemon(f"{place}/socket")
        daemon.start()
        jobs = [
            ShowJob(daemon.socket),
            ShowJob(daemon.socket, name="dlrm-ablation-17", ranks=2, pace_ms=35, is_tuned=False),
        ]
        pause = threading.Event()
        for _ in range(STEPS):  # a past for the charts
            for job in jobs:
                job.step()
            pause.wait(STEP_SECONDS)
        draw_page(daemon.port, folder)
        for job in jobs:
            job.step()
        draw_top(fetch(f"http://127.0.0.1:{daemon.port}"), folder)
        for job in jobs:
            job.close()
        daemon.close()


if __name__ == "__main__":
    main()
