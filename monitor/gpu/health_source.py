"""Judges the health of each GPU (`pacecar.gpu_health`) once a tick, from what the tick read.

One tick does not show everything that a verdict needs.  So this remembers, for each GPU, when Xid errors came, since
when the fabric has not been joined, and which NVLinks were up or connected while the daemon ran.

Pure: snapshots in, verdicts and their samples out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pacecar.clock import NS_PER_SECOND
from pacecar.gpu_health import GpuHealth, GpuReadings, HealthVerdict, judge
from pacecar.records import Sample, Snapshot

__all__ = ["XID_SECONDS", "GpuHealthSource", "health_samples"]

XID_SECONDS = 600
"""How long an Xid error counts, as in the alert PacecarGpuXid: by then other readings show what it broke."""

_FLAGS = {
    "pacecar_gpu_row_remap_failed": "row_remap_failed",
    "pacecar_gpu_row_remap_pending": "row_remap_pending",
    "pacecar_gpu_retired_pages_pending": "retired_pages_pending",
    "pacecar_gpu_sram_ecc_threshold_exceeded": "sram_threshold_exceeded",
}
_NUMBERS = {
    "pacecar_gpu_pcie_width": "pcie_width",
    "pacecar_gpu_pcie_width_max": "pcie_width_max",
    "pacecar_gpu_fabric_status": "fabric_status",
    "pacecar_gpu_ecc_uncorrected_errors": "uncorrected_errors",
    "pacecar_gpu_c2c_links": "chip_links",
}
_INPUTS = (
    *_FLAGS,
    *_NUMBERS,
    *(
        f"pacecar_gpu_{name}"
        for name in (
            "up", "down", "info", "nvlink_info", "nvlink_link_state", "fabric_state", "fabric_health", "fabric_info",
            "fabric_condition", "xid_errors_total",
        )
    ),
)  # fmt: skip
_LINK_DOWN = 0
"""Value of `pacecar_gpu_nvlink_link_state`; 2 (asleep) and 3 (up without traffic) are healthy."""


class GpuHealthSource:
    """Takes snapshots in order.  One thread."""

    def __init__(self) -> None:
        self._xid_counts: dict[tuple[str, int], float] = {}
        self._xids: dict[tuple[str, int], int] = {}
        self._fabric_since_ns: dict[str, int] = {}
        self._wired: defaultdict[str, set[int]] = defaultdict(set)
        self._reported: set[str] = set()
        self._inputs: list[Sequence[Sample]] = []
        self._health: dict[str, GpuHealth] = {}

    def update(self, snapshot: Snapshot) -> dict[str, GpuHealth]:
        """Return GPU label -> its health after this tick: the same object if nothing changed."""
        inputs = [snapshot.of(metric) for metric in _INPUTS]
        if inputs != self._inputs or self._xids or self._fabric_since_ns:  # these depend on time
            self._inputs, self._health = inputs, self._judged(snapshot)
        return self._health

    def _judged(self, snapshot: Snapshot) -> dict[str, GpuHealth]:
        found: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        self._read_presence(snapshot, found)
        for metric, reading in _FLAGS.items():
            for sample in snapshot.of(metric):
                found[sample.labels[0]][reading] = sample.value != 0
        for metric, reading in _NUMBERS.items():
            for sample in snapshot.of(metric):
                found[sample.labels[0]][reading] = int(sample.value)
        self._read_links(snapshot, found)
        self._read_fabric(snapshot, found)
        self._read_xids(snapshot, found)
        verdicts = judge([GpuReadings(**readings) for readings in found.values()])
        return dict(zip(found, verdicts, strict=True))

    def _read_presence(self, snapshot: Snapshot, found: Mapping[str, dict[str, Any]]) -> None:
        for sample in snapshot.of("pacecar_gpu_up"):
            found[sample.labels[0]]["is_up"] = True if sample.value else None  # 0 without a reason: not read so far
        for sample in snapshot.of("pacecar_gpu_down"):
            if sample.value:
                found[sample.labels[0]].update(is_up=False, down_reason=sample.labels[1].replace("_", " "))
        for sample in snapshot.of("pacecar_gpu_info"):
            gpu, _, name, *_, mig = sample.labels
            found[gpu].update(name=name, has_mig=mig == "on")

    def _read_links(self, snapshot: Snapshot, found: Mapping[str, dict[str, Any]]) -> None:
        switched: set[str] = set()
        for sample in snapshot.of("pacecar_gpu_nvlink_info"):
            self._wired[sample.labels[0]].add(int(sample.labels[1]))
            if sample.labels[3] == "switch":
                switched.add(sample.labels[0])
        up: defaultdict[str, set[int]] = defaultdict(set)
        down: defaultdict[str, set[int]] = defaultdict(set)
        for sample in snapshot.of("pacecar_gpu_nvlink_link_state"):
            gpu, link = sample.labels[0], int(sample.labels[1])
            (down if sample.value == _LINK_DOWN else up)[gpu].add(link)
        for gpu in up.keys() | down.keys():
            self._wired[gpu] |= up[gpu]
            found[gpu].update(
                links_up=frozenset(up[gpu]),
                links_down=frozenset(down[gpu]),
                links_wired=frozenset(self._wired[gpu]),
                has_switch=gpu in switched,
            )

    def _read_fabric(self, snapshot: Snapshot, found: Mapping[str, dict[str, Any]]) -> None:
        now_ns, since_ns = snapshot.started_ns, dict[str, int]()
        for sample in snapshot.of("pacecar_gpu_fabric_state"):
            gpu, state = sample.labels
            if not sample.value:
                continue
            found[gpu]["fabric_state"] = state
            if state != "completed":
                since_ns[gpu] = self._fabric_since_ns.get(gpu, now_ns)
                found[gpu]["fabric_waits_ns"] = now_ns - since_ns[gpu]
        self._fabric_since_ns = since_ns
        for sample in snapshot.of("pacecar_gpu_fabric_health"):
            if sample.value:
                found[sample.labels[0]]["fabric_health"] = sample.labels[1]
        for sample in snapshot.of("pacecar_gpu_fabric_info"):
            found[sample.labels[0]]["fabric_problem"] = sample.labels[-1]
        for sample in snapshot.of("pacecar_gpu_fabric_condition"):
            gpu, condition = sample.labels
            found[gpu].setdefault("fabric_conditions", {})[condition] = sample.value != 0

    def _read_xids(self, snapshot: Snapshot, found: Mapping[str, dict[str, Any]]) -> None:
        """Count the errors of the last XID_SECONDS; those counted before the first snapshot are older."""
        now_ns, reported = snapshot.started_ns, set[str]()
        for sample in snapshot.of("pacecar_gpu_xid_errors_total"):
            gpu, code = sample.labels[0], int(sample.labels[1])
            reported.add(gpu)
            # A rare code has no series before its first error.
            before = self._xid_counts.get((gpu, code), 0 if gpu in self._reported else sample.value)
            if sample.value > before:
                self._xids[gpu, code] = now_ns
            self._xid_counts[gpu, code] = sample.value
        self._reported |= reported
        over_ns = now_ns - XID_SECONDS * NS_PER_SECOND
        self._xids = {key: at_ns for key, at_ns in self._xids.items() if at_ns > over_ns}
        for gpu in reported & found.keys():  # an Xid may belong to an unknown GPU
            found[gpu]["xids"] = frozenset(code for other, code in self._xids if other == gpu)


def health_samples(verdicts: Mapping[str, GpuHealth]) -> Iterator[Sample]:
    """Yield each GPU's verdict, and for each reason that could be judged whether it holds."""
    for gpu, health in verdicts.items():
        for verdict in HealthVerdict:
            yield Sample("pacecar_gpu_health", (gpu, verdict.value), int(health.verdict is verdict))
        held = {finding.reason for finding in health.findings}
        for reason in sorted(health.judged):
            yield Sample("pacecar_gpu_health_reason", (gpu, reason.value), int(reason in held))
