"""Replays InfiniteHBD's public fault trace (400 nodes, 348 days) through the headings of a job's life.

    git clone https://github.com/stepfun-ai/InfiniteHBD-Trace
    python bench/bench_restarts.py InfiniteHBD-Trace

Two replays.  *Nodes*: each node trains whenever it is not faulty; its down time, charged by `pacecar.ledger.attempts`,
is compared with the sum of the trace's fault durations, and the faults with fault_statistics.json.  *Job*: one job on
all nodes with spare ones, which every fault kills and which resumes from its last checkpoint; its lost steps are
compared with those counted without the ledger.  Ends with 1 if any differ.

Source: Shou et al., "InfiniteHBD", SIGCOMM 2025, arXiv 2502.03885.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pacecar.ledger.attempts import Attempt, JobLife, StepRow, charge

SECOND = 1_000_000_000
DAY = 86_400 * SECOND
DAYS = 349
"""The last event is on day 348."""


class Fault(NamedTuple):
    """A node was down from `begin_ns` to `end_ns`."""

    node: str
    begin_ns: int
    end_ns: int
    level: str


def faults_of(events: list[dict[str, Any]]) -> Iterator[Fault]:
    """Yield the faults; the first end of the same kind on the same node ends one."""
    open_since: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for event in events:
        key = (event["node_id"], *event["fault_type"].values())
        at_ns = round(event["event_time"] * DAY)
        if event["event_type"] == "fault_start":
            open_since[key].append(at_ns)
        else:
            yield Fault(key[0], open_since[key].pop(0), at_ns, event["fault_type"]["Level"])
    for key, begun in open_since.items():
        yield from (Fault(key[0], at_ns, DAYS * DAY, key[1]) for at_ns in begun)


def up_times(faults: list[Fault]) -> list[tuple[int, int]]:
    """Return when a node was up; its faults may overlap."""
    found, up_ns = [], 0
    for fault in sorted(faults, key=lambda one: one.begin_ns):
        if fault.begin_ns > up_ns:
            found.append((up_ns, fault.begin_ns))
        up_ns = max(up_ns, fault.end_ns)
    return [*found, (up_ns, DAYS * DAY)] if up_ns < DAYS * DAY else found


def node_life(up: list[tuple[int, int]]) -> JobLife:
    """Return the life of a node that is one long step whenever it is up."""
    life = charge([Attempt(begin, [StepRow(end, 1, end - begin)], end) for begin, end in up], intervals=1)
    assert life is not None, "a node that was never up has no life"
    return life


def job_attempts(kills: list[int], options: argparse.Namespace) -> tuple[list[Attempt], int]:
    """Return a job's attempts between `kills`, and how many steps were trained again."""
    step_ns, start_up_ns, down_ns = (round(one * SECOND) for one in (options.step, options.start_up, options.down))
    found: list[Attempt] = []
    began, number, lost = 0, 0, 0
    for kill in [*kills, DAYS * DAY]:
        if kill <= began:
            continue  # down already
        first, rows = began + start_up_ns, []
        done = max(0, kill - first) // step_ns
        for end in sorted({min(1, done), *range(options.steps_saved, done, options.steps_saved), done} - {0}):
            before = rows[-1].number - number if rows and rows[-1].number is not None else 0
            rows.append(StepRow(first + end * step_ns, end - before, (end - before) * step_ns, number + end))
        is_last = kill == DAYS * DAY
        found.append(
            Attempt(began, rows, kill if is_last else rows[-1].ended_ns if rows else kill, is_failed=not is_last)
        )
        kept = done if is_last else (number + done) // options.steps_saved * options.steps_saved - number
        lost += done - kept
        number, began = number + kept, kill + down_ns
    return found, lost


def main() -> int:
    """Print both replays; return 1 if they differ from the trace's own figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="the repository's folder")
    parser.add_argument("--step", type=float, default=20.0, help="seconds of a step")
    parser.add_argument("--steps-saved", type=int, default=90, help="steps between checkpoints")
    parser.add_argument("--start-up", type=float, default=300.0, help="seconds from a start to its first step")
    parser.add_argument("--down", type=float, default=300.0, help="seconds from a kill to the next start")
    options = parser.parse_args()
    faults = list(faults_of(json.loads((options.trace / "fault_trace.json").read_text())))
    told = json.loads((options.trace / "fault_statistics.json").read_text())
    levels = Counter(fault.level for fault in faults)
    same = dict(levels) == {level: group["LevelTotal"] for level, group in told.items()}
    write = sys.stdout.write
    write(f"faults {len(faults)}, by level {dict(levels)}: {'as' if same else 'NOT as'} in fault_statistics.json\n")

    by_node: dict[str, list[Fault]] = defaultdict(list)
    for fault in faults:
        by_node[fault.node].append(fault)
    charged = direct = 0
    for its in by_node.values():
        up = up_times(its)
        charged += node_life(up).headings_ns["down"]
        direct += up[-1][1] - up[0][0] - sum(end - begin for begin, end in up)
    same &= charged == direct
    write(f"{len(by_node)} nodes, down {charged / DAY:.2f} node-days; without the ledger {direct / DAY:.2f}\n")

    begun = time.process_time()
    attempts, lost = job_attempts(sorted({fault.begin_ns for fault in faults}), options)
    life = charge(attempts)
    assert life is not None, "there is at least one attempt"
    taken = time.process_time() - begun
    same &= life.lost_steps == lost and sum(life.headings_ns.values()) == life.wall_ns == DAYS * DAY
    write(f"one job: {len(life.attempts)} attempts, {life.wall_ns / DAY:.1f} days, lost {life.lost_steps} steps;")
    write(f" without the ledger {lost}\n")
    write(f"productive_time_ratio {life.productive_time_ratio:.4f}, ETTR {life.ettr:.4f}, {taken:.2f} s of processor\n")
    for heading, length in life.headings_ns.items():
        if length:
            write(f"  {heading:<22} {length / DAY:9.3f} days\n")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
