"""Provides `attach`, the one call with which a training script is measured and tuned; it returns a `Pacer`.

`attach` connects the rooms inside the training process: the hook that measures, the sinks that carry records away, and
the tuner that turns knobs.  What the caller typed wrongly is an error at once, where he sees it.  What is wrong with
the world (a bad configuration file, a missing daemon, a second hook, a torch that is not understood) never is.  It is
logged once, and the pacer that comes back is *inert*: `data`, `microbatches` and `backward` still do their arithmetic,
so the same script trains to the same numbers.

`check_arguments` checks the arguments and options of `attach`, and merges the options into a configuration.

Whatever is wrong here is an error at once, where the caller sees it: a misspelt option that is ignored is the worst
configuration bug, because the user believes in it.  Left out: files and environment (`pacecar.config`).

Left out: the `Pacer` itself (`handle`), which is there where this module cannot be imported.
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

    Call it on every rank, after the process group and DistributedDataParallel are made and before the first step.

    Args:
        model: what the loop calls; DistributedDataParallel or not.
        optimizer: its `step` ends a step.
        tune: "off", "advise", "exact", "lossy" or "adaptive"; default as configured ([tune] mode, "exact").
        micro_batch: samples per forward and backward to begin with.  Giving it lets the controller tune it, and the
            loop must use `pacer.microbatches` and `pacer.backward`, or `pacer.train_batch`.
        micro_tokens: the same in padded tokens, for loops that say `tokens`; it is tuned in place of `micro_batch`.
        scaler: a GradScaler that `pacer.backward` shall use.
        job: name of the job; default from the launcher's environment.
        run_dir: folder for `rank<r>.jsonl`; default none.
        config: all settings; default from file and environment (see `pacecar.config.load_config`).
        loggers: where records go besides, see `pacecar.adapters.loggers`; `close` closes them.
        options: any key of [hook] or [tune], for example `exploration_budget=0.02`.

    Returns:
        A Pacer.  It is inert, with the reason in `inert_because` and in the log, when this process already has one,
        when [hook] enabled is false, or when pacecar could not start.

    Raises:
        TypeError: model, optimizer, micro_batch or micro_tokens is of a wrong type, or an option does not exist.
        ConfigError: an option or `tune` has a value that is not allowed.
    """
    check_arguments(model, optimizer, {"micro_batch": micro_batch, "micro_tokens": micro_tokens}, options)
    rescue: OomSafeTrial | None = None
    try:
        batcher = MicroBatcher(find_ddp(model), micro_batch, micro_tokens=micro_tokens, scaler=scaler)
        rescue = OomSafeTrial(model, batcher)
        base = config if config is not None else load_config()
    except ConfigError as error:
        return inert(f"configuration: {error}", rescue, scaler=scaler)
    except Exception as error:  # as below
        logger.debug("attach failed", exc_info=True)
        return inert(f"could not start: {type(error).__name__}: {error}", rescue, scaler=scaler)
    given = {**options, "mode": tune, "job": job, "run_dir": None if run_dir is None else os.fspath(run_dir)}
    try:
        settings = with_options(base, given)
    except ConfigError:
        raise
    except Exception as error:  # as below: msgspec looks at our modules anew, and they may be gone
        logger.debug("attach failed", exc_info=True)
        return inert(f"could not start: {type(error).__name__}: {error}", rescue, scaler=scaler)
    if not settings.hook.enabled:
        return inert("[hook] enabled is false", rescue, level=logging.INFO)
    try:
        pacer = Pacer(rescue, JobRun(model, optimizer, rescue, settings, loggers))
        atexit.register(pacer._end_at_exit)
        return pacer
    except AlreadyAttachedError as error:
        return inert(f"{error}; close that one first if this one shall measure", rescue)
    except Exception as error:  # the job comes first: nothing of ours may end it
        logger.debug("attach failed", exc_info=True)
        return inert(f"could not start: {type(error).__name__}: {error}", rescue)


def check_arguments(model: object, optimizer: object, sizes: dict[str, object], options: dict[str, Any]) -> None:
    """Raise TypeError or ConfigError for arguments that cannot be used; `sizes` are those of the micro-batch."""
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
    """Raise TypeError for an option that is neither of [hook] nor of [tune]."""
    known = {*HookConfig.__struct_fields__, *TuneConfig.__struct_fields__}
    for key in options:
        if key not in known:
            raise TypeError(f"attach() has no option {key!r}; it has {', '.join(sorted(known))}")


def with_options(base: Config, options: dict[str, Any]) -> Config:
    """Return `base` with `options` of [hook] and [tune] that are not None; raise ConfigError for values not allowed."""
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
