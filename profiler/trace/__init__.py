"""Reads trace files: bytes of a file in, one `Trace` of columns out.

In: a trace file of torch.profiler (Chrome JSON; plain, gzip or zstd), intact or damaged.
Out: `columns.Trace`, integers in numpy columns with each string kept once, and warnings about what was odd.
Start at `reader.read_trace`; `details` has what only tables need.
"""
