"""The batch's knobs: micro-batches, and the global batch (adaptive).

Input: sizes in samples or padded tokens.  Output: batches that are cut or combined differently, with weighted losses.
Start with `micro_batch_knobs` and `global_batch`.

    micro_batch                splits a batch (`batch_slicing`, pure) and weights the losses
    micro_batch_knobs          which sizes may be tried; `micro_batch_eligibility` says where none may
    oom_safe_trial             forecasts a larger size's memory, and tries it where a failure costs no step
    work_share                 moves samples from slow ranks to fast ones; `share_plan` (pure) computes how many
    global_batch               combines the loader's batches into one update
    gradient_noise_meter       measures; `gradient_noise_scale` (pure) computes what a batch is worth, also to a policy
"""
