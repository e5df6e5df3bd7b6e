"""Put what bench_tuning measured where the documentation shows it: `python -m bench.keep_tuning [FILE...]`.

Each FILE (of `--json`) goes to docs/measurements/tuning/ under its own name.  Then all that is made of the files there
is made anew: the tables of tuning.md, tuning-curves.json, and the fits in policies.md.  Without a FILE only that.

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
from tests.controller.measured_curves import SWEEPS, measured, table

FIGURES = re.compile(r"(?<=## Figures\n\n).*?(?=\n\nSide by side: )", re.DOTALL)
FITS = re.compile(r"^\| case \| alpha ms .*?(?=\n\n)", re.DOTALL | re.MULTILINE)


def put(page: str, place: re.Pattern[str], made: str) -> str:
    """Return the page with `made` at the place.

    Raises:
        ValueError: the page has no such place, or several.
    """
    changed, count = place.subn(lambda _: made, page)
    if count != 1:
        raise ValueError(f"{count} places match {place.pattern!r}, one is needed")
    return changed


def figures(folder: Path = SWEEPS) -> str:
    """Return the short tables of all files in the folder; `bench_tuning --show` prints the long ones."""
    kept = [case for file in sorted(folder.glob("*.json")) for case in json.loads(file.read_text())]
    return summary(kept, is_short=True)


def main(files: Sequence[str]) -> None:
    """Keep the files, and make everything anew."""
    for file in map(Path, files):
        (SWEEPS / file.name).write_text(file.read_text())
    fits = list(measured())
    MEASURED.write_text(dump((curve for curve, _ in fits), source="measured"))
    for name, place, made in (("tuning.md", FIGURES, figures()), ("policies.md", FITS, table(fits))):
        page = SWEEPS.parent / name
        page.write_text(put(page.read_text(), place, made))


if __name__ == "__main__":
    main(sys.argv[1:])
