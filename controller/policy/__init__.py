"""Decides which setting to try next, and when to stop trying: pure decisions of rank 0.

In come the pace of each setting and forecasts, out go knob changes with their reasons, and decision records.
Start with `tuning_policy`, one state machine; `candidate_selection` and `geometric_search` choose, `detectors` notice
that conditions changed.

    candidate_selection        which trial pays, by search, forecast and exploration budget
    detectors                  that the pace or the all-reduces changed, that a rank is failing
    ordered_policy             runs the user's policy under people's orders and after what an earlier run remembered
    remembered_setting_trial   puts what was remembered to the trial
    policy_sequence            policies one after the other, as if they were one
    sampler_policy             measures one setting after another; `throughput_doubling` names the next one
    registry                   the policy that the configuration names
    decision_records, phrases  records and sentences for people
"""
