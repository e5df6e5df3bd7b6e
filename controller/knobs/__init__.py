"""Turns the knobs of a running job, and undoes it.

In come a knob and a value, out goes the changed job: `ddp/` buckets and compression, `dataloader/` workers and
prefetch, micro-batches, the global batch, FSDP2 and DeepSpeed's ZeRO.  Start with `actuator`, which every knob
implements.
"""
