"""The data loader's knobs: workers and prefetch, changed between two batches.

Input: a number of workers.  Output: a loader that continues with the next batch of the same order.  Start with `knobs`,
which chooses the loader.  The script iterates `switchable_loader`; `worker_set` starts and ends a set of processes
behind it, and `index_sampler` shares its sampler among them.  `randomness_check` detects random draws in the workers,
`worker_limits` computes how many fit; `forecast.gain_model` predicts what other workers are worth.
"""
