"""Checks a trace against itself before it is analyzed: does what it says fit together?

In: a `Trace` as it was read.  Out: the trace without what contradicts the rest, and a warning for each contradiction;
or the reason why there is nothing to analyze.  Start at `examine.examine`.

A reader believes every row that parses.  But a trace has more than one witness for most of what it says: a kernel has
a launch, a stream runs one kernel at a time, a synchronization ends after the work that it waited for, a step has work
in it.  Where two witnesses disagree, a ledger of both would be wrong and look exact.

    examine      runs the checks in order, and stops at the first that refuses the trace
    counts       ranks, sizes of groups and messages, the wall clock: signs and ranges
    recordings   is this one recording?  rows that occur twice, rows far from all others, rows without an end
    streams      a stream runs one kernel at a time
    clocks       do the host's clock and the device's agree?
    kernels      does each launch have its kernel?
    marks        do the marked steps hold the work?
    selection    a trace with some of its rows

What a check does is in its warning (`TraceWarning.effect`): it says so, leaves rows out, cuts the record short, calls a
part of the figures unknown, or refuses.  No answer is better than a wrong one.  Pure: `Trace` in, `Trace` out.
"""
