"""Run long files first, draw fewer examples in `make test`, and say at the end what was left to `make test-all`.

Files go to whichever process is free; a long one that begins last leaves the other process idle.  How long one takes is
guessed from its markers alone: durations of an earlier run would make the order depend on where that ran.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

__all__ = [
    "decisive", "pytest_collection_modifyitems", "pytest_configure", "pytest_deselected", "pytest_sessionfinish",
    "pytest_terminal_summary", "pytest_testnodedown", "pytest_xdist_auto_num_workers", "reduced",
]  # fmt: skip

SECONDS = {"distributed": 6.0, "slow": 1.0}
SECONDS_OTHERWISE = 0.1

PROCESSES_PER_CORE = 2
"""A third of the time of a process on a core of its own is waiting: for ranks, timeouts, a page."""

REDUCTION = 4
"""`make check` and `make test` draw one in so many of the examples, seeds and runs of `make test-all`."""

_divisor = 1

LEFT = pytest.StashKey[Counter[tuple[str, str]]]()
"""How many tests of a room (folder) were left out, by the target that runs them."""


def reduced(count: int) -> int:
    """Return how many of `count` examples, seeds or runs to take: all, or a quarter where `full` tests are left out."""
    return -(-count // _divisor)


def decisive(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Return `values` to parametrize a test with; all but the `kept` ones are left to `make test-all`.

    Raises:
        ValueError: a kept value is none of `values`, so that `make test` would silently have fewer cases.
    """
    values = list(values)
    unknown = [one for one in kept if one not in values]
    if unknown:
        raise ValueError(f"cannot keep {unknown}: not among {values}")
    return [value if value in kept else pytest.param(value, marks=pytest.mark.full) for value in values]


def pytest_configure(config: pytest.Config) -> None:
    """Keep the order that is made here, as xdist would put the files with the most tests first; draw fewer examples."""
    global _divisor
    _divisor = REDUCTION if "not full" in config.option.markexpr else 1
    profile = settings.get_profile("pacecar")
    settings.register_profile("reduced", profile, max_examples=reduced(profile.max_examples))
    settings.load_profile("reduced")
    config.stash[LEFT] = Counter()
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return how many processes `--numprocesses=auto` means; `logical` is one a core, for tests that do not wait."""
    per_core = 1 if config.option.numprocesses == "logical" else PROCESSES_PER_CORE
    return math.ceil(per_core * len(os.sched_getaffinity(0)))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first; the tests of a file keep their order."""
    weight: Counter[Path] = Counter()
    for item in items:
        seconds = [SECONDS[mark.name] for mark in item.iter_markers() if mark.name in SECONDS]
        weight[item.path] += max(seconds, default=SECONDS_OTHERWISE)  # type: ignore[assignment]  # seconds, not counts
    items.sort(key=lambda item: (-weight[item.path], item.path))


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count what another target runs."""
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        target = "make soak-*" if "soak" in marks else "make test-all" if marks & {"full", "alone"} else None
        if target is not None:
            room = item.path.relative_to(item.config.rootpath).parts[1]
            item.config.stash[LEFT][target, room] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that reports, where this is one of several."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left"] = [[*key, count] for key, count in session.config.stash[LEFT].items()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Hear it; all processes collect the same tests."""
    for target, room, count in getattr(node, "workeroutput", {}).get("left", ()):
        node.config.stash[LEFT][target, room] = count


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was left out, in one line a target."""
    for target in sorted({target for target, _ in config.stash[LEFT]}):
        rooms = {room: count for (of, room), count in config.stash[LEFT].items() if of == target}
        each = ", ".join(f"{room} {count}" for room, count in sorted(rooms.items(), key=lambda pair: -pair[1]))
        terminalreporter.write_line(f"left to `{target}`: {sum(rooms.values())} tests ({each})")
