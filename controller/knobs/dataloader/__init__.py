"""The data loader's knobs: workers and prefetch, changed between two batches.

In comes a number of workers, out goes a loader that continues with the next batch of the same order.
Start with `knobs`, which chooses the loader; `switchable_loader` is what the script iterates, `worker_set` starts and
ends a set of processes behind it, `index_sampler` shares its sampler among them.  `randomness_check` sees random draws
in the workers, `worker_limits` says what there is room for; what other workers are worth is `forecast.dataloader`.
"""
