"""Reads one GPU: probes it once, then runs its queries in a bounded number of driver calls a tick.

    probe    after the GPU was opened or came back: run every query once
    tick     one call for the fields, the fast queries, then the longest overdue, up to CALLS_PER_TICK_MAX calls

In MIG mode each instance has memory, processes and its share of the performance monitor.  A change of mode or of
instances causes a new probe, as does an NVLink that goes up or down.

A query that is refused or fails loses only its own series.  A lost GPU raises.  So does a GPU that answers nothing at
all, because a driver may say "invalid argument" for a handle that has gone.  The next read of a lost GPU takes a new
handle, checks that it belongs to the same GPU, and probes again.

Left out: threads.  The caller of `read` decides how long to wait, and what to do about the other GPUs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple, cast

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.records import Sample

from .driver import (
    FieldValue,
    GpuLostError,
    Handle,
    Identity,
    Number,
    Nvml,
    NvmlError,
    RemoteLink,
    UnsupportedError,
)
from .queries.derived import CLOCK_REASONS, NO_NUMBERS, ClockEvents, GpuCounter, MeanPower
from .queries.field_reader import FieldReader, raise_if_fatal
from .queries.fields import ENERGY, LINK_COUNT, LINK_STATE, Field, fields_of
from .queries.gpm import GPM_CALLS, GPM_METRICS, INSTANCE_PARTS, Gpm
from .queries.queries import (
    EVERY_TICK,
    NEVER,
    SECONDS_5,
    SECONDS_30,
    C2cLinks,
    InstanceProcesses,
    NvmlQuery,
    Processes,
    SramEcc,
    fan_queries,
    gpu_queries,
    instance_queries,
    link_queries,
)
from .queries.query_schedule import QuerySchedule, ScheduledQuery

__all__ = ["CALLS_PER_TICK_MAX", "LINKS_MAX", "Device", "DeviceFacts", "DeviceReading"]

CALLS_PER_TICK_MAX = 12
"""Driver calls for one GPU in a tick that does not probe."""

PROBE_SECONDS = 0.5
"""After this time the next read continues the probe; at a millisecond a call a whole probe takes a tenth of a
second."""

SLOW_CALLS_MIN = 2
"""Calls of every tick reserved for slow queries, enough for the most expensive recurring one."""

NARROW_NS_MAX = 120 * NS_PER_SECOND // 1000
"""The longest time between two glances at the default of ten a second, with jitter: at 36 GB/s a 32-bit counter wraps
once in it."""

LANE_BYTES_PER_SECOND = {
    0: 0.0, 1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9, 7: 15.125e9,
}  # fmt: skip
"""PCIe generation -> bytes a second of one lane in one direction, after the line code (PCI-SIG base specifications)."""

LINKS_MAX = 36
"""NVML_NVLINK_MAX_LINKS of the newest header."""

_ARCHITECTURES = {
    2: "kepler", 3: "maxwell", 4: "pascal", 5: "volta", 6: "turing", 7: "ampere", 8: "ada", 9: "hopper",
    10: "blackwell", 13: "rubin",
}  # fmt: skip  # NVML_DEVICE_ARCH_*

_NO_SUCH_MODE = (3, 13)
"""NVML_ERROR_NOT_SUPPORTED and NVML_ERROR_FUNCTION_NOT_FOUND: answers of a GPU or a driver without MIG."""

_log = logging.getLogger(__name__)


class DeviceFacts(NamedTuple):
    """Facts of a GPU, and of the driver session that found it."""

    gpu_index: int
    identity: Identity
    driver: str
    cuda: str


class DeviceReading(NamedTuple):
    """One tick of one GPU: samples, failures, duration and number of calls.

    `withdrawn` counts the numbers that were answered before and are refused now, even if this tick did not ask for
    them.
    """

    samples: list[Sample]
    failures: list[str]
    took_ns: int = 0
    calls: int = 0
    withdrawn: int = 0


class Device:
    """One GPU.  Used by one thread at a time."""

    def __init__(self, label: str, nvml: Nvml, clock: Clock) -> None:
        self.label = label
        self.uuid = ""
        self._calls = 0
        self._nvml = nvml
        self._clock = clock
        self._fields = FieldReader(label, nvml, clock)
        self._events = ClockEvents(label)
        self._power = MeanPower(label)
        self._energy_counter = GpuCounter(doubts_zero=True)
        self._processes = Processes(label)
        self._of_instances = InstanceProcesses(label)
        self._sram = SramEcc(label)
        self._schedule = QuerySchedule()
        self._gpms: list[Gpm] = []
        self.info: Sample | None = None
        """The last known facts of the GPU; they outlive its failures."""
        self._instances: list[Sample] = []
        self._mig: dict[int, int] = {}
        self._knows_instances = False
        self._links = 0
        self._remote_ends: dict[int, RemoteLink] = {}
        self._links_info: list[Sample] = []
        self._is_probed = False
        self._is_lost = False
        self._is_mig = False
        self._with_details = True
        self._lacks: set[Number] = set()
        self._refused: list[Sample] = []
        self._driver: str | None = None
        self._counted_ns: dict[str, int] = {}
        self._read_ns: int | None = None
        self._power_is_next = True
        self._spare_calls = self._glances = self._glance_due_ns = self._glance_gap_ns = 0
        self._reasons_supported: int | None = None
        self._narrow: tuple[Field, ...] = ()

    @property
    def calls(self) -> int:
        """Driver calls so far."""
        return self._calls + self._fields.calls

    def attach(self, handle: Handle | None, facts: DeviceFacts) -> None:
        """Use the handle of a new driver session; without one the next read looks for the GPU at its index.

        Everything allocated in the old session is gone.
        """
        if self._driver != facts.driver:
            self._driver = facts.driver
            self._c2c = C2cLinks(self.label, facts.driver)
            self._events.restart()
        self._facts = facts
        if handle is not None:
            self._handle, self.uuid = handle, facts.identity.uuid
            if self.info is None:  # until the probe adds the rest
                self.info = self._info_sample("", "")
        self._fields.meanings.restart()
        self._energy_counter.restart()
        self._power.restart()
        self._gpms = []
        self._is_probed, self._is_lost = False, handle is None

    def read(self, *, everything: bool = True) -> DeviceReading:
        """Run the queries that are due.

        Without `everything` the last details are served again: single links, slow fields, GPM's parts of the SMs.

        Raises:
            GpuLostError: the GPU does not answer; the next read checks whether it is back.
            DriverStoppedError, DriverMissingError: the session is over; `attach` before the next read.
        """
        failures: list[str] = []
        calls_before, begun_ns = self.calls, self._clock.monotonic_ns()
        try:
            if self._is_lost:
                self._reopen()
            is_probing = not self._is_probed
            if is_probing:
                self._probe(failures)
            self._with_details = everything or is_probing
            answers = self._fields.ask(self._handle, failures, everything=is_probing, with_details=self._with_details)
            if is_probing:
                self._add_energy_and_links()
            self._counted_ns = {
                field.labels[0]: int(answers[field].value)
                for field in self._fields.meanings.counted_reasons()
                if field in answers
            }
            answered = len(answers)
            if not self._with_details:
                answers |= self._fields.details()
            samples = self._instances + list(answers.values()) + self._fields.slow_samples()
            samples += self._fields.meanings.health()
            samples += self._mean_power(answers.values()) + self._fields.link_totals(answers)
            answered += self._run_queries(
                failures,
                None if is_probing or self._schedule.has_unasked() else self._calls_left(),
                begun_ns + int(PROBE_SECONDS * NS_PER_SECOND),
            )
        except GpuLostError:
            self._is_lost = True
            raise
        if self._fields.must_probe:
            self._is_probed = False
        if answered == 0:
            self._is_lost = True
            raise GpuLostError("it answers no query" + (f": {failures[0]}" if failures else ""))
        self._budget_glances(self.calls - calls_before)
        self._fields.meanings.pcie_bytes_per_second_max = self._pcie_bytes_per_second_max()
        self._narrow = self._fields.meanings.narrow(NARROW_NS_MAX)
        took_ns = self._clock.monotonic_ns() - begun_ns
        if self._with_details:
            self._refused = self._count_refused()
        samples += self._schedule.samples()
        if self._is_mig:
            samples += self._of_instances.samples(are_all_known=self._knows_instances)
        if len(self._remote_ends) < self._links and not self._schedule.has_unasked():
            self._remember_links_that_are_up(samples)
        samples += self._links_info
        samples += self._refused
        return DeviceReading(samples, failures, took_ns, self.calls - calls_before, int(self._refused[-1].value))

    def _count_refused(self) -> list[Sample]:
        """Return how many numbers the driver refuses: since the probe, and (the last sample) since later."""
        counts = [self._fields.refused(), self._schedule.refused(), *(gpm.refused() for gpm in self._gpms)]
        return [
            Sample("pacecar_gpu_refused_numbers", (self.label, since), number)
            for since, number in (
                ("probe", sum(count.never_answered for count in counts)),
                ("later", sum(count.answered_before for count in counts)),
            )
        ]

    def _calls_left(self) -> int:
        """Return the calls left for the queries of this tick; calls saved on details are not spent."""
        saved = 0 if self._with_details else self._schedule.detail_calls()
        return CALLS_PER_TICK_MAX - 1 - self._glances - saved

    @property
    def is_glance_due(self) -> bool:
        """Whether `glance` would call the driver now; for the collector's thread while no query runs."""
        return self._is_probed and not self._is_lost and (bool(self._narrow) or self._has_spare_call)

    @property
    def next_glance_ns(self) -> int:
        """When `glance` may next call the driver, if no tick comes first."""
        if self._narrow:
            return 0
        return self._glance_due_ns if self._spare_calls > 0 else NEVER

    @property
    def _has_spare_call(self) -> bool:
        return self._spare_calls > 0 and self._clock.monotonic_ns() >= self._glance_due_ns

    def glance(self) -> DeviceReading:
        """Read power or utilization, in turn, if ticks left a driver call for it.

        The bound on a tick's calls includes the glances before and after it, which are spread over the time between
        ticks. In addition, where a PCIe counter may wrap within a tick, each glance makes one call for it.
        """
        if not self.is_glance_due:
            return DeviceReading([], [])
        if self._narrow:
            self._fields.read_counters(self._handle, self._narrow)
        if not self._has_spare_call:
            return DeviceReading([], [])
        now = self._clock.monotonic_ns()
        self._spare_calls -= 1
        self._glance_due_ns = now + self._glance_gap_ns
        self._glances += 1
        self._calls += 1
        self._power_is_next = not self._power_is_next
        ask = self._glance_utilization if self._power_is_next else self._glance_power
        return DeviceReading(list(ask()), [])

    def _glance_power(self) -> Iterable[Sample]:
        yield Sample("pacecar_gpu_power_watts", (self.label,), self._nvml.number(self._handle, Number.POWER))

    def _glance_utilization(self) -> Iterable[Sample]:
        percent = self._nvml.utilization(self._handle).gpu_percent
        yield Sample("pacecar_gpu_utilization_ratio", (self.label,), percent / 100)

    def _pcie_bytes_per_second_max(self) -> float | None:
        """Return the bytes a second of the PCIe link in one direction; None while generation or width are unknown."""
        generation = self._schedule.value_of(Number.PCIE_GENERATION_MAX.value)
        width = self._schedule.value_of(Number.PCIE_WIDTH_MAX.value)
        if generation is None or width is None:
            return None
        lane = LANE_BYTES_PER_SECOND.get(int(generation))
        return None if lane is None else lane * width

    def _budget_glances(self, calls: int) -> None:
        now = self._clock.monotonic_ns()
        period = 0 if self._read_ns is None else now - self._read_ns
        self._read_ns = now
        kept = 1 + self._schedule.fast_calls() + SLOW_CALLS_MIN
        self._spare_calls = CALLS_PER_TICK_MAX - max(calls, kept)
        self._glances = 0
        self._glance_gap_ns = period // (self._spare_calls + 1) if self._spare_calls > 0 else 0
        self._glance_due_ns = now + self._glance_gap_ns

    # --- coming and going -----------------------------------------------------------------------

    def _reopen(self) -> None:
        self._calls += 1
        handle = self._nvml.device(self._facts.gpu_index)
        self._calls += 4
        identity = self._nvml.identity(handle)
        if self.uuid not in ("", identity.uuid):
            raise GpuLostError(f"GPU {identity.uuid} answers in place of {self.uuid}")
        self._handle, self.uuid, self._facts = handle, identity.uuid, self._facts._replace(identity=identity)
        self._is_probed = self._is_lost = False
        self._power.restart()

    def _probe(self, failures: list[str]) -> None:
        """Find out which queries the GPU answers."""
        for gpm in self._gpms:
            gpm.close()
        self._gpms = []
        self._schedule.clear()
        self._lacks.clear()
        architecture = self._fact(Number.ARCHITECTURE)
        mig = self._fact(Number.MIG_MODE)
        self._reasons_supported = self._fact(Number.CLOCK_REASONS_SUPPORTED)
        is_cut = "on" if mig == 1 else "off" if mig is not None or Number.MIG_MODE in self._lacks else ""
        self.info = self._info_sample(_ARCHITECTURES.get(architecture or 0, ""), is_cut)
        self._is_mig, self._instances = mig == 1, []
        self._links = self._count_links()
        known = fields_of(self._facts.driver, self._links)
        self._fields.begin([field for field in known if not self._is_disbelieved(field)])
        self._schedule.add(gpu_queries(self.label))
        if mig != 1:
            self._schedule.add(self._processes.queries())
        self._schedule.add(self._sram.queries())
        self._schedule.add(self._c2c.queries())
        self._schedule.add(fan_queries(self.label, self._fact(Number.FANS) or 0))
        self._schedule.add([NvmlQuery("clock events", 1, EVERY_TICK, self._clock_events)])
        if mig is not None:
            self._schedule.add([NvmlQuery("mig mode", 1, SECONDS_30, self._mig_mode)])
        if mig == 1:
            self._add_instances(failures)
        elif self._fact(Number.GPM_SUPPORT) == 1:
            self._add_gpm(Gpm(self._nvml, GPM_METRICS, (self.label,)), "performance monitor", EVERY_TICK)
        self._is_probed = True

    def _fact(self, which: Number) -> int | None:
        """Return an optional fact; if it cannot be read, the GPU has not failed, and the query is tried again later."""
        self._calls += 1
        try:
            return self._nvml.number(self._handle, which)
        except NvmlError as error:
            raise_if_fatal(error)
            if error.code in _NO_SUCH_MODE:
                self._lacks.add(which)
            self._probe_when_answered(which.value, lambda nvml, handle: nvml.number(handle, which))
            return None

    def _probe_when_answered(self, name: str, ask: Callable[[Nvml, Handle], object]) -> None:
        """Ask again, less and less often, for what the probe was refused; an answer causes a new probe."""

        def again(nvml: Nvml, handle: Handle) -> list[Sample]:
            ask(nvml, handle)
            self._is_probed = False
            return []

        self._schedule.add([NvmlQuery(f"{name} for the probe", 1, SECONDS_30, again)])

    def _info_sample(self, architecture: str, mig: str) -> Sample:
        identity, facts = self._facts.identity, self._facts
        labels = (
            self.label, identity.uuid, identity.name, facts.driver, identity.pci_bus_id, architecture, facts.cuda,
            identity.vbios, mig,
        )  # fmt: skip
        return Sample("pacecar_gpu_info", labels, 1)

    def _count_links(self) -> int:
        """Return the number of NVLinks: from its field, or by asking for links until there is none."""
        self._calls += 1
        try:
            answer = self._nvml.fields(self._handle, [LINK_COUNT])[0]
            if isinstance(answer, FieldValue):
                return min(answer.value, LINKS_MAX)
            raise_if_fatal(answer)
        except NvmlError as error:
            raise_if_fatal(error)
        for link in range(LINKS_MAX):
            self._calls += 1
            try:
                self._nvml.link_active(self._handle, link)
            except NvmlError as error:
                raise_if_fatal(error)
                if link == 0:
                    self._probe_when_answered("first link", lambda nvml, handle: nvml.link_active(handle, 0))
                return link
        return LINKS_MAX

    def _add_energy_and_links(self) -> None:
        """Add queries for what the fields do not report."""
        self._fields.drop_doubles()
        if not self._fields.meanings.has(ENERGY):
            self._schedule.add([NvmlQuery("energy", 1, EVERY_TICK, self._energy)])
            self._fields.leave_to_query(ENERGY)
        states = {field.field.scope for field in self._fields.meanings.asked() if "link_state" in field.metric}
        for link in range(self._links):
            ask_state = link not in states
            self._schedule.add(link_queries(self.label, link, ask_state=ask_state, remember=self._remember_link))
            if ask_state:
                self._fields.leave_to_query(LINK_STATE._replace(scope=link))

    def _remember_link(self, link: int, end: RemoteLink) -> None:
        """Keep the remote end of a link, because the driver may not report it while the link is down."""
        if self._remote_ends.get(link) != end:
            self._remote_ends[link] = end
            self._links_info = [
                Sample("pacecar_gpu_nvlink_info", (self.label, str(link), *end), 1)
                for link, end in sorted(self._remote_ends.items())
            ]

    def _remember_links_that_are_up(self, samples: Iterable[Sample]) -> None:
        """Record that a link that is up leads somewhere, even if the driver does not say where."""
        for sample in samples:
            if sample.metric == "pacecar_gpu_nvlink_link_state" and sample.value:
                link = int(sample.labels[1])
                if link not in self._remote_ends:
                    self._remember_link(link, RemoteLink("", "", ""))

    def _add_gpm(self, gpm: Gpm, name: str, stale_ns: int) -> None:
        self._gpms.append(gpm)

        def ask(_: Nvml, handle: Handle) -> list[Sample | NvmlError]:
            return gpm.ask(handle, self._clock.monotonic_ns(), with_details=self._with_details)

        self._schedule.add([NvmlQuery(name, GPM_CALLS, stale_ns, ask)])

    # --- MIG ------------------------------------------------------------------------------------

    def _add_instances(self, failures: list[str]) -> None:
        self._knows_instances = False
        self._of_instances = InstanceProcesses(self.label)
        self._mig.clear()
        self._calls += 1
        try:
            slots = self._nvml.instance_slots(self._handle)
        except NvmlError as error:
            raise_if_fatal(error)
            self._probe_when_answered("mig slots", lambda nvml, handle: nvml.instance_slots(handle))
            return
        has_gpm = self._fact(Number.GPM_SUPPORT) == 1
        measured: set[int] = set()
        self._knows_instances = True
        for slot in range(slots):
            self._schedule.add([NvmlQuery(f"mig slot {slot}", 1, SECONDS_30, self._mig_slot(slot))])
            self._calls += 1
            try:
                key = self._nvml.instance_key(self._handle, slot)
                if key is None:
                    continue
                self._calls += 5
                instance = self._nvml.instance(self._handle, slot)
            except NvmlError as error:
                raise_if_fatal(error)
                failures.append(f"mig slot {slot}: {error}")
                self._knows_instances = False
                continue
            self._mig[slot] = key
            labels = (self.label, str(instance.gpu_instance), str(instance.compute_instance))
            self._instances.append(Sample("pacecar_gpu_instance_info", (*labels, instance.uuid, instance.name), 1))
            self._schedule.add(instance_queries(self.label, instance))
            self._schedule.add(self._of_instances.queries(instance))
            if has_gpm and instance.gpu_instance not in measured:  # the monitor knows only GPU instances
                measured.add(instance.gpu_instance)
                gpm = Gpm(self._nvml, INSTANCE_PARTS, labels[:2], instance.gpu_instance)
                self._add_gpm(gpm, f"mig {instance.gpu_instance} performance monitor", SECONDS_5)

    def _mig_mode(self, nvml: Nvml, handle: Handle) -> list[Sample]:
        mode, after_reset = nvml.mig_modes(handle)
        if (mode == 1) != self._is_mig:
            self._is_probed = False
        gpu = (self.label,)
        samples = [
            Sample("pacecar_gpu_mig_enabled", gpu, int(mode == 1)),
            Sample("pacecar_gpu_mig_enabled_after_reset", gpu, int(after_reset == 1)),
        ]
        if mode != 1 or self._knows_instances:  # an unread instance still exists
            samples.append(Sample("pacecar_gpu_mig_instances", gpu, len(self._mig) if mode == 1 else 0))
        return samples

    def _mig_slot(self, slot: int) -> Callable[[Nvml, Handle], list[Sample]]:
        def ask(nvml: Nvml, handle: Handle) -> list[Sample]:
            if nvml.instance_key(handle, slot) != self._mig.get(slot):
                self._is_probed = False
            return []

        return ask

    # --- asking ---------------------------------------------------------------------------------

    def _run_queries(self, failures: list[str], calls: int | None, until_ns: int) -> int:
        """Run the queries that are due and return how many were answered.

        Without a bound of `calls` slow queries run until `until_ns`, the rest at the next read: otherwise the probe of
        a slow driver would take a minute without any result.
        """
        answered = 0
        for asked in self._schedule.due(self._clock.monotonic_ns(), calls, with_details=self._with_details):
            if calls is None and asked.query.stale_ns and self._clock.monotonic_ns() >= until_ns:
                break
            answered += self._ask(asked, failures)
        return answered

    def _ask(self, asked: ScheduledQuery, failures: list[str]) -> bool:
        query = asked.query
        self._calls += query.calls
        try:
            answers = list(query.ask(self._nvml, self._handle))
            failed = [answer for answer in answers if isinstance(answer, NvmlError)]
            for error in failed:
                raise_if_fatal(error)
        except UnsupportedError as error:
            asked.refused(self._clock.monotonic_ns())
            self._note_failure(asked, error, failures)
        except NvmlError as error:
            raise_if_fatal(error)
            asked.failed(self._clock.monotonic_ns())
            self._note_failure(asked, error, failures)
        else:
            samples = [answer for answer in answers if isinstance(answer, Sample)] if failed else answers
            asked.answered(cast("list[Sample]", samples), self._clock.monotonic_ns())
            failures += [f"{query.name}: {error}" for error in failed]
            return True
        return False

    def _note_failure(self, asked: ScheduledQuery, error: NvmlError, failures: list[str]) -> None:
        """Report that the query failed, unless it fails so often that it is now asked less often."""
        if asked.is_backed_off:
            _log.debug("gpu %s: %s: asked less often from now on: %s", self.label, asked.query.name, error)
        else:
            failures.append(f"{asked.query.name}: {error}")

    # --- derived --------------------------------------------------------------------------------

    def _clock_events(self, nvml: Nvml, handle: Handle) -> Iterable[Sample]:
        supported = sum(CLOCK_REASONS) if self._reasons_supported is None else self._reasons_supported
        mask = nvml.number(handle, Number.CLOCK_REASONS)
        if mask in NO_NUMBERS:
            raise NvmlError(f"{mask} is not a set of reasons")
        samples = list(self._events.update(mask, supported, self._clock.monotonic_ns(), self._counted_ns))
        for field in self._fields.meanings.counted_reasons().copy():
            if self._is_disbelieved(field):
                self._fields.meanings.drop(field)
                _log.warning(
                    "gpu %s: driver %s contradicts the samples of %s in field %d: samples are served instead",
                    self.label, self._facts.driver, field.labels[0], field.field.number,
                )  # fmt: skip
        return samples

    def _is_disbelieved(self, field: Field) -> bool:
        return field.labels[:1] != () and field.bits_min > 0 and field.labels[0] in self._events.disbelieved

    def _energy(self, nvml: Nvml, handle: Handle) -> list[Sample]:
        value = nvml.number(handle, Number.ENERGY)
        if value in NO_NUMBERS:
            raise NvmlError(f"implausible count {value}")
        energy = self._energy_counter.update(value)
        if self._energy_counter.has_fallen:
            raise NvmlError(f"fell to {value}, not confirmed")
        if energy is None:
            return []
        samples = [Sample("pacecar_gpu_energy_joules_total", (self.label,), energy)]
        return samples + self._mean_power(samples)

    def _mean_power(self, answers: Iterable[Sample]) -> list[Sample]:
        return [
            power
            for sample in answers
            if sample.metric == "pacecar_gpu_energy_joules_total"
            for power in self._power.update(int(sample.value), self._clock.monotonic_ns())
        ]
