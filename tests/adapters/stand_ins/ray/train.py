"""The context of a worker: there is one where RAY_EXPERIMENT names the run, as it is inside of a training function."""

import os
from types import SimpleNamespace


def get_context() -> SimpleNamespace:
    name = os.environ.get("RAY_EXPERIMENT")
    if name is None:
        raise RuntimeError("`get_context` was called outside of a Ray Train training function")
    return SimpleNamespace(get_experiment_name=lambda: name)
