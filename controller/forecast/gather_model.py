"""Forecasts what FSDP2's knobs save, from the bytes of its modules and an exact window.

In a micro-batch every module is gathered before its forward, again before its backward if it freed its parameters, and
its gradients are reduced once:

    frees   gather ... gather ... reduce        keeps   gather ............ reduce

So keeping saves one collective of a module, a known share of all communication: by number where latency binds, by bytes
where bandwidth does (a reduction sends up to twice a gather's bytes, as gloo's reduce-scatter does).  Which of these,
the window does not say, but modules of similar size make it matter little.  Nor does the window say whether the saved
gathers were exposed.  The mean assumes as often as any; the bounds are all of them and as few as possible.  A model on
the host waits for each gather (FSDP2 gathers with `async_op=False`) and then copies it, which the window counts as
compute.  A setting that was timed tells more: the model then counts as far as it was right.

Pure.  Left out: kept memory that makes the allocator slower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean

from ..observation import ShardedBytes
from .forecast import Forecast
from .setting_history import SettingReading, TypicalPace

__all__ = ["expect_prefetch", "expect_reshard"]

REDUCE_BYTES = (1, 2)
"""Bytes that reducing a module's gradients sends, over those of a gather, at least and at most."""

COPY_NS, COPY_NS_MAX = 0.7, 1.5
"""What the host takes to page in and to copy a gathered byte, usually and at most (0.6 and 1.2 on two cores)."""

UNIFORM_ERROR = 1 / math.sqrt(12)
"""Standard deviation of a uniform distribution over its width."""

ERROR_MIN = 0.01
"""Standard error of any forecast here, as a share of the step: kept memory changes caches and the allocator's work."""

PREFETCH_SHARE = 0.25
"""Share of what more prefetching could hide at most that it is expected to hide, and half of its error."""


def expect_reshard(
    modules: ShardedBytes, paces: Mapping[int, TypicalPace], here: int, to: int, reading: SettingReading
) -> Forecast:
    """Return the gain if `to` blocks free their parameters after forward, not `here`; `reading` is a window of `here`.

    `paces` are the typical ones by the number of blocks that free theirs.
    """
    gain, spread = _by_window(modules, here, to, reading)
    if gain == 0.0 or reading.exposed_ns == 0:
        return Forecast(0.0, 0.0, "no communication is exposed, nothing to win")
    weights, scales = [(gain / spread) ** 2], [1.0]  # how often the model's gain is the true one
    present = paces.get(here)
    for value, pace in paces.items():
        modelled = 0.0 if present is None or value == here else _by_window(modules, here, value, reading)[0]
        if present is not None and modelled != 0.0:
            error = math.hypot(pace.error_ratio, present.error_ratio)
            weights.append((modelled / error) ** 2)
            scales.append((1 - pace.ns / present.ns) / modelled)
    scale = sum(w * s for w, s in zip(weights, scales, strict=True)) / sum(weights)
    count = abs(here - to)
    basis = f"{count} {'gather' if count == 1 else 'gathers'} {'fewer' if to < here else 'more'} in each backward"
    return Forecast(gain * scale, math.hypot(gain / math.sqrt(sum(weights)), ERROR_MIN), basis)


def expect_prefetch(here: int, to: int, reading: SettingReading) -> Forecast:
    """Return the gain of gathering `to` modules ahead, not `here`; at best, the step is as long as its link works."""
    most_ns = min(reading.exposed_ns, max(0, reading.wall_ns - reading.communication_ns))
    most = most_ns / reading.wall_ns
    if most == 0.0:
        return Forecast(0.0, 0.0, "no exposed communication could be hidden")
    gain = PREFETCH_SHARE * (most if to > here else -most)
    return Forecast(gain, math.hypot(2 * gain, ERROR_MIN), f"{most:.0%} of the step is communication that could hide")


def _by_window(modules: ShardedBytes, here: int, to: int, reading: SettingReading) -> tuple[float, float]:
    """Return the gain by the model alone, and its standard error."""
    first, last = sorted((here, to))
    moved = sum(modules.freeable_bytes[first:last])
    saved_ns = [share * reading.communication_ns for share in _moved_shares(modules, here, to, moved)]
    exposed = reading.exposed_ns / max(1, reading.communication_ns)
    mean_ns, least_ns, most_ns = exposed * fmean(saved_ns), min(saved_ns), max(saved_ns)
    if modules.on_host:
        mean_ns = fmean(saved_ns) + COPY_NS * moved
        low_ns, high_ns = exposed * least_ns, most_ns + COPY_NS_MAX * moved
    elif to < here:
        hidden_ns = reading.communication_ns - reading.exposed_ns
        low_ns, high_ns = max(0.0, least_ns - hidden_ns), min(most_ns, float(reading.exposed_ns))
    else:
        low_ns, high_ns = 0.0, most_ns
    spread = UNIFORM_ERROR * (high_ns - low_ns) / reading.wall_ns
    return math.copysign(mean_ns / reading.wall_ns, here - to), math.hypot(spread, ERROR_MIN)


def _moved_shares(modules: ShardedBytes, here: int, to: int, moved: int) -> list[float]:
    """Return what gathering `moved` bytes takes of the communication under `here`: by number, then by bytes."""
    sizes = (*modules.freeable_bytes, *modules.other_bytes)
    now = sum(modules.freeable_bytes[:here])
    return [
        abs(here - to) / (2 * len(sizes) + here),
        *(moved / ((1 + ratio) * sum(sizes) + now) for ratio in REDUCE_BYTES),
    ]
