"""Builds the sentences about tuning that people read, so that all of them agree."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from pacecar.knobs import setting

from ..experiment.ab_trial import AbortCause, TrialEnd
from ..experiment.sequential_test import SequentialTest
from ..forecast.forecast import Forecast

__all__ = [
    "UNEARNED",
    "attribution",
    "change",
    "changes",
    "expectation",
    "hopeless",
    "progress",
    "saving",
    "setting",
    "staying",
    "trial_reason",
    "unprovable",
    "verdict_reason",
]

UNEARNED = "no trial yet: the first profiled step comes before it, and the overhead budget must pay for its switches"


def change(knob: str, old: int, new: int) -> str:
    """Return "knob old -> new"."""
    return f"{knob} {setting(knob, old)} -> {setting(knob, new)}"


def changes(kept: Mapping[str, int], new: Iterable[tuple[str, int]]) -> str:
    """Return "knob old -> new" of every knob that is turned."""
    return ", ".join(change(knob, kept[knob], value) for knob, value in new)


def attribution(changes: Sequence[tuple[str, int]], shares: Sequence[float], gain: float | None) -> str:
    """Return how much of a joint `gain` the model attributes to each knob; nothing where it cannot."""
    expected = math.fsum(shares)
    if gain is None or expected <= 0:
        return ""
    parts = (f"{knob} {gain * share / expected * 100:.1f} %" for (knob, _), share in zip(changes, shares, strict=True))
    return f"; by the model {', '.join(parts)}"


def hopeless(change: str) -> str:
    """Return that a change is left out because it should cost more than it gains."""
    return f"{change}: not expected to pay for a trial"


def unprovable(change: str, steps: float) -> str:
    """Return that a change is left out for now because a trial would take so many steps to prove it."""
    if steps == math.inf:
        return hopeless(change)
    unit = 10 ** math.floor(math.log10(steps))  # one digit, so that not every window changes the text
    return f"{change}: not tried yet, at this noise a proof takes about {math.ceil(steps / unit) * unit} steps"


def staying(knob: str, now: int, old: int) -> str:
    """Return that an unproven value stays in force when tuning ends."""
    return f"{knob} stays at {setting(knob, now)} on all ranks, unproven ({setting(knob, old)} before)"


def saving(gain: float) -> str:
    """Return "saves 4.0 %" or "costs 4.0 %"."""
    return f"saves {gain * 100:.1f} %" if gain >= 0 else f"costs {-gain * 100:.1f} %"


def expectation(forecast: Forecast | None) -> str:
    """Return what the model expects, and on what basis."""
    if forecast is None:
        return "the model cannot tell what it is worth"
    if forecast.is_floor:
        return f"expected to save at least {forecast.gain_ratio * 100:.1f} % ({forecast.basis})"
    spread = f"+- {forecast.spread_ratio * 100:.1f} %"
    verb = "save" if forecast.gain_ratio >= 0 else "cost"
    return f"expected to {verb} {abs(forecast.gain_ratio) * 100:.1f} % {spread} ({forecast.basis})"


def trial_reason(kept: Mapping[str, int], new: Sequence[tuple[str, int]], forecast: Forecast | None) -> str:
    """Return why a candidate is tried (or would be)."""
    return f"{changes(kept, new)}: {_idea(kept, new)}; {expectation(forecast)}"


def _idea(kept: Mapping[str, int], changes: Sequence[tuple[str, int]]) -> str:
    if len(changes) > 1:
        return "together, because one makes the other worth it"
    ((knob, new),) = changes
    old = kept[knob]
    if knob == "micro_batch":
        idea = "fewer, larger micro-batches pay the fixed cost of a pass less often"
        if new < old:
            idea = "smaller micro-batches may stay in the cache"
    elif knob == "bucket_bytes":
        idea = "smaller buckets leave less to send when backward ends"
        if new > old:
            idea = "larger buckets pay the fixed cost of a collective less often"
    elif knob == "gc_interval":
        idea = "all ranks collect garbage at once, and only what is new"
        if new == 0:
            idea = "Python may collect garbage at better moments"
    elif knob == "checkpointed_blocks":
        idea = "blocks that keep their activations run forward once" if new < old else "activations take less memory"
    elif knob == "work_share":
        idea = "slow ranks give samples to fast ones" if new else "every rank does as many samples again"
    else:
        idea = "a neighbour of the present value"
    return idea


def progress(what: str, pairs: int, pairs_max: int, evidence: SequentialTest | None) -> str:
    """Return the progress of a trial of `what`."""
    so_far = "" if evidence is None else f", {saving(evidence.gain_ratio)} so far{_bounds(evidence)}"
    return f"{what}: trial, pair {min(pairs + 1, pairs_max)} of at most {pairs_max}{so_far}"


def verdict_reason(what: str, end: TrialEnd, forecast: Forecast | None) -> str:
    """Return the outcome of a trial of `what`, with its reason."""
    if end.cause in (AbortCause.NEVER_CAME, AbortCause.ENDLESS, AbortCause.CUT_SHORT, AbortCause.TAKEN_BACK):
        return f"{what}: {end.detail}"
    measured = "" if end.gain_ratio is None else f" {saving(end.gain_ratio)}"
    expected = "" if forecast is None else f"; expected {forecast.gain_ratio * 100:.1f} %"
    return f"{what}:{measured}{_bounds(end.evidence)}, {end.detail}{expected}"


def _bounds(evidence: SequentialTest | None) -> str:
    """Return the bounds of the gain in parentheses; nothing where there are none."""
    if evidence is None or evidence.gain_low is None or evidence.gain_high is None:
        return ""
    return f" ({evidence.gain_low * 100:.1f} .. {evidence.gain_high * 100:.1f} %)"
