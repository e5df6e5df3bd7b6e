"""Decides which setting to try next, and when to stop trying: pure decisions of rank 0.

The pace of each setting and forecasts come in; proposals with their reasons and decision records go out. Start with
`tuning_policy`, one state machine, which also makes the policy that the configuration names. `candidate_selection` and
`geometric_search` choose what to try, and `change_detector` notices that conditions changed.

    candidate_selection        which trial pays, by search, forecast and exploration budget
    joint_moves                several knobs tried as one change, because they depend on each other
    change_detector            the pace (`pace_tracker`) or the all-reduces changed, or a rank is failing
    remembered_trial           the first candidate: what an earlier run kept
    hand_orders                people's orders, which come before the policy's proposals
    sampler_policy             measures one setting after another; `throughput_doubling` names the next one
    decision_records, phrases  records and sentences for people

To add a policy: the `Policy` protocol of `controller/observation.py`, which gets observations, returns proposals and
touches nothing else; its name in `TuneConfig.policy` of `pacecar/config.py`, a line in `tuning_policy.make_policy`.
One that pacecar is only compared with: a line in `bench/baselines.py`.
"""
