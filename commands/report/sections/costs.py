"""Computes what training costs: price times GPUs times hours, for an epoch, a million tokens and the whole run.

One rank is one GPU.  A pace is charged for the GPUs of the ranks that recorded it; the whole run is charged for all
GPUs of the job, including idle ones and the time between steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..document import Cost, CostSide, RunSide

__all__ = ["Prices", "cost_of"]

NS_PER_HOUR = 3_600_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices from the user; at most one of `tokens_per_epoch` and `samples_per_epoch` is given."""

    per_gpu_hour: float | None = None
    samples_per_epoch: int | None = None
    tokens_per_epoch: int | None = None
    epochs: int = 1


def cost_of(
    prices: Prices, gpus: int, measured_gpus: int, sides: Mapping[str, RunSide], run_ns: int | None
) -> Cost | None:
    """Return the costs of the stretches and the run; None without a price."""
    if prices.per_gpu_hour is None:
        return None
    before, after = (_side(prices, measured_gpus, sides.get(name)) for name in ("before", "after"))
    epoch = None
    if prices.tokens_per_epoch is not None:
        epoch = f"{prices.tokens_per_epoch:,} tokens".replace(",", " ")
    elif prices.samples_per_epoch is not None:
        epoch = f"{prices.samples_per_epoch:,} samples".replace(",", " ")
    run = None if run_ns is None else prices.per_gpu_hour * gpus * run_ns / NS_PER_HOUR
    return Cost(
        price_per_gpu_hour=prices.per_gpu_hour,
        gpus=gpus,
        epochs=prices.epochs,
        epoch_of=epoch,
        before=before,
        after=after,
        saved_ratio=_saved_ratio(sides.get("before"), sides.get("after")),
        run=run,
    )


def _saved_ratio(before: RunSide | None, after: RunSide | None) -> float | None:
    """Return the share of the price that is saved: GPUs are paid by the hour, so it is the share of time saved."""
    if before is None or after is None:
        return None
    was, now = before.samples_per_second, after.samples_per_second
    if was is None or now is None:
        return 1 - after.step_mean_ns / before.step_mean_ns if before.step_mean_ns else None
    return 1 - was / now if now else None


def _side(prices: Prices, gpus: int, side: RunSide | None) -> CostSide | None:
    if side is None or prices.per_gpu_hour is None:
        return None
    per_hour = prices.per_gpu_hour * gpus
    samples, tokens = side.samples_per_second, side.tokens_per_second
    seconds = None
    if prices.tokens_per_epoch is not None:
        seconds = prices.tokens_per_epoch / tokens if tokens else None
    elif prices.samples_per_epoch is not None:
        seconds = prices.samples_per_epoch / samples if samples else None
    per_epoch = None if seconds is None else per_hour * seconds / 3600
    return CostSide(
        per_hour=per_hour,
        per_million_samples=per_hour / 3600 * 1e6 / samples if samples else None,
        per_million_tokens=per_hour / 3600 * 1e6 / tokens if tokens else None,
        per_epoch=per_epoch,
        per_epochs=None if per_epoch is None else per_epoch * prices.epochs,
        epoch_seconds=seconds,
    )
