"""Builds the causal model and the document of simulated jobs."""

from __future__ import annotations

from collections.abc import Sequence

from pacecar.profiler.analysis.all_ranks.clocks import align_clocks
from pacecar.profiler.analysis.all_ranks.job_model import model_of
from pacecar.profiler.analysis.all_ranks.matching.collective_matching import match
from pacecar.profiler.analysis.all_ranks.rank_comparison import analyze_job
from pacecar.profiler.analysis.one_rank.one_trace import analyze_trace
from pacecar.profiler.analysis.report import TraceJob
from pacecar.profiler.causal.model import JobModel
from pacecar.profiler.trace.columns import Trace

__all__ = ["analyzed", "modelled"]


def modelled(traces: Sequence[Trace]) -> JobModel:
    """Return the causal model of these traces."""
    matching = match(traces, len(traces))
    model = model_of(traces, matching.groups, matching.events, align_clocks(traces, matching.groups))
    assert model is not None
    return model


def analyzed(traces: Sequence[Trace]) -> TraceJob:
    """Return the document's part on the ranks together."""
    return analyze_job(traces, [analyze_trace(trace) for trace in traces])
