"""Lists the fields of one nvmlDeviceGetFieldValues a tick, with their metrics, and turns their values into samples.

A field costs a tenth of a call, and each has its own return code: one that a GPU lacks is dropped, and the others stay.
What changes in normal use is read at every tick; what changes when hardware breaks (errors, retired pages, the state of
a link) joins the same call slice by slice.

By nvml.h: 138 and 139 count KiB, 197 and 198 bytes, 83 mJ, 164 MB/s, and the clock event counters nanoseconds.  The
scope of the NVLink fields is a link, all ones for the sum over all links.  201 to 222 came with NVLink 5.  Which driver
knows a number by which meaning is in `field_numbers`.

Left out on purpose: the bit error ratios (218, 220, 222), coded as mantissa and exponent, which say nothing between
two ticks that the error counts beside them do not; field 185, which took milliseconds where it was measured; raw
NVLink traffic with its protocol (140, 141), because people compare data with data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

from pacecar.clock import NS_PER_SECOND
from pacecar.records import Sample

from ..driver import ALL_LINKS, FieldId, FieldValue
from .derived import ROUND, GpuCounter, LinkCounter
from .field_numbers import is_defined

__all__ = ["ENERGY", "LINK_COUNT", "LINK_STATE", "Field", "FieldMeanings", "fields_of"]

LINK_COUNT = FieldId(91)
ENERGY = FieldId(83)
LINK_STATE = FieldId(165)


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """A field, its metric, the metric's labels after `gpu` and the factor to the inside unit.

    There is one object of each, for all GPUs: it is looked up some hundred times a tick, so by what it is and not by
    what is in it.
    """

    field: FieldId
    metric: str
    labels: tuple[str, ...] = ()
    factor: int = 1
    counts: bool = False
    fast: bool = False
    of_link: bool = False
    has_query: bool = False
    """Whether a query reads the same number where the field is refused."""
    is_wide: bool = False
    """Whether its gauge counts without a bound, so that no range leaves out all ones: the reader does."""
    bits_min: int = 0
    """An answer of fewer bits is that of another field: the driver numbers them otherwise."""

    @property
    def series(self) -> tuple[str, tuple[str, ...]]:
        """What its samples are told apart by, on one GPU."""
        return self.metric, self.labels


def _counter(number: int, metric: str, *labels: str, scope: int = 0, factor: int = 1, fast: bool = False) -> Field:
    return Field(FieldId(number, scope), f"pacecar_gpu_{metric}", labels, factor, counts=True, fast=fast)


def _gauge(number: int, metric: str, *labels: str, scope: int = 0, factor: int = 1, fast: bool = False) -> Field:
    return Field(FieldId(number, scope), f"pacecar_gpu_{metric}", labels, factor, fast=fast)


CLOCK_EVENTS = "clock_event_seconds_total"


def _clock_event(number: int, reason: str) -> Field:
    """Return the field in which the driver counts the time of a reason; 32 bits of nanoseconds are 4 s."""
    return replace(_counter(number, CLOCK_EVENTS, reason, "driver", fast=True), bits_min=63)


_GPU_FIELDS = (
    replace(_counter(83, "energy_joules_total", fast=True), has_query=True),
    _gauge(82, "memory_temperature_celsius", fast=True),
    replace(_counter(197, "pcie_transmit_bytes_total", fast=True), of_link=True),
    replace(_counter(198, "pcie_receive_bytes_total", fast=True), of_link=True),
    _counter(138, "nvlink_transmit_bytes_total", scope=ALL_LINKS, factor=1024, fast=True),
    _counter(139, "nvlink_receive_bytes_total", scope=ALL_LINKS, factor=1024, fast=True),
    _clock_event(74, "sw_power_cap"),
    _clock_event(76, "sync_boost"),
    _clock_event(251, "sw_thermal_slowdown"),
    _clock_event(252, "hw_thermal_slowdown"),
    _clock_event(253, "hw_power_brake"),
    _clock_event(269, "sw_thermal_slowdown"),
    _clock_event(270, "hw_thermal_slowdown"),
    _clock_event(271, "hw_power_brake"),
    _counter(94, "pcie_replays_total"),
    _counter(3, "ecc_errors_total", "corrected", "volatile"),
    _counter(4, "ecc_errors_total", "uncorrected", "volatile"),
    # As the driver counts: a counter's total does not fall at a reset.
    replace(_gauge(4, "ecc_uncorrected_errors"), is_wide=True),
    _counter(5, "ecc_errors_total", "corrected", "aggregate"),
    _counter(6, "ecc_errors_total", "uncorrected", "aggregate"),
    _gauge(29, "retired_pages", "single_bit"),
    _gauge(30, "retired_pages", "double_bit"),
    _gauge(31, "retired_pages_pending"),
    _gauge(142, "remapped_rows", "corrected"),
    _gauge(143, "remapped_rows", "uncorrected"),
    _gauge(144, "row_remap_pending"),
    _gauge(145, "row_remap_failed"),
    _gauge(1, "ecc_enabled"),
    _gauge(2, "ecc_enabled_after_reset"),
    _gauge(193, "temperature_margin_threshold_celsius", "shutdown"),
    _gauge(194, "temperature_margin_threshold_celsius", "slowdown"),
    _gauge(195, "temperature_margin_threshold_celsius", "memory_max"),
    _gauge(196, "temperature_margin_threshold_celsius", "gpu_max"),
)

LINK_ERRORS = {
    161: "replay",
    162: "recovery",
    163: "crc",
    206: "malformed_packet",
    207: "buffer_overrun",
    208: "receive",
    209: "receive_remote",
    210: "receive_general",
    211: "link_integrity",
    212: "transmit_discard",
    213: "recovery_successful",
    214: "recovery_failed",
    215: "link_recovery",
    219: "effective",
    221: "symbol",
}
"""Field -> the kind under which its errors are counted: 161 to 163 up to NVLink 4, the others on NVLink 5."""


def fields_of(driver: str, links: int) -> list[Field]:
    """Return the fields of a GPU with so many NVLinks that a driver of that version knows."""
    every = chain(_GPU_FIELDS, *(_link_fields(link) for link in range(links)))
    return [field for field in every if is_defined(field.field.number, driver)]


@cache  # bounded by the links that a GPU can have
def _link_fields(link: int) -> tuple[Field, ...]:
    """Return the fields of one NVLink."""
    label = str(link)
    return (
        _counter(138, "nvlink_link_transmit_bytes_total", label, scope=link, factor=1024, fast=True),
        _counter(139, "nvlink_link_receive_bytes_total", label, scope=link, factor=1024, fast=True),
        # NVLink 5 counts bytes and packets of a link itself; a GPU that answers both is read at the first.
        _counter(202, "nvlink_link_transmit_bytes_total", label, scope=link, fast=True),
        _counter(204, "nvlink_link_receive_bytes_total", label, scope=link, fast=True),
        _counter(201, "nvlink_link_transmit_packets_total", label, scope=link),
        _counter(203, "nvlink_link_receive_packets_total", label, scope=link),
        replace(_gauge(165, "nvlink_link_state", label, scope=link), has_query=True),
        _gauge(164, "nvlink_link_bytes_per_second", label, scope=link, factor=1_000_000),
        *(
            _counter(number, "nvlink_link_errors_total", label, kind, scope=link)
            for number, kind in LINK_ERRORS.items()
        ),
    )


class FieldMeanings:
    """The fields that one GPU answers, and their counters."""

    def __init__(self, gpu: str) -> None:
        self._gpu = gpu
        self.pcie_bytes_per_second_max: float | None = None
        """The most that the PCIe link moves in one direction; None: not known."""
        self._counters: dict[Field, GpuCounter] = {}
        self._link_counters: dict[Field, LinkCounter] = {}
        self._unreliable: set[Field] = set()
        self._missed: set[Field] = set()
        self._fields: list[Field] = []
        self.fast: list[Field] = []
        """What is asked for at every tick."""
        self.slow: list[Field] = []
        """What is asked for slice by slice."""
        self._reasons: list[Field] = []
        self._of_links: list[tuple[str, list[Field]]] | None = None
        self.kept: dict[Field, tuple[FieldValue, Sample]] = {}
        """The latest answer of each field, where an equal one means the same sample, and that sample."""

    def ask(self, fields: Iterable[Field]) -> None:
        """Take `fields` as those that are worth asking; counters that were there before go on."""
        self.kept.clear()
        self._fields = list(fields)
        self.fast = [field for field in self._fields if field.fast]
        self.slow = [field for field in self._fields if not field.fast]
        self._reasons = [field for field in self._fields if field.metric.endswith(CLOCK_EVENTS)]
        self._of_links = None

    def restart(self) -> None:
        """Note that the driver may have been loaded anew, so that its counters begin at zero."""
        self.kept.clear()
        for counter in self._counters.values():
            counter.restart()
        for link in self._link_counters.values():
            link.restart()

    def drop(self, field: Field) -> None:
        """Ask for `field` no more."""
        self._fields.remove(field)
        (self.fast if field.fast else self.slow).remove(field)
        self._unreliable.discard(field)
        if field in self._reasons:
            self._reasons.remove(field)
        self._of_links = None

    def take_back(self, field: Field) -> None:
        """Ask for `field` again, which was dropped."""
        self._fields.append(field)
        (self.fast if field.fast else self.slow).append(field)
        if field.metric.endswith(CLOCK_EVENTS):
            self._reasons.append(field)
        self._of_links = None

    def series(self) -> set[tuple[str, tuple[str, ...]]]:
        """Return the series of the fields that are asked for."""
        return {field.series for field in self._fields}

    def of_links(self) -> list[tuple[str, list[Field]]]:
        """Return metric and summands of what is summed over links, because the driver gives no sum."""
        if self._of_links is None:
            self._of_links = []
            for way in ("transmit", "receive"):
                metric, of_link = (f"pacecar_gpu_nvlink_{kind}{way}_bytes_total" for kind in ("", "link_"))
                links = [field for field in self.fast if field.metric == of_link]
                if links and not any(field.metric == metric for field in self.fast):
                    self._of_links.append((metric, links))
        return self._of_links

    def asked(self) -> list[Field]:
        """Return all fields that are worth asking."""
        return list(self._fields)

    def has(self, field: FieldId) -> bool:
        """Return whether `field` is among those that are asked for."""
        return any(other.field == field for other in self._fields)

    def counted_reasons(self) -> list[Field]:
        """Return the fields in which the driver counts the time of a clock event reason itself."""
        return self._reasons

    def narrow(self, gap_ns: int) -> tuple[Field, ...]:
        """Return the PCIe counters that may wrap at 32 bits, if reading them each `gap_ns` is often enough."""
        most = self.pcie_bytes_per_second_max
        if most is None or most * gap_ns >= ROUND * NS_PER_SECOND:
            return ()
        counters = ((field, self._link_counters.get(field)) for field in self.fast if field.of_link)
        return tuple(field for field, counter in counters if counter is not None and not counter.is_wide)

    def look(self, field: Field, answer: FieldValue, asked_ns: int, answered_ns: int) -> None:
        """Take a reading of a PCIe counter between two ticks."""
        counter = self._link_counters[field]
        if counter.update(answer.value, asked_ns, answered_ns, self.pcie_bytes_per_second_max) is None:
            self._missed.add(field)

    def health(self) -> Iterator[Sample]:
        """Yield whether the PCIe counters are reliable, where there are any."""
        links = [field for field in self.fast if field.of_link and field in self._link_counters]
        if links:
            yield Sample("pacecar_gpu_pcie_counters_reliable", (self._gpu,), int(self._unreliable.isdisjoint(links)))

    def sample(self, field: Field, answer: FieldValue, asked_ns: int, answered_ns: int) -> Sample | None:
        """Return the sample of one answer; None for a counter that may have wrapped unseen, or fell and may be back."""
        kept = self.kept.get(field)
        value = answer.value
        if field.of_link:
            link = self._link_counters.setdefault(field, LinkCounter())
            total = link.update(answer.value, asked_ns, answered_ns, self.pcie_bytes_per_second_max)
            if total is None or field in self._missed:
                self._missed.discard(field)
                self._unreliable.add(field)
                return None
            self._unreliable.discard(field)
            value = total
        elif field.counts:
            counter = self._counters.get(field)
            if counter is None:
                counter = self._counters[field] = GpuCounter(doubts_zero=field.field == ENERGY)
            counted = counter.update(answer.value, answer.bits)
            if counted is None:
                self.kept.pop(field, None)
                return None
            value = counted
        labels = (self._gpu, *field.labels) if kept is None else kept[1].labels
        sample = Sample(field.metric, labels, value * field.factor)
        if not field.of_link:  # whose answer means another time even where it is the same
            self.kept[field] = (answer, sample)
        return sample

    def has_fallen(self, field: Field) -> bool:
        """Return whether the last reading of a counter was a fall that is not confirmed."""
        counter = self._link_counters.get(field) or self._counters.get(field)
        return counter is not None and counter.has_fallen

    def without_doubles(self) -> Iterator[Field]:
        """Yield the fields that repeat an earlier one of the same series."""
        seen: set[tuple[str, tuple[str, ...]]] = set()
        for field in self._fields:
            if field.series in seen:
                yield field
            seen.add(field.series)
