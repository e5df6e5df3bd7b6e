"""Rules for NCCL's variables that disable something this machine has.

Most of NCCL's variables are for debugging, and then stay in scripts for years.  A variable is a finding only if it
disables something that works: RDMA if a port is up, P2P if there is NVLink.
"""

from __future__ import annotations

import re
import shlex

from pacecar.formatting.quantities import gigabits

from ..facts.evidence import FindingEvidence, Gain
from ..facts.model import GpuFacts, NodeFacts, Seen
from ..findings import FindingSource, Hit, Rule, Severity, hit
from ..sources import NCCL_ENV
from ..transport_paths import (
    carriers,
    is_one_node_run,
    links,
    local_gain,
    reached_as,
    selected,
    training_ports,
    uses_rdma,
)

__all__ = ["RULES", "active_ports", "gain", "linked", "nvlinks"]

SOCKETS_MAX = 64
"""The maximum of NTHREADS x NSOCKS_PERTHREAD (NCCL user guide, NCCL_NSOCKS_PERTHREAD)."""

SOCKET_THREADS_SPEED = 100_000_000_000
"""From 100 Gbit/s on, NCCL's documentation recommends more socket threads (NCCL_SOCKET_NTHREADS,
NCCL_NSOCKS_PERTHREAD)."""

SLOWER_RATIO = 2
"""An interface this many times slower than another one that is up was probably not intended."""

_DOWN = frozenset({"down", "notpresent", "lowerlayerdown", "testing", "dormant"})
"""States in which nothing can be sent; lo is "unknown" (Documentation/networking/operstates.rst)."""

_NVLS_CAPABILITY = (9, 0)
"""NVLink SHARP needs Hopper and NVSwitch 3 (NCCL user guide, NCCL_NVLS_ENABLE)."""


def gain(facts: NodeFacts) -> Gain | None:
    """Return the bound on hiding communication, if a run on this machine has it."""
    return local_gain(facts, "communication_hidden")


def _unset(seen: Seen[str], name: str) -> str:
    """Return the command that removes a setting from its source."""
    place, _, line = seen.where.rpartition(":")
    if not line.isdigit():
        return f"unset {name}    # and remove it from the job's script"
    return f"sudo sed -i '{line}d' {shlex.quote(place)}"


def _set_to(facts: NodeFacts, *names: str) -> list[tuple[str, Seen[str]]]:
    return [(name, seen) for name in names if (seen := facts.settings.get(name)) is not None]


def _shown(found: list[tuple[str, Seen[str]]]) -> tuple[FindingEvidence, ...]:
    return tuple(seen.as_evidence(name) for name, seen in found)


def active_ports(facts: NodeFacts) -> tuple[FindingEvidence, ...]:
    """Return the RDMA ports that are up, as evidence."""
    return tuple(
        FindingEvidence(
            f"{port.device} port {port.port}",
            "ACTIVE" if port.rate is None else f"ACTIVE, {gigabits(port.rate * 8)}",
            port.where,
        )
        for port in facts.network.active_ports
    )


def nvlinks(facts: NodeFacts) -> tuple[FindingEvidence, ...]:
    """Return the GPUs with NVLinks, as evidence."""
    return tuple(
        FindingEvidence(f"GPU {gpu.index}", f"{len(gpu.links_up)} NVLinks up", f"NVML, GPU {gpu.index}")
        for gpu in linked(facts)
    )


def linked(facts: NodeFacts) -> tuple[GpuFacts, ...]:
    """Return the GPUs with an NVLink that is up."""
    return tuple(gpu for gpu in facts.gpus.working if gpu.links_up)


def _has_nvls(facts: NodeFacts) -> bool:
    return len(facts.gpus.working) > 1 and all(
        gpu.has_switch and gpu.capability is not None and gpu.capability >= _NVLS_CAPABILITY
        for gpu in facts.gpus.working
    )


def _ib_disabled(facts: NodeFacts) -> Hit | None:
    disabled, network = facts.settings.is_on("NCCL_IB_DISABLE"), facts.settings.get("NCCL_NET")
    found = [] if disabled is None else [("NCCL_IB_DISABLE", disabled)]
    if network is not None and network.value.lower() == "socket":
        found.append(("NCCL_NET", network))
    # A virtual machine's Ethernet card may have a port without RDMA; then the variable is right.
    ports = [
        port for port in facts.network.active_ports if not facts.cpus.is_virtual or port.link_layer == "InfiniBand"
    ]
    if not found or not ports or is_one_node_run(facts):
        return None
    return Hit((*_shown(found), *active_ports(facts)), _unset(found[0][1], found[0][0]), gain(facts))


def _no_p2p(facts: NodeFacts) -> Seen[str] | None:
    disabled, level = facts.settings.is_on("NCCL_P2P_DISABLE"), facts.settings.get("NCCL_P2P_LEVEL")
    return disabled or (level if level is not None and level.value.upper() in ("LOC", "0") else None)


def _p2p_disabled(facts: NodeFacts) -> Hit | None:
    seen = _no_p2p(facts)
    if seen is None or len(linked(facts)) < 2:
        return None
    name = "NCCL_P2P_DISABLE" if seen is facts.settings.get("NCCL_P2P_DISABLE") else "NCCL_P2P_LEVEL"
    return Hit((seen.as_evidence(name), *nvlinks(facts)), _unset(seen, name), gain(facts))


def _p2p_disabled_pcie(facts: NodeFacts) -> Hit | None:
    seen = _no_p2p(facts)
    possible = [pair for pair, status in sorted(facts.gpus.peers.items()) if status == 0 and pair[0] < pair[1]]
    if seen is None or not possible or len(linked(facts)) >= 2:
        return None
    name = "NCCL_P2P_DISABLE" if seen is facts.settings.get("NCCL_P2P_DISABLE") else "NCCL_P2P_LEVEL"
    evidence = [
        FindingEvidence(f"P2P between GPU {one} and {other}", "possible", "NVML, nvmlDeviceGetP2PStatus")
        for one, other in possible
    ]
    return Hit((seen.as_evidence(name), *evidence), _unset(seen, name), gain(facts))


def _shm_disabled(facts: NodeFacts) -> Hit | None:
    seen = facts.settings.is_on("NCCL_SHM_DISABLE")
    impossible = [pair for pair, status in sorted(facts.gpus.peers.items()) if status != 0 and pair[0] < pair[1]]
    if seen is None or not impossible:
        return None
    evidence = [
        FindingEvidence(f"P2P between GPU {one} and {other}", "not possible", "NVML, nvmlDeviceGetP2PStatus")
        for one, other in impossible
    ]
    return Hit((seen.as_evidence("NCCL_SHM_DISABLE"), *evidence), _unset(seen, "NCCL_SHM_DISABLE"), gain(facts))


def _for_all_reduce(text: str) -> str | None:
    """Return the list of NCCL_ALGO or NCCL_PROTO for all-reduce: `ring` for `ring;broadcast:tree`.

    Since 2.24 a list may name a collective (`allreduce:tree`); a list without a name is for all others.
    """
    said: str | None = None
    for part in text.lower().split(";"):
        name, colon, names = part.strip().partition(":")
        if not colon:
            said = name
        elif name == "allreduce":
            said = names
    return said


def _without_nvls(text: str | None) -> bool:
    if text is None:
        return False
    return "nvls" in text if text.startswith("^") else "nvls" not in text


def _algo_excludes_nvls(facts: NodeFacts) -> Hit | None:
    seen = facts.settings.get("NCCL_ALGO")
    if seen is None or not _has_nvls(facts) or not _without_nvls(_for_all_reduce(seen.value)):
        return None
    return Hit((seen.as_evidence("NCCL_ALGO"), *nvlinks(facts)), _unset(seen, "NCCL_ALGO"), gain(facts))


def _nvls_off(facts: NodeFacts) -> Hit | None:
    seen = facts.settings.is_off("NCCL_NVLS_ENABLE")
    if seen is None or not _has_nvls(facts):
        return None
    return Hit((seen.as_evidence("NCCL_NVLS_ENABLE"), *nvlinks(facts)), _unset(seen, "NCCL_NVLS_ENABLE"), gain(facts))


def _algo_set(facts: NodeFacts) -> Hit | None:
    seen = facts.settings.get("NCCL_ALGO")
    if seen is None or _algo_excludes_nvls(facts) is not None:
        return None
    return Hit((seen.as_evidence("NCCL_ALGO"),), _unset(seen, "NCCL_ALGO"), gain(facts))


def _only_ll(value: str) -> bool:
    """Return whether only the protocol LL is left; `^` excludes the named ones."""
    text = _for_all_reduce(value) or ""
    named = set(re.findall(r"ll128|ll|simple", text))
    return ({"ll", "ll128", "simple"} - named if text.startswith("^") else named) == {"ll"}


def _proto_slow(facts: NodeFacts) -> Hit | None:
    seen = facts.settings.get("NCCL_PROTO")
    if seen is None or not _only_ll(seen.value):
        return None
    return Hit((seen.as_evidence("NCCL_PROTO"),), _unset(seen, "NCCL_PROTO"), gain(facts))


def _proto_set(facts: NodeFacts) -> Hit | None:
    seen = facts.settings.get("NCCL_PROTO")
    if seen is None or _only_ll(seen.value):
        return None
    return Hit((seen.as_evidence("NCCL_PROTO"),), _unset(seen, "NCCL_PROTO"), gain(facts))


def _interfaces_of(facts: NodeFacts, name: str) -> tuple[Seen[str], list[str]] | None:
    """Return the variable and the interfaces that it selects, None if it is unset or no interface is known."""
    seen = facts.settings.get(name)
    names = [card.name for card in facts.network.interfaces]
    if seen is None or not names:
        return None
    if name.startswith("GLOO"):
        return seen, [card for card in names if card in seen.value.split(",")]
    return seen, selected(names, seen.value)


def _no_interface(facts: NodeFacts) -> Hit | None:
    by_name = {card.name: card for card in facts.network.interfaces}
    evidence: list[FindingEvidence] = []
    remedy = ""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        found = _interfaces_of(facts, name)
        if found is None or any(by_name[card].state not in _DOWN for card in found[1]):
            continue
        there = ", ".join(f"{card.name} ({card.state})" for card in facts.network.interfaces)
        folder = facts.network.interfaces[0].where.rpartition("/")[0]
        evidence += [found[0].as_evidence(name), FindingEvidence("interfaces", there, folder)]
        up = [card.name for card in facts.network.interfaces if card.is_physical and card.state == "up"]
        remedy = remedy or (f"export {name}={up[0]}" if up else _unset(found[0], name))
    return hit(evidence, remedy)


def _slow_interface(facts: NodeFacts) -> Hit | None:
    if uses_rdma(facts):
        return None  # then sockets are only used to start the job
    by_name = {card.name: card for card in facts.network.interfaces}
    best = next(reversed(links(facts)), None)
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        found = _interfaces_of(facts, name)
        speeds = [] if found is None else [speed for card in found[1] if (speed := by_name[card].speed) is not None]
        if found is None or best is None or best.speed is None or not speeds or max(speeds) * SLOWER_RATIO > best.speed:
            continue
        evidence = [found[0].as_evidence(name)]
        evidence += [
            FindingEvidence(card.name, gigabits(card.speed or 0), f"{card.where}/speed")
            for card in (*(by_name[card] for card in found[1] if by_name[card].speed), best)
        ]
        return Hit(evidence, f"export {name}={reached_as(best)}", gain(facts))
    return None


def _hca_names(facts: NodeFacts) -> tuple[Seen[str], list[str], list[str]] | None:
    """Return NCCL_IB_HCA, the `device:port` names that it selects, and those of all active training ports."""
    seen = facts.settings.get("NCCL_IB_HCA")
    active = [f"{port.device}:{port.port}" for port in training_ports(facts) if port.is_active]
    if seen is None or not active:
        return None
    return seen, [name for name in active if _is_meant(name, seen.value)], active


def _is_meant(name: str, text: str) -> bool:
    """Return whether NCCL_IB_HCA selects `device:port`: a list of prefixes, or of exact names (=), with optional ports.

    The prefix is that of the device: `mlx5_1:1` also selects port 1 of mlx5_10.
    """
    device, _, port = name.partition(":")
    names = text.removeprefix("^")
    entries = [entry.partition(":") for entry in names.removeprefix("=").split(",") if entry]
    is_named = any(
        (device == start if names.startswith("=") else device.startswith(start)) and wanted in ("", port)
        for start, _, wanted in entries
    )
    return is_named != text.startswith("^")


def _no_hca(facts: NodeFacts) -> Hit | None:
    found = _hca_names(facts)
    if found is None or found[1]:
        return None
    return Hit(
        (found[0].as_evidence("NCCL_IB_HCA"), *active_ports(facts)), _unset(found[0], "NCCL_IB_HCA"), gain(facts)
    )


def _few_hcas(facts: NodeFacts) -> Hit | None:
    found = _hca_names(facts)
    if found is None or not found[1] or len(found[1]) == len(found[2]):
        return None
    left_out = [name for name in found[2] if name not in found[1]]
    evidence = (
        found[0].as_evidence("NCCL_IB_HCA"),
        FindingEvidence("active ports left out", ", ".join(left_out), "/sys/class/infiniband"),
    )
    return Hit(evidence, _unset(found[0], "NCCL_IB_HCA"), gain(facts))


def _socket_product(facts: NodeFacts) -> Hit | None:
    found = _set_to(facts, "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")
    product = 1
    for _, seen in found:
        product *= int(seen.value) if seen.value.strip().isdigit() else 1
    if product <= SOCKETS_MAX:
        return None
    return Hit((*_shown(found), FindingEvidence("product", f"{product}, at most {SOCKETS_MAX}", "computed")),
               "export NCCL_SOCKET_NTHREADS=8 NCCL_NSOCKS_PERTHREAD=8")  # fmt: skip


def _socket_threads(facts: NodeFacts) -> Hit | None:
    if not facts.gpus.working or uses_rdma(facts) or _set_to(facts, "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"):
        return None
    fast = [card for card in carriers(facts) if (card.speed or 0) >= SOCKET_THREADS_SPEED]
    if not fast:
        return None
    evidence = [
        FindingEvidence(card.name, f"{gigabits(card.speed or 0)}, no RDMA port in use", f"{card.where}/speed")
        for card in fast
    ]
    return Hit(evidence, "export NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4", gain(facts))


def _gdr_off(facts: NodeFacts) -> Hit | None:
    if not uses_rdma(facts) or not facts.gpus.working:
        return None
    found = [
        (name, seen)
        for name, seen in _set_to(facts, "NCCL_NET_GDR_LEVEL", "NCCL_IB_GDR_LEVEL")
        if seen.value.upper() in ("LOC", "0")
    ]
    # Without NVLink, NCCL reads through the host by default (NCCL_NET_GDR_READ).
    names = ["NCCL_NET_GDR_READ"] if linked(facts) else []
    names += [] if facts.gpus.peermem is not None else ["NCCL_DMABUF_ENABLE"]
    found += [(name, seen) for name in names if (seen := facts.settings.is_off(name)) is not None]
    if not found:
        return None
    return Hit((*_shown(found), *active_ports(facts)), _unset(found[0][1], found[0][0]), gain(facts))


RULES = (
    Rule("nccl-ib-disabled", Severity.CRITICAL, "A variable disables RDMA, which is available",
         "all traffic between nodes uses the kernel's TCP, at a fraction of the port's rate", "machine",
         NCCL_ENV.at("NCCL_IB_DISABLE; NCCL_NET"), _ib_disabled),
    Rule("nccl-p2p-disabled", Severity.CRITICAL, "A variable disables NVLink, which is available",
         "NVLink needs P2P; without it, GPUs of one node communicate through the host's memory", "machine",
         NCCL_ENV.at("NCCL_P2P_DISABLE; NCCL_P2P_LEVEL"), _p2p_disabled),
    Rule("nccl-p2p-disabled-pcie", Severity.WARNING, "A variable disables P2P over PCIe, which is available",
         "transfers between GPUs of one node are copied through the host's memory", "machine",
         NCCL_ENV.at("NCCL_P2P_DISABLE; NCCL_P2P_LEVEL"), _p2p_disabled_pcie),
    Rule("nccl-shm-disabled", Severity.WARNING, "A variable disables shared memory for GPUs without P2P",
         "NCCL then uses the network within the node", "machine", NCCL_ENV.at("NCCL_SHM_DISABLE"), _shm_disabled),
    Rule("nccl-algo-excludes-nvls", Severity.WARNING, "NCCL_ALGO excludes NVLink SHARP (NVLS)",
         "these GPUs and switches can reduce in the fabric, but the list of algorithms lacks it",
         "machine",
         NCCL_ENV.at("NCCL_ALGO"), _algo_excludes_nvls),
    Rule("nccl-nvls-off", Severity.WARNING, "NVLink SHARP (NVLS) is turned off",
         "these GPUs and switches can reduce in the fabric", "machine",
         NCCL_ENV.at("NCCL_NVLS_ENABLE"), _nvls_off),
    Rule("nccl-algo-set", Severity.INFO, "NCCL_ALGO is set",
         "NCCL chooses the algorithm by size and topology; a fixed one suits only one size",
         "machine", NCCL_ENV.at("NCCL_ALGO, among the variables for debugging"), _algo_set),
    Rule("nccl-proto-slow", Severity.WARNING, "NCCL_PROTO allows only the protocol for small messages",
         "half of what LL sends is flags, so large gradients get half the bandwidth or less", "machine",
         FindingSource("Hu et al. 2025", "Demystifying NCCL, section on communication protocols"), _proto_slow),
    Rule("nccl-proto-set", Severity.INFO, "NCCL_PROTO is set",
         "NCCL chooses the protocol by size; its documentation discourages a fixed one", "machine",
         NCCL_ENV.at("NCCL_PROTO"), _proto_set),
    Rule("nccl-no-interface", Severity.CRITICAL, "The named network interface is missing or down",
         "ranks cannot connect, and the job hangs or fails at its start", "machine",
         NCCL_ENV.at("NCCL_SOCKET_IFNAME"), _no_interface),
    Rule("nccl-slow-interface", Severity.WARNING, "The named network interface is not the fastest one",
         "gradients use a link with a fraction of another one's speed", "machine",
         NCCL_ENV.at("NCCL_SOCKET_IFNAME"), _slow_interface),
    Rule("nccl-no-hca", Severity.CRITICAL, "NCCL_IB_HCA names no active RDMA port",
         "NCCL falls back to TCP", "machine", NCCL_ENV.at("NCCL_IB_HCA"), _no_hca),
    Rule("nccl-few-hcas", Severity.WARNING, "NCCL_IB_HCA excludes active RDMA ports",
         "ports near the GPUs are meant to share the traffic; those excluded stay idle", "machine",
         NCCL_ENV.at("NCCL_IB_HCA"), _few_hcas),
    Rule("nccl-socket-product", Severity.WARNING, "More sockets are set than NCCL allows",
         "threads times sockets per thread may be at most 64; NCCL uses fewer than requested", "machine",
         NCCL_ENV.at("NCCL_NSOCKS_PERTHREAD"), _socket_product),
    Rule("nccl-socket-threads", Severity.INFO, "A single thread sends on a 100 Gbit/s link",
         "one connection on one core does not fill it; NCCL uses more on request", "machine",
         NCCL_ENV.at("NCCL_SOCKET_NTHREADS; NCCL_NSOCKS_PERTHREAD"), _socket_threads),
    Rule("nccl-gdr-off", Severity.WARNING, "A variable disables GPUDirect RDMA",
         "network traffic is copied through the host's memory", "machine",
         NCCL_ENV.at("NCCL_NET_GDR_LEVEL; NCCL_NET_GDR_READ; NCCL_DMABUF_ENABLE"), _gdr_off),
)  # fmt: skip
