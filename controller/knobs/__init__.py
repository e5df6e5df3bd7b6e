"""What can be turned in a running job, how, and how it is undone.

In come a knob and a value, out goes the changed job: `ddp/` buckets and compression, `dataloader/` workers and prefetch,
micro-batches, FSDP2 and DeepSpeed's ZeRO.  Start with `actuator`, which every knob implements.
"""
