"""Doubles the batch when throughput rose by 10 % and halves it when it fell by 10 %, the rule that articles recommend.

It applies the rule between 256 and 8192 samples to `batch_samples`, and on its own scale to every other knob.  The rule
compares a window with the window before it, whatever changed in between.  So it

- needs a start: the first window after the warm-up is followed by a doubling, one knob after the other;
- stays if a change moved throughput by less than 10 %, for better or worse;
- takes a fall as a reason to halve, even if halving caused it;
- alternates forever if a change between two neighbours is over 10 %: what it just halved raised throughput, so it
  doubles again.

For `bucket_bytes` that means one doubling, from 25 MiB to the next size near 50 MiB.  If that costs less than 10 %, as
on most measured links (TUNING), it is kept and the job stays slower; if it costs more, the two sizes alternate.
Smaller buckets, which are nearly always better, are only seen in that case.  Choices (compression) have no double and
are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pacecar.knobs import by_name

from ..observation import KnobSpace
from .geometric_search import neighbour

__all__ = ["MOVED_RATIO", "DoublingSampler"]

MOVED_RATIO = 0.1
"""Smaller changes of throughput change nothing."""

WINDOW_STEPS = 20
"""The articles do not say how long to measure; as long as the trials of Optuna's TPE in bench/."""

BATCH_SAMPLES = (256, 8192)


class DoublingSampler:
    """See the module's docstring."""

    windows = 1
    window_steps = WINDOW_STEPS
    settle_steps = 2

    def __init__(self) -> None:
        self.begin(())

    def begin(self, spaces: Sequence[KnobSpace]) -> None:
        """Learn the scales, and start over."""
        self._domains: dict[str, tuple[int, ...]] = {}
        self._values: dict[str, int] = {}
        self._knob: str | None = None
        self._throughput: float | None = None
        self._move = 0
        for space in spaces:
            known = by_name.get(space.knob)
            if known is not None and known.kind == "choice":
                continue
            low, high = BATCH_SAMPLES if space.knob == "batch_samples" else (space.domain[0], space.domain[-1])
            self._domains[space.knob] = tuple(v for v in space.domain if v == space.value or low <= v <= high)
            self._values[space.knob] = space.value
        self._best = dict(self._values)
        self._unpushed = list(self._values)

    @property
    def best(self) -> dict[str, int]:
        """The last setting under which throughput did not fall."""
        return dict(self._best)

    def propose(self) -> dict[str, int] | None:
        """Return the next window's setting: the present one unless throughput moved."""
        if not self._values:
            return None
        if self._throughput is not None:
            if self._move == 0 and self._unpushed:
                self._knob = self._unpushed.pop(0)
                self._move = 1
            knob = self._knob
            if knob is not None and self._move != 0:
                there = neighbour(self._domains[knob], self._values[knob], 2.0 if self._move > 0 else 0.5)
                self._values[knob] = self._values[knob] if there is None else there
        return dict(self._values)

    def tell(self, values: Mapping[str, int], pace_ns: float) -> bool:
        """Compare throughput with the window before."""
        throughput = values.get("batch_samples", 1) / pace_ns
        before, self._throughput = self._throughput, throughput
        self._move = 0
        if before is not None and throughput >= before * (1 + MOVED_RATIO):
            self._move = 1
        elif before is not None and throughput <= before * (1 - MOVED_RATIO):
            self._move = -1
        if self._move >= 0:
            self._best = {knob: values[knob] for knob in self._values}
        return True
