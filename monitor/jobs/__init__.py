"""The state of the jobs on this node.

Validated records and host samples come in; out goes the state that pages and metrics show.  Start with `state`;
`job_table` holds the jobs, `tracked_job` one of them with its ranks, `rank_health` the late, hung and silent ranks, and
`evictions` chooses who makes room.  `silent_jobs` judges a job of which no rank says anything.

`cgroup_identity` finds the container, pod and Slurm job of a process, `job_energy` computes the energy of a step.
`node_signals` derives what the daemon sends to jobs: throttled GPUs, and what else on the node changes step times.
"""
