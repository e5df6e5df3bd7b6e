"""Reads a GPU's fields in one call a tick: all that change fast, and a slice of the slow ones.

While probing, all fields are asked for, in parts, and those that the GPU lacks are dropped.  Later each field is
treated on its own: one that fails is missing until it is read again.

Left out on purpose: what the fields mean; that is the table in `fields`.
"""

from __future__ import annotations

from collections.abc import Sequence

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.records import Sample

from ..driver import (
    DriverMissingError,
    DriverStoppedError,
    FieldValue,
    GpuLostError,
    Handle,
    Nvml,
    NvmlError,
    UnsupportedError,
)
from .fields import Field, FieldMeanings
from .query_schedule import FAILURES_MAX, REFUSALS_MAX

__all__ = ["FieldReader", "must_go_on"]

PROBE_FIELDS_MAX = 128
"""Fields in one call while probing; a driver has to walk over all of them."""

SLOW_FIELDS_MAX = 32
"""Slow fields that join the call of one tick, so that all ticks cost the same."""

SLOW_FIELDS_NS_MIN = NS_PER_SECOND // 2
"""Between two such slices: ten ticks a second must not make slow fields fast."""


def must_go_on(error: NvmlError) -> None:
    """Raise `error` if it means that no other query will be answered either."""
    if isinstance(error, (GpuLostError, DriverStoppedError, DriverMissingError)):
        raise error


class FieldReader:
    """The fields of one GPU: what to ask, and the last answers of the slow ones."""

    def __init__(self, gpu: str, nvml: Nvml, clock: Clock) -> None:
        self.meanings = FieldMeanings(gpu)
        self.calls = 0
        self.link_changed = False
        self._gpu = gpu
        self._nvml = nvml
        self._clock = clock
        self._slow_fields: dict[Field, Sample] = {}
        self._refusals: dict[Field, int] = {}  # of those that were answered before
        self._failures: dict[Field, int] = {}
        self._slow_turn = 0
        self._slow_asked_ns: int | None = None

    def begin(self, fields: list[Field]) -> None:
        """Take `fields` as those to probe for."""
        self._slow_fields.clear()
        self._refusals.clear()
        self._failures.clear()
        self.link_changed = False
        self.meanings.ask(fields)

    def drop_doubles(self) -> None:
        """Drop the fields that repeat an earlier one of the same series."""
        for field in list(self.meanings.without_doubles()):
            self.meanings.drop(field)
            self._slow_fields.pop(field, None)

    def slow_samples(self) -> list[Sample]:
        """Return the last answers of the slow fields."""
        return list(self._slow_fields.values())

    def ask(self, handle: Handle, failures: list[str], *, everything: bool) -> dict[Field, Sample]:
        """Ask for the fields that are due in one call (several while probing) and return the fast ones."""
        asked = self.meanings.asked() if everything else self._due_fields()
        answers: dict[Field, Sample] = {}
        for start in range(0, len(asked), PROBE_FIELDS_MAX if everything else max(1, len(asked))):
            part = asked[start : start + PROBE_FIELDS_MAX] if everything else asked
            self.calls += 1
            asked_ns = self._clock.monotonic_ns()
            try:
                values = self._nvml.fields(handle, [field.field for field in part])
            except NvmlError as error:
                must_go_on(error)
                if isinstance(error, UnsupportedError) and everything:
                    for field in part:
                        self.meanings.drop(field)
                else:
                    failures.append(f"fields: {error}")
                continue
            kept = self.meanings.kept
            for field, value in zip(part, values, strict=True):
                if (before := kept.get(field)) is None or before[0] != value:
                    self._take_field(field, value, asked_ns, answers, failures)
                elif field.fast:  # the sample of a slow one is still there
                    answers[field] = before[1]
        return answers

    def look(self, handle: Handle, fields: Sequence[Field]) -> None:
        """Read `fields`, counters that wrap too soon to be read once a tick, in one call."""
        self.calls += 1
        asked_ns = self._clock.monotonic_ns()
        values = self._nvml.fields(handle, [field.field for field in fields])
        for field, value in zip(fields, values, strict=True):
            if isinstance(value, FieldValue):
                self.meanings.look(field, value, asked_ns, self._clock.monotonic_ns())

    def _due_fields(self) -> list[Field]:
        """Return the fast fields and the next slice of the slow ones."""
        now = self._clock.monotonic_ns()
        fast, slow = self.meanings.fast, self.meanings.slow
        if self._slow_asked_ns is not None and now - self._slow_asked_ns < SLOW_FIELDS_NS_MIN:
            return list(fast)
        if not slow:
            return list(fast)
        self._slow_asked_ns = now
        start = self._slow_turn % len(slow)
        self._slow_turn = start + SLOW_FIELDS_MAX if start + SLOW_FIELDS_MAX < len(slow) else 0
        return fast + slow[start : start + SLOW_FIELDS_MAX]

    def _take_field(
        self,
        field: Field,
        answer: FieldValue | NvmlError,
        asked_ns: int,
        answers: dict[Field, Sample],
        failures: list[str],
    ) -> None:
        if isinstance(answer, NvmlError):
            must_go_on(answer)
            self._slow_fields.pop(field, None)
            self.meanings.kept.pop(field, None)  # so that the next answer is news
            if self._is_over(field, answer):
                self.meanings.drop(field)
            else:
                failures.append(f"field {field.field.number} ({field.metric}): {answer}")
            return
        if field.counts and answer.value < 0:
            failures.append(f"field {field.field.number} ({field.metric}): a count of {answer.value}")
            return
        self._refusals[field] = 0
        sample = self.meanings.sample(field, answer, asked_ns, self._clock.monotonic_ns())
        if sample is None:
            return
        if field.fast:
            answers[field] = sample
            return
        before = self._slow_fields.get(field)
        self._slow_fields[field] = sample
        if "link_state" in field.metric and before is not None and before.value != sample.value:
            self.link_changed = True

    def _is_over(self, field: Field, error: NvmlError) -> bool:
        """Note a failure, and return whether to ask no more; the limits are those of the queries."""
        was_answered = field in self._refusals
        failures = self._failures[field] = self._failures.get(field, 0) + 1
        if not isinstance(error, UnsupportedError):
            return not was_answered and failures >= FAILURES_MAX
        if was_answered:
            self._refusals[field] += 1
        return not was_answered or self._refusals[field] >= REFUSALS_MAX

    def link_totals(self, answers: dict[Field, Sample]) -> list[Sample]:
        """Return the sums over links where the driver gives none, and only when every link answered."""
        totals: list[Sample] = []
        for metric, fields in self.meanings.of_links():
            links = [answers[field].value for field in fields if field in answers]
            if len(links) == len(fields):
                totals.append(Sample(metric, (self._gpu,), sum(links)))
        return totals
