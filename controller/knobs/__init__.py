"""Turns the knobs of a running job, and undoes it.

In come a knob and a value, out goes the changed job: `ddp/` buckets and compression, `dataloader/` workers and
prefetch, micro-batches, the global batch, FSDP2 and DeepSpeed's ZeRO.  Start with `actuator`, which every knob
implements.

    micro_batch                splits a batch by `batch_slicing` (pure) and weighs the losses
    micro_batch_knobs          which sizes may be tried; `micro_batch_eligibility` where none may
    oom_safe_trial             tries a larger size where a failure costs no step; `memory_forecast` predicts
    global_batch               puts the loader's batches together into one update
    gradient_noise_meter       measures; `gradient_noise_scale` (pure) says what a batch is worth, and
                               `statistical_pace` lets a policy judge by that
    fsdp2                      when FSDP2 gathers parameters
    deepspeed_zero             the two sizes that ZeRO looks at in each step
    foreach_ops                norms of many tensors in one call
"""
