"""Hooks into the training process: notes where phases and steps begin and end, and makes records of them.

In: torch's hooks of model, optimizer and loader; commands from the daemon.
Out: step records with ledgers, and finished steps for the listener (the tuner).
Start at `hook`; `step_boundary` is the path of every step, `window_schedule` decides when an exact window is taken.

    phase_hooks                     notes forward, backward and optimizer
    module_calls, step_hooks        see the model's calls and the optimizer's steps, with nothing on the user's objects
    optimizer_succession            whose steps count when the script makes a new optimizer for the model
    step_records                    makes the records later, on threads that look anyway, because python between two
                                    steps runs with cold caches
    counted_steps                   adds steps to the totals that were only counted
    loading                         what the loop draws from its loaders: waits, samples, how much is left
    commands                        what the daemon sends: the command `trace`, the state of the device
    identity                        who this process is
    single_instance                 one active hook a process
"""
