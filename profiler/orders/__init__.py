"""Carries a person's orders from one rank to all ranks of a job, and their replies back.

In: commands that the daemon of any node passes on to one of its ranks.  Out: replies of all ranks to that daemon.
Start at `job_orders.JobOrders`.

    passing_on   which rank asks which, and what is said of ranks that do not answer
    job_news     the latest records about the whole job, on the ranks that make them
    two_looks    what all ranks are doing, and whether the job hangs
    job_orders   one rank's part: what it carries out itself, and what it has the others do
"""
