"""Lists the fields of the one nvmlDeviceGetFieldValues call a tick, and turns their values into samples.

A field costs a tenth of a call and has its own return code: one that a GPU lacks is dropped, and the others stay.
Fields that change in normal use are read at every tick; those that change when hardware breaks (errors, retired pages,
link states) join the same call slice by slice.

By nvml.h, 138 and 139 count KiB, 197 and 198 bytes, 83 mJ, 164 MB/s, and the clock event counters nanoseconds.  The
scope of the NVLink fields is a link, or all ones for the sum over all links.  201 to 222 came with NVLink 5.
`field_numbers` knows which driver uses a number with which meaning.

Left out: the bit error ratios (218, 220, 222), which add nothing to the error counts between two ticks; field 185,
which took milliseconds; and raw NVLink traffic with its protocol (140, 141), because people compare payloads.
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

    All GPUs share one object of each.  Equality is identity, because fields are looked up some hundred times a tick.
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
    """Whether its gauge has no upper bound, so that no range excludes the answer "all ones": the reader does."""
    bits_min: int = 0
    """An answer with fewer bits belongs to another field: this driver uses another numbering."""

    @property
    def is_detail(self) -> bool:
        """Whether it is a counter of one link, which is read only when its result will be looked at."""
        return self.fast and self.counts and self.metric.startswith("pacecar_gpu_nvlink_link_")

    @property
    def series(self) -> tuple[str, tuple[str, ...]]:
        """What distinguishes its samples on one GPU."""
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
    # The driver's own count: a counter's total would not fall at a reset.
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
"""Field -> the kind of its errors: 161 to 163 up to NVLink 4, the others on NVLink 5."""


def fields_of(driver: str, links: int) -> list[Field]:
    """Return the fields that a driver of that version knows, for a GPU with that many NVLinks."""
    every = chain(_GPU_FIELDS, *(_link_fields(link) for link in range(links)))
    return [field for field in every if is_defined(field.field.number, driver)]


@cache  # bounded by the links that a GPU can have
def _link_fields(link: int) -> tuple[Field, ...]:
    """Return the fields of one NVLink."""
    label = str(link)
    return (
        _counter(138, "nvlink_link_transmit_bytes_total", label, scope=link, factor=1024, fast=True),
        _counter(139, "nvlink_link_receive_bytes_total", label, scope=link, factor=1024, fast=True),
        # NVLink 5 counts bytes and packets of a link itself; if a GPU answers both, the first is used.
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
        """The PCIe link's speed in one direction; None: unknown."""
        self._counters: dict[Field, GpuCounter] = {}
        self._link_counters: dict[Field, LinkCounter] = {}
        self._unreliable: set[Field] = set()
        self._missed: set[Field] = set()
        self._fields: list[Field] = []
        self.fast: list[Field] = []
        """Fields of every tick."""
        self.slow: list[Field] = []
        """Fields that are read slice by slice."""
        self.essential: list[Field] = []
        """The fast fields that every tick reads."""
        self.details: list[Field] = []
        """The other fast fields: counters of single links."""
        self._reasons: list[Field] = []
        self._of_links: list[tuple[str, list[Field]]] | None = None
        self.kept: dict[Field, tuple[FieldValue, Sample]] = {}
        """The latest answer of each field whose samples depend on the answer alone, and its sample."""

    def set_fields(self, fields: Iterable[Field]) -> None:
        """Ask for `fields` from now on; existing counters go on."""
        self.kept.clear()
        self._fields = list(fields)
        self.fast = [field for field in self._fields if field.fast]
        self.slow = [field for field in self._fields if not field.fast]
        self._sort_details()
        self._reasons = [field for field in self._fields if field.metric.endswith(CLOCK_EVENTS)]
        self._of_links = None

    def _sort_details(self) -> None:
        self.details = [field for field in self.fast if field.is_detail]
        self.essential = [field for field in self.fast if not field.is_detail]
        self.fast = self.essential + self.details  # samples keep their order with and without new details

    def restart(self) -> None:
        """Note that the driver may have been reloaded, so that its counters start at zero."""
        self.kept.clear()
        for counter in self._counters.values():
            counter.restart()
        for link in self._link_counters.values():
            link.restart()

    def drop(self, field: Field) -> None:
        """Stop asking for `field`."""
        self._fields.remove(field)
        (self.fast if field.fast else self.slow).remove(field)
        self._sort_details()
        self._unreliable.discard(field)
        if field in self._reasons:
            self._reasons.remove(field)
        self._of_links = None

    def restore(self, field: Field) -> None:
        """Ask again for `field`, which was dropped."""
        self._fields.append(field)
        (self.fast if field.fast else self.slow).append(field)
        self._sort_details()
        if field.metric.endswith(CLOCK_EVENTS):
            self._reasons.append(field)
        self._of_links = None

    def series(self) -> set[tuple[str, tuple[str, ...]]]:
        """Return the series of the fields that are asked for."""
        return {field.series for field in self._fields}

    def of_links(self) -> list[tuple[str, list[Field]]]:
        """Return metric and summands for sums over links that the driver does not report."""
        if self._of_links is None:
            self._of_links = []
            for way in ("transmit", "receive"):
                metric, of_link = (f"pacecar_gpu_nvlink_{kind}{way}_bytes_total" for kind in ("", "link_"))
                links = [field for field in self.fast if field.metric == of_link]
                if links and not any(field.metric == metric for field in self.fast):
                    self._of_links.append((metric, links))
        return self._of_links

    def asked(self) -> list[Field]:
        """Return all fields that are asked for."""
        return list(self._fields)

    def has(self, field: FieldId) -> bool:
        """Return whether `field` is asked for."""
        return any(other.field == field for other in self._fields)

    def counted_reasons(self) -> list[Field]:
        """Return the fields in which the driver itself counts the time of a clock event reason."""
        return self._reasons

    def narrow(self, gap_ns: int) -> tuple[Field, ...]:
        """Return the PCIe counters that may wrap at 32 bits, if a reading each `gap_ns` can follow them."""
        most = self.pcie_bytes_per_second_max
        if most is None or most * gap_ns >= ROUND * NS_PER_SECOND:
            return ()
        counters = ((field, self._link_counters.get(field)) for field in self.fast if field.of_link)
        return tuple(field for field, counter in counters if counter is not None and not counter.is_wide)

    def update_counter(self, field: Field, answer: FieldValue, asked_ns: int, answered_ns: int) -> None:
        """Record a reading of a PCIe counter between two ticks."""
        counter = self._link_counters[field]
        if counter.update(answer.value, asked_ns, answered_ns, self.pcie_bytes_per_second_max) is None:
            self._missed.add(field)

    def health(self) -> Iterator[Sample]:
        """Yield whether the PCIe counters are reliable, if there are any."""
        links = [field for field in self.fast if field.of_link and field in self._link_counters]
        if links:
            yield Sample("pacecar_gpu_pcie_counters_reliable", (self._gpu,), int(self._unreliable.isdisjoint(links)))

    def sample(self, field: Field, answer: FieldValue, asked_ns: int, answered_ns: int) -> Sample | None:
        """Return the sample of an answer; None for a counter that may have wrapped unseen or has fallen."""
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
        if not field.of_link:  # an equal answer may mean another total
            self.kept[field] = (answer, sample)
        return sample

    def has_fallen(self, field: Field) -> bool:
        """Return whether the last reading of a counter was an unconfirmed fall."""
        counter = self._link_counters.get(field) or self._counters.get(field)
        return counter is not None and counter.has_fallen

    def without_doubles(self) -> Iterator[Field]:
        """Yield the fields that repeat the series of an earlier one."""
        seen: set[tuple[str, tuple[str, ...]]] = set()
        for field in self._fields:
            if field.series in seen:
                yield field
            seen.add(field.series)
