"""The hook in the training process: where a step begins and ends, and what is written of it.

In come torch's hooks of model, optimizer and loader, out go step records and ledgers.
Start with `hook`; `step_boundary` is the path of every step, `window_schedule` decides when an exact window is taken.
"""
