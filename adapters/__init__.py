"""Connects hook and knobs to libraries that run the training loop themselves: one module for each library.

    pacecar.adapters.transformers    PacecarCallback for Trainer
    pacecar.adapters.accelerate      attach(accelerator, model, optimizer)
    pacecar.adapters.lightning       PacecarCallback for Trainer
    pacecar.adapters.deepspeed       attach(engine)
    pacecar.adapters.ray             attach(model, optimizer) in a worker of Ray Train
    pacecar.adapters.loggers         TensorBoard, Wandb, Mlflow for attach(loggers=...)

Nothing is imported here: each module imports its library, and says which one is missing.  What an adapter changes in
a library's objects is an attribute of one object, for the time of one training, and is taken back afterwards.
"""

from __future__ import annotations
