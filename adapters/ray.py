"""Measures and tunes a loop under Ray Train: `attach` is called inside the function that each worker runs.

    def train_loop(config):
        model = ray.train.torch.prepare_model(net)
        with attach(model, optimizer, tune="exact") as pacer:
            for batch in pacer.data(loader):
                ...
            with pacer.checkpoint():
                ray.train.report(metrics, checkpoint=checkpoint)

Ray starts the workers, so no launcher's variable names the job: it is named after Ray's run.  The rest is as in a plain
loop, which is what Ray Train's workers run: `prepare_model` returns torch's own DistributedDataParallel or FSDP, and
ranks are torch's.  A worker group that Ray restarts consists of new processes, which attach again.

Ray runs that function on a thread of its own.  Windows are as exact there; torch's profiler prints once, on stderr,
that its callback is of another thread than its registration.

`prepare_data_loader` and Ray's datasets return Ray's own loaders: waits are measured, workers stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from .guarded_imports import attach_for, checked

try:
    from ray import train
except ImportError as error:
    raise ImportError("pacecar.adapters.ray needs Ray Train: pip install 'ray[train]>=2.60'") from error

if TYPE_CHECKING:
    from pacecar.job.handle import Pacer

__all__ = ["attach"]


def attach(model: nn.Module, optimizer: object, *, tune: str | None = None, **options: Any) -> Pacer:  # noqa: ANN401
    """Measure, and unless `tune` is "off" tune, this worker's job; call it on all workers before the first step.

    `model` is what `prepare_model` returned; `options` are those of `pacecar.attach`, `job` by default Ray's run.

    Raises:
        RuntimeError: this is not a worker of Ray Train.
        TypeError: an option does not exist.
        ConfigError: an option or `tune` has a value that is not allowed.
    """
    checked(tune, options)
    name = train.get_context().get_experiment_name()
    if name and options.get("job") is None:
        options = {**options, "job": name}
    return attach_for("ray", model, optimizer, tune=tune, options=options)
