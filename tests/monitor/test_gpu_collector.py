"""The GPU collector against a driver that the test owns: one in Python, and real pynvml over a library in C."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pacecar.monitor.collectors.gpu import ALL_LINKS, REOPEN_SECONDS, GpuCollector
from pacecar.monitor.nvml import (
    DriverMissingError,
    DriverStoppedError,
    GpuLostError,
    Identity,
    Memory,
    NvmlError,
    UnsupportedError,
    Utilization,
)
from pacecar.records import Absent, Failed, Ok

SECOND = 1_000_000_000
CLOCKS = {"graphics": 1, "sm": 2, "memory": 3, "video": 4}


class Driver:
    """Two GPUs; handle 1 and 2; every number differs.  `fault(call number, method, handle)` may raise or replace."""

    def __init__(self, count=2, fault=None):
        self.count = count
        self.fault = fault or (lambda number, method, handle: None)
        self.calls = []
        self.starts = 0
        self.zero = False

    def _answer(self, method, handle, value):
        self.calls.append((method, handle))
        self.fault(len(self.calls), method, handle)
        return value

    def number(self, method, handle, value):
        return self._answer(method, handle, 0 if self.zero else value + 100 * handle)

    def start(self):
        self.starts += 1
        self._answer("start", None, None)

    def stop(self):
        self.calls.append(("stop", None))

    def driver_version(self):
        return self._answer("driver_version", None, "580.1")

    def device_count(self):
        return self._answer("device_count", None, self.count)

    def device(self, index):
        return self._answer("device", index + 1, index + 1)

    def identity(self, handle):
        return self._answer("identity", handle, Identity(f"GPU-{handle}", "H200", f"0000:{handle}:00.0"))

    def utilization(self, handle):
        return Utilization(self.number("utilization", handle, -90), 0 if self.zero else 25)

    def memory(self, handle):
        total = self.number("memory", handle, 11)
        return Memory(total, *(0, 0) if self.zero else (total + 1, total + 2))

    def power(self, handle):
        return self.number("power", handle, 12)

    def power_limit(self, handle):
        return self.number("power_limit", handle, 13)

    def energy(self, handle):
        return self.number("energy", handle, 14)

    def temperature(self, handle):
        return self.number("temperature", handle, 15)

    def clock(self, handle, domain):
        return self.number(f"clock {domain}", handle, 20 + CLOCKS[domain])

    def clock_max(self, handle, domain):
        return self.number(f"clock_max {domain}", handle, 30 + CLOCKS[domain])

    def fields(self, handle, ids):
        self._answer("fields", handle, None)
        return [self.field(handle, field) for field in ids]

    def field(self, handle, field):
        known = {(197, 0): 41, (198, 0): 42, (138, ALL_LINKS): 43, (139, ALL_LINKS): 44}
        return 0 if self.zero else known[tuple(field)] + 100 * handle


def test_values_of_each_gpu(clock, values):
    read = values(GpuCollector(Driver(), clock).collect())
    assert read[("gpu_info", "1", "GPU-2", "H200", "580.1", "0000:2:00.0")] == 1
    expected = {
        ("gpu_utilization_ratio", "0"): 0.1,
        ("gpu_memory_utilization_ratio", "0"): 0.25,
        ("gpu_memory_size_bytes", "0"): 111,
        ("gpu_memory_used_bytes", "0"): 112,
        ("gpu_memory_free_bytes", "0"): 113,
        ("gpu_power_watts", "0"): 112,
        ("gpu_power_limit_watts", "0"): 113,
        ("gpu_energy_joules_total", "0"): 114,
        ("gpu_temperature_celsius", "0"): 115,
        ("gpu_clock_hertz", "0", "sm"): 122,
        ("gpu_clock_hertz", "1", "memory"): 223,
        ("gpu_clock_max_hertz", "0", "graphics"): 131,
        ("gpu_clock_max_hertz", "1", "video"): 234,
        ("gpu_pcie_transmit_bytes_total", "0"): 141,
        ("gpu_pcie_receive_bytes_total", "0"): 142,
        ("gpu_nvlink_transmit_bytes_total", "0"): 143 * 1024,
        ("gpu_nvlink_receive_bytes_total", "1"): 244 * 1024,
    }
    assert expected.items() <= read.items()


def test_zero_is_a_measurement(clock, values):
    driver = Driver()
    before = values(GpuCollector(driver, clock).collect())
    driver.zero = True
    after = values(GpuCollector(driver, clock).collect())
    assert after.keys() == before.keys()
    assert {key[0] for key, value in after.items() if value != 0} == {"gpu_info"}


def test_no_driver_is_absent_and_is_looked_for_again_only_after_a_while(clock, values):
    def missing(number, method, handle):
        if method == "start" and driver.starts == 1:
            raise DriverMissingError("no library")

    driver = Driver(fault=missing)
    collector = GpuCollector(driver, clock)
    assert isinstance(collector.collect(), Absent)
    clock.advance((REOPEN_SECONDS - 1) * SECOND)
    assert isinstance(collector.collect(), Absent)
    assert driver.starts == 1
    clock.advance(SECOND)
    assert isinstance(collector.collect(), Ok)


def test_driver_without_gpus_is_absent_and_let_go(clock):
    driver = Driver(count=0)
    assert isinstance(GpuCollector(driver, clock).collect(), Absent)
    assert driver.calls[-1] == ("stop", None)


def test_unsupported_question_is_absent_and_asked_once_for_that_gpu_alone(clock, values):
    def unsupported(number, method, handle):
        if method == "energy" and handle == 1:
            raise UnsupportedError("Not Supported")

    driver = Driver(fault=unsupported)
    collector = GpuCollector(driver, clock)
    for _ in range(3):
        outcome = collector.collect()
        assert isinstance(outcome, Ok)
        energies = {k[1]: v for k, v in values(outcome).items() if k[0] == "gpu_energy_joules_total"}
        assert energies == {"1": 214}
    assert driver.calls.count(("energy", 1)) == 1
    assert driver.calls.count(("energy", 2)) == 3


def test_each_field_has_its_own_fate(clock, values):
    class NoNvlink(Driver):
        def field(self, handle, field):
            if field.number == 138:
                return UnsupportedError("Not Supported")
            if field.number == 139:
                return NvmlError("Unknown Error")
            return super().field(handle, field)

    collector = GpuCollector(NoNvlink(count=1), clock)
    for _ in range(2):
        outcome = collector.collect()
        assert isinstance(outcome, Failed)
        assert outcome.reason == "gpu 0: pacecar_gpu_nvlink_receive_bytes_total: Unknown Error"
        counters = {key[0] for key in values(outcome) if "pcie" in key[0] or "nvlink" in key[0]}
        assert counters == {"gpu_pcie_transmit_bytes_total", "gpu_pcie_receive_bytes_total"}


def test_lost_gpu_is_asked_no_further_and_the_other_goes_on(clock, values):
    def lost(number, method, handle):
        if method == "power" and handle == 1:
            raise GpuLostError("GPU is lost")

    driver = Driver(fault=lost)
    outcome = GpuCollector(driver, clock).collect()
    assert isinstance(outcome, Failed)
    assert outcome.reason == "gpu 0: GPU is lost"
    assert ("temperature", 1) not in driver.calls
    read = values(outcome)
    assert ("gpu_memory_size_bytes", "0") in read
    assert ("gpu_power_watts", "0") not in read
    assert ("gpu_temperature_celsius", "1") in read


@pytest.mark.parametrize("error", [NvmlError, GpuLostError, UnsupportedError, DriverStoppedError, DriverMissingError])
def test_any_one_call_may_fail(error, clock, values):
    """For every n: when the n-th call fails, no exception escapes and the numbers that come are the right ones."""
    probe = Driver()
    everything = values(GpuCollector(probe, clock).collect())
    for n in range(1, len(probe.calls) + 1):

        def fail(number, method, handle, n=n):
            if number == n:
                raise error("broken")

        driver = Driver(fault=fail)
        collector = GpuCollector(driver, clock)
        outcome = collector.collect()
        if not isinstance(outcome, Absent):
            assert values(outcome).items() <= everything.items()
        assert not isinstance(outcome, Ok) or error is UnsupportedError
        clock.advance(REOPEN_SECONDS * SECOND)
        assert isinstance(collector.collect(), Ok)


def test_reloaded_driver_is_opened_anew_at_the_next_tick(clock):
    def stopped(number, method, handle):
        if method == "utilization" and driver.starts == 1:
            raise DriverStoppedError("Uninitialized")

    driver = Driver(fault=stopped)
    collector = GpuCollector(driver, clock)
    assert isinstance(collector.collect(), Failed)
    assert isinstance(collector.collect(), Ok)
    assert driver.starts == 2


STAND_IN = r"""
#include <stdint.h>
#include <stdio.h>
#include <string.h>
typedef void *dev; typedef unsigned long long u64;
typedef struct { u64 total, free, used; } mem;
typedef struct { unsigned gpu, memory; } util;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, sub; char bus_id[32]; } pci;
typedef struct {
  uint32_t field, scope; int64_t stamp, latency; unsigned type, ret; union { u64 ull; double d; } v;
} fv;
static int index_of(dev d) { return (int)(intptr_t)d - 1; }
int nvmlInitWithFlags(unsigned f) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int r) { return "stand-in error"; }
int nvmlSystemGetDriverVersion(char *s, unsigned n) { snprintf(s, n, "599.77"); return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, dev *d) { *d = (dev)(intptr_t)(i + 1); return 0; }
int nvmlDeviceGetUUID(dev d, char *s, unsigned n) { snprintf(s, n, "GPU-%d", index_of(d)); return 0; }
int nvmlDeviceGetName(dev d, char *s, unsigned n) { snprintf(s, n, "Stand-in"); return 0; }
int nvmlDeviceGetPciInfo_v3(dev d, pci *p) {
  memset(p, 0, sizeof *p); snprintf(p->bus_id, 32, "0000:0%d:00.0", index_of(d)); return 0; }
int nvmlDeviceGetUtilizationRates(dev d, util *u) { if (index_of(d)) return 15; u->gpu = 97; u->memory = 31; return 0; }
int nvmlDeviceGetMemoryInfo(dev d, mem *m) { m->total = 1001; m->free = 402; m->used = 603; return 0; }
int nvmlDeviceGetPowerUsage(dev d, unsigned *p) { *p = 650123; return 0; }
int nvmlDeviceGetEnforcedPowerLimit(dev d, unsigned *p) { *p = 700001; return 0; }
int nvmlDeviceGetTotalEnergyConsumption(dev d, u64 *e) { *e = 9000000001ULL; return 0; }
int nvmlDeviceGetTemperature(dev d, int s, unsigned *t) { *t = 0; return 0; }
int nvmlDeviceGetClockInfo(dev d, int c, unsigned *m) { if (c == 3) return 3; *m = 1000 + c; return 0; }
int nvmlDeviceGetMaxClockInfo(dev d, int c, unsigned *m) { *m = 2000 + c; return 0; }
int nvmlDeviceGetFieldValues(dev d, int n, fv *f) {
  for (int i = 0; i < n; i++) {
    f[i].ret = 0; f[i].type = 3; f[i].v.ull = 5000000000ULL + f[i].field;
    if (f[i].field == 138) f[i].ret = 3;
    if (f[i].field == 139) { if (f[i].scope != 0xFFFFFFFF) f[i].ret = 2; f[i].v.ull = 7; }
  }
  return 0;
}
"""

ASK = """
import json
from pacecar.clock import SystemClock
from pacecar.monitor.collectors.gpu import GpuCollector
from pacecar.monitor.nvml import PyNvml
collector = GpuCollector(PyNvml(), SystemClock())
outcomes = [collector.collect(), collector.collect()]
collector.close()
print(json.dumps([[type(o).__name__, getattr(o, "reason", ""), [[s.metric, *s.labels, s.value] for s in o.samples]]
                  for o in outcomes]))
"""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """A folder with a libnvidia-ml.so.1 that answers as a machine with two GPUs would, the second one lost."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the stand-in driver library with")
    folder = tmp_path_factory.mktemp("nvml")
    source = folder / "nvml.c"
    source.write_text(STAND_IN)
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60)
    return folder


@pytest.mark.distributed
def test_real_pynvml_over_a_driver_library_in_c(stand_in):
    """Structures, units and return codes cross pynvml as they cross it from the real driver."""
    environ = os.environ | {"LD_LIBRARY_PATH": str(stand_in)}
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=environ, capture_output=True, text=True, check=True, timeout=60
    )
    for kind, reason, samples in json.loads(done.stdout):
        assert kind == "Failed"
        assert reason == "gpu 1: GPU is lost (NVML error 15)"
        read = {tuple(sample[:-1]): sample[-1] for sample in samples}
        expected = {
            ("pacecar_gpu_info", "0", "GPU-0", "Stand-in", "599.77", "0000:00:00.0"): 1,
            ("pacecar_gpu_utilization_ratio", "0"): 0.97,
            ("pacecar_gpu_memory_utilization_ratio", "0"): 0.31,
            ("pacecar_gpu_memory_size_bytes", "0"): 1001,
            ("pacecar_gpu_memory_used_bytes", "0"): 603,
            ("pacecar_gpu_memory_free_bytes", "0"): 402,
            ("pacecar_gpu_power_watts", "0"): 650123,
            ("pacecar_gpu_power_limit_watts", "0"): 700001,
            ("pacecar_gpu_energy_joules_total", "0"): 9000000001,
            ("pacecar_gpu_temperature_celsius", "0"): 0,
            ("pacecar_gpu_clock_hertz", "0", "sm"): 1001,
            ("pacecar_gpu_clock_hertz", "0", "graphics"): 1000,
            ("pacecar_gpu_clock_hertz", "0", "memory"): 1002,
            ("pacecar_gpu_clock_max_hertz", "0", "video"): 2003,
            ("pacecar_gpu_pcie_transmit_bytes_total", "0"): 5000000197,
            ("pacecar_gpu_pcie_receive_bytes_total", "0"): 5000000198,
            ("pacecar_gpu_nvlink_receive_bytes_total", "0"): 7 * 1024,
        }
        assert expected.items() <= read.items()
        assert ("pacecar_gpu_clock_hertz", "0", "video") not in read
        assert ("pacecar_gpu_nvlink_transmit_bytes_total", "0") not in read
        assert ("pacecar_gpu_info", "1", "GPU-1", "Stand-in", "599.77", "0000:01:00.0") in read


def test_only_nvml_py_knows_pynvml():
    monitor = Path(__file__).parents[2] / "monitor"
    users = {path.name for path in monitor.rglob("*.py") if "import pynvml" in path.read_text()}
    assert users == {"nvml.py"}
