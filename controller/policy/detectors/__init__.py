"""Detects that conditions changed, also during trials: observations in, alarms for `tuning_policy` out.

Start with `change_detector`: by the job's pace, which `pace_tracker` tracks (CUSUM), or by its all-reduces.
`stall_detector` detects that a rank is failing, and that this is over.
"""
