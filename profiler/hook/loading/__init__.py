"""Watches what the training loop draws from its loaders: the waits, the samples, and how much is left.

In: the script's loaders and checkpoints.  Out: phases of the step timer, samples of a batch, the job's expected length.
Start at `data_loading.DataLoading`, which the hook calls.

    timed_loader, data_loading      waits for data, samples, checkpoints
    batch_lengths                   the number of samples in a batch
    job_length                      whether the job will end within a minute
"""
