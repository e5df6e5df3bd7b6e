"""Provides `attach`, the one call that measures and tunes a training script, and checks its arguments.

A wrong argument or option raises at once, where the caller sees it: a misspelt option that is ignored is the worst
configuration bug.  A problem in the environment (a bad configuration file, a missing daemon, a second hook, an unknown
torch) never raises.  It is logged once, and the returned pacer is *inert*: `data`, `microbatches` and `backward` still
do their arithmetic, so the same script trains to the same numbers.

The `Pacer` itself is in `handle`, which is available even if this module cannot be imported.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from pacecar.config import Config, ConfigError, HookConfig, TuneConfig, load_config
from pacecar.controller.knobs.batch.micro_batch import MicroBatcher
from pacecar.controller.knobs.batch.oom_safe_trial import OomSafeTrial
from pacecar.profiler.hook.hook import AlreadyAttachedError
from pacecar.profiler.ranks.data_parallel import find_ddp
from pacecar.profiler.transport.record_queue import RecordSink

from .handle import Pacer, inert
from .wiring import JobRun

__all__ = [
    "Pacer",
    "attach",
    "check_arguments",
    "check_names",
    "with_options",
]

logger = logging.getLogger("pacecar")


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    tune: str | None = None,
    micro_batch: int | None = None,
    micro_tokens: int | None = None,
    scaler: torch.amp.GradScaler | None = None,
    job: str | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    config: Config | None = None,
    loggers: Sequence[RecordSink] = (),
    **options: Any,  # noqa: ANN401  checked against HookConfig and TuneConfig, key by key
) -> Pacer:
    """Measure, and unless `tune` is "off" tune, the job that trains `model` with `optimizer`.

    Call it on every rank, after creating the process group and DistributedDataParallel and before the first step.

    Args:
        model: what the loop calls; DistributedDataParallel or not.
        optimizer: its `step` ends a step.
        tune: "off", "advise", "exact", "lossy" or "adaptive"; default as configured ([tune] mode, "exact").
        micro_batch: samples per forward and backward to begin with.  Giving it lets the controller tune it, and the
            loop must use `pacer.microbatches` and `pacer.backward`, or `pacer.train_batch`.
        micro_tokens: the same in padded tokens, for loops that pass `tokens`; tuned instead of `micro_batch`.
        scaler: a GradScaler for `pacer.backward` to use.
        job: name of the job; default from the launcher's environment.
        run_dir: folder for `rank<r>.jsonl`; default none.
        config: all settings; default from file and environment (see `pacecar.config.load_config`).
        loggers: further places for records, see `pacecar.adapters.loggers`; `close` closes them.
        options: any key of [hook] or [tune], for example `exploration_budget=0.02`.

    Returns:
        A Pacer.  It is inert, with the reason in `inert_because` and in the log, if this process already has one,
        if [hook] enabled is false, or if pacecar could not start.

    Raises:
        TypeError: model, optimizer, micro_batch or micro_tokens has a wrong type, or an option does not exist.
        ConfigError: an option or `tune` has a value that is not allowed.
    """
    check_arguments(model, optimizer, {"micro_batch": micro_batch, "micro_tokens": micro_tokens}, options)
    given = {**options, "mode": tune, "job": job, "run_dir": None if run_dir is None else os.fspath(run_dir)}
    trials: OomSafeTrial | None = None
    try:
        batcher = MicroBatcher(find_ddp(model), micro_batch, micro_tokens=micro_tokens, scaler=scaler)
        trials = OomSafeTrial(model, batcher)
        try:
            base = config if config is not None else load_config()
        except ConfigError as error:
            return inert(f"configuration: {error}", trials)
        settings = with_options(base, given)
    except ConfigError:
        raise
    except Exception as error:  # as below
        logger.debug("attach failed", exc_info=True)
        return inert(f"could not start: {type(error).__name__}: {error}", trials, scaler=scaler)
    try:
        if not settings.hook.enabled:
            return inert("[hook] enabled is false", trials, is_wanted=True)
        pacer = Pacer(trials, JobRun(model, optimizer, trials, settings, loggers))
        atexit.register(pacer._end_at_exit)
        return pacer
    except AlreadyAttachedError as error:
        return inert(f"{error}; to measure with this one, close that one first", trials)
    except Exception as error:  # the job comes first: pacecar must not end it
        logger.debug("attach failed", exc_info=True)
        return inert(f"could not start: {type(error).__name__}: {error}", trials, scaler=scaler)


def check_arguments(model: object, optimizer: object, sizes: dict[str, object], options: dict[str, Any]) -> None:
    """Raise TypeError or ConfigError for unusable arguments; `sizes` are those of the micro-batch."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"attach(model=...): a torch.nn.Module is needed, not {type(model).__name__}")
    if not callable(getattr(optimizer, "register_step_post_hook", None)):
        raise TypeError(
            f"attach(optimizer=...): a torch.optim.Optimizer is needed, not {type(optimizer).__name__};"
            " for a wrapper pass the optimizer inside it"
        )
    for name, size in sizes.items():
        if size is not None and (not isinstance(size, int) or isinstance(size, bool)):
            raise TypeError(f"attach({name}=...): a whole number is needed, not {size!r}")
        if size is not None and size < 1:
            raise ConfigError(f"attach({name}={size}): at least 1 is needed")
    check_names(options)


def check_names(options: dict[str, Any]) -> None:
    """Raise TypeError for an option that is neither in [hook] nor in [tune]."""
    known = {*HookConfig.__struct_fields__, *TuneConfig.__struct_fields__}
    for key in options:
        if key not in known:
            raise TypeError(f"attach() has no option {key!r}; it has {', '.join(sorted(known))}")


def with_options(base: Config, options: dict[str, Any]) -> Config:
    """Return `base` with the `options` of [hook] and [tune] that are not None; raise ConfigError for bad values."""
    given = {key: value for key, value in options.items() if value is not None}
    hook = {key: value for key, value in given.items() if key in HookConfig.__struct_fields__}
    tune = {key: value for key, value in given.items() if key in TuneConfig.__struct_fields__}
    try:
        return msgspec.convert(
            {
                "daemon": msgspec.structs.asdict(base.daemon),
                "hook": msgspec.structs.asdict(base.hook) | hook,
                "tune": msgspec.structs.asdict(base.tune) | tune,
            },
            Config,
        )
    except msgspec.ValidationError as error:
        raise ConfigError(f"attach({', '.join(f'{k}={v!r}' for k, v in given.items())}): {error}") from error
