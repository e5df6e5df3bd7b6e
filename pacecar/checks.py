"""Sums up how far the step estimate was off over a whole run, for the demo's closing tables and for a report.

It is apart from `pacecar.records.estimate_check`, which every training process loads and which needs no statistics.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from pacecar.records.estimate_check import CheckedError

__all__ = ["EstimateError", "estimate_error"]


class EstimateError(msgspec.Struct, frozen=True, kw_only=True):
    """How far off the estimate was against `windows` exact windows of all ranks: shares of the step (0..1).

    `own_setting` are those windows whose knobs had been calibrated before; its median is None where there was none.
    """

    windows: int
    median_ratio: float
    worst_ratio: float
    own_setting: int
    own_setting_median_ratio: float | None
    bias_limit_ratio: float | None


def estimate_error(errors: Sequence[CheckedError]) -> EstimateError | None:
    """Sum up the checks of a run; None where there was none."""
    if not errors:
        return None
    ratios = [ratio for ratio, _, _ in errors]
    own = [ratio for ratio, is_own, _ in errors if is_own]
    limits = [limit for _, _, limit in errors if limit is not None]
    return EstimateError(
        windows=len(ratios),
        median_ratio=statistics.median(ratios),
        worst_ratio=max(ratios),
        own_setting=len(own),
        own_setting_median_ratio=statistics.median(own) if own else None,
        bias_limit_ratio=statistics.median(limits) if limits else None,
    )
