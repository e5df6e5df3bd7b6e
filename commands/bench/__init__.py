"""What does the job's own road between ranks give?  Collectives of torch.distributed, timed over sizes.

    sizes       what people type                                pure
    operations  one collective: buffers, the call, is it right?
    measure     the rounds of one size on all ranks
    fit         alpha and beta of what was measured             pure
    rated       what the link between the ranks is rated at
    document    the result, for programs
    text        the result in the layout of nccl-tests          pure
    net         one run, from the process group to the exit code

iperf and the vendors' tests say what the wire can do; a job gets what its backend makes of it, so the backend is what
is asked.  Left out: tuning anything (the controller does), collectives that overlap, and operations that no
data-parallel job waits for (all-to-all, broadcast).
"""
