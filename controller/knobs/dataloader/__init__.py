"""The data loader's knobs: workers and prefetch, changed between two batches.

In comes a number of workers, out goes a loader that continues with the next batch of the same order.
Start with `knobs`; `switchable_loader` is what the script iterates, `worker_set` the processes behind it.
"""
