"""The batch's knobs: micro-batches, and the global batch (adaptive).

In come sizes in samples or padded tokens, out goes a batch that is cut or put together otherwise, with weighed losses.
Start with `micro_batch_knobs` and `global_batch`.

    micro_batch                splits a batch by `batch_slicing` (pure) and weighs the losses
    micro_batch_knobs          which sizes may be tried; `micro_batch_eligibility` where none may
    oom_safe_trial             tries a larger size where a failure costs no step; `memory_forecast` predicts
    global_batch               puts the loader's batches together into one update
    gradient_noise_meter       measures; `gradient_noise_scale` (pure) says what a batch is worth, and
                               `statistical_pace` lets a policy judge by that
"""
