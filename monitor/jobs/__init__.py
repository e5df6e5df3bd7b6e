"""What the daemon knows of the jobs on this node.

In come validated records and host samples, out goes the state that pages and metrics are made from.
Start with `state`; `job_table` holds jobs and ranks, `rank_health` who is late or silent, `evictions` who makes room.
"""
