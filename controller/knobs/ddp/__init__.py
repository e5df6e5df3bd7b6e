"""DDP's knobs: bucket sizes and gradient compression, changed while the job trains.

Input: sizes in bytes or a compression's name.  Output: a rebuilt Reducer or another communication hook.  Start with
`buckets` and `compression` (its arithmetic is in `comm_hook`).  Both share one Reducer, so `buckets` creates them
together and `reducer` rebuilds it once per switch.  Only `torch_internals` takes a Reducer out of DDP and puts one in.
`gradient_check` compares the ranks' gradients after a switch.
"""
