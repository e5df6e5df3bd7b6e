"""Identifies this training process: which job, launch, rank and device it is, for the daemon and the other ranks.

In: the environment of launcher and scheduler, and the model's process group.  Out: one `JobHello`.
Start at `job_identity`; `launch_id` agrees on a number that only this start of the job has, and `network_interface`
finds the interface that the collectives use.
"""
