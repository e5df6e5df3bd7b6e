"""The stand-in driver itself, and what no test may do to a driver: use it after its shutdown.

The product gives up a hung call but cannot end it, so it may return at any time: even after its test, when pynvml
already has the library of the next one.
"""

import os
import re
import subprocess
import sys

import pytest

from pacecar.monitor.collectors.gpu import GpuCollector
from pacecar.monitor.gpu.nvml import PyNvml
from tests.kit.waiting import until
from tests.monitor.nvml_standin.standin import GPUS, SOURCE

SECOND = 1_000_000_000
UNINITIALIZED = 1

# These begin, end or explain a session, or free what they are given.
LIFE = {"nvmlInitWithFlags", "nvmlInit_v2", "nvmlShutdown", "nvmlErrorString"}
NUMBERS = re.findall(r"^NUMBER\((nvml\w+)", SOURCE.read_text(), re.MULTILINE)
FUNCTIONS = sorted({*re.findall(r"^int (nvml\w+)\(", SOURCE.read_text(), re.MULTILINE), *NUMBERS} - LIFE)

ASK_ALL = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
sample = ctypes.create_string_buffer(64)
query = (ctypes.c_void_p * 8192)(0, ctypes.addressof(sample), ctypes.addressof(sample))  # what nvmlGpmMetricsGet reads
for name in sys.argv[2:]:
    print(name, flush=True)
    assert getattr(library, name)(query if "Metrics" in name else None, None, None, None) == 1, name
"""


def child(script, *arguments):
    """Run a script that may crash; return its exit status, last line and stderr."""
    command = [sys.executable, "-X", "faulthandler", "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=os.environ)
    return done.returncode, done.stdout.splitlines()[-1:], done.stderr


@pytest.mark.distributed
def test_a_driver_that_was_never_initialized_says_so_in_every_function(standin, driver_library):
    """Like the real one.  It once crashed when a thread of an earlier test called it too soon."""
    assert len(FUNCTIONS) > 50
    code, last, complaint = child(ASK_ALL, str(driver_library / "libnvidia-ml.so.1"), *FUNCTIONS)
    assert code == 0, (last, complaint)


# What two tests in a row do, with a call of the first still held when the second has loaded its driver.
TWO_TESTS = """
import ctypes, os, shutil, sys, threading
from pathlib import Path
import pynvml
from tests.kit.fake_clock import FakeClock
from pacecar.monitor.collectors.gpu import GpuCollector
from pacecar.monitor.gpu.nvml import PyNvml
from tests.monitor.nvml_standin.standin import Control
from tests.kit.waiting import until

def load(name):
    folder = Path(sys.argv[2], name)
    folder.mkdir()
    control = Control(folder / "control")
    os.environ["PACECAR_STANDIN"] = str(control.path)
    pynvml.nvmlLib = ctypes.CDLL(shutil.copy(sys.argv[1], folder))
    pynvml._nvmlGetFunctionPointer_cache = {}
    return control

first, clock = load("first"), FakeClock(monotonic_ns=5_000_000_000)
first.page.count, first.page.links = 1, 0
collector = GpuCollector(PyNvml(), clock, deadline_seconds=0.05, kernel_log="/nowhere")
until(lambda: type(collector.collect()).__name__ == "Ok", "the GPU answers")
first.hold(0)
clock.advance(1_000_000_000)
collector.collect()
until(lambda: first.page.hanging == 1, "a call is held")
collector.close()
second = load("second")
of_gpus = lambda: [thread for thread in threading.enumerate() if thread.name.startswith("pacecar-gpu-")]
until(lambda: len(of_gpus()) == 1, "all threads but the one that waits have ended")
(thread,) = of_gpus()
first.release()
thread.join(30)
print(thread.is_alive(), sum(second.calls_in_all()) > 0, flush=True)
"""


@pytest.mark.distributed
def test_a_call_that_returns_in_the_next_test_crashes_nothing(standin, driver_library, tmp_path):
    """The thread calls the second driver, which is not initialized, with a handle of the first."""
    code, last, complaint = child(TWO_TESTS, str(driver_library / "libnvidia-ml.so.1"), str(tmp_path))
    assert (code, last) == (0, ["False True"]), complaint


def wait_for_gpu(standin):
    standin.hold(0)


def wait_for_events(standin):
    standin.hold(GPUS)


def wait_for_the_driver(standin):
    standin.page.driver_life += 1
    standin.hold(GPUS)


def wait_for_a_gpu_to_be_found(standin):
    standin.page.driver_life += 1
    standin.hold(1)


@pytest.mark.slow
@pytest.mark.parametrize("plant", [wait_for_gpu, wait_for_events, wait_for_the_driver, wait_for_a_gpu_to_be_found])
def test_wherever_a_call_hangs_the_driver_is_not_shut_down_beside_it(standin, clock, tmp_path, plant):
    """Neither by closing nor by reopening: in a shutdown a real driver frees what the hung call uses."""
    standin.page.count, standin.page.links = 2, 0
    collector = GpuCollector(PyNvml(), clock, deadline_seconds=0.05, kernel_log=str(tmp_path / "kmsg"))
    until(lambda: type(collector.collect()).__name__ == "Ok", "both GPUs answer")
    plant(standin)

    def is_held():
        clock.advance(2 * SECOND)
        collector.collect()
        return standin.page.hanging > 0

    until(is_held, "a call is held")
    standin.page.driver_life += 1  # a reason to open anew
    for _ in range(3):
        clock.advance(20 * SECOND)
        collector.collect()
    shutdowns = standin.page.shutdowns
    collector.close()
    assert standin.page.hanging > 0
    assert standin.page.shutdowns == shutdowns
    assert standin.page.shutdowns_beside_calls == 0
