"""Compares the traces of all ranks: matches collectives, aligns clocks, reports what the causal model finds.

In: the ranks' `Trace`s.  Out: a `report.TraceJob`.  Start at `rank_comparison`, which ties the parts together.

    matching                          which rows of several traces are one collective
    clocks, job_times                 the ranks' clocks as one, and when things happened on it
    collective_arrivals, lateness     waiting and time on the wire; who waited for whom
    all_to_all                        how evenly all-to-alls are spread
    job_model, verdict_report         what the causal model gets, and what it finds as lists of the document
    replayed_scenarios                what-if questions, by replay
    critical_tables                   the critical path's time in the tables of kernels and operators
"""
