"""Keeps what one rank knows about disturbances of its own node and of others: the inputs of `DisturbanceGate`.

    at any moment           daemon -> record queue's thread -> record -> queue
    at a vote's boundary    queue -> update -> DisturbanceGate -> kind of disturbance -> side channel -> rank 0's policy

A rank gets signals only from the daemon of its own node, but a trial measures the slowest rank of all.  So each rank
judges its own node and sends the kind of disturbance with its next gather: one number beside the paces.  Rank 0 holds
the policy for it, and all ranks take the trial back at one boundary.  Meanwhile a rank that sees a disturbance votes
against trials, so none is turned anywhere.

Nothing waits: signals go into a short queue and are read between steps.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections import deque
from collections.abc import Callable, Mapping

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.kernel_files.cgroups import parse_cpu_max
from pacecar.kernel_files.contention import (
    are_processors_contended,
    do_ranks_exceed,
    do_threads_exceed,
    openmp_threads,
)
from pacecar.kernel_files.processors import parse_pressure_average
from pacecar.kernel_files.reader import KernelFiles
from pacecar.records import JobHello
from pacecar.records.host_signals import HostSignals

from ..observation import NodeView
from .node_disturbance import WORDS, Disturbance, DisturbanceGate, own_bytes_per_second

__all__ = ["NodeMonitor", "ranks_on_node"]

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
