"""Writes the ledgers of all ranks, their work and the critical path as one trace, for Perfetto and chrome://tracing.

In: an `Analysis`, the document with the columns and times behind it.  Out: a file.  Start at `perfetto.write_perfetto`.

    perfetto       the file: ledgers, steps and counters of each rank, on the corrected clocks
    rank_rows      kernels by stream and host rows by thread, if several ranks share a file
    path_slices    the critical path, with an arrow wherever it goes to another rank
    trace_events   events of the format as bytes
"""
