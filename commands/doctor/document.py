"""Formats facts and findings as one JSON object for scripts, a public format versioned by `SCHEMA_VERSION`.

Null means "absent" or "unknown".  Left out: environment variables that are in no finding.
"""

from __future__ import annotations

from typing import Any

from pacecar import __version__

from .facts.model import GpuFacts, NodeFacts
from .findings import Finding, Severity
from .rules.registry import Judgement
from .topology import offers

__all__ = ["SCHEMA_VERSION", "as_document", "counts", "inventory"]

SCHEMA_VERSION = 1


def counts(judgement: Judgement) -> dict[str, int]:
    """Return the number of findings of each severity, worst first."""
    worst_first = sorted(Severity, key=lambda severity: -severity.rank)
    return {str(severity): sum(f.severity is severity for f in judgement.findings) for severity in worst_first}


def as_document(facts: NodeFacts, judgement: Judgement) -> dict[str, Any]:
    """Return what `pacecar doctor --json` prints."""
    return {
        "schema_version": SCHEMA_VERSION,
        "pacecar_version": __version__,
        "host": facts.host,
        "counts": counts(judgement),
        "findings": [_finding(finding) for finding in judgement.findings],
        "unreadable": [*facts.unreadable, *judgement.failed],
        "limited": list(facts.limited),
        "rules_applied": judgement.applied,
        "rules_without_input": {str(needs): number for needs, number in judgement.not_applied.items()},
        "inventory": inventory(facts),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    gain = finding.gain
    return {
        "id": finding.id,
        "severity": str(finding.severity),
        "title": finding.title,
        "why": finding.why,
        "evidence": [{"what": e.what, "value": e.value, "where": e.where} for e in finding.evidence],
        "gain": None if gain is None else {"at_most_ratio": gain.at_most_ratio, "basis": gain.basis},
        "remedy": finding.remedy,
        "source": str(finding.source),
    }


def inventory(facts: NodeFacts) -> dict[str, Any]:
    """Return a description of this machine."""
    cpus, gpus, network = facts.cpus, facts.gpus, facts.network
    return {
        "cpu": {
            "model": None if cpus.model is None else cpus.model.value,
            "sockets": cpus.sockets,
            "cpus": cpus.count,
            "numa_nodes": len(cpus.nodes) or None,
            "is_virtual": cpus.is_virtual,
        },
        "memory_bytes": None if cpus.memory_bytes is None else cpus.memory_bytes.value,
        "kernel": None if cpus.kernel is None else cpus.kernel.value,
        "driver": {"version": gpus.driver, "cuda": gpus.cuda, "absent": gpus.absent},
        "gpus": [_gpu(facts, gpu) for gpu in gpus.boards],
        "rdma": [
            {
                "device": port.device,
                "port": port.port,
                "state": port.state,
                "link_layer": port.link_layer,
                "bits_per_second": None if port.rate is None else port.rate * 8,
            }
            for port in network.ports
        ],
        "interfaces": [
            {"name": card.name, "state": card.state, "bits_per_second": card.speed, "mtu": card.mtu}
            for card in network.interfaces
            if card.is_physical
        ],
        "torch": facts.torch_version,
        "topology": offers(facts),
    }


def _gpu(facts: NodeFacts, gpu: GpuFacts) -> dict[str, Any]:
    device = facts.device_at(gpu.address)
    return {
        "index": gpu.index,
        "name": gpu.name or None,
        "uuid": gpu.uuid or None,
        "pci": gpu.address or None,
        "numa_node": None if device is None else device.node,
        "compute_capability": None if gpu.capability is None else "{}.{}".format(*gpu.capability),
        "memory_bytes": gpu.memory_bytes,
        "nvlinks_up": len(gpu.links_up),
        "lost": gpu.lost,
    }
