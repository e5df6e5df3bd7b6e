"""Makes the pictures of the analysis' page for docs/analyze.md: `python -m tests.docs.analysis_pictures docs/images`.

Of a simulated job whose rank 3 computes 12 % slower, so that no trace is needed; needs `make tools` for a browser.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from pacecar.commands.analyze import AnalyzeOptions, run_analyze
from tests.kit.browser import chromium
from tests.kit.simulated_jobs import Fault, FaultKind, Job, Layout, Model, simulate
from tests.kit.simulated_jobs.kineto import write_job

__all__ = ["JOB", "write_page_of_job"]

JOB = Job(Layout(data=8), Model(), faults=(Fault(FaultKind.SLOW_COMPUTE, (3,), 0.12),), seed=1)
"""What the pictures show."""

WIDTH, HEAD_HEIGHT = 1080, 860


def write_page_of_job(folder: Path) -> Path:
    """Write the traces of the job and its page into `folder`, and return the page."""
    traces = write_job(folder, simulate(JOB).traces(), JOB.layout)
    page = folder / "page.html"
    code = run_analyze(AnalyzeOptions(paths=tuple(traces), as_json=True, is_quiet=True, html=page))
    assert code == 0
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as scratch, chromium() as browser:
        page = write_page_of_job(Path(scratch))
        opened = browser.new_page(viewport={"width": WIDTH, "height": HEAD_HEIGHT}, color_scheme="light")
        opened.goto(page.as_uri())
        opened.screenshot(path=folder / "analyze-page.png")
        opened.locator("#timeline").screenshot(path=folder / "analyze-ranks.png")


if __name__ == "__main__":
    main()
