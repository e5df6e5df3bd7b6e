"""Defines the JSON result of `pacecar preflight`, in bytes and FLOP a second and nanoseconds; None is unknown."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Check", "LinkMeeting", "NodeChecks", "PreflightFault", "PreflightResult"]

FORMAT = "pacecar-preflight-1"

Check = Literal["compute", "memory", "disk", "hardware", "link", "silent"]


class NodeChecks(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank measured alone.

    `node` is the same for all ranks of a node, `host` its name.  The disk and the hardware are checked by one rank of a
    node only.  `findings` make a node unfit, `warnings` do not; `missing` is what could not be measured (the disk), and
    why; that is a fault if it could be on most nodes.
    """

    rank: int
    node: str
    host: str
    device: str
    flops_per_second: float | None = None
    memory_bytes_per_second: float | None = None
    disk_bytes_per_second: float | None = None
    findings: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


class LinkMeeting(msgspec.Struct, frozen=True, kw_only=True):
    """What two ranks measured together in one round, each way; `error` is why they could not."""

    round: int
    ranks: tuple[int, int]
    forth_bytes_per_second: float | None = None
    back_bytes_per_second: float | None = None
    latency_ns: int | None = None
    error: str | None = None

    @property
    def bytes_per_second(self) -> float | None:
        """The slower way."""
        if self.forth_bytes_per_second is None or self.back_bytes_per_second is None:
            return None
        return min(self.forth_bytes_per_second, self.back_bytes_per_second)


class PreflightFault(msgspec.Struct, frozen=True, kw_only=True):
    """Something slow or broken.

    `ranks` are all ranks of a node, one rank, or the two ends of a link of which neither end alone is slow.  `ratio` is
    the measured value over the peers' median.  Only nodes at fault by themselves are left out, not ends of a link.
    """

    check: Check
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    detail: str
    ratio: float | None = None
    is_between: bool = False


class PreflightResult(msgspec.Struct, frozen=True, kw_only=True):
    """Everything; `untold` is what could not be judged, and why."""

    format: str = FORMAT
    ranks: int
    rounds: int
    nodes: tuple[NodeChecks, ...]
    links: tuple[LinkMeeting, ...]
    faults: tuple[PreflightFault, ...]
    exclude: tuple[str, ...]
    untold: tuple[str, ...]
    wall_ns: int
    pacecar_version: str
    torch_version: str
