"""DDP's knobs: bucket sizes and gradient compression, changed while the job trains.

In come sizes in bytes or a compression's name, out goes a rebuilt Reducer or another communication hook.
Start with `buckets` and `compression` (its arithmetic is in `comm_hook`); both share one Reducer, so `buckets` makes
them together and `reducer` rebuilds it once a switch.  `torch_internals` is the only module that takes a Reducer out of
DDP and puts one in.  `gradient_check` compares the ranks' gradients after a switch.
"""
