"""Reads a GPU's fields in one call a tick: all fast ones and a slice of the slow ones.

A probe asks for all fields, in parts.  Fields are independent: one that fails is missing until it is read again, and
one that is refused is asked for less and less often (`refusals`), in the same call.  If the whole call fails, each
field in it has failed.

Left out: what the fields mean (`fields`).
"""

from __future__ import annotations

from collections.abc import Sequence

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.records import Sample

from ..driver import (
    DriverMissingError,
    DriverStoppedError,
    FieldId,
    FieldValue,
    GpuLostError,
    Handle,
    Nvml,
    NvmlError,
    UnsupportedError,
)
from .derived import NO_NUMBERS
from .fields import Field, FieldMeanings
from .refusals import Attempts, RefusedNumbers

__all__ = ["FieldReader", "raise_if_fatal"]

PROBE_FIELDS_MAX = 128
"""Fields in one call of a probe; a driver walks over all of them."""

SLOW_FIELDS_MAX = 32
"""Slow fields that join the call of one tick, so that all ticks cost the same."""

SLOW_FIELDS_NS_MIN = NS_PER_SECOND // 2
"""Least time between two slices: ten ticks a second must not make slow fields fast."""


def raise_if_fatal(error: NvmlError) -> None:
    """Raise `error` if it means that no other query will be answered either."""
    if isinstance(error, (GpuLostError, DriverStoppedError, DriverMissingError)):
        raise error


class FieldReader:
    """The fields of one GPU: which to ask for, and the last answers of the slow ones."""

    def __init__(self, gpu: str, nvml: Nvml, clock: Clock) -> None:
        self.meanings = FieldMeanings(gpu)
        self.calls = 0
        self.must_probe = False
        """Whether other numbers may be available now: a link went up or down, or its field is no longer answered."""
        self._gpu = gpu
        self._nvml = nvml
        self._clock = clock
        self._slow_fields: dict[Field, Sample] = {}
        self._attempts: dict[Field, Attempts] = {}
        self._refused: dict[Field, int] = {}  # -> when to ask again
        self._retry_ns = 0  # when the first of them is due
        self._withdrawn = 0  # how many of them were answered before
        self._slow_turn = 0
        self._slow_asked_ns: int | None = None

    def begin(self, fields: list[Field]) -> None:
        """Start a probe for `fields`."""
        self._slow_fields.clear()
        self._attempts.clear()
        self._refused.clear()
        self._withdrawn = 0
        self.must_probe = False
        self.meanings.set_fields(fields)

    def refused(self) -> RefusedNumbers:
        """Return how many fields are refused."""
        return RefusedNumbers(len(self._refused) - self._withdrawn, self._withdrawn)

    def leave_to_query(self, field_id: FieldId) -> None:
        """Stop asking for a refused field, because a query reads the same number."""
        for field in [field for field in self._refused if field.field == field_id]:
            del self._refused[field]
            self._withdrawn -= self._attempts[field].was_answered

    def drop_doubles(self) -> None:
        """Drop the fields that repeat the series of an earlier one."""
        for field in list(self.meanings.without_doubles()):
            self.meanings.drop(field)
            self._slow_fields.pop(field, None)

    def slow_samples(self) -> list[Sample]:
        """Return the last answers of the slow fields."""
        return list(self._slow_fields.values())

    def details(self) -> dict[Field, Sample]:
        """Return the last answers of the fast fields that are details."""
        kept = self.meanings.kept
        return {field: kept[field][1] for field in self.meanings.details if field in kept}

    def ask(
        self, handle: Handle, failures: list[str], *, everything: bool, with_details: bool = True
    ) -> dict[Field, Sample]:
        """Ask for the fields that are due in one call (several while probing) and return the fast ones."""
        due = self._due_fields if with_details else lambda: self.meanings.essential
        asked = self.meanings.asked() if everything else due()
        answers: dict[Field, Sample] = {}
        for start in range(0, len(asked), PROBE_FIELDS_MAX if everything else max(1, len(asked))):
            part = asked[start : start + PROBE_FIELDS_MAX] if everything else asked
            self.calls += 1
            asked_ns = self._clock.monotonic_ns()
            try:
                values = self._nvml.fields(handle, [field.field for field in part])
            except NvmlError as error:
                raise_if_fatal(error)
                failed_one_by_one: list[str] = []
                for field in part:
                    self._record_answer(field, error, asked_ns, answers, failed_one_by_one)
                failures += [f"fields: {error}"] if failed_one_by_one else []
                continue
            kept = self.meanings.kept
            for field, value in zip(part, values, strict=True):
                if (before := kept.get(field)) is None or before[0] != value:
                    self._record_answer(field, value, asked_ns, answers, failures)
                elif field.fast:  # the sample of a slow one is still there
                    answers[field] = before[1]
        return answers

    def read_counters(self, handle: Handle, fields: Sequence[Field]) -> None:
        """Read counters that wrap too soon for one reading a tick, in one call."""
        self.calls += 1
        asked_ns = self._clock.monotonic_ns()
        values = self._nvml.fields(handle, [field.field for field in fields])
        for field, value in zip(fields, values, strict=True):
            if isinstance(value, FieldValue):
                self.meanings.update_counter(field, value, asked_ns, self._clock.monotonic_ns())

    def _due_fields(self) -> list[Field]:
        """Return the fast fields, the next slice of the slow ones, and refused ones that are due."""
        now = self._clock.monotonic_ns()
        fast, slow = self.meanings.fast, self.meanings.slow
        if self._slow_asked_ns is not None and now - self._slow_asked_ns < SLOW_FIELDS_NS_MIN:
            return list(fast)
        again = self._due_again(now) if self._refused and now >= self._retry_ns else []
        if not slow:
            return fast + again
        self._slow_asked_ns = now
        start = self._slow_turn % len(slow)
        self._slow_turn = start + SLOW_FIELDS_MAX if start + SLOW_FIELDS_MAX < len(slow) else 0
        return fast + slow[start : start + SLOW_FIELDS_MAX] + again

    def _due_again(self, now_ns: int) -> list[Field]:
        """Return the next refused fields to ask for, without those whose series another field has."""
        given = self.meanings.series()
        due = [field for field, due_ns in self._refused.items() if due_ns <= now_ns and field.series not in given]
        if len(due) <= SLOW_FIELDS_MAX:
            later = [due_ns for due_ns in self._refused.values() if due_ns > now_ns]
            self._retry_ns = min(later, default=now_ns + NS_PER_SECOND)
        return due[:SLOW_FIELDS_MAX]

    def _record_answer(
        self,
        field: Field,
        answer: FieldValue | NvmlError,
        asked_ns: int,
        answers: dict[Field, Sample],
        failures: list[str],
    ) -> None:
        attempts = self._attempts.get(field)
        if attempts is None:
            attempts = self._attempts[field] = Attempts()
        if isinstance(answer, FieldValue) and answer.bits < field.bits_min:
            answer = UnsupportedError(f"{answer.bits} bits cannot be a count of {field.metric}")
        if isinstance(answer, NvmlError):
            raise_if_fatal(answer)
            self._forget(field)
            wait_ns = attempts.refused() if isinstance(answer, UnsupportedError) else attempts.failed()
            if attempts.is_backed_off:
                self._back_off(field, attempts, wait_ns)
            else:
                failures.append(f"field {field.field.number} ({field.metric}): {answer}")
            return
        if (field.counts or field.is_wide) and (answer.value < 0 or answer.value in NO_NUMBERS):
            self._forget(field)
            failures.append(f"field {field.field.number} ({field.metric}): implausible count {answer.value}")
            return
        if field in self._refused:
            del self._refused[field]
            self._withdrawn -= attempts.was_answered
            self.meanings.restore(field)
        attempts.answered()
        sample = self.meanings.sample(field, answer, asked_ns, self._clock.monotonic_ns())
        if sample is None:
            self._slow_fields.pop(field, None)
            if self.meanings.has_fallen(field):
                failures.append(f"field {field.field.number} ({field.metric}): fell to {answer.value}, not confirmed")
            return
        if field.fast:
            answers[field] = sample
            return
        before = self._slow_fields.get(field)
        self._slow_fields[field] = sample
        if "link_state" in field.metric and before is not None and before.value != sample.value:
            self.must_probe = True

    def _forget(self, field: Field) -> None:
        """Drop the last answer of `field`: what was not read now is missing."""
        self._slow_fields.pop(field, None)
        self.meanings.kept.pop(field, None)  # so that the next answer counts as new

    def _back_off(self, field: Field, attempts: Attempts, wait_ns: int) -> None:
        due_ns = self._clock.monotonic_ns() + wait_ns
        if field not in self._refused:
            self.meanings.drop(field)
            self._withdrawn += attempts.was_answered
            self.must_probe = self.must_probe or (attempts.was_answered and field.has_query)
        self._retry_ns = min(due_ns, self._retry_ns) if self._refused else due_ns
        self._refused[field] = due_ns

    def link_totals(self, answers: dict[Field, Sample]) -> list[Sample]:
        """Return sums over links that the driver does not report, if every link answered."""
        totals: list[Sample] = []
        for metric, fields in self.meanings.of_links():
            links = [answers[field].value for field in fields if field in answers]
            if len(links) == len(fields):
                totals.append(Sample(metric, (self._gpu,), sum(links)))
        return totals
