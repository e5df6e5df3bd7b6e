"""Checks a trace against itself before it is analyzed.

In: a `Trace` as it was read.  Out: the trace without rows that contradict the rest, and a warning for each
contradiction; or the reason why there is nothing to analyze.  Start at `examine.examine`.

A reader accepts every row that parses.  But a trace records most facts more than once: a kernel has a launch, a stream
runs one kernel at a time, a synchronization ends after the work that it waited for, a step contains work.  If two
records disagree, a ledger of both would be wrong and look exact.

    examine      runs the checks in order, and stops at the first that refuses the trace
    counts       signs and ranges of ranks, group and message sizes, and the wall clock
    recordings   is this one recording?  rows that occur twice, far from all others, or without an end
    streams      a stream runs one kernel at a time
    clocks       do the host's clock and the device's agree?
    kernels      does each launch have its kernel?
    marks        do the marked steps contain the work?
    selection    a trace with some of its rows

The warning says what a check did (`TraceWarning.effect`): it reported, left rows out, cut the record short, called a
part of the figures unknown, or refused.  No answer is better than a wrong one.  Pure: `Trace` in, `Trace` out.
"""
