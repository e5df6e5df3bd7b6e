"""Watches what the training loop draws from its loaders: the waits, the samples, and how much is left.

In: the script's loaders and checkpoints.  Out: phases of the step timer, samples of a batch, the job's expected length.
Start at `data_loading.DataLoading`, which the hook calls.

    timed_loader, data_loading      waits for data, samples, checkpoints
    batch_lengths                   how many samples a batch has
    job_length                      does the job end within a minute?
"""
