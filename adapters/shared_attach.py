"""Attaches on behalf of an adapter: unwraps the optimizer, and only measures where tuning would be unsafe.

Model and optimizer come wrapped.  Frameworks put an object around the optimizer that looks like torch's own and has
none of its hooks, so what is attached to is the innermost one.  What an adapter finds unclear ends tuning and not
measuring, and rank 0 says so once, in one line.

Left out: what the user typed wrongly, which is an error when the adapter is made (`checked`).
"""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from pacecar.config import Config, ConfigError
from pacecar.job.attach import Pacer, attach, check_names, with_options

from .versions import untested

__all__ = ["attach_for", "checked", "innermost", "say"]

logger = logging.getLogger("pacecar")

WRAPPERS_MAX = 8
"""Optimizers inside one another; a wrapper that contains itself would have no end."""


def checked(tune: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Return `options` for `pacecar.attach`.

    Raises:
        TypeError: an option does not exist.
        ConfigError: an option or `tune` has a value that is not allowed.
    """
    names = {key: value for key, value in options.items() if key not in ("job", "run_dir", "config", "loggers")}
    check_names(names)
    try:
        with_options(Config(), {**names, "mode": tune})
    except ConfigError:
        raise
    except Exception:
        logger.debug("options are not checked", exc_info=True)  # what is wrong with us, `attach` says
    return options


def innermost(optimizer: object) -> Any:  # noqa: ANN401  an Optimizer, or what the library has in its place
    """Return the optimizer inside all wrappers, which keep it in their attribute `optimizer`."""
    for _ in range(WRAPPERS_MAX):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer) or inner is optimizer:
            break
        optimizer = inner
    return optimizer


def say(text: str) -> None:
    """Log one warning, on rank 0."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        logger.warning("pacecar: %s", text)


def attach_for(
    library: str,
    model: nn.Module,
    optimizer: object,
    *,
    tune: str | None,
    options: dict[str, Any],
    untuned_because: str | None = None,
) -> Pacer:
    """Attach; only to measure, where `untuned_because` says why or the installed `library` is an untested version."""
    reason = untuned_because or untested(library)
    if reason is not None and tune != "off":
        say(f"measured, not tuned: {reason}")
        tune = "off"
    return attach(model, innermost(optimizer), tune=tune, **options)
