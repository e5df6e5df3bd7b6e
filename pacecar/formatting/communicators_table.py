"""Makes the table of what NCCL's Inspector measured, for `pacecar analyze` and `pacecar report`."""

from __future__ import annotations

from collections.abc import Sequence

from pacecar.nccl_inspector import CommunicatorBandwidth

from .quantities import unit_for
from .tables import Table, TableColumn

__all__ = ["communicators_table"]

NAME_CHARACTERS_MAX = 18
"""A hash has so many."""


def communicators_table(found: Sequence[CommunicatorBandwidth], most: int) -> Table | None:
    """Return the collectives, sends and receives of each communicator, as NCCL's Inspector measured them."""
    rows = found[:most]
    if not rows:
        return None
    columns = [
        TableColumn.text("operation", [row.operation for row in rows]),
        TableColumn.text("communicator", [row.name or row.communicator for row in rows], most=NAME_CHARACTERS_MAX),
        TableColumn.text("id", [row.communicator for row in rows], "wide"),
        TableColumn.size("size", [row.bytes for row in rows]),
        TableColumn.count("ranks", [row.ranks for row in rows]),
        TableColumn.count("nodes", [row.nodes for row in rows], "wide"),
        TableColumn.count("count", [row.count for row in rows]),
        TableColumn.time("median", unit_for([row.median_ns for row in rows]), [row.median_ns for row in rows]),
        TableColumn.bandwidth("alg bw", [row.algorithm_bandwidth for row in rows], "wide"),
        TableColumn.bandwidth("bus bw", [row.bus_bandwidth for row in rows]),
        TableColumn.text("of", [row.highest for row in rows], "wide"),
        TableColumn.bandwidth("lowest", [row.lowest_bus_bandwidth for row in rows]),
        TableColumn.text("lowest of", [row.lowest for row in rows], "wide"),
    ]
    note = (
        "Medians of the rank with the highest bus bandwidth, which waited least: times include waiting for the last"
        " rank. The lowest waited longest, or has a worse link."
    )
    cut = f"the first {len(rows)} of {len(found)}" if len(rows) < len(found) else ""
    return Table("Communicators (NCCL's Inspector)", columns, note=note, cut=cut)
