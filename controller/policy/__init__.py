"""Decides which setting to try next, and when to stop trying: pure decisions of rank 0.

In come the pace of each setting and forecasts, out go knob changes with their reasons, and decision records.
Start with `tuning_policy`; `candidate_selection` and `geometric_search` choose, `change_detector` notices that
conditions changed.
"""
