"""Makes all ranks turn a knob at the same step, or none of them.

Input: proposals of rank 0.  Output: switches that every rank agreed on, by votes on gloo groups of pacecar's own. Start
with `protocol` (pure; the model checker in tests/ runs it) and `rank_agreement`, which runs it for several ranks;
`channels` carries its votes.  `agreement` is what the tuner calls; a job of one rank agrees there at once.

    capabilities        which knobs every rank can turn
    step_observations   what ranks tell each other about their steps, and what the policy sees of it
    knob_switch         carries out what was voted for, and rehearses it before the first trial
    step_boundaries     boundaries for scripts that skip steps, and when a rank must leave
"""
