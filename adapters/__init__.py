"""Connects hook and knobs to libraries that run the training loop themselves: one module for each library.

    pacecar.adapters.transformers    PacecarCallback for Trainer
    pacecar.adapters.accelerate      attach(accelerator, model, optimizer)
    pacecar.adapters.lightning       PacecarCallback for Trainer
    pacecar.adapters.deepspeed       attach(engine)
    pacecar.adapters.ray             attach(model, optimizer) in a worker of Ray Train
    pacecar.adapters.loggers         TensorBoard, Wandb, Mlflow for attach(loggers=...)

Nothing is imported here: each module imports its library, and says which one is missing.  What an adapter changes in
a library's objects is an attribute of one object, for the time of one training, and is taken back afterwards.

What they share: `shared_attach` unwraps and says the one line, `versions` has the tested ranges, outside of which
nothing is tuned, `regroup` forms other micro-batches so that the trainer counts what it always counted,
`loss_additivity` tries before the first step whether the loss adds up over pieces, `method_descriptors` replaces a
method without putting anything on the object, and `metric_log` makes the entries of the loggers.
"""

from __future__ import annotations
