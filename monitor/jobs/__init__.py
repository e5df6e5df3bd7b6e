"""What the daemon knows of the jobs on this node.

In come validated records and host samples, out goes the state that pages and metrics are made from.
Start with `state`; `job_table` holds jobs and ranks, `rank_health` who is late or silent, `evictions` who makes room.

`cgroup_identity` names the container, pod and Slurm job of a process, `job_energy` computes what a step takes.
`node_signals` makes what jobs are told: which GPUs hold their clocks down, and what else on the node changes step
times.
"""
