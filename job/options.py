"""Checks the arguments and options of `attach`, and merges the options into a configuration.

Whatever is wrong here is an error at once, where the caller sees it: a misspelt option that is ignored is the worst
configuration bug, because the user believes in it.  Left out: files and environment (`pacecar.config`).
"""

from __future__ import annotations

from typing import Any

import msgspec
from torch import nn

from pacecar.config import Config, ConfigError, HookConfig, TuneConfig

__all__ = ["check_arguments", "check_names", "with_options"]


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
