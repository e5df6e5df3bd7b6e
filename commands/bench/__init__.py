"""Measures the network as the job's own backend uses it: collectives of torch.distributed, timed over sizes.

    command          the options of `pacecar bench net`
    sizes            parses sizes, and lists those to measure              pure
    operations       one collective: its buffers, its call, the check of its result
    measure          times one size on all ranks
    alpha_beta_fit   alpha and beta of what was measured                   pure
    rated_bandwidth  what the link between the ranks is rated at
    document         the result, for programs
    text             the result in the layout of nccl-tests                pure
    net              one run, from the process group to the exit code

iperf and the vendors' tests say what the wire can do; a job gets what its backend makes of it, so the backend is what
is measured.  Left out: tuning anything (the controller does), collectives that overlap, and operations that no
data-parallel job waits for (all-to-all, broadcast).
"""
