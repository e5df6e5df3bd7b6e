"""Judges the health of each GPU of a node: one verdict with its reasons, for every screen, alert and check.

The page, `pacecar top`, the snapshot, the metrics and the doctor all use these rules, so they agree about each GPU.

    ok         no reading shows a fault
    degraded   it works, but is slower or at risk: act when it is free
    failed     run no jobs on it until it is repaired
    unknown    no reading yet

A value that was not read never leads to a verdict.  Reasons come from a closed set, because they are labels of metrics.

Healthy, and so not a reason: corrected ECC errors; a PCIe link whose generation falls at rest (the width does not); an
NVLink that leads nowhere on this board, sleeps, or is off in MIG mode; a fabric that is being joined; an Xid that a
program causes by itself.  Heat and power are left out because they come and go; PacecarGpuThrottled judges them over
minutes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from pacecar.clock import NS_PER_SECOND
from pacecar.formatting.quantities import plural

__all__ = [
    "FABRIC_JOIN_SECONDS",
    "REASONS",
    "XIDS_OF_PROGRAMS",
    "XIDS_OF_REPAIR",
    "GpuHealth",
    "GpuReadings",
    "HealthFinding",
    "HealthReason",
    "HealthVerdict",
    "ReasonMeaning",
    "judge",
]

FABRIC_JOIN_SECONDS = 300
"""After a boot the fabric manager trains all links of a switched node, which takes up to a few minutes.  A GPU that has
not joined by then waits for a fabric manager that does not run."""

XIDS_OF_PROGRAMS = ("13", "31", "43", "45")
"""Engine exception, page fault, reset of a channel, cleanup (NVIDIA's Xid catalog, column "application").

Anybody with a GPU can cause them at will.
"""

XIDS_OF_REPAIR = ("63", "92", "160")
"""Xids that note bad memory and cost no work by themselves: a row or page to be taken out of use was recorded (63; 64
is that this failed), many errors that were corrected (92), memory marked for repair (160).  NVIDIA, "GPU Memory Error
Management", in-band reporting.  What could not be corrected says so itself: 48, 94 and 95."""


class HealthVerdict(StrEnum):
    """The state of a GPU."""

    OK = "ok"
    DEGRADED = "degraded"
    FAILED = "failed"
    UNKNOWN = "unknown"


class HealthReason(StrEnum):
    """Why a GPU is not ok, worst first."""

    DOWN = "down"
    ROW_REMAP_FAILED = "row_remap_failed"
    SRAM_ECC_THRESHOLD = "sram_ecc_threshold"
    ECC_UNCORRECTED = "ecc_uncorrected"
    XID = "xid"
    FABRIC_FAILED = "fabric_failed"
    FABRIC_NOT_JOINED = "fabric_not_joined"
    FABRIC_MISCONFIGURED = "fabric_misconfigured"
    NVLINK_DOWN = "nvlink_down"
    FABRIC_DEGRADED = "fabric_degraded"
    MEMORY_REPAIR_PENDING = "memory_repair_pending"
    PCIE_WIDTH = "pcie_width"


class ReasonMeaning(NamedTuple):
    """The verdict that a reason leads to, its words, and the remedy."""

    verdict: HealthVerdict
    words: str
    remedy: str


_DEGRADED, _FAILED = HealthVerdict.DEGRADED, HealthVerdict.FAILED

REASONS: Mapping[HealthReason, ReasonMeaning] = {
    HealthReason.DOWN: ReasonMeaning(
        _FAILED, "down", "look for Xid errors in the kernel's log, drain the node and restart it"
    ),
    HealthReason.ROW_REMAP_FAILED: ReasonMeaning(
        _FAILED, "memory", "take it out of use and have the board replaced"
    ),
    HealthReason.SRAM_ECC_THRESHOLD: ReasonMeaning(
        _FAILED, "SRAM", "take it out of use and have the board replaced"
    ),
    HealthReason.ECC_UNCORRECTED: ReasonMeaning(
        _FAILED, "uncorrected ECC errors", "restart its jobs from a checkpoint and reset it"
    ),
    HealthReason.XID: ReasonMeaning(_FAILED, "Xid errors", "drain it and follow NVIDIA's advice for this Xid"),
    HealthReason.FABRIC_FAILED: ReasonMeaning(
        _FAILED, "NVLink fabric", "read the fabric manager's log and restart it, on an idle node"
    ),
    HealthReason.FABRIC_NOT_JOINED: ReasonMeaning(
        _FAILED, "NVLink fabric", "start the fabric manager: without it CUDA does not start (error 802)"
    ),
    HealthReason.FABRIC_MISCONFIGURED: ReasonMeaning(
        _FAILED, "NVLink fabric", "compare the fabric's configuration (partition, clique) with the other nodes'"
    ),
    HealthReason.NVLINK_DOWN: ReasonMeaning(
        _FAILED, "NVLink", "drain the node, reset all GPUs of the fabric together and restart the fabric manager"
    ),
    HealthReason.FABRIC_DEGRADED: ReasonMeaning(
        _DEGRADED, "NVLink fabric", "drain the node and look for links and switches that are down"
    ),
    HealthReason.MEMORY_REPAIR_PENDING: ReasonMeaning(
        _DEGRADED, "memory", "reset it when no process uses it"
    ),
    HealthReason.PCIE_WIDTH: ReasonMeaning(_DEGRADED, "PCIe link", "drain the node and reseat the card or its riser"),
}  # fmt: skip
"""Every reason.  `failed` means that work stops or is corrupted, like `critical` in alerts and in the doctor."""

FABRIC_MISCONFIGURATION = "incorrect_configuration"
"""The one condition of `pacecar_gpu_fabric_condition` that is not a degradation."""

FABRIC_HEALTHY, NO_FABRIC_PROBLEM = "healthy", "none"
"""Label values of `pacecar_gpu_fabric_health` and `pacecar_gpu_fabric_info` for a healthy fabric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReadings:
    """The readings of one GPU.  None, or an empty set of links, means that it was not read.

    `is_up` is None before the first reading; `down_reason` says why it is False.  `uncorrected_errors` are counted
    since the driver was loaded or the GPU was reset.  `xids` are the codes of the Xid errors of the last minutes.
    `fabric_waits_ns` is how long the GPU has been joining the fabric.  `links_wired` are links that are known to lead
    somewhere, up or down; `chip_links` are NVLink-C2C links to the processor beside it (Grace).  `fabric_health` is the
    driver's own summary; `fabric_problem` is what is wrong in the configuration.
    """

    name: str = ""
    is_up: bool | None = None
    down_reason: str | None = None
    row_remap_failed: bool | None = None
    row_remap_pending: bool | None = None
    retired_pages_pending: bool | None = None
    sram_threshold_exceeded: bool | None = None
    uncorrected_errors: int | None = None
    xids: frozenset[int] | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    chip_links: int | None = None
    has_mig: bool | None = None
    links_up: frozenset[int] = frozenset()
    links_down: frozenset[int] = frozenset()
    links_wired: frozenset[int] = frozenset()
    has_switch: bool = False
    fabric_state: str | None = None
    fabric_status: int | None = None
    fabric_waits_ns: int | None = None
    fabric_conditions: Mapping[str, bool] = field(default_factory=dict)
    fabric_health: str | None = None
    fabric_problem: str | None = None


class HealthFinding(NamedTuple):
    """A reason that holds, and the figure that shows it."""

    reason: HealthReason
    figure: str

    @property
    def words(self) -> str:
        """The reason with its figure, for people."""
        return f"{REASONS[self.reason].words}: {self.figure}"

    @property
    def remedy(self) -> str:
        """What to do."""
        return REASONS[self.reason].remedy


@dataclass(frozen=True, slots=True)
class GpuHealth:
    """The verdict on one GPU: the reasons that hold, worst first, and all reasons that could be judged."""

    verdict: HealthVerdict
    findings: tuple[HealthFinding, ...] = ()
    judged: frozenset[HealthReason] = frozenset()


def judge(gpus: Sequence[GpuReadings]) -> list[GpuHealth]:
    """Return the health of each GPU of one node, in order.  Siblings show which NVLinks a GPU should have."""
    return [_health(gpu, gpus) for gpu in gpus]


def _health(gpu: GpuReadings, node: Sequence[GpuReadings]) -> GpuHealth:
    checks = dict(_checks(gpu, node))
    findings = tuple(
        HealthFinding(reason, figure) for reason in HealthReason if (figure := checks.get(reason)) is not None
    )
    if not checks:
        return GpuHealth(HealthVerdict.UNKNOWN)
    verdicts = {REASONS[finding.reason].verdict for finding in findings}
    worst = next((verdict for verdict in (_FAILED, _DEGRADED) if verdict in verdicts), HealthVerdict.OK)
    return GpuHealth(worst, findings, frozenset(checks))


def _checks(gpu: GpuReadings, node: Sequence[GpuReadings]) -> Iterator[tuple[HealthReason, str | None]]:
    """Yield each reason that can be judged, with the figure that shows it, or None if it does not hold."""
    if gpu.is_up is not None:
        yield HealthReason.DOWN, None if gpu.is_up else gpu.down_reason or "nothing is read"
    if gpu.row_remap_failed is not None:
        figure = "row remapping failed: no spare row is left"
        yield HealthReason.ROW_REMAP_FAILED, figure if gpu.row_remap_failed else None
    if gpu.sram_threshold_exceeded is not None:
        figure = "more uncorrected errors than NVIDIA allows"
        yield HealthReason.SRAM_ECC_THRESHOLD, figure if gpu.sram_threshold_exceeded else None
    if gpu.uncorrected_errors is not None:
        errors = gpu.uncorrected_errors
        yield HealthReason.ECC_UNCORRECTED, f"{errors} since the last reset" if errors > 0 else None
    if gpu.xids is not None:
        yield HealthReason.XID, _xids(gpu.xids)
    yield from _fabric(gpu)
    if (gpu.links_up or gpu.links_down) and not gpu.has_mig:
        yield HealthReason.NVLINK_DOWN, _links(gpu, node)
    if gpu.row_remap_pending is not None or gpu.retired_pages_pending is not None:
        repairs = (("a row remapping", gpu.row_remap_pending), ("a page retirement", gpu.retired_pages_pending))
        waiting = [what for what, waits in repairs if waits]
        verb = "waits" if len(waiting) == 1 else "wait"
        yield HealthReason.MEMORY_REPAIR_PENDING, f"{' and '.join(waiting)} {verb} for a reset" if waiting else None
    if gpu.pcie_width is not None and gpu.pcie_width_max is not None and not gpu.chip_links:
        # On Grace, NVLink-C2C connects the processor, and PCIe carries almost nothing.
        is_narrow = gpu.pcie_width < gpu.pcie_width_max
        yield HealthReason.PCIE_WIDTH, f"{gpu.pcie_width} of {gpu.pcie_width_max} lanes" if is_narrow else None


def _xids(codes: frozenset[int]) -> str | None:
    faults = sorted(codes - {int(code) for code in (*XIDS_OF_PROGRAMS, *XIDS_OF_REPAIR)})
    return f"{', '.join(map(str, faults))} in the last minutes" if faults else None


def _fabric(gpu: GpuReadings) -> Iterator[tuple[HealthReason, str | None]]:
    state = gpu.fabric_state
    if state is not None:
        waits_ns, waits = gpu.fabric_waits_ns, state != "completed"
        if not waits:
            yield HealthReason.FABRIC_NOT_JOINED, None
        elif waits_ns is not None:
            words = f"{_spoken(state)} for {waits_ns // NS_PER_SECOND // 60} minutes"
            is_late = waits_ns >= FABRIC_JOIN_SECONDS * NS_PER_SECOND
            yield HealthReason.FABRIC_NOT_JOINED, words if is_late else None
        if not waits and gpu.fabric_status is not None:
            status = gpu.fabric_status
            yield HealthReason.FABRIC_FAILED, f"completed with error {status}" if status != 0 else None
    if FABRIC_MISCONFIGURATION in gpu.fabric_conditions:
        kind = "" if gpu.fabric_problem in (None, "", NO_FABRIC_PROBLEM) else f" ({_spoken(str(gpu.fabric_problem))})"
        holds = gpu.fabric_conditions[FABRIC_MISCONFIGURATION]
        yield HealthReason.FABRIC_MISCONFIGURED, f"incorrect configuration{kind}" if holds else None
    conditions = {name: holds for name, holds in gpu.fabric_conditions.items() if name != FABRIC_MISCONFIGURATION}
    if conditions or gpu.fabric_health is not None:
        held = [name for name, holds in conditions.items() if holds]
        if not held and gpu.fabric_health not in (None, FABRIC_HEALTHY):
            held = [str(gpu.fabric_health)]
        yield HealthReason.FABRIC_DEGRADED, ", ".join(map(_spoken, held)) or None


def _spoken(name: str) -> str:
    return name.replace("_", " ")


def _links(gpu: GpuReadings, node: Sequence[GpuReadings]) -> str | None:
    """Return which links of `gpu` are down that should be up.

    Bridges connect two GPUs of four, or some links of each, so a link that is down may lead nowhere.  It should be up
    if it is known to lead somewhere, if all links lead to switches, or if another GPU of this model has more links up.
    If no GPU of this model has a link up, the cause is the fabric or MIG and not a link.
    """
    alike = [other for other in node if other.name == gpu.name and not other.has_mig]
    most = max((len(other.links_up) for other in alike), default=0)
    is_switched = any(other.has_switch for other in alike) or "SXM" in gpu.name
    down = gpu.links_down
    if not (most > 0 and (is_switched or 0 < len(gpu.links_up) < most)):
        down &= gpu.links_wired
    if not down:
        return None
    return f"{plural(len(gpu.links_up), 'link')} up; down: {','.join(map(str, sorted(down)))}"
