"""Builds the causal model and the document of simulated jobs."""

from __future__ import annotations

from collections.abc import Sequence

from pacecar.analysis.align.collective_matching import match
from pacecar.analysis.align.host_clocks import align_clocks
from pacecar.analysis.all_ranks.causal_model import JobModel
from pacecar.analysis.all_ranks.model_input import model_of
from pacecar.analysis.all_ranks.rank_comparison import analyze_job
from pacecar.analysis.document.report import TraceJob
from pacecar.analysis.one_rank.one_trace import analyze_trace
from pacecar.analysis.shelf import Shelf
from pacecar.analysis.trace.columns import Trace

__all__ = ["analyzed", "modelled"]


def modelled(traces: Sequence[Trace]) -> JobModel:
    """Return the causal model of these traces."""
    matching = match(traces, len(traces))
    model = model_of(traces, matching.groups, matching.events, align_clocks(traces, matching.groups), Shelf())
    assert model is not None
    return model


def analyzed(traces: Sequence[Trace]) -> TraceJob:
    """Return the document's part on the ranks together."""
    return analyze_job(traces, [analyze_trace(trace) for trace in traces])
