"""Analyses of simulated jobs for the tests of page and merged trace: of one a rank is slow, of the other none is."""

from __future__ import annotations

from collections.abc import Sequence

from pacecar.analysis.all_ranks.rank_comparison import compare_ranks
from pacecar.analysis.document.report import TraceDocument
from pacecar.analysis.one_rank.one_trace import analyze_trace
from pacecar.analysis.reading.parallel_reading import Analysis
from pacecar.analysis.trace.columns import Trace
from tests.kit.simulated_jobs import Fault, FaultKind, Job, Layout, Model, simulate

__all__ = ["SLOW_RANK", "analysis_of", "healthy", "straggling"]

SLOW_RANK = 2

_LAYOUT, _MODEL = Layout(data=4), Model(layers=2)


def analysis_of(traces: Sequence[Trace]) -> Analysis:
    """Return the analysis of traces that were never files."""
    reports = [analyze_trace(trace) for trace in traces]
    job, times = compare_ranks(traces, reports)
    return Analysis(TraceDocument(traces=reports, job=job), tuple(traces), times)


def straggling() -> Analysis:
    """Return a job whose rank `SLOW_RANK` computes a fifth slower."""
    fault = Fault(FaultKind.SLOW_COMPUTE, (SLOW_RANK,), 0.2)
    return analysis_of(simulate(Job(_LAYOUT, _MODEL, faults=(fault,), seed=4)).traces())


def healthy() -> Analysis:
    """Return a job in which nobody is to blame."""
    return analysis_of(simulate(Job(_LAYOUT, _MODEL, seed=4)).traces())
