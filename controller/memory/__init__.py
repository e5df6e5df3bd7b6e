"""What a job has learned, kept for its next start.

In come settings that were kept, out go those of the most alike former job.
Start with `knob_store`; `job_fingerprint` says which jobs are alike, `store_thread` keeps the disk off the step.
"""
