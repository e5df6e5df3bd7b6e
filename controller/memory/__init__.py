"""Keeps what a job has learned for its next start.

Settings that were kept come in; those of an earlier job with the same fingerprint go out.  Start with `knob_store`, the
file; `job_fingerprint` is its key and says which jobs are alike, `store_thread` keeps the disk off the step.  What is
remembered has to prove itself again (`policy.remembered_trial`).
"""
