"""Writes the result of `pacecar preflight` for people, and the nodes to leave out in the launcher's own words. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from pacecar.formatting.plain_text import clean
from pacecar.formatting.quantities import DASH, bandwidth, plural
from pacecar.formatting.tables import TextColumn, table_lines

from .document import LinkMeeting, NodeChecks, PreflightFault, PreflightResult

__all__ = ["leave_out", "lines"]

SHOWN = 40
"""Ranks in the table; those at fault come first."""

HEAD = ("rank", "host", "device", "TFLOP/s", "memory", "disk", "slowest link", "latency", "verdict")
LEFT = {"host", "device", "verdict"}


def lines(result: PreflightResult, backend: str | None, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of the table, the faults and what to do."""
    over = "" if backend is None else f", {result.rounds} rounds of links over {backend}"
    yield f"# preflight: {plural(result.ranks, 'rank')}{over}, {result.wall_ns / 1e9:.1f} s"
    named: dict[int, list[PreflightFault]] = defaultdict(list)
    for fault in result.faults:
        for rank in fault.ranks:
            named[rank].append(fault)
    links: dict[int, list[LinkMeeting]] = defaultdict(list)
    for meeting in result.links:
        for rank in meeting.ranks:
            links[rank].append(meeting)
    first = sorted(result.nodes, key=lambda one: (one.rank not in named, one.rank))[:SHOWN]
    rows = [_row(one, links[one.rank], named[one.rank]) for one in sorted(first, key=lambda one: one.rank)]
    widths = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)]
    columns = [TextColumn(title, width, title not in LEFT) for title, width in zip(HEAD, widths, strict=True)]
    yield from table_lines(columns, rows)
    if len(result.nodes) > SHOWN:
        yield f"and {plural(len(result.nodes) - SHOWN, 'more rank')}; --json has all"
    yield ""
    for fault in result.faults:
        yield clean(f"{_who(fault)}: {fault.check}: {fault.detail}")
    for one in result.nodes:
        yield from (clean(f"rank {one.rank} on {one.host}: note: {warning}") for warning in one.warnings)
    yield from (clean(f"cannot be told: {reason}") for reason in result.untold)
    if not result.faults:
        yield "nothing is slow or broken" if not result.untold else "nothing is slow or broken, of what could be told"
    elif result.exclude:
        yield clean(leave_out(result.exclude, environ))
    else:
        yield "no node is at fault by itself: leave out one end of the slow link, or have it repaired"


def leave_out(hosts: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return how to start the job without these hosts, as Slurm, Kubernetes or Open MPI are told; else their names."""
    if "SLURM_JOB_ID" in environ:
        return f"leave out: sbatch --exclude={','.join(hosts)}"
    if "KUBERNETES_SERVICE_HOST" in environ:
        if not environ.get("NODE_NAME"):  # then they are the names of pods
            return f"leave out the nodes of the pods {' '.join(hosts)} (set NODE_NAME to have them named)"
        return f"leave out: kubectl cordon {' '.join(hosts)}"
    if "OMPI_COMM_WORLD_SIZE" in environ or "PRTE_MCA_prte_launch" in environ:
        return f"leave out of the host file: {' '.join(hosts)}"
    return f"leave out: {' '.join(hosts)}"


def _row(one: NodeChecks, links: Sequence[LinkMeeting], faults: Sequence[PreflightFault]) -> tuple[str, ...]:
    rates = [rate for link in links if (rate := link.bytes_per_second) is not None]
    waits = [link.latency_ns for link in links if link.latency_ns is not None]
    verdict = Counter("between" if fault.is_between else fault.check for fault in faults)
    return (
        str(one.rank),
        one.host,
        one.device,
        DASH if one.flops_per_second is None else f"{one.flops_per_second / 1e12:.3g}",
        bandwidth(one.memory_bytes_per_second),
        bandwidth(one.disk_bytes_per_second),
        bandwidth(min(rates, default=None)),
        DASH if not waits else f"{max(waits) / 1000:.0f} us",
        ", ".join(verdict) or "fit",
    )


def _who(fault: PreflightFault) -> str:
    ranks = ", ".join(map(str, fault.ranks[:4])) + (", ..." if len(fault.ranks) > 4 else "")
    if fault.is_between:
        return f"between ranks {ranks} ({' and '.join(fault.hosts)})"
    return f"rank {ranks} on {', '.join(fault.hosts) or 'an unknown host'}"
