"""Reads one GPU: probes it once, then asks what it answers, in a bounded number of driver calls a tick.

    probe    after the GPU was opened or came back: everything is asked once
    tick     one call for the fields; what changes fast; and what is longest overdue, up to CALLS_PER_TICK_MAX calls

In MIG mode each instance has memory, processes and its share of the performance monitor; a change of mode or of
instances is a reason to probe again, as is an NVLink that comes up or goes down.

A query that is refused or fails costs its own series.  A GPU that is lost raises, and so does one that answers nothing
at all, because a driver may say "invalid argument" of a handle that has gone.  The next read of a lost GPU takes a new
handle, makes sure that the same GPU is behind it, and probes again.

Left out on purpose: threads.  The caller of `read` decides how long to wait, and what to do about the other GPUs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

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
from .queries.field_reader import FieldReader, must_go_on
from .queries.fields import ENERGY, LINK_COUNT, LINK_STATE, Field, fields_of
from .queries.gpm import GPM_CALLS, GPM_METRICS, INSTANCE_PARTS, Gpm
from .queries.queries import (
    EVERY_TICK,
    SECONDS_5,
    SECONDS_30,
    C2cLinks,
    NvmlQuery,
    Processes,
    SramEcc,
    fan_questions,
    gpu_questions,
    instance_questions,
    link_questions,
)
from .queries.query_schedule import QuerySchedule, ScheduledQuery

__all__ = ["CALLS_PER_TICK_MAX", "LINKS_MAX", "Device", "DeviceFacts", "DeviceReading"]

CALLS_PER_TICK_MAX = 12
"""Driver calls for one GPU in a tick that does not probe."""

PROBE_SECONDS = 0.5
"""After so long a probe goes on at the next read: with a millisecond a call all of it takes a tenth of a second."""

SLOW_CALLS_MIN = 2
"""Calls of every tick that are kept for slow queries: the most expensive of those that recur takes as many."""

NARROW_NS_MAX = 120 * NS_PER_SECOND // 1000
"""The longest time between two glances at the default of ten a second, jitter included: at 36 GB/s a counter of 32 bits
wraps once in it."""

LANE_BYTES_PER_SECOND = {
    0: 0.0, 1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9, 7: 15.125e9,
}  # fmt: skip
"""PCIe generation -> what a lane moves in one direction after its line code (PCI-SIG base specifications)."""

LINKS_MAX = 36
"""NVML_NVLINK_MAX_LINKS of the newest header."""

_ARCHITECTURES = {
    2: "kepler", 3: "maxwell", 4: "pascal", 5: "volta", 6: "turing", 7: "ampere", 8: "ada", 9: "hopper",
    10: "blackwell", 13: "rubin",
}  # fmt: skip  # NVML_DEVICE_ARCH_*

_log = logging.getLogger(__name__)


class DeviceFacts(NamedTuple):
    """Facts of a GPU, and of the driver session that found it."""

    gpu_index: int
    identity: Identity
    driver: str
    cuda: str


class DeviceReading(NamedTuple):
    """One tick of one GPU: what came, what failed, and how long that took with how many calls.

    `withdrawn` counts the numbers that were answered before and are refused now, whether they were asked for or not.
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
        self._sram = SramEcc(label)
        self._schedule = QuerySchedule()
        self._gpms: list[Gpm] = []
        self.info: Sample | None = None
        """The facts of the GPU as they were last known; they outlive its failures."""
        self._instances: list[Sample] = []
        self._mig: dict[int, int] = {}
        self._links = 0
        self._remote_ends: dict[int, RemoteLink] = {}
        self._links_info: list[Sample] = []
        self._is_probed = False
        self._is_lost = False
        self._is_mig = False
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
        """Take the handle of a new driver session; without one the next read looks for the GPU at its index.

        What was allocated in the old session is gone with it.
        """
        if self._driver != facts.driver:
            self._driver = facts.driver
            self._c2c = C2cLinks(self.label, facts.driver)
            self._events.restart()
        self._facts = facts
        if handle is not None:
            self._handle, self.uuid = handle, facts.identity.uuid
            if self.info is None:  # until the probe knows the rest
                self.info = self._info_sample("", "")
        self._fields.meanings.restart()
        self._energy_counter.restart()
        self._power.restart()
        self._gpms = []
        self._is_probed, self._is_lost = False, handle is None

    def read(self) -> DeviceReading:
        """Ask what is due.

        Raises:
            GpuLostError: the GPU does not answer; the next read looks whether it is back.
            DriverStoppedError, DriverMissingError: the session is over; `attach` before the next read.
        """
        failures: list[str] = []
        calls_before, begun_ns = self.calls, self._clock.monotonic_ns()
        try:
            if self._is_lost:
                self._find_again()
            is_probing = not self._is_probed
            if is_probing:
                self._probe(failures)
            answers = self._fields.ask(self._handle, failures, everything=is_probing)
            if is_probing:
                self._add_energy_and_links()
            self._counted_ns = {
                field.labels[0]: int(answers[field].value)
                for field in self._fields.meanings.counted_reasons()
                if field in answers
            }
            samples = self._instances + list(answers.values()) + self._fields.slow_samples()
            samples += self._fields.meanings.health()
            samples += self._mean_power(answers.values()) + self._fields.link_totals(answers)
            answered = len(answers) + self._ask_questions(
                failures,
                None if is_probing or self._schedule.has_unasked() else CALLS_PER_TICK_MAX - 1 - self._glances,
                begun_ns + int(PROBE_SECONDS * NS_PER_SECOND),
            )
        except GpuLostError:
            self._is_lost = True
            raise
        if self._fields.must_probe:
            self._is_probed = False
        if answered == 0:
            self._is_lost = True
            raise GpuLostError("it answers nothing" + (f": {failures[0]}" if failures else ""))
        self._leave_for_glances(self.calls - calls_before)
        self._fields.meanings.pcie_bytes_per_second_max = self._pcie_bytes_per_second_max()
        self._narrow = self._fields.meanings.narrow(NARROW_NS_MAX)
        took_ns = self._clock.monotonic_ns() - begun_ns
        refused = self._refused()
        samples += self._schedule.samples()
        if len(self._remote_ends) < self._links and not self._schedule.has_unasked():
            self._remember_links_that_are_up(samples)
        samples += self._links_info
        samples += [Sample("pacecar_gpu_refused_numbers", (self.label, since), n) for since, n in refused.items()]
        return DeviceReading(samples, failures, took_ns, self.calls - calls_before, refused["later"])

    def _refused(self) -> dict[str, int]:
        """Return how many numbers the driver refuses, by when that began: at the probe, or later."""
        counts = [self._fields.refused(), self._schedule.refused(), *(gpm.refused() for gpm in self._gpms)]
        return {
            "probe": sum(count.never_answered for count in counts),
            "later": sum(count.answered_before for count in counts),
        }

    @property
    def is_glance_due(self) -> bool:
        """Whether `glance` would ask the driver anything now; for the collector's thread, while nobody asks."""
        return self._is_probed and not self._is_lost and (bool(self._narrow) or self._has_spare_call)

    @property
    def _has_spare_call(self) -> bool:
        return self._spare_calls > 0 and self._clock.monotonic_ns() >= self._glance_due_ns

    def glance(self) -> DeviceReading:
        """Read power or utilization, alternately, with one of the calls that ticks leave over; else nothing.

        The calls of a tick are bounded with the glances before it and after it, which are spread over the time between.
        Beyond them is one call at every glance where a PCIe counter may wrap within a tick.
        """
        if not self.is_glance_due:
            return DeviceReading([], [])
        if self._narrow:
            self._fields.look(self._handle, self._narrow)
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
        """Return the most that the PCIe link can move in one direction; None while generation or width are unknown."""
        generation = self._schedule.value_of(Number.PCIE_GENERATION_MAX.value)
        width = self._schedule.value_of(Number.PCIE_WIDTH_MAX.value)
        if generation is None or width is None:
            return None
        lane = LANE_BYTES_PER_SECOND.get(int(generation))
        return None if lane is None else lane * width

    def _leave_for_glances(self, calls: int) -> None:
        now = self._clock.monotonic_ns()
        period = 0 if self._read_ns is None else now - self._read_ns
        self._read_ns = now
        kept = 1 + self._schedule.fast_calls() + SLOW_CALLS_MIN
        self._spare_calls = CALLS_PER_TICK_MAX - max(calls, kept)
        self._glances = 0
        self._glance_gap_ns = period // (self._spare_calls + 1) if self._spare_calls > 0 else 0
        self._glance_due_ns = now + self._glance_gap_ns

    # --- coming and going -----------------------------------------------------------------------

    def _find_again(self) -> None:
        self._calls += 1
        handle = self._nvml.device(self._facts.gpu_index)
        self._calls += 4
        identity = self._nvml.identity(handle)
        if self.uuid not in ("", identity.uuid):
            raise GpuLostError(f"GPU {identity.uuid} answers in its place, not {self.uuid}")
        self._handle, self.uuid, self._facts = handle, identity.uuid, self._facts._replace(identity=identity)
        self._is_probed = self._is_lost = False
        self._power.restart()

    def _probe(self, failures: list[str]) -> None:
        """Find out what the GPU can be asked for."""
        for gpm in self._gpms:
            gpm.close()
        self._gpms = []
        self._schedule.clear()
        architecture = self._fact(Number.ARCHITECTURE)
        mig = self._fact(Number.MIG_MODE)
        self._reasons_supported = self._fact(Number.CLOCK_REASONS_SUPPORTED)
        self.info = self._info_sample(_ARCHITECTURES.get(architecture or 0, ""), "on" if mig == 1 else "off")
        self._is_mig, self._instances = mig == 1, []
        self._links = self._count_links()
        known = fields_of(self._facts.driver, self._links)
        self._fields.begin([field for field in known if not self._is_disbelieved(field)])
        self._schedule.add(gpu_questions(self.label))
        self._schedule.add(self._processes.questions())
        self._schedule.add(self._sram.questions())
        self._schedule.add(self._c2c.questions())
        self._schedule.add(fan_questions(self.label, self._fact(Number.FANS) or 0))
        self._schedule.add([NvmlQuery("clock events", 1, EVERY_TICK, self._clock_events)])
        if mig is not None:
            self._schedule.add([NvmlQuery("mig mode", 1, SECONDS_30, self._mig_mode)])
        if mig == 1:
            self._add_instances(failures)
        elif self._fact(Number.GPM_SUPPORT) == 1:
            self._add_gpm(Gpm(self._nvml, GPM_METRICS, (self.label,)), "performance monitor", EVERY_TICK)
        self._is_probed = True

    def _fact(self, which: Number) -> int | None:
        """Return a fact that need not be there; a failure here is no failure of the GPU, and is asked about again."""
        self._calls += 1
        try:
            return self._nvml.number(self._handle, which)
        except NvmlError as error:
            must_go_on(error)
            self._probe_when_answered(which.value, lambda nvml, handle: nvml.number(handle, which))
            return None

    def _probe_when_answered(self, name: str, ask: Callable[[Nvml, Handle], object]) -> None:
        """Ask again for what the probe was refused, ever less often; its answer is a reason to probe again."""

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
        """Return how many NVLinks there are: by the field for it, or by asking until there is none."""
        self._calls += 1
        try:
            answer = self._nvml.fields(self._handle, [LINK_COUNT])[0]
            if isinstance(answer, FieldValue):
                return min(answer.value, LINKS_MAX)
            must_go_on(answer)
        except NvmlError as error:
            must_go_on(error)
        for link in range(LINKS_MAX):
            self._calls += 1
            try:
                self._nvml.link_active(self._handle, link)
            except NvmlError as error:
                must_go_on(error)
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
            self._schedule.add(link_questions(self.label, link, ask_state=ask_state, remember=self._remember_link))
            if ask_state:
                self._fields.leave_to_query(LINK_STATE._replace(scope=link))

    def _remember_link(self, link: int, end: RemoteLink) -> None:
        """Keep what a link leads to, because the driver may not say it while the link is down."""
        if self._remote_ends.get(link) != end:
            self._remote_ends[link] = end
            self._links_info = [
                Sample("pacecar_gpu_nvlink_info", (self.label, str(link), *end), 1)
                for link, end in sorted(self._remote_ends.items())
            ]

    def _remember_links_that_are_up(self, samples: Iterable[Sample]) -> None:
        """Note that such a link leads somewhere, where the driver does not say to what."""
        for sample in samples:
            if sample.metric == "pacecar_gpu_nvlink_link_state" and sample.value:
                link = int(sample.labels[1])
                if link not in self._remote_ends:
                    self._remember_link(link, RemoteLink("", "", ""))

    def _add_gpm(self, gpm: Gpm, name: str, stale_ns: int) -> None:
        self._gpms.append(gpm)
        clock = self._clock
        self._schedule.add([NvmlQuery(name, GPM_CALLS, stale_ns, lambda _, h: gpm.ask(h, clock.monotonic_ns()))])

    # --- MIG ------------------------------------------------------------------------------------

    def _add_instances(self, failures: list[str]) -> None:
        self._calls += 1
        try:
            slots = self._nvml.instance_slots(self._handle)
        except NvmlError as error:
            must_go_on(error)
            self._probe_when_answered("mig slots", lambda nvml, handle: nvml.instance_slots(handle))
            return
        has_gpm = self._fact(Number.GPM_SUPPORT) == 1
        measured: set[int] = set()
        self._mig.clear()
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
                must_go_on(error)
                failures.append(f"mig slot {slot}: {error}")
                continue
            self._mig[slot] = key
            labels = (self.label, str(instance.gpu_instance), str(instance.compute_instance))
            self._instances.append(Sample("pacecar_gpu_instance_info", (*labels, instance.uuid, instance.name), 1))
            self._schedule.add(instance_questions(self.label, instance))
            if has_gpm and instance.gpu_instance not in measured:  # the monitor knows GPU instances only
                measured.add(instance.gpu_instance)
                gpm = Gpm(self._nvml, INSTANCE_PARTS, labels[:2], instance.gpu_instance)
                self._add_gpm(gpm, f"mig {instance.gpu_instance} performance monitor", SECONDS_5)

    def _mig_mode(self, nvml: Nvml, handle: Handle) -> list[Sample]:
        mode, after_reset = nvml.mig_modes(handle)
        if (mode == 1) != self._is_mig:
            self._is_probed = False
        gpu = (self.label,)
        return [
            Sample("pacecar_gpu_mig_enabled", gpu, int(mode == 1)),
            Sample("pacecar_gpu_mig_enabled_after_reset", gpu, int(after_reset == 1)),
            Sample("pacecar_gpu_mig_instances", gpu, len(self._mig) if mode == 1 else 0),
        ]

    def _mig_slot(self, slot: int) -> Callable[[Nvml, Handle], list[Sample]]:
        def ask(nvml: Nvml, handle: Handle) -> list[Sample]:
            if nvml.instance_key(handle, slot) != self._mig.get(slot):
                self._is_probed = False
            return []

        return ask

    # --- asking ---------------------------------------------------------------------------------

    def _ask_questions(self, failures: list[str], calls: int | None, until_ns: int) -> int:
        """Ask what is due and return how many answers came.

        Without a bound of `calls` slow queries are made until `until_ns`, and the others by the next read: a driver
        that is slow would be probed for a minute, in which nothing is known of the GPU.
        """
        answered = 0
        for asked in self._schedule.due(self._clock.monotonic_ns(), calls):
            if calls is None and asked.question.stale_ns and self._clock.monotonic_ns() >= until_ns:
                break
            answered += self._ask(asked, failures)
        return answered

    def _ask(self, asked: ScheduledQuery, failures: list[str]) -> bool:
        question = asked.question
        self._calls += question.calls
        try:
            samples = list(question.ask(self._nvml, self._handle))
        except UnsupportedError as error:
            asked.refused(self._clock.monotonic_ns())
            self._note_failure(asked, error, failures)
        except NvmlError as error:
            must_go_on(error)
            asked.failed(self._clock.monotonic_ns())
            self._note_failure(asked, error, failures)
        else:
            asked.answered(samples, self._clock.monotonic_ns())
            return True
        return False

    def _note_failure(self, asked: ScheduledQuery, error: NvmlError, failures: list[str]) -> None:
        """Report that the query failed, unless it is refused so often that it is asked ever less."""
        if asked.is_backed_off:
            _log.debug("gpu %s: %s: asked less often from now on: %s", self.label, asked.question.name, error)
        else:
            failures.append(f"{asked.question.name}: {error}")

    # --- derived --------------------------------------------------------------------------------

    def _clock_events(self, nvml: Nvml, handle: Handle) -> Iterable[Sample]:
        supported = sum(CLOCK_REASONS) if self._reasons_supported is None else self._reasons_supported
        mask = nvml.number(handle, Number.CLOCK_REASONS)
        if mask in NO_NUMBERS:
            raise NvmlError(f"{mask} names no reasons")
        samples = list(self._events.update(mask, supported, self._clock.monotonic_ns(), self._counted_ns))
        for field in self._fields.meanings.counted_reasons().copy():
            if self._is_disbelieved(field):
                self._fields.meanings.drop(field)
                _log.warning(
                    "gpu %s: driver %s counts another time for %s in field %d than samples show: samples are served",
                    self.label, self._facts.driver, field.labels[0], field.field.number,
                )  # fmt: skip
        return samples

    def _is_disbelieved(self, field: Field) -> bool:
        return field.labels[:1] != () and field.bits_min > 0 and field.labels[0] in self._events.disbelieved

    def _energy(self, nvml: Nvml, handle: Handle) -> list[Sample]:
        value = nvml.number(handle, Number.ENERGY)
        if value in NO_NUMBERS:
            raise NvmlError(f"a count of {value}")
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
