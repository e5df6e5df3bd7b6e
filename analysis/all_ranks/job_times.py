"""Holds times on the job's common clock: each trace's clock, and the critical path piece by piece.

The document has the path only as sums by rank and cause.  Drawings (a page, a merged trace) need the time of each piece
and the ranks' times on one axis.  These columns are kept beside the document and are not in the JSON.

Pure: a model in, columns out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..align.clock_fit import RankClockCorrection
from ..graph.causes import CauseCode
from ..graph.critical_path import CriticalPath
from ..trace.columns import NONE, CollectiveColumns
from .causal_model import JobModel

__all__ = ["JobTimes", "PathPiece", "job_times"]

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PathPiece:
    """A stretch of the critical path, [start_ns, end_ns) on the common clock, and what it was spent in.

    `name` is the kernel, the operator or the annotation; None for host time without one.  `operation` is the
    collective's, for time on the wire.
    """

    rank: int
    cause: str
    name: str | None
    operation: str | None
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class JobTimes:
    """The clock of each rank, and the critical path as columns; None if no path was found.

    `ranks`, `names` (those of the traces) are by place, `operations` by the collectives' numbers in the path.
    """

    ranks: Sequence[int]
    clocks: dict[int, RankClockCorrection]
    columns: CriticalPath | None = None
    base_ns: int = 0
    names: Sequence[tuple[str, ...]] = ()
    operations: Sequence[str] = ()

    def path(self) -> list[PathPiece]:
        """Return the path from its beginning on, as pieces without gaps; neighbours differ."""
        if self.columns is None or not len(self.columns.start_ns):
            return []
        path = self.columns
        # Parts without rows that differ in nothing else are one piece.
        kinds = np.stack((path.rank, path.cause.astype(np.int64), path.name, path.row, path.join))[:, ::-1]
        starts, ends = path.start_ns[::-1] + self.base_ns, path.end_ns[::-1] + self.base_ns
        first = np.flatnonzero(np.concatenate(([True], (kinds[:, 1:] != kinds[:, :-1]).any(axis=0))))
        last = np.append(first[1:], len(starts)) - 1
        spans = zip(starts[first].tolist(), ends[last].tolist(), strict=True)
        return [
            PathPiece(
                rank=self.ranks[place],
                cause=CauseCode(cause).word,
                name=self.names[place][name] if name != NONE else None,
                operation=self.operations[join] if join != NONE else None,
                start_ns=start,
                end_ns=end,
            )
            for (place, cause, name, _, join), (start, end) in zip(kinds[:, first].T.tolist(), spans, strict=True)
        ]


def job_times(
    model: JobModel | None,
    ranks: Sequence[int],
    clocks: Sequence[RankClockCorrection],
    collectives: Sequence[CollectiveColumns],
) -> JobTimes:
    """Return the times; `ranks` and `clocks` are by place, `collectives` by their number in the model's input."""
    of_rank = dict(zip(ranks, clocks, strict=True))
    if model is None:
        return JobTimes(ranks, of_rank)
    names = [graph.events.trace.names for graph in model.graph.ranks]
    operations = [collectives[number].operation for number in model.kept_joins.tolist()]
    return JobTimes(ranks, of_rank, model.path, model.graph.base_ns, names, operations)
