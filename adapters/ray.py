"""Measures and tunes a loop under Ray Train: `attach` is called inside the function that each worker runs.

    def train_loop(config):
        model = ray.train.torch.prepare_model(net)
        with attach(model, optimizer, tune="exact") as pacer:
            for batch in pacer.data(loader):
                ...
            with pacer.checkpoint():
                ray.train.report(metrics, checkpoint=checkpoint)

Ray starts the workers, so none of a launcher's variables names the job: its name is that of Ray's run.  All else is as
in a plain loop, because that is what Ray Train's workers run: `prepare_model` returns torch's own
DistributedDataParallel or FSDP, and ranks are torch's.  A worker group that Ray starts anew is new processes, and
attaches anew.

Ray runs that function on a thread of its own.  Windows are as exact there; torch's profiler says once, on stderr, that
its callback is of another thread than its registration.

Left out: data. `prepare_data_loader` returns a loader of Ray's own, and so do its datasets: waits are measured, workers
stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from pacecar import inert_attach

_unloaded: Exception | None = None
try:
    from .shared_attach import attach_for, checked
except Exception as error:  # noqa: BLE001  a broken install: the script trains on, with an inert pacer
    _unloaded = error

try:
    from ray import train
except ImportError as error:
    raise ImportError("pacecar.adapters.ray needs Ray Train: pip install 'ray[train]>=2.60'") from error

if TYPE_CHECKING:
    from pacecar.job.handle import Pacer

__all__ = ["attach"]


def attach(model: nn.Module, optimizer: object, *, tune: str | None = None, **options: Any) -> Pacer:  # noqa: ANN401
    """Measure, and unless `tune` is "off" tune, the job of this worker; call it on all of them before the first step.

    `model` is what `prepare_model` returned; `options` are those of `pacecar.attach`, `job` by default Ray's run.

    Raises:
        RuntimeError: this is no worker of Ray Train.
        TypeError: an option does not exist.
        ConfigError: an option or `tune` has a value that is not allowed.
    """
    if _unloaded is None:
        checked(tune, options)
    name = train.get_context().get_experiment_name()
    if name and options.get("job") is None:
        options = {**options, "job": name}
    if _unloaded is not None:
        unmeasured: Pacer = inert_attach(_unloaded)(model, optimizer)
        return unmeasured
    return attach_for("ray", model, optimizer, tune=tune, options=options)
