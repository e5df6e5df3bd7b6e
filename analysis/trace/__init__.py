"""Reads trace files: bytes of a file in, one `Trace` of columns out.

In: a trace file of torch.profiler (Chrome JSON; plain, gzip or zstd), intact or damaged.
Out: `columns.Trace`, integers in numpy columns with each string kept once, and warnings about what was odd.
Start at `reader.read_trace`.

    decoding                             bytes into typed events and the header
    rows, column_parts                   events into columns, batch by batch
    row_kinds, times, begin_end_pairs    which rows are kept; times as exact integers; begins and ends joined
    assemble, kernel_links, collectives  the columns of all batches into one trace; which kernel is which collective
    steps                                the steps that the trace marks, and the window of each
    host_activity                        which host threads train, and why the device had nothing to do
    details                              what only tables need
"""
