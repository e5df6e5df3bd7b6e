"""Turns the knobs of a running job, and undoes it.

In come a knob and a value, out goes the changed job.  Start with `actuator`, which every knob implements.

    ddp              buckets and compression
    dataloader       workers and prefetch
    batch            micro-batches and the global batch
    fsdp2            when FSDP2 gathers parameters
    deepspeed_zero   the two sizes that ZeRO looks at in each step
    foreach_ops      norms of many tensors in one call
"""
