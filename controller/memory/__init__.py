"""Keeps what a job has learned for its next start.

In come settings that were kept, out go those of an earlier job with the same fingerprint.
Start with `knob_store`, the file; `job_fingerprint` is its key and says which jobs are alike, `store_thread` keeps the
disk off the step.  What is remembered proves itself again: `policy.remembered_setting_trial`.
"""
