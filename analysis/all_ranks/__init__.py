"""Compares the traces of all ranks: who waited for whom, and what the causal model of the job answers.

In: the ranks' `Trace`s.  Out: a `report.TraceJob`.  Start at `rank_comparison`, which combines the parts.

    collective_arrivals                waiting and time on the wire; who waited for whom
    all_to_all                         how evenly all-to-alls are spread
    model_input, causal_model          the graph's input from aligned traces; path, replay error and verdict
    job_times                          times of path and ranks on the common clock
    verdict_report                     the verdict as lists of the document
    replayed_scenarios                 what-if questions, by replay
    critical_tables, critical_modules  the critical path's time in the tables, and in modules of the model
"""
