"""DDP's knobs: bucket sizes and gradient compression, changed while the job trains.

In come sizes in bytes or a compression's name, out goes a rebuilt Reducer or another communication hook.
Start with `buckets`; `reducer` rebuilds, `torch_internals` is the only module that takes a Reducer out of DDP and
puts one in.
"""
