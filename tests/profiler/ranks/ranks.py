"""Run a job of several ranks that watch each other, in one network or in a namespace each, and ask what it said."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tests.kit.ranks import finish, start_ranks

JOB = Path(__file__).parent / "job_rank_monitor.py"

CAUSES = {"data": "data_wait"}
"""What a rank is said to be late in that plays something, where it has another name."""

Row = dict[str, Any]


def run_job(
    folder: Path,
    acts: Sequence[Mapping[str, Any]] = (),
    *,
    world: int = 4,
    meddle: Callable[[], None] | None = None,
    prefixes: Sequence[Sequence[str]] | None = None,
    **settings: Any,
) -> list[list[Row]]:
    """Run all ranks to their end; return each rank's records, the summary last.

    It ends after its acts, at its `steps`, or when `meddle` has returned, which runs beside the ranks; their process
    ids are in `folder / "pid<rank>"`.  With `prefixes` (of `ip netns exec`) each rank enters its namespace itself, so
    that it can be forked.
    """
    folder.mkdir(exist_ok=True)
    given = {"acts": list(acts), "folder": str(folder), **settings}
    where: dict[str, Any] = {}
    if prefixes is not None:
        given["namespaces"] = [f"/var/run/netns/{prefix[-1]}" for prefix in prefixes]
        where = {"address": "10.77.0.1", "environ": {"GLOO_SOCKET_IFNAME": "eth0"}}
    ranks = start_ranks([JOB, json.dumps(given)], world, **where)
    try:
        if meddle is not None:
            meddle()
    finally:
        if meddle is not None:
            (folder / "end").touch()
        ended = finish(ranks)
    codes = [rank.code for rank in ended]
    if codes != [0] * world:
        play = (folder / "play").read_text() if (folder / "play").exists() else "not begun"
        said = "\n".join(f"rank {rank}: {end.out[-300:]}\n{end.err[-3000:]}" for rank, end in enumerate(ended))
        raise AssertionError(f"exit codes {codes}, play {play}\n{said}")
    return [[json.loads(line) for line in rank.out.splitlines()] for rank in ended]


def stragglers(heard: list[list[Row]]) -> list[Row]:
    return [row for row in heard[0] if row["type"] == "straggler"]


def named(heard: list[list[Row]]) -> list[Row]:
    return [row for row in stragglers(heard) if not row["ended"]]


def played(heard: list[list[Row]]) -> list[tuple[int, str]]:
    """Return rank and cause of each act."""
    return [(act["rank"], CAUSES.get(act["how"], act["how"])) for act in heard[0][-1]["acts"]]


def lateness_ns(heard: list[list[Row]], row: Row) -> float:
    """Return how much later than the other ranks the named one came to meet them, by the job's own clock.

    Median over the steps in evidence.
    """
    arrivals = [rank[-1]["arrivals"] for rank in heard]
    return median(
        arrivals[row["late_rank"]][step]
        - median(mine[step] for rank, mine in enumerate(arrivals) if rank != row["late_rank"])
        for step in range(row["since_step"], row["step"] + 1)
    )
