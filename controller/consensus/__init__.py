"""Makes all ranks turn a knob at the same step, or none of them.

In come proposals of rank 0, out go switches that every rank has agreed on, by votes on gloo groups of pacecar's own.
Start with `agreement` (for one rank) and `protocol` (pure; the model checker in tests/ runs it); `rank_agreement` runs
it for several ranks, on two side groups of `profiler/transport`: `channels` carries the votes on one of them.

    capabilities                 which knobs can be turned on every rank
    step_observations            what the ranks tell each other of their steps, and what the policy sees of it
    knob_switch, rehearsal       carries out what was voted for; tries that once before the first trial
    step_boundaries, parting     where boundaries are in scripts that leave out steps; when a rank must leave
"""
