"""Rules for NCCL's log: transports in use where the machine offers better ones.

Even with correct variables the transport may be wrong: a module is missing, a container hides a card.  So the log is
compared with the machine, unless it names other hosts.  A slow start shows only there, too.
"""

from __future__ import annotations

import shlex

from ..facts.evidence import FindingEvidence
from ..facts.model import NodeFacts
from ..findings import Hit, Rule, Severity
from ..sources import NCCL_ENV, NCCL_TROUBLE
from .nccl import active_ports, gain, linked, nvlinks

__all__ = ["RULES"]


def _log_sockets(facts: NodeFacts) -> Hit | None:
    log = facts.log
    if log is None or "NET/Socket" not in log.transports or not facts.network.active_ports:
        return None
    if not log.is_of(facts.host):
        return None
    line, count = log.transports["NET/Socket"]
    lines = [
        line.as_evidence(f"one of {count} channels"),
        *(other.as_evidence("network") for other in (log.no_rdma, log.network) if other is not None),
    ]
    return Hit(
        (*lines, *active_ports(facts)),
        "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET torchrun ...    # logs why NET/IB is not used",
        gain(facts),
    )


def _log_no_gpudirect(facts: NodeFacts) -> Hit | None:
    if facts.log is None:
        return None
    found = {
        name: said for name, said in facts.log.transports.items()
        if name.startswith("NET/") and name != "NET/Socket" and not name.endswith("/GDRDMA")
        # Without NVLink, NCCL sends through the host and only receives directly (NCCL_NET_GDR_READ).
        and (f"{name}/GDRDMA" not in facts.log.transports or linked(facts))
    }  # fmt: skip
    if not found:
        return None
    evidence = tuple(line.as_evidence(f"one of {count} channels") for line, count in found.values())
    return Hit(evidence, "lsmod | grep nvidia_peermem || sudo modprobe nvidia-peermem", gain(facts))


def _log_shm(facts: NodeFacts) -> Hit | None:
    if facts.log is None or "SHM" not in facts.log.transports or not facts.log.is_of(facts.host):
        return None
    gpus = facts.gpus.working
    reaches_all = len(gpus) == 2 or all(gpu.has_switch for gpu in gpus)  # bridges join pairs of cards only
    if len(gpus) < 2 or len(linked(facts)) < len(gpus) or not reaches_all:
        return None
    line, count = facts.log.transports["SHM"]
    return Hit(
        (line.as_evidence(f"one of {count} channels"), *nvlinks(facts)),
        "nvidia-smi topo -p2p r && nvidia-smi nvlink -s",
        gain(facts),
    )


def _log_warnings(facts: NodeFacts) -> Hit | None:
    if facts.log is None or not facts.log.warnings:
        return None
    evidence = [line.as_evidence("warning") for line in facts.log.warnings]
    more = facts.log.warning_count - len(evidence)
    if more > 0:
        evidence.append(FindingEvidence("warnings", f"{more} more", facts.log.where))
    return Hit(evidence, f"grep -n 'NCCL WARN' {shlex.quote(facts.log.where)}")


SLOW_INIT_SECONDS = 30.0
"""Long enough to be worth a look at every restart; the finding is only `info`."""

_INIT_REMEDIES = {
    "bootstrap": "NCCL_SOCKET_IFNAME=...    # the interface of the bootstrap; check name resolution and firewalls",
    "topo": "NCCL_TOPO_DUMP_FILE=topo.xml torchrun ...    # and load it again with NCCL_TOPO_FILE",
}


def _log_slow_init(facts: NodeFacts) -> Hit | None:
    if facts.log is None or facts.log.slowest_init is None:
        return None
    line, seconds, part = facts.log.slowest_init
    if seconds < SLOW_INIT_SECONDS:
        return None
    remedy = _INIT_REMEDIES.get(part, "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV torchrun ...    # shows each stage")
    return Hit((line.as_evidence(f"{seconds:.0f} s, mostly {part}" if part else f"{seconds:.0f} s"),), remedy)


RULES = (
    Rule("log-sockets", Severity.CRITICAL, "NCCL's log shows TCP although RDMA ports are up",
         "the job runs at a fraction of the ports' rate", "--nccl-log",
         NCCL_TROUBLE.at("Networking issues"), _log_sockets),
    Rule("log-no-gpudirect", Severity.WARNING, "NCCL's log shows RDMA without GPUDirect",
         "data of NET channels without GDRDMA is copied through the host's memory", "--nccl-log",
         NCCL_TROUBLE.at("GPU-to-NIC communication"), _log_no_gpudirect),
    Rule("log-shared-memory", Severity.WARNING, "NCCL's log shows shared memory although NVLink is up",
         "these pairs of GPUs communicate through the host's memory", "--nccl-log",
         NCCL_TROUBLE.at("GPU-to-GPU communication"), _log_shm),
    Rule("log-warnings", Severity.WARNING, "NCCL's log has warnings",
         "NCCL warns about failures before it gives up", "--nccl-log",
         NCCL_ENV.at("NCCL_DEBUG"), _log_warnings),
    Rule("log-slow-init", Severity.INFO, "A communicator took long to make",
         "it delays every start and restart of the job", "--nccl-log",
         NCCL_ENV.at("NCCL_DEBUG"), _log_slow_init),
)  # fmt: skip
