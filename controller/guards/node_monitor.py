"""Decides from the signals of the nodes' daemons whether a trial may run now.

A trial compares step times, so whatever else slows the job must not come and go meanwhile: throttled clocks, a fault, a
shortage of memory, other traffic on the link.  The daemon reports these every few seconds (`HostSignals`).

    at any moment           daemon -> record queue's thread -> record -> queue
    at a vote's boundary    queue -> update -> DisturbanceGate -> kind of disturbance -> side channel -> rank 0's policy

A rank gets signals only from the daemon of its own node, but a trial measures the slowest rank of all.  So each rank
judges its own node and sends the kind of disturbance with its next gather: one number beside the paces.  Rank 0 holds
the policy for it, and all ranks take the trial back at one boundary.  Meanwhile a rank that sees a disturbance votes
against trials, so none is turned anywhere.  Nothing waits: signals go into a short queue and are read between steps.

A signal is valid for AGE_PERIODS of its own periods from its tick.  After that nothing is known and nothing is held: a
dead daemon must neither stop tuning for good nor promise a quiet node.  A disturbance that lasts HOLD_SECONDS_MAX is a
condition of the job, and tuning goes on with it.  So is one that keeps coming and going: the time that it may hold
tuning grows back slowly (REGAIN_RATIO).

    traffic of others   all bytes a second less what the job may be sending itself, as a share of the rated link;
                        bad from BUSY_RATIO on, good again under QUIET_RATIO, both for STEADY signals in a row, because
                        the statistics can handle a burst that ends before the next signal
    memory              some task waited for memory (PSI) for STALLED_RATIO of the time

Waiting for a processor does not count: a job that keeps all of them busy waits for them itself, and a node's total does
not tell who else does.  A rank that other programs keep from running is a straggler (`tuning_pause`).
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from enum import IntEnum

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.kernel_files.cgroups import parse_cpu_max
from pacecar.kernel_files.processors import (
    are_processors_contended,
    do_ranks_exceed,
    do_threads_exceed,
    openmp_threads,
    parse_pressure_average,
)
from pacecar.kernel_files.reader import KernelFiles
from pacecar.records import JobHello
from pacecar.records.host_signals import HostSignals

from ..observation import NodeView

__all__ = ["WORDS", "Disturbance", "DisturbanceGate", "NodeMonitor", "own_bytes_per_second", "ranks_on_node"]

AGE_PERIODS = 3
"""Two signals may be lost or late on a busy node."""

PERIOD_NS_MAX = 30 * NS_PER_SECOND
"""Longest period that counts for AGE_PERIODS."""

HOLD_SECONDS_MAX = 120.0
"""Longer than the burst of a backup or a checkpoint, shorter than a neighbour's job."""

REGAIN_RATIO = 0.25
"""Share of undisturbed time by which the time that a disturbance may hold tuning grows back.  One that is present a
fifth of the time belongs to the job, perhaps its data loading over the same link."""

BUSY_RATIO = 0.2
QUIET_RATIO = 0.1
STEADY = 2

STALLED_RATIO = 0.1
"""A node that waits this much for memory reclaims and swaps, which decides how long steps take."""

OWN_MARGIN = 1.5
"""Allows for headers, retransmissions, and steps faster than the mean in the job's own traffic."""


class Disturbance(IntEnum):
    """What makes step times invalid for comparing knobs; ranks send each other the numbers."""

    FAULT = 1
    THROTTLED = 2
    MEMORY = 3
    TRAFFIC = 4


WORDS: Mapping[Disturbance, str] = {
    Disturbance.FAULT: "its device has a fault",
    Disturbance.THROTTLED: "its device is throttled",
    Disturbance.MEMORY: "its node is short of memory",
    Disturbance.TRAFFIC: "others use its node's link",
}
"""The reason shown for another rank's disturbance, of which only the kind is known."""


class DisturbanceGate:
    """Keeps the last signal, and how long each disturbance may still hold tuning.  For one thread."""

    def __init__(self) -> None:
        self._signal: HostSignals | None = None
        self._busy = self._quiet = 0
        self._is_busy = False
        self._held: Disturbance | None = None
        self._exhausted: set[Disturbance] = set()
        self._hold_left_ns = dict.fromkeys(Disturbance, HOLD_SECONDS_MAX * NS_PER_SECOND)
        self._asked_ns: int | None = None

    def record(self, signal: HostSignals | None, now_ns: int, *, own_bytes_per_second: float | None) -> None:
        """Take the daemon's signal, None without a daemon; and what the job sends, None if unknown."""
        if self.fresh(now_ns) is None:
            self._busy = self._quiet = 0
            self._is_busy = False  # what was true before the gap may not be now
        self._signal = signal
        if signal is None:
            return
        others = _others_ratio(signal, own_bytes_per_second)
        self._busy = self._busy + 1 if others is not None and others >= BUSY_RATIO else 0
        self._quiet = self._quiet + 1 if others is None or others < QUIET_RATIO else 0
        if self._busy >= STEADY:
            self._is_busy = True
        elif self._quiet >= STEADY:
            self._is_busy = False

    @property
    def last(self) -> HostSignals | None:
        """The last signal of any age; None without a daemon."""
        return self._signal

    def fresh(self, now_ns: int) -> HostSignals | None:
        """Return the last signal while it is valid."""
        signal = self._signal
        if signal is None:
            return None
        is_fresh = 0 <= now_ns - signal.taken_ns <= AGE_PERIODS * min(signal.period_ns, PERIOD_NS_MAX)
        return signal if is_fresh else None

    def reason(self, now_ns: int) -> tuple[Disturbance, str] | None:
        """Return why no trial may run now, or None.  Call it at every vote: it counts the time between calls."""
        bad = self._disturbances(now_ns)
        elapsed_ns = 0 if self._asked_ns is None else max(0, now_ns - self._asked_ns)
        self._asked_ns = now_ns
        self._exhausted &= bad.keys()
        for kind in Disturbance:
            if kind is self._held:
                self._hold_left_ns[kind] -= elapsed_ns
            elif kind not in bad:
                regained = self._hold_left_ns[kind] + REGAIN_RATIO * elapsed_ns
                self._hold_left_ns[kind] = min(HOLD_SECONDS_MAX * NS_PER_SECOND, regained)
            if self._hold_left_ns[kind] < 0 and kind in bad:
                self._exhausted.add(kind)
        self._held = next((kind for kind in Disturbance if kind in bad and kind not in self._exhausted), None)
        return None if self._held is None else (self._held, bad[self._held])

    def link_ratio(self, now_ns: int) -> float | None:
        """Return the use of the link's fuller direction as a share of its rated speed; None if unknown."""
        signal = self.fresh(now_ns)
        rate = None if signal is None else _rate(signal)
        if signal is None or rate is None or not signal.link_bytes_per_second:
            return None
        return rate / signal.link_bytes_per_second

    def _disturbances(self, now_ns: int) -> dict[Disturbance, str]:
        """Return every present disturbance with a sentence."""
        signal = self.fresh(now_ns)
        bad: dict[Disturbance, str] = {}
        if signal is None:
            return bad
        if signal.faults:
            bad[Disturbance.FAULT] = f"this node's device has a fault: {', '.join(signal.faults)}"
        if signal.throttled_by:
            bad[Disturbance.THROTTLED] = f"this node's device is throttled: {', '.join(signal.throttled_by)}"
        stalled = signal.memory_stalled_ratio
        if stalled is not None and stalled >= STALLED_RATIO:
            bad[Disturbance.MEMORY] = f"this node is short of memory: tasks waited for it {stalled:.0%} of the time"
        if self._is_busy:
            bad[Disturbance.TRAFFIC] = f"others send over {signal.interface}: over {BUSY_RATIO:.0%} of the link"
        return bad


def own_bytes_per_second(
    gradient_bytes: int, *, world_size: int, ranks_on_node: int, pace_ns: int, sent_ratio: float = 1.0
) -> float | None:
    """Return the most bytes a second that this node's ranks send to all-reduce all gradients each step.

    A ring sends 2(n-1)/n of the bytes from each rank (Patarasuk and Yuan, JPDC 69, 2009; nccl-tests PERFORMANCE.md); in
    the worst case each rank of the node sends to another node.  `sent_ratio` is what compression leaves.
    """
    if pace_ns <= 0 or world_size < 1:
        return None
    sent = 2 * (world_size - 1) / world_size * gradient_bytes * sent_ratio * ranks_on_node
    return sent * NS_PER_SECOND / pace_ns


def _rate(signal: HostSignals) -> float | None:
    rates = [r for r in (signal.receive_bytes_per_second, signal.transmit_bytes_per_second) if r is not None]
    return max(rates) if rates else None


def _others_ratio(signal: HostSignals, own: float | None) -> float | None:
    """Return the share of the link that others use; None where it cannot be computed."""
    rate = _rate(signal)
    if rate is None or own is None or not signal.link_bytes_per_second:
        return None
    return max(0.0, rate - OWN_MARGIN * own) / signal.link_bytes_per_second


SIGNALS_MAX = 8
"""Most signals that wait for a boundary: older ones are no longer valid."""

PACES_MAX = 16
"""Steps whose median says how fast the job sends: enough that a checkpoint or an evaluation does not matter."""

_LOCAL_WORLD = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
"""Variables with the number of ranks on a node: of torchrun, Open MPI's mpirun, Slurm's srun."""


def ranks_on_node(world_size: int, environ: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks of the job this node has; all of them without such a variable."""
    for name in _LOCAL_WORLD:
        text = environ.get(name, "")
        if text.isdecimal() and int(text) > 0:
            return min(world_size, int(text))
    return world_size


class NodeMonitor:
    """One rank's view of its node.  Call `record` from any thread, everything else from the training thread.

    `gradient_bytes` is what DDP reduces in a step, None if unknown.  `spare_bytes` returns the device memory that this
    process has reserved but not used, which the daemon counts as used.
    """

    def __init__(
        self,
        hello: JobHello,
        clock: Clock,
        *,
        gradient_bytes: int | None = None,
        spare_bytes: Callable[[], int] = int,
        environ: Mapping[str, str] = os.environ,
        files: KernelFiles | None = None,
    ) -> None:
        self._hello = hello
        self._clock = clock
        self._gradient_bytes = gradient_bytes
        self._spare_bytes = spare_bytes
        self._ranks = ranks_on_node(hello.world_size, environ)
        self._threads = openmp_threads(environ.get("OMP_NUM_THREADS"))
        self._files = files or KernelFiles()
        self._queued: deque[HostSignals | None] = deque(maxlen=SIGNALS_MAX)
        self._paces: deque[int] = deque(maxlen=PACES_MAX)
        self._gate = DisturbanceGate()
        self._held: tuple[Disturbance, str] | None = None
        self._view = NodeView()
        self.others: Mapping[int, int] = {}
        """Rank -> the number of its disturbance, as last received; this rank's own does not count."""

    def record(self, signal: HostSignals | None) -> None:
        """Queue the daemon's signal; None if the connection broke."""
        self._queued.append(signal)

    def note(self, wall_ns: int) -> None:
        """Record the wall time of a step."""
        self._paces.append(wall_ns)

    def update(self) -> Disturbance | None:
        """Judge the signals since the last call; return what disturbs this rank's steps, or None."""
        has_signals = bool(self._queued)
        if not has_signals and self._gate.last is None and self._held is None:
            return None  # a job without a daemon pays nothing
        now_ns = self._clock.monotonic_ns()
        own = self._own_bytes_per_second() if has_signals else None
        while self._queued:
            self._gate.record(self._queued.popleft(), now_ns, own_bytes_per_second=own)
        self._held = self._gate.reason(now_ns)
        if has_signals or self._gate.fresh(now_ns) is None:
            self._view = self._current_view(now_ns)
        return self.disturbance

    @property
    def disturbance(self) -> Disturbance | None:
        """What disturbed this rank's steps at the last `update`, or None."""
        return None if self._held is None else self._held[0]

    @property
    def view(self) -> NodeView:
        """The node as a policy sees it."""
        return self._view

    def reason(self) -> str | None:
        """Return why nothing may be tried or judged now, or None: this node's disturbance, or another rank's."""
        if self._held is not None:
            return self._held[1]
        for rank, number in sorted(self.others.items()):
            if rank != self._hello.rank and number in WORDS:
                return f"rank {rank}: {WORDS[Disturbance(number)]}"
        return None

    def room_bytes(self) -> int | None:
        """Return the free memory of this rank's device, or its share of the host's for a CPU; None if unknown."""
        signal = self._gate.fresh(self._clock.monotonic_ns())
        if signal is None:
            return None
        if self._hello.device != "cpu":
            return None if signal.device_free_bytes is None else signal.device_free_bytes + self._spare_bytes()
        return None if signal.host_available_bytes is None else signal.host_available_bytes // self._ranks

    def is_crowded(self) -> bool:
        """Return whether more wants to run on this node than it has processors, by the doctor's rule.

        Reads three small files of /proc and /sys, which takes tens of microseconds: for reports, not for steps.
        """
        files, count = self._files, os.cpu_count()
        pressure = _parsed(files.text(files.proc / "pressure/cpu"), lambda text: parse_pressure_average(text, "some"))
        load = _parsed(files.text(files.proc / "loadavg"), lambda text: float(text.split()[1]))
        quota = _parsed(files.text(files.sys / "fs/cgroup/cpu.max"), parse_cpu_max)
        usable = count if quota is None or count is None else min(count, max(int(quota), 1))
        is_on_cpu = self._hello.device == "cpu"
        return (
            are_processors_contended(pressure=pressure, load=load, count=count)
            or do_threads_exceed(threads=self._threads, ranks=self._ranks, usable=usable)
            or (is_on_cpu and do_ranks_exceed(ranks=self._ranks, usable=usable))
        )

    def describe(self) -> tuple[str, ...]:
        """Return what is known about the node now, in sentences."""
        now_ns = self._clock.monotonic_ns()
        last = self._gate.last
        if last is None:
            sentences = ["its state is unknown: no daemon reports it"]
        elif self._gate.fresh(now_ns) is None:
            age = (now_ns - last.taken_ns) / NS_PER_SECOND
            sentences = [f"its state is unknown: the daemon's last report is {age:.1f} s old"]
        else:
            sentences = [f"{(now_ns - last.taken_ns) / NS_PER_SECOND:.1f} s ago: {', '.join(_parts(last))}"]
        reason = self.reason()
        return tuple(sentences if reason is None else [*sentences, f"holds tuning: {reason}"])

    def _own_bytes_per_second(self) -> float | None:
        """Return the most that the job may send over the link; None if unknown, or if it sends nothing."""
        if self._gradient_bytes is None or not self._paces or self._ranks >= self._hello.world_size:
            return None
        return own_bytes_per_second(
            self._gradient_bytes,
            world_size=self._hello.world_size,
            ranks_on_node=self._ranks,
            pace_ns=round(statistics.median(self._paces)),
        )

    def _current_view(self, now_ns: int) -> NodeView:
        signal, room = self._gate.fresh(now_ns), self.room_bytes()
        if signal is None:
            return NodeView()
        total = signal.host_total_bytes if self._hello.device == "cpu" else signal.device_total_bytes
        return NodeView(
            link_ratio=self._gate.link_ratio(now_ns) if self._ranks < self._hello.world_size else None,
            headroom_ratio=None if room is None or not total else min(1.0, room / total),
            cpu_stalled_ratio=signal.cpu_stalled_ratio,
        )


def _parsed(text: str | None, parse: Callable[[str], float | None]) -> float | None:
    """Return the value in a kernel file; None if it is missing or malformed."""
    if text is None:
        return None
    with contextlib.suppress(ValueError, IndexError):
        return parse(text)
    return None


def _parts(signal: HostSignals) -> list[str]:
    """Return the known parts of a signal, in words."""
    parts: list[str] = []
    rates = (signal.receive_bytes_per_second, signal.transmit_bytes_per_second)
    if signal.interface is not None and None not in rates:
        speed = "" if not signal.link_bytes_per_second else f" of {signal.link_bytes_per_second / 1e6:.0f}"
        shown = " and ".join(f"{(rate or 0.0) / 1e6:.1f}" for rate in rates)
        parts.append(f"{signal.interface} receives and sends {shown}{speed} MB/s")
    if signal.throttled_by is not None:
        parts.append(f"throttled: {', '.join(signal.throttled_by) or 'no'}")
    if signal.faults is not None:
        parts.append(f"faults: {', '.join(signal.faults) or 'none'}")
    for what, free, total in (
        ("device", signal.device_free_bytes, signal.device_total_bytes),
        ("host", signal.host_available_bytes, signal.host_total_bytes),
    ):
        if free is not None and total is not None:
            parts.append(f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB {what} memory free")
    for what, ratio in (("memory", signal.memory_stalled_ratio), ("a processor", signal.cpu_stalled_ratio)):
        if ratio is not None:
            parts.append(f"tasks wait for {what} {ratio:.0%} of the time")
    return parts or ["the daemon reports no values here"]
