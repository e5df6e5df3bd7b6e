"""Draws two steps for docs/ledger.md by the analyzer's own `--picture`: `python -m tests.docs.pictures docs/images`.

The same step twice, 14 ms of compute and an all-reduce of 6 ms: once under compute, once after it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from pacecar.commands.analyze import AnalyzeOptions, run_analyze
from tests.analysis.tracefiles import write_trace

__all__ = ["DRAWINGS", "draw"]

DRAWINGS = {
    "ledger-overlapped": ("dccccccccccccccoo", "......AAAAAA....."),
    "ledger-exposed": ("dcccccccccccccc......oo", "...............AAAAAA.."),
}
"""Picture -> streams of its step, a millisecond a letter (see `write_trace`)."""


def draw(folder: Path) -> None:
    """Write the pictures into `folder`."""
    with tempfile.TemporaryDirectory() as scratch:
        for name, lanes in DRAWINGS.items():
            beats = len(lanes[0])
            trace = write_trace(Path(scratch) / f"{name}.json", lanes, rank=0, steps=[(0, beats)], names={"c": "gemm"})
            code = run_analyze(AnalyzeOptions(paths=(trace,), as_json=True, picture=folder / f"{name}.svg"))
            assert code == 0, name


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    draw(parser.parse_args().folder)
