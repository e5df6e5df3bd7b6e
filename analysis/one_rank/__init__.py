"""Analyzes one rank's trace: its steps, ledger, collectives, families of kernels and what-if scenarios.

Start at `one_trace`; `tables` has what one looks figures up in, and `origins` says what each row came from.
`condensed_trace` merges rows of a trace that is sent to another rank, `timed_stretches` adds what timers of the running
job know, `trace_bytes` encodes it.
"""
