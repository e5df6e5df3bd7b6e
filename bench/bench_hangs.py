"""Injects hangs and healthy pauses into real gloo jobs; prints who was named, after how long, and whether rightly."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from tests.profiler.hangs.injection import ALL, Case, inject

LATE = ("not_joined",)

FAULTS: dict[str, tuple[tuple[str, ...], bool]] = {
    "stop": (("stopped",), False),
    "loader": (LATE, False),
    "loader_pipe": (LATE, False),
    "sleep": (LATE, False),
    "late": (LATE, False),
    "forward": (LATE, False),
    "lock": (LATE, False),
    "receive": ((*LATE, "skipped", "extra"), False),
    "c_call": (LATE, False),
    "c_lock": (LATE, False),
    "c_lock_gil": (("no_answer",), False),
    "gil": (("no_answer",), False),
    "skip": (("skipped", "mismatched", *LATE), True),
    "extra": (("extra", "mismatched", "skipped", *LATE), True),
    "shape": (("mismatched",), True),
    "other": (("mismatched",), True),
    "exit": (("gone",), True),
    "kill": (("gone",), True),
    "leave": (("no_answer", *LATE), False),
    "finish": (("no_answer", *LATE), False),
    "nobody": (("nobody",), False),
    "busy": (LATE, False),
}
"""What happens -> right kinds, and whether gloo may end the job by itself."""

HEALTHY = (
    Case("pause", 0, 2), Case("pause", 1, 3), Case("pause_all", ALL, 2), Case("write", 0, 2, pause_seconds=20),
    Case("compute", 1, 2, pause_seconds=20), Case("checkpoint", 0, 3, pause_seconds=25),
    Case("evaluate", 0, 2, pause_seconds=20), Case("evaluate", 0, 3, pause_seconds=20),
    Case("none", 0, 2, stop_all_seconds=20), Case("none", 0, 4, stop_all_seconds=20),
    Case("pause_all", ALL, 2, pause_seconds=20), Case("pause_loader", ALL, 2, pause_seconds=60),
    Case("long", ALL, 2, steps=10_000, pause_seconds=8),
)  # fmt: skip


LINKS = tuple(
    Case(fault, rank, world, ("link",), may_end=fault == "link_down", hosts=count)
    for fault, rank, world, count in (
        ("link_down", 1, 2, 2), ("link_down", 0, 2, 2), ("link_down", 3, 4, 2), ("link_down", 2, 3, 3),
        ("unplug", 1, 2, 2), ("unplug", 0, 4, 2), ("unplug", 0, 3, 3), ("unplug", 2, 3, 3),
        ("lossy", 1, 2, 2), ("lossy", 2, 3, 3), ("lossy", 0, 4, 2),
    )
)  # fmt: skip
"""A link that goes dead between hosts, which are network namespaces."""


def cases() -> list[Case]:
    found = []
    for fault, (kinds, may_end) in FAULTS.items():
        places = ((1, 2), (0, 2), (2, 3), (0, 4)) if fault in ("stop", "loader", "gil", "skip") else ((1, 2), (0, 3))
        places = ((ALL, 2), (ALL, 3)) if fault == "nobody" else places
        found += [Case(fault, rank, world, kinds, may_end) for rank, world in places]
    return found + (list(LINKS) if os.geteuid() == 0 else [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="faults")
    parser.add_argument("--skip-healthy", action="store_true")
    parser.add_argument("--skip-hangs", action="store_true")
    parser.add_argument("--first", type=int, default=None, help="at most so many hangs")
    parser.add_argument("-v", action="store_true", help="print evidence and logs")
    given = parser.parse_args()
    counts: dict[str, int] = {}
    taken = []
    chosen = [] if given.skip_hangs else cases()[: given.first]
    chosen += [] if given.skip_healthy else HEALTHY
    for number, case in enumerate(one for one in chosen if not given.only or one.fault in given.only):
        with tempfile.TemporaryDirectory() as folder:
            begun = time.monotonic()
            outcome = inject(Path(folder) / "job", case)
        judged = outcome.judged(case)
        counts[("healthy " if not case.kinds else "") + judged] = (
            counts.get(("healthy " if not case.kinds else "") + judged, 0) + 1
        )
        said = next((verdict for verdict in outcome.verdicts if not verdict["ended"]), None)
        after = said["seconds"] if said else None
        if after is not None and case.kinds:
            taken.append(after)
        words = f"{said['kind']} {said['culprits']}: {said['summary']}" if said else "no verdict"
        sys.stdout.write(
            f"{number:3} {case.fault:12} rank {case.rank} of {case.world}  {judged:8}"
            f" {'' if after is None else f'{after:5.1f} s'}  {words}  [{time.monotonic() - begun:.0f} s]\n"
        )
        if given.v or judged in ("wrong", "none"):
            sys.stdout.write(f"    {said and said['evidence']}\n{outcome.log}\n")
        sys.stdout.flush()
    slowest = f", slowest verdict {max(taken):.1f} s, median {median(taken):.1f}" if taken else ""
    sys.stdout.write(f"{counts}{slowest}\n")


if __name__ == "__main__":
    main()
