"""Put what bench_tuning measured where the documentation shows it: `python -m bench.keep_tuning [FILE...]`.

Each FILE (of `--json`) goes to docs/measurements/tuning/ under its own name.  Then all that is made of the files there
is made anew: the tables of tuning.md and tuning-curves.json.  Without a FILE only that.

The replayed table of policies.md is not: `make bench-policies` takes twenty minutes or more.  A test says when that
table is of other curves.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.tuning_figures import summary
from tests.controller.curves import MEASURED, dump
from tests.controller.measured_curves import SWEEPS, measured

FIGURES = re.compile(r"(?<=## Figures\n\n).*?(?=\n\nSide by side: )", re.DOTALL)


def figures(folder: Path = SWEEPS) -> str:
    """Return the short tables of all files in the folder; `bench_tuning --show` prints the long ones."""
    kept = [case for file in sorted(folder.glob("*.json")) for case in json.loads(file.read_text())]
    return summary(kept, is_short=True)


def main(files: Sequence[str]) -> None:
    """Keep the files, and make everything anew."""
    for file in map(Path, files):
        (SWEEPS / file.name).write_text(file.read_text())
    MEASURED.write_text(dump((curve for curve, _ in measured()), source="measured"))
    page = SWEEPS.with_suffix(".md")
    made, count = FIGURES.subn(lambda _: figures(), page.read_text())
    if count != 1:
        raise ValueError(f"{page}: {count} places match {FIGURES.pattern!r}, one is needed")
    page.write_text(made)


if __name__ == "__main__":
    main(sys.argv[1:])
