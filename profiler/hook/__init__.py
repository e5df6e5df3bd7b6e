"""Hooks into the training process: records when phases and steps begin and end.

In: torch's hooks of model, optimizer and loader; commands from the daemon.
Out: step records with ledgers, and finished steps for the listener (the tuner).
Start at `hook`; `step_boundary` is the path of every step, `window_schedule` decides when an exact window is taken.

    phase_hooks                     times forward, backward and optimizer
    module_calls, step_hooks        observe the model's calls and the optimizer's steps without touching user objects
    optimizer_succession            which optimizer's steps count after the script makes a new one for the model
    step_records                    builds the records later, on other threads, because Python code between two steps
                                    runs with cold caches
    loading                         what the loop draws from its loaders: waits, samples, how much is left
    commands                        what the daemon sends: the `trace` command, the state of the device
    identity                        the identity of this process: job, launch, rank, device
    single_instance                 at most one active hook per process
"""
