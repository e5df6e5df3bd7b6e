"""Shared by the tests of the daemon: a recorded machine, failing readers, records of a job, and a job's socket."""

import ctypes
import shutil
import socket
import threading
import time

import msgspec
import pynvml
import pytest

from pacecar.clock import SystemClock
from pacecar.kernel_files.reader import KernelFiles
from pacecar.metrics.catalog import by_name
from pacecar.monitor.sampling.sampler import Sampler
from pacecar.records import JobHello, Knobs, Ledger, Ok, Sample, StepRecord
from pacecar.wire import encode_frame
from tests.kit.fake_clock import FakeClock
from tests.kit.machines import machine as recorded
from tests.monitor.nvml_standin.standin import Control, build, compiler


class FailingFiles(KernelFiles):
    """Reads a recorded machine and fails at the n-th read (1 is the first)."""

    def __init__(self, root, fail_at):
        super().__init__(root / "proc", root / "sys")
        self.fail_at = fail_at
        self.reads = 0

    def read(self, path):
        self.reads += 1
        if self.reads == self.fail_at:
            raise OSError(5, "Input/output error", str(path))
        return super().read(path)


@pytest.fixture
def machine(tmp_path):
    """A copy of the recorded machine that a test may change."""
    return recorded("training_host", tmp_path / "machine")


@pytest.fixture
def files(machine):
    return KernelFiles(machine / "proc", machine / "sys")


@pytest.fixture
def failing_files(machine):
    return lambda fail_at: FailingFiles(machine, fail_at)


@pytest.fixture
def clock():
    return FakeClock(monotonic_ns=5_000_000_000)


def told(sample):
    """Return the labels of a sample as in Prometheus, where a job without a launch has no such label."""
    labels = by_name(sample.metric).labels
    return tuple(value for label, value in zip(labels, sample.labels, strict=True) if label != "launch" or value)


@pytest.fixture
def values():
    """Turn an outcome into {(metric without prefix, labels...): value}."""

    def turn(outcome):
        return {(s.metric.removeprefix("pacecar_"), *told(s)): s.value for s in outcome.samples}

    return turn


HELLO = JobHello(
    job="run-7", rank=0, local_rank=0, world_size=2, pid=4242, host="node-a", device="cpu", backend="gloo",
    framework="torch 2.13.0", pacecar_version="0.1.0", started_wall_ns=1_700_000_000_000_000_000,
    attempt=2, process_wall_ns=1_699_999_987_000_000_000, rendezvous_wall_ns=1_699_999_991_000_000_000,
)  # fmt: skip

STEP = StepRecord(
    job="run-7", rank=0, step=41, ended_wall_ns=1_700_000_001_000_000_000, wall_ns=9, data_wait_ns=11, forward_ns=12,
    backward_ns=13, optimizer_ns=14, micro_batches=3, samples=32, tokens=512, source="estimate",
    ledger=Ledger(wall_ns=9, compute_ns=4, exposed_communication_ns=5, communication_ns=5), calibration_age_steps=17,
    totals=Ledger(
        wall_ns=3600, compute_ns=1001, exposed_communication_ns=802, exposed_copy_ns=603, data_wait_ns=404,
        host_bound_ns=305, optimizer_host_ns=206, checkpoint_ns=107, unknown_ns=172, communication_ns=1711,
        overlapped_communication_ns=909,
    ),
    total_steps=42, total_samples=1344, total_tokens=21504, overhead_ns=15, total_overhead_ns=630, total_windows=2,
    dropped_records=5, knobs=Knobs(epoch=6, values={"bucket_bytes": 1048576, "compression": "none"}), gc_ns=2,
    total_gc_ns=730, global_step=5042, saved_steps=33, total_evaluation_ns=770, total_compile_ns=780,
)  # fmt: skip
"""A different number in every field."""


@pytest.fixture
def make_hello():
    return lambda **changes: msgspec.structs.replace(HELLO, **changes)


@pytest.fixture
def make_step():
    return lambda **changes: msgspec.structs.replace(STEP, **changes)


class Hook:
    """The job's end of a connection."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(5)
        self.socket.connect(str(path))

    def say(self, *records):
        for record in records:
            self.socket.send(encode_frame(record))

    def send(self, frame):
        self.socket.send(frame)

    def close(self):
        self.socket.close()


@pytest.fixture
def hooks():
    """A function that connects a hook to a socket path; all are closed at the end."""
    opened = []

    def connect(path):
        opened.append(Hook(path))
        return opened[-1]

    yield connect
    for hook in opened:
        hook.close()


class SteadyCollector:
    """Always returns the same; counts how often it was called."""

    def __init__(self, name="steady"):
        self.name = name
        self.calls = 0

    def collect(self):
        self.calls += 1
        return Ok((Sample("pacecar_host_cpus_online", (), 2),))


@pytest.fixture(scope="session")
def steady():
    return SteadyCollector


@pytest.fixture(scope="session")
def driver_library(tmp_path_factory):
    """The folder of a libnvidia-ml.so.1 built for the tests; skips if there is no C compiler."""
    if compiler() is None:
        pytest.skip("no C compiler to build the stand-in driver library with")
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def start_sampler():
    """A function that starts a sampler of collectors; all are closed at the end."""
    started = []

    def start(*collectors, **options):
        started.append(Sampler(collectors, SystemClock(), **({"deadline_seconds": 30.0} | options)))
        started[-1].start()
        return started[-1]

    yield start
    for sampler in started:
        sampler.close()


LEAVE_SECONDS = 30
"""How long to wait for the threads of a test once nothing holds them; they need milliseconds."""


@pytest.fixture
def standin(driver_library, tmp_path, monkeypatch):
    """The control page of a stand-in driver that the real pynvml of this process talks to, one for each test.

    No thread outlives the test: pynvml has one library for the whole process, so a hung thread would go on in the
    library of the next test.  And no test may shut the driver down beside a call.
    """
    library = shutil.copy(driver_library / "libnvidia-ml.so.1", tmp_path)  # another file is another set of globals
    control = Control(tmp_path / "control")
    before = set(threading.enumerate())
    monkeypatch.setenv("PACECAR_STANDIN", str(control.path))
    monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(library))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    yield control
    control.release()
    control.page.latency_us = 0
    asking = [t for t in set(threading.enumerate()) - before if t.name.startswith("pacecar-gpu")]
    limit = time.monotonic() + LEAVE_SECONDS
    for thread in asking:
        while thread in threading.enumerate() and not thread.is_alive() and time.monotonic() < limit:
            time.sleep(0.001)  # one that is listed, and has not begun, cannot be joined
        thread.join(max(0.0, limit - time.monotonic()))
    assert [thread.name for thread in asking if thread.is_alive()] == []
    assert (control.page.shutdowns_beside_calls, control.page.void_handles) == (0, 0)
