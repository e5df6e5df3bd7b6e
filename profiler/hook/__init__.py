"""Hooks into the training process: notes where phases and steps begin and end, and makes records of them.

In: torch's hooks of model, optimizer and loader; commands from the daemon.
Out: step records with ledgers, and finished steps for the listener (the tuner).
Start at `hook`; `step_boundary` is the path of every step, `window_schedule` decides when an exact window is taken.
"""
