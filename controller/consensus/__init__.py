"""Makes all ranks turn a knob at the same step, or none of them.

In come proposals of rank 0, out go switches that every rank has agreed on, by votes on gloo groups of pacecar's own.
Start with `agreement` and `protocol` (pure; the model checker in tests/ runs it); `channels` carries the votes.
"""
