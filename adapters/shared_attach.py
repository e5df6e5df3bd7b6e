"""Attaches on behalf of an adapter: unwraps the optimizer, and only measures where tuning would be unsafe.

Model and optimizer come wrapped.  Frameworks put an object around the optimizer that looks like torch's own and has
none of its hooks, so the innermost one is attached to.  What an adapter finds unclear ends tuning and not measuring,
and rank 0 logs one line about it.  A user's mistake is an error when the adapter is made (`checked`).

A trainer's loop is not a public interface: which attribute marks a complete update, and what divides the loss, changes
between minor versions.  A knob that reads it wrongly would silently train another model, so nothing is turned outside
the tested versions.  Measuring only needs torch's own hooks.
"""

from __future__ import annotations

import logging
from importlib import metadata
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from pacecar.config import Config, ConfigError
from pacecar.job.attach import Pacer, attach, check_names, with_options
from pacecar.version_numbers import major_minor

__all__ = ["TESTED", "attach_for", "checked", "innermost", "say", "untested"]

logger = logging.getLogger("pacecar")

TESTED: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "transformers": ((5, 23), (5, 23)),
    "accelerate": ((1, 15), (1, 15)),
    "lightning": ((2, 6), (2, 6)),
    "deepspeed": ((0, 19), (0, 19)),
    "ray": ((2, 60), (2, 60)),
}
"""Library -> first and last minor version, both included: what `requirements/adapters.txt` was when tests passed."""

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
        logger.debug("options are not checked", exc_info=True)  # `attach` logs what is wrong with pacecar itself
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


def untested(library: str, version: str | None = None) -> str | None:
    """Return why `library` must not be tuned in this version (by default the installed one), or None."""
    if version is None:
        try:
            version = metadata.version(library)
        except metadata.PackageNotFoundError:
            return f"the version of {library} is unknown"
    found = major_minor(version)
    first, last = TESTED[library]
    if found is not None and first <= found <= last:
        return None
    low, high = (".".join(map(str, bound)) for bound in (first, last))
    return f"{library} {version} is outside the tested versions {low if low == high else f'{low} to {high}'}"


def attach_for(
    library: str,
    model: nn.Module,
    optimizer: object,
    *,
    tune: str | None,
    options: dict[str, Any],
    untuned_because: str | None = None,
) -> Pacer:
    """Attach; only measure if `untuned_because` gives a reason or the installed `library` is an untested version."""
    reason = untuned_because or untested(library)
    if reason is not None and tune != "off":
        say(f"measured, not tuned: {reason}")
        tune = "off"
    return attach(model, innermost(optimizer), tune=tune, **options)
