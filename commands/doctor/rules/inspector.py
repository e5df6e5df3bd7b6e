"""Rules for what NCCL's Inspector wrote of a job (`pacecar.nccl_inspector`), and for one that writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from pacecar.formatting.quantities import bandwidth, plural, size_text
from pacecar.nccl_inspector import CommunicatorBandwidth

from ..facts.evidence import FindingEvidence
from ..facts.model import NodeFacts
from ..findings import Hit, Rule, Severity, hit
from ..sources import NCCL_INSPECTOR

__all__ = ["RULES"]

SLOW_RATIO = 0.7
"""A lost rail of two, or a link at half its rate, costs more; healthy communicators differ by a tenth."""

PEERS_MIN = 2
"""Of two communicators it cannot be said which is slow."""

BYTES_MIN = 1 << 20
"""Smaller messages depend on latency."""

COUNT_MIN = 10
SLOW_MAX = 5
"""Communicators that are named."""

INTERVAL = "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS"
THREAD = "NCCL_INSPECTOR_DUMP_THREAD_ENABLE"


def _slow_communicator(facts: NodeFacts) -> Hit | None:
    alike: dict[object, list[tuple[CommunicatorBandwidth, float]]] = {}
    for row in () if facts.inspector is None else facts.inspector.rows:
        is_rated = row.bytes >= BYTES_MIN and (row.count is None or row.count >= COUNT_MIN)
        if row.bus_bandwidth is not None and is_rated and row.communicator is not None:
            key = row.operation, row.bytes.bit_length(), row.ranks, row.nodes
            alike.setdefault(key, []).append((row, row.bus_bandwidth))
    found = [
        (rate / of_peers, _evidence(row, rate, of_peers, len(rows) - 1))
        for rows in alike.values()
        if len(rows) > PEERS_MIN
        for row, rate in rows
        if rate < SLOW_RATIO * (of_peers := median(other for peer, other in rows if peer is not row))
    ]
    found.sort(key=lambda one: one[0])
    return hit(
        (evidence for _, evidence in found[:SLOW_MAX]),
        "nvidia-smi nvlink -s; ibstat    # on its nodes: is a link or port down or slow?",
    )


def _evidence(row: CommunicatorBandwidth, rate: float, of_peers: float, peers: int) -> FindingEvidence:
    name = f" ({row.name})" if row.name else ""
    what = f"{row.operation} of {size_text(row.bytes)} on communicator {row.communicator}{name}"
    value = f"bus bandwidth {bandwidth(rate)}, the median of its {plural(peers, 'peer')} {bandwidth(of_peers)}"
    return FindingEvidence(what, value, f"NCCL's Inspector, {row.highest}, which waited least")


def _writes_nothing(facts: NodeFacts) -> Hit | None:
    enabled = facts.settings.is_on("NCCL_INSPECTOR_ENABLE")
    if enabled is None or facts.inspector is None or facts.inspector.files:
        return None
    evidence = list(_reasons(facts))
    if not evidence and facts.process is not None:
        evidence = [FindingEvidence("files", "none", "NCCL_INSPECTOR_DUMP_DIR, or nccl-inspector-* where the job runs")]
        if (plugin := facts.settings.get("NCCL_PROFILER_PLUGIN")) is not None:
            evidence.append(plugin.as_evidence("NCCL_PROFILER_PLUGIN"))
    if not evidence:
        return None
    return Hit(
        (enabled.as_evidence("NCCL_INSPECTOR_ENABLE"), *evidence),
        f"export NCCL_PROFILER_PLUGIN=/path/to/libnccl-profiler-inspector.so {INTERVAL}=1000000",
    )


def _reasons(facts: NodeFacts) -> Iterator[FindingEvidence]:
    interval = facts.settings.get(INTERVAL)
    if interval is None:
        yield FindingEvidence(INTERVAL, "not set, so nothing is ever written", "the environment")
    elif interval.value.strip().startswith("-"):
        yield interval.as_evidence(INTERVAL)
    if (thread := facts.settings.is_off(THREAD)) is not None:
        yield thread.as_evidence(THREAD)


RULES = (
    Rule("inspector-slow-communicator", Severity.WARNING, "A communicator is much slower than others of its shape",
         "the same operation, size and number of ranks and nodes should use the links as well", "machine",
         NCCL_INSPECTOR.at("inspectorComputeOpBw"), _slow_communicator),
    Rule("inspector-writes-nothing", Severity.INFO, "NCCL's Inspector is on but writes nothing",
         "it costs time and measures nothing", "machine",
         NCCL_INSPECTOR.at("inspectorStartDumpThread"), _writes_nothing),
)  # fmt: skip
