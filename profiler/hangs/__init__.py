"""Finds out why a job hangs: one rank asks all what they are doing, and names the one that holds the others up.

In: progress of this rank from `ranks.rank_monitor`; accounts of the other ranks.  Out: `HangVerdict` records.
Start at `hang_watch.HangWatch`.  The verdict itself is `pacecar.analysis.hang`'s.

    hang_detector          how long this rank has ended no step, and from when on that is unusual
    rank_account           what this rank is doing, for the others
    torch_flight_recorder  the collectives that a rank has begun but not finished
    account_road           how ranks ask each other: sockets of our own
    inquiry                several rounds of accounts, and whether they allow a verdict
    nccl_witness           what NCCL's RAS and log say, as evidence
    hang_evidence          the accounts behind a verdict, as a file in the run folder
    hang_watch             when to ask, who judges, and what is reported
"""
