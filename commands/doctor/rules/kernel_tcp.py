"""Rules for the kernel's TCP, if it carries gradients: without RDMA, or with gloo.

A connection's buffers limit its data in flight, so they must hold the bandwidth-delay product: link speed times round
trip.  No file has the round trip; without `--round-trip-ms` it is assumed, and the finding is only `info`.  Half of a
TCP buffer is the kernel's overhead (tcp_adv_win_scale 1, ip-sysctl.rst).
"""

from __future__ import annotations

import re

from pacecar.clock import NS_PER_SECOND
from pacecar.formatting.quantities import gigabits

from ..facts.evidence import FindingEvidence, Gain
from ..facts.model import Interface, NodeFacts, Seen
from ..findings import FindingSource, Hit, Rule, Severity, hit
from ..sources import IP_SYSCTL, TORCH
from ..transport_paths import carriers, is_local_run, links, local_gain, reached_as

__all__ = ["RULES"]

BUFFER_OVERHEAD = 2

ASSUMED_ROUND_TRIP_NS = 1_000_000
"""Within a data centre under load: about 0.1 ms of wire, and a switch's queue of 12 MB at 100 Gbit/s (1 ms)."""

RETRANSMITTED_RATIO_MIN = 0.001
"""With this loss, 1448-byte segments and 1 ms, loss-based TCP reaches about 450 Mbit/s per connection (Mathis et al.
1997)."""

SEGMENTS_MIN = 1_000_000
"""With fewer segments, a ratio of 0.001 is chance."""

FAST = 25_000_000_000
"""From this speed on, 1500-byte packets and default limits are reported; they suffice for slower links."""

ETHERNET_MTU = 1500

IDLE_NS = 200_000_000
"""The shortest retransmission timeout (TCP_RTO_MIN in include/net/tcp.h); longer pauses reset the window."""

SLOWER_RATIO = 2


def _gain(facts: NodeFacts) -> Gain | None:
    return local_gain(facts, "communication_hidden")


def _fastest(facts: NodeFacts) -> Interface | None:
    return max((card for card in carriers(facts) if card.speed), key=lambda card: card.speed or 0, default=None)


def _needed(card: Interface, facts: NodeFacts) -> int:
    """Return the bandwidth-delay product in bytes."""
    round_trip_ns = ASSUMED_ROUND_TRIP_NS if facts.round_trip_ns is None else facts.round_trip_ns
    assert card.speed is not None, "those without a speed were left out"
    return card.speed * round_trip_ns // (8 * NS_PER_SECOND)


def _speed(card: Interface) -> FindingEvidence:
    return FindingEvidence(card.name, gigabits(card.speed or 0), f"{card.where}/speed")


def _product(card: Interface, facts: NodeFacts) -> FindingEvidence:
    needed = _needed(card, facts)
    if facts.round_trip_ns is None:
        assumed = f"at an assumed round trip of {ASSUMED_ROUND_TRIP_NS / 1e6:g} ms (--round-trip-ms)"
    else:
        assumed = f"at {facts.round_trip_ns / 1e6:g} ms round trip"
    return FindingEvidence("bandwidth-delay product", f"{needed / 2**20:.1f} MiB {assumed}", "computed")


def _largest(seen: Seen[str] | None) -> int | None:
    """Return the last number, as of `4096 131072 6291456`."""
    parts = [] if seen is None else seen.value.split()
    return int(parts[-1]) if parts and parts[-1].isdigit() else None


def _rounded(number: int) -> int:
    return 1 << max(number - 1, 1).bit_length()


def _tcp_buffers(facts: NodeFacts) -> Hit | None:
    return None if facts.round_trip_ns is None else _small_buffers(facts)


def _tcp_buffers_assumed(facts: NodeFacts) -> Hit | None:
    return None if facts.round_trip_ns is not None else _small_buffers(facts)


def _small_buffers(facts: NodeFacts) -> Hit | None:
    card = _fastest(facts)
    if card is None:
        return None
    needed = BUFFER_OVERHEAD * _needed(card, facts)
    evidence, remedy = [], []
    for name in ("net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"):
        seen = facts.network.sysctls.get(name)
        largest = _largest(seen)
        if seen is None or largest is None or largest >= needed or not re.fullmatch(r"\d+\s+\d+\s+\d+", seen.value):
            continue
        low, middle, _ = seen.value.split()  # keep these settings
        evidence.append(seen.as_evidence(f"{name} (min default max)"))
        remedy.append(f"{name}='{low} {middle} {_rounded(needed)}'")
    if not evidence:
        return None
    return Hit((*evidence, _speed(card), _product(card, facts)), f"sudo sysctl -w {' '.join(remedy)}", _gain(facts))


def _core_buffers(facts: NodeFacts) -> Hit | None:
    card = _fastest(facts)
    if card is None or (card.speed or 0) < FAST:
        return None
    needed = _needed(card, facts)
    found = [
        (name, seen)
        for name in ("net.core.rmem_max", "net.core.wmem_max")
        if (seen := facts.network.sysctls.get(name)) is not None
        and (largest := _largest(seen)) is not None
        and largest < needed
    ]
    if not found:
        return None
    settings = " ".join(f"{name}={_rounded(needed)}" for name, _ in found)
    return Hit(
        (*(seen.as_evidence(name) for name, seen in found), _speed(card), _product(card, facts)),
        f"sudo sysctl -w {settings}",
    )


def _reno(facts: NodeFacts) -> Hit | None:
    seen = facts.network.sysctls.get("net.ipv4.tcp_congestion_control")
    card = _fastest(facts)
    if seen is None or card is None or seen.value != "reno":
        return None
    return Hit(
        (seen.as_evidence("congestion control"), _speed(card)),
        "sudo sysctl -w net.ipv4.tcp_congestion_control=cubic",
        _gain(facts),
    )


def _retransmits(facts: NodeFacts) -> Hit | None:
    sent, again = facts.network.segments_sent, facts.network.segments_again
    seen = facts.network.sysctls.get("net.ipv4.tcp_congestion_control")
    if not carriers(facts) or sent is None or again is None or sent.value < SEGMENTS_MIN:
        return None
    ratio = again.value / sent.value
    if ratio < RETRANSMITTED_RATIO_MIN or (seen is not None and seen.value not in ("cubic", "reno")):
        return None
    evidence = (
        again.as_evidence("segments sent again", f"{again.value} of {sent.value} since boot ({ratio:.2%})"),
        *([] if seen is None else [seen.as_evidence("congestion control")]),
    )
    return Hit(
        evidence,
        "sudo modprobe tcp_bbr && sudo sysctl -w net.ipv4.tcp_congestion_control=bbr  # and find the loss: ethtool -S",
        _gain(facts),
    )


def _mtu(facts: NodeFacts) -> Hit | None:
    found = [
        card
        for card in carriers(facts)
        if (card.speed or 0) >= FAST and card.mtu is not None and card.mtu <= ETHERNET_MTU
    ]
    if not found:
        return None
    evidence = [
        item
        for card in found
        for item in (FindingEvidence(f"MTU of {card.name}", str(card.mtu), f"{card.where}/mtu"), _speed(card))
    ]
    return Hit(
        evidence,
        f"sudo ip link set {found[0].name} mtu 9000    # on all nodes and switches on the way, or not at all",
        _gain(facts),
    )


def _duplex(facts: NodeFacts) -> Hit | None:
    evidence = [
        FindingEvidence(f"duplex of {card.name}", card.duplex, f"{card.where}/duplex")
        for card in facts.network.interfaces
        if card.is_physical and card.state == "up" and card.duplex == "half"
    ]
    name = evidence[0].what.rpartition(" ")[2] if evidence else ""
    return hit(evidence, f"sudo ethtool -s {name} autoneg on    # at both ends of the cable")


def _slow_start(facts: NodeFacts) -> Hit | None:
    seen = facts.network.sysctls.get("net.ipv4.tcp_slow_start_after_idle")
    if seen is None or seen.value != "1" or facts.run is None or not is_local_run(facts) or not carriers(facts):
        return None
    pace, ledger = facts.run.pace_ns, facts.run.ledger
    if pace is None or ledger is None or ledger.wall_ns == 0:
        return None
    quiet = pace - pace * ledger.communication_ns // ledger.wall_ns
    if quiet < IDLE_NS:
        return None
    step = FindingEvidence(
        "step", f"{pace / 1e6:.0f} ms, {quiet / 1e6:.0f} ms of it without communication", facts.run.where
    )
    return Hit(
        (seen.as_evidence("tcp_slow_start_after_idle"), step),
        "sudo sysctl -w net.ipv4.tcp_slow_start_after_idle=0",
        _gain(facts),
    )


def _slower_card(facts: NodeFacts) -> Hit | None:
    if facts.run is None or not is_local_run(facts):
        return None
    used = [card for card in carriers(facts) if card.speed]
    best = next(reversed(links(facts)), None)
    if not used or best is None or best.speed is None or (used[0].speed or 0) * SLOWER_RATIO > best.speed:
        return None
    backend = next((hello.backend for hello in facts.run.hellos if hello.backend), "") or ""
    variable = "NCCL_SOCKET_IFNAME" if "nccl" in backend else "GLOO_SOCKET_IFNAME"
    evidence = (FindingEvidence("collectives go through", used[0].name, facts.run.where), _speed(used[0]), _speed(best))
    return Hit(evidence, f"export {variable}={reached_as(best)}", _gain(facts))


RULES = (
    Rule("net-tcp-buffers", Severity.WARNING, "TCP's buffers are smaller than the link needs",
         "a connection's buffers limit its data in flight, however fast the link is", "machine",
         IP_SYSCTL.at("tcp_rmem; tcp_wmem; tcp_adv_win_scale"), _tcp_buffers),
    Rule("net-tcp-buffers-assumed", Severity.INFO, "TCP's buffers may be smaller than the link needs",
         "with a round trip of 1 ms a connection could not fill the link; measure it under load and pass it", "machine",
         IP_SYSCTL.at("tcp_rmem; tcp_wmem; tcp_adv_win_scale"), _tcp_buffers_assumed),
    Rule("net-core-buffers", Severity.INFO, "Programs may not request the buffers that the link needs",
         "TCP sizes buffers by tcp_rmem and tcp_wmem, but these limits apply to SO_RCVBUF and SO_SNDBUF",
         "machine", FindingSource("Linux kernel", "admin-guide/sysctl/net.rst, rmem_max and wmem_max"), _core_buffers),
    Rule("net-reno", Severity.INFO, "TCP uses Reno congestion control",
         "Reno opens the window by one segment per round trip and halves it at each loss, so fast links stay empty",
         "machine", FindingSource("RFC 9438", "CUBIC for Fast and Long-Distance Networks, section 1"), _reno),
    Rule("net-retransmits", Severity.INFO, "TCP retransmits many segments",
         "loss-based congestion control slows down at each loss", "machine",
         FindingSource("Mathis et al. 1997",
         "The Macroscopic Behavior of the TCP Congestion Avoidance Algorithm"), _retransmits),
    Rule("net-mtu", Severity.INFO, "A fast link sends packets of 1500 bytes",
         "six times as many packets as with jumbo frames, each of which costs processor time", "machine",
         FindingSource("ESnet, fasterdata knowledge base", "MTU Issues"), _mtu),
    Rule("net-half-duplex", Severity.WARNING, "A link is half duplex",
         "sending and receiving take turns; one end failed to negotiate", "machine",
         FindingSource("ethtool(8)", "--change, autoneg and duplex"), _duplex),
    Rule("net-slow-start", Severity.INFO, "TCP starts slowly after each pause",
         "a window unused for a retransmission timeout is reset, and communication pauses longer in each step",
         "--run",
         IP_SYSCTL.at("tcp_slow_start_after_idle"), _slow_start),
    Rule("net-slower-card", Severity.WARNING, "Collectives do not go through the fastest interface",
         "gradients use a link with a fraction of another one's speed", "--run",
         TORCH.at("Distributed communication package, Common environment variables"), _slower_card),
)  # fmt: skip
