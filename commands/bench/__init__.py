"""Measures the network through the job's own backend: collectives of torch.distributed, timed over sizes.

    command          the options of `pacecar bench net`
    sizes            parses sizes, and lists those to measure              pure
    operations       one collective: buffers, call, check of the result
    measure          times one size on all ranks
    alpha_beta_fit   fits latency and bandwidth to the measured times      pure
    rated_bandwidth  the rated speed of the link between the ranks
    document         the result, for programs
    text             the result in the layout of nccl-tests                pure
    net              one run, from the process group to the exit code
    algorithms       a run under each of several settings of NCCL, in processes of their own
    tuner_csv        which of them won, for NCCL's example tuner plugin    pure

iperf and vendors' tests measure the wire; a job gets what its backend makes of it.  Left out, as weighed in
docs/decisions (bench net): overlapping collectives, and operations that no data-parallel job waits for (all-to-all,
broadcast).
"""
