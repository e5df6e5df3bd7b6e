"""Break the product in 25 places, one at a time, and say which of them the tests notice.

    python -m tests.kit.mutations                          every mutation, each against the tests of `make test`
    python -m tests.kit.mutations --only vote rate         those whose name contains one of these words
    python -m tests.kit.mutations --marks "not soak"       another choice of tests
    python -m tests.kit.mutations --everything             all tests where those of its room notice nothing

Each mutation is a slip that a review may miss: a sign, a unit, a bound, a dropped vote.  It is written into the file,
the tests of the folders that are nearest run until one fails, and the file is put back, whatever happens; a tree with
changes in these files is refused.  Exit code 1 if a mutation went unnoticed.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DECISIVE = "not full and not alone and not soak"
SECONDS_MAX = 1800
"""A mutation may make a job hang; tests have limits of their own, this is beyond them."""


class Mutation(NamedTuple):
    """`old` in `file`, once, becomes `new`; `tests` are where it should be noticed."""

    name: str
    file: str
    old: str
    new: str
    tests: str


MUTATIONS = (
    Mutation("a vote is dropped: ranks that disagree apply",
             "controller/consensus/protocol.py", "if least == 0 or least != -negated_greatest:", "if least == 0:",
             "tests/controller"),
    Mutation("a frozen rank's vote is not heard",
             "controller/consensus/protocol.py", "if alive == 0:", "if alive < 0:",
             "tests/controller"),
    Mutation("the job's pace is the fastest rank's, not the slowest's",
             "controller/consensus/protocol.py", "max(words[_HEAD + i] for words", "min(words[_HEAD + i] for words",
             "tests/controller"),
    Mutation("the dead band counts for the change, not against it",
             "controller/experiment/sequential_test.py",
             "log_e = _log_e(count, total, scatter, mean + math.log1p(-dead_band)",
             "log_e = _log_e(count, total, scatter, mean - math.log1p(-dead_band)", "tests/controller"),
    Mutation("what trials lost is paid back by the time that passed",
             "controller/experiment/exploration_budget.py",
             "self._budget_ratio * self._elapsed_ns, advance) - self.spent_ns",
             "self._budget_ratio * self._elapsed_ns, advance) + self.spent_ns", "tests/controller"),
    Mutation("a piece's share of the loss is counted in pieces, not samples",
             "controller/knobs/batch/batch_slicing.py", "weight = 1.0 if share == whole else share / whole",
             "weight = 1.0 if share == whole else 1 / (len(edges))", "tests/controller"),
    Mutation("a loss that grows is taken for one that falls",
             "controller/guards/divergence_detector.py",
             "z = (x - self._level) / self._scale", "z = (self._level - x) / self._scale",
             "tests/controller"),
    Mutation("one rank's failure does not count for the others",
             "controller/knobs/batch/oom_safe_trial.py",
             "if not self._peers.any_rank(failure is not None):", "if failure is None:",
             "tests/controller"),
    Mutation("communication under compute is called exposed",
             "pacecar/ledger/attribution.py", "_OVERLAP = _COMMUNICATION | 1 << _BITS[Work.COMPUTE]",
             "_OVERLAP = _COMMUNICATION | 1 << _BITS[Work.COPY]", "tests/pacecar/ledger"),
    Mutation("a copy hides communication",
             "pacecar/ledger/attribution.py",
             'elif runs(Work.COMMUNICATION):\n        name = "exposed_communication"\n    elif runs(Work.COPY):\n'
             '        name = "exposed_copy"',
             'elif runs(Work.COPY):\n        name = "exposed_copy"\n    elif runs(Work.COMMUNICATION):\n'
             '        name = "exposed_communication"', "tests/pacecar/ledger"),
    Mutation("windows are bought with what has been spent",
             "profiler/timing/overhead_budget.py", "return self.cost_ns + self._predicted_ns() <= self.ratio_max",
             "return self.cost_ns - self._predicted_ns() <= self.ratio_max", "tests/profiler"),
    Mutation("dropped records are not counted when the queue is full",
             "profiler/transport/record_queue.py", "            self._dropped += len(self._queue)", "            pass",
             "tests/profiler"),
    Mutation("one quiet range clears a late rank",
             "profiler/ranks/cusum.py", "_AGAINST_NAMED = THRESHOLD / 3", "_AGAINST_NAMED = THRESHOLD",
             "tests/profiler"),
    Mutation("ticks of the kernel are taken for milliseconds",
             "monitor/collectors/cpu.py", "self._tick_ns = 1_000_000_000 // (", "self._tick_ns = 1_000_000 // (",
             "tests/monitor"),
    Mutation("sectors are timed in microseconds",
             "monitor/collectors/disk.py", '(12, "pacecar_host_disk_busy_seconds_total", NS_PER_MS)',
             '(12, "pacecar_host_disk_busy_seconds_total", 1_000)', "tests/monitor"),
    Mutation("NVLink's KiB are taken for bytes",
             "monitor/gpu/queries/fields.py",
             '_counter(138, "nvlink_transmit_bytes_total", scope=ALL_LINKS, factor=1024, fast=True)',
             '_counter(138, "nvlink_transmit_bytes_total", scope=ALL_LINKS, factor=1000, fast=True)', "tests/monitor"),
    Mutation("a rank may be as large as the world",
             "monitor/ingest/frame_validation.py", "if hello.rank >= hello.world_size:",
             "if hello.rank > hello.world_size:", "tests/monitor"),
    Mutation("nobody's user may steer nobody's job",
             "monitor/ingest/authorization.py", "in all_targets if uid == ROOT or NOBODY != uid == target.uid]",
             "in all_targets if uid == ROOT or uid == target.uid]", "tests/monitor"),
    Mutation("energy of a driver that was loaded anew is taken off",
             "monitor/jobs/job_energy.py", "if used < 0:  #", "if used < -(1 << 62):  #", "tests/monitor"),
    Mutation("a frame may be any size",
             "pacecar/wire.py", "if _HEADER.size + len(payload) > FRAME_BYTES_MAX:", "if len(payload) > 1 << 30:",
             "tests/pacecar tests/monitor"),
    Mutation("a kept change's loss is added to what is proven",
             "pacecar/run_statistics.py", "return 1 - math.prod(1 - gain for gain in known)",
             "return 1 - math.prod(1 - abs(gain) for gain in known)",
             "tests/commands/report tests/commands/demo tests/pacecar"),
    Mutation("an interval that touches zero shows a difference",
             "commands/report/significance.py",
             "if change.low <= 0 <= change.high:", "if change.low < 0 < change.high:",
             "tests/commands/report"),
    Mutation("batches of another kind are put together",
             "adapters/regroup.py", "if self._waiting and (kind is None or kind != self._kind):",
             "if self._waiting and kind is None:", "tests/adapters"),
    Mutation("ranks attach though one of them has not come",
             "job/autoattach/tuning_permission.py", "is_complete = self._store.add(self._here, 0) >= self._world_size",
             "is_complete = self._store.add(self._here, 0) >= self._world_size - 1", "tests/job/autoattach"),
    Mutation("a job that is silent for minutes still speaks",
             "dashboards/rules/alerts_job.py", "({age} < {SPEAKS_SECONDS})", "({age} > {SPEAKS_SECONDS})",
             "tests/dashboards"),
)  # fmt: skip


def outcome(mutation: Mutation, marks: str, *, everything: bool) -> str | None:
    """Return the first test that fails while the mutation is in; None if none does."""
    path = ROOT / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        raise SystemExit(f"{mutation.file}: {mutation.old!r} is there {text.count(mutation.old)} times, not once")
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        for tests in (mutation.tests.split(), *([["tests"]] if everything else [])):
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "--dist=loadfile", "-m", marks, *tests],
                cwd=ROOT, capture_output=True, text=True, timeout=SECONDS_MAX, check=False,
            )  # fmt: skip
            failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            if failed:  # with -x and several processes pytest says 2: interrupted
                return failed[0][:160]
            if done.returncode != 0:
                raise SystemExit(f"pytest exited {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    except subprocess.TimeoutExpired:
        return f"nothing ended in {SECONDS_MAX} s"
    finally:
        path.write_text(text)
    return None


def main() -> int:
    """Run what was asked for, a line each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], help="words of the mutations' names or files")
    parser.add_argument("--marks", default=DECISIVE, help="which tests, as pytest's -m")
    parser.add_argument("--everything", action="store_true", help="all tests where those of its room notice nothing")
    given = parser.parse_args()
    chosen = [m for m in MUTATIONS if any(word in m.name or word in m.file for word in given.only)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the file is put back
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--", *{m.file for m in chosen}],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    if changed:
        raise SystemExit(f"these files have changes that could be lost:\n{changed}")
    unnoticed = 0
    for mutation in chosen:
        begun = time.monotonic()
        noticed = outcome(mutation, given.marks, everything=given.everything)
        unnoticed += noticed is None
        print(
            f"{'caught' if noticed else 'MISSED'}  {time.monotonic() - begun:5.0f} s  {mutation.file}: {mutation.name}"
        )
        print(f"                 {noticed or 'no test failed'}", flush=True)
    print(f"{len(chosen) - unnoticed} of {len(chosen)} caught")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    raise SystemExit(main())
