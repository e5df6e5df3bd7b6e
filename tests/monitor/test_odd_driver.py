"""A driver with impossible answers: the number is missing and counted as a read failure, and no total is wrong."""

import pytest

from pacecar.clock import SystemClock
from pacecar.monitor.collectors.gpu import GpuCollector
from pacecar.monitor.gpu.driver import DriverMemory, DriverUtilization, FieldId, FieldValue, Number
from pacecar.monitor.gpu.nvml import PyNvml
from pacecar.monitor.gpu.queries.fields import ENERGY
from pacecar.monitor.sampling.sampler import Sampler
from pacecar.monitor.sampling.ticker import SamplingTick
from pacecar.records import Ok

SECOND = 1_000_000_000
UNKNOWN = 2**32 - 1
TX = FieldId(138, 0xFFFFFFFF)


class OddNvml(PyNvml):
    """The stand-in's driver, except for the `numbers` and `values` of GPU 0."""

    def __init__(self):
        super().__init__()
        self.numbers, self.values, self.odd = {}, {}, {}
        self.first = None

    def device(self, index):
        handle = super().device(index)
        if index == 0:
            self.first = handle
        return handle

    def number(self, handle, which):
        value = super().number(handle, which)
        return self.numbers.get(which, value) if handle is self.first else value

    def utilization(self, handle):
        rates = super().utilization(handle)
        return self.odd.get("utilization", rates) if handle is self.first else rates

    def memory(self, handle):
        memory = super().memory(handle)
        return self.odd.get("memory", memory) if handle is self.first else memory

    def fields(self, handle, ids):
        answers = super().fields(handle, ids)
        if handle is not self.first:
            return answers
        return [
            FieldValue(self.values[one], 64) if one in self.values else a for one, a in zip(ids, answers, strict=True)
        ]


@pytest.fixture
def node(standin, clock, tmp_path):
    """The driver, and what a tick a second later serves for GPU 0 and GPU 1, with the outcome."""
    standin.page.count = 2
    nvml = OddNvml()
    collector = GpuCollector(nvml, clock, deadline_seconds=20.0, kernel_log=str(tmp_path / "kmsg"))
    sampler = Sampler([collector], SystemClock(), deadline_seconds=60.0)

    def tick(seconds=1.0):
        clock.advance(int(seconds * SECOND))
        outcome = sampler.sample(SamplingTick(0, 0, 0, 0)).outcomes["gpu"]
        served = ({(s.metric.removeprefix("pacecar_gpu_"), *s.labels[1:]): s.value for s in outcome.samples
                   if s.labels[:1] == (gpu,)} for gpu in "01")  # fmt: skip
        return (*served, outcome)

    yield nvml, tick
    sampler.close()


ODD = {
    "utilization_ratio": lambda nvml: nvml.odd.update(utilization=DriverUtilization(UNKNOWN, 7)),
    "power_watts": lambda nvml: nvml.numbers.update({Number.POWER: UNKNOWN}),
    "temperature_celsius": lambda nvml: nvml.numbers.update({Number.TEMPERATURE: 2**31 - 1}),
    "memory_used_bytes": lambda nvml: nvml.odd.update(memory=DriverMemory(1 << 30, 1 << 31, 1 << 20, 1 << 20)),
    "memory_temperature_celsius": lambda nvml: nvml.values.update({FieldId(82): UNKNOWN}),
}


@pytest.mark.parametrize("metric", ODD)
def test_a_number_that_cannot_be_is_missing_of_that_gpu_and_counted(metric, node):
    nvml, tick = node
    for _ in range(4):
        before, other, _ = tick()
    ODD[metric](nvml)
    tick()
    served, neighbour, outcome = tick()
    gone = {key for key in before.keys() - served.keys() if "_window_" not in key[0]}
    assert gone == {(metric,)}
    assert neighbour.keys() == other.keys()
    assert (type(outcome), outcome.read_failures) == (Ok, 1)
    assert f"NVML: pacecar_gpu_{metric} of gpu='0': " in outcome.reason
    assert served["read_failures_total",] == before["read_failures_total",] + 1  # of the tick before this one
    assert neighbour["read_failures_total",] == other["read_failures_total",]


@pytest.mark.slow
def test_reasons_that_the_driver_does_not_know_charge_no_time(node):
    nvml, tick = node
    for _ in range(3):
        before, _, _ = tick()
    nvml.numbers[Number.CLOCK_REASONS] = UNKNOWN
    served, _, outcome = tick()
    sampled = {key for key in before if key[0] == "clock_event_seconds_total" and key[-1] == "sampled"}
    assert sampled
    assert not sampled & served.keys()
    assert "clock events" in outcome.reason
    del nvml.numbers[Number.CLOCK_REASONS]
    after, _, _ = tick()
    assert {key: after[key] - before[key] for key in sampled if key[1] != "gpu_idle"} == dict.fromkeys(
        (key for key in sampled if key[1] != "gpu_idle"), 0
    )


@pytest.mark.parametrize(
    ("field", "metric", "factor"), [(ENERGY, "energy_joules_total", 1), (TX, "nvlink_transmit_bytes_total", 1024)]
)
@pytest.mark.parametrize("start", [1_000_000, 3_000_000_000, 1 << 40])
def test_a_counter_of_zero_once_is_missing_and_moves_no_total(field, metric, factor, start, node):
    nvml, tick = node
    steps = [start, start + 100_000, 0, start + 300_000, start + 400_000]
    seen = []
    for value in steps:
        nvml.values[field] = value
        served, _, outcome = tick()
        seen.append(served.get((metric,)))
        if value == 0:
            assert outcome.read_failures == 1
            assert f"field {field.number}" in outcome.reason
        power = served.get(("power_mean_watts",))
        assert field != ENERGY or power is None or 50_000 <= power <= 150_000
    assert seen == [None if value == 0 else value * factor for value in steps]


@pytest.mark.slow
@pytest.mark.parametrize("unknown", [2**32 - 1, 2**63 - 1, 2**64 - 1])
@pytest.mark.parametrize("field", [ENERGY, FieldId(3)], ids=["fast", "slow"])
def test_a_counter_that_the_driver_does_not_know_once_moves_no_total(field, unknown, node):
    nvml, tick = node
    key = ("energy_joules_total",) if field == ENERGY else ("ecc_errors_total", "corrected", "volatile")
    seen = []
    for value in (5_000_000, unknown, 5_400_000):
        nvml.values[field] = value
        for _ in range(8):  # the slow ones are asked for in turns
            served, _, _ = tick()
        seen.append(served.get(key))
    assert seen == [5_000_000, None, 5_400_000]


@pytest.mark.slow
@pytest.mark.parametrize("unknown", [UNKNOWN, 2**64 - 1])
def test_uncorrected_errors_that_the_driver_does_not_know_are_missing_and_no_fault(unknown, node):
    nvml, tick = node
    seen = []
    for value in (3, unknown, 0):
        nvml.values[FieldId(4)] = value
        for _ in range(8):  # asked for in turns
            served, _, _ = tick()
        seen.append(served.get(("ecc_uncorrected_errors",)))
    assert seen == [3, None, 0]


def test_an_energy_of_zero_at_the_first_reading_is_no_megawatt(node):
    nvml, tick = node
    seen = []
    for value in (0, 10**9, 10**9 + 500_000):
        nvml.values[ENERGY] = value
        served, _, _ = tick()
        seen.append((served.get(("energy_joules_total",)), served.get(("power_mean_watts",))))
    assert seen == [(None, None), (10**9, None), (10**9 + 500_000, 500_000)]


def test_a_counter_that_began_again_goes_on_once_it_is_confirmed(node):
    nvml, tick = node
    seen = []
    for value in (7_000_000, 100, 300, 600):
        nvml.values[TX] = value
        seen.append(tick()[0].get(("nvlink_transmit_bytes_total",)))
    assert seen == [7_000_000 * 1024, None, 7_000_300 * 1024, 7_000_600 * 1024]
