"""Connects hook and knobs to libraries that run the training loop themselves: one module for each library.

    transformers    PacecarCallback for Trainer
    accelerate      attach(accelerator, model, optimizer)
    lightning       PacecarCallback for Trainer
    deepspeed       attach(engine)
    ray             attach(model, optimizer) in a worker of Ray Train
    loggers         TensorBoard, Wandb, Mlflow for attach(loggers=...)

This package imports none of them: each module imports its library, and names the one that is missing.  An adapter
changes only attributes of single objects, for the time of one training, and restores them afterwards.

What they share, imported through `guarded_imports`: `shared_attach` unwraps, logs the one line and has the tested
versions, outside of which nothing is tuned.  `regroup` forms other micro-batches without changing the trainer's counts,
`loss_additivity` tests before the first step whether the loss adds up over pieces, `method_descriptors` replaces a
method without changing the object, and `metric_log` makes the entries of the loggers.

To add an adapter, in this order:

1. A module here that imports the library and calls `attach_for` from the library's own callback (`ray` is the shortest,
   `lightning` has a callback).  Import shared parts from `guarded_imports`, so that a broken install does not end the
   job.  If the trainer keeps its batches whole, set `pacer.batcher.refused` to the reason.  A line in this docstring.
2. `adapters/shared_attach.py`: the tested versions, by *distribution* name, which `attach_for` gets, too;
   `requirements/adapters.txt`: the version.
3. `pyproject.toml`, by *import* name: the contract "A trainer's library is known to its adapter only", and mypy's list
   of missing libraries.
4. `tests/adapters/`: a stand-in in `tests/adapters/stand_ins/` that makes the library's calls in its order;
   `job_<library>.py`, which trains (`turning.py` has what jobs share); `test_<library>.py`, which compares with
   `LIBRARIES` of `world.py` and ends in `test_the_table_says_what_ran`.  If importing it starts no threads: `PRELOADED`
   of `world.py`.
5. `tests/adapters/job_unloaded.py`: a training in `ADAPTERS`; `NAMED` in `tests/adapters/test_unloaded.py`.  If it
   saves checkpoints: `tests/adapters/job_saves.py` and `tests/adapters/test_saves.py`.
6. `docs/examples/`: an example for torchrun that takes `--steps` and prints `knobs at the end {...}`.  A row in
   `docs/adapters.md`; `docs/engines.md` if more is to be said.
7. `make compatibility` runs the real library and writes `tests/adapters/ran/` and `docs/compatibility.md`.
"""

from __future__ import annotations
