"""Reads the parts of a trace that only tables need: shapes, modules, python frames, stacks, FLOPs, allocator events.

In: the events of a file, decoded with more of their members (`detail_events`).  Out: `detail_columns.TraceDetails`,
whose host columns are parallel to `Trace.host_rows`.  Start at `detail_rows.DetailRows`.

Decoding these members doubles the time, so `read_trace` does it only on request.
"""
