"""Identifies this training process by job, launch, rank and device, for the daemon and the other ranks.

In: the environment of launcher and scheduler, and the model's process group.  Out: one `JobHello`.
Start at `job_identity`; `launch_id` agrees on a number unique to this start of the job, and `network_interface` finds
the interface that the collectives use.
"""
