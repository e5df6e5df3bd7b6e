"""Detects that a job has changed, while nothing is tried or in spite of what is tried.

In: observations of steps.  Out: alarms for `tuning_policy`, with the windows since the change.
Start at `change_detector`: by the job's pace, which `pace_tracker` tracks (CUSUM), or by its all-reduces.
`stall_detector` detects that a rank is failing, and that it is over.
"""
