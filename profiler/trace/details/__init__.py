"""Reads what only tables need of a trace: shapes, modules, python frames, stacks, FLOPs and the allocator's events.

In: the events of a file, decoded with more of their members (`detail_events`).  Out: `detail_columns.TraceDetails`,
whose host columns lie beside those of `Trace.host_rows`.  Start at `detail_rows.DetailRows`.

Decoding these members takes about as long again as all else, so `read_trace` does it only where it is asked to.
"""
