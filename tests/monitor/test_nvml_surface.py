"""Whatever the driver answers, of every call, field and metric that the daemon asks for.

Nothing is raised; what is served can be true and is there once; what was not answered has no series and is counted;
the other GPU keeps all of its series; no counter falls.
"""

import ast
import ctypes
import os
import re
import shutil
from pathlib import Path

import pynvml
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pacecar.monitor.gpu
from pacecar.clock import SystemClock
from pacecar.metrics.catalog import by_name
from pacecar.metrics.metric import MetricKind
from pacecar.metrics.value_ranges import ANYTHING, RANGES
from pacecar.monitor.collectors.gpu import GpuCollector
from pacecar.monitor.gpu.driver import Number
from pacecar.monitor.gpu.nvml import PyNvml
from pacecar.monitor.gpu.queries.field_numbers import DEFINED, is_defined
from pacecar.monitor.gpu.queries.gpm import GPM_METRICS, INSTANCE_PARTS
from pacecar.monitor.sampling.sampler import Sampler
from pacecar.monitor.sampling.ticker import SamplingTick
from pacecar.records import Absent, Failed
from tests.kit.fake_clock import FakeClock
from tests.kit.selection import reduced
from tests.monitor.nvml_standin.odd_library import (
    FIELDS,
    FREE,
    FUNCTION_NOT_FOUND,
    LISTS,
    METRICS,
    SESSION,
    Odd,
    OddLibrary,
)
from tests.monitor.nvml_standin.standin import Control

SECOND = 1_000_000_000
STEPS = (1, 1, 1, 31, 1, 301, 1)
"""Seconds between ticks: long enough that what is slowest is asked again."""

CODES = sorted({code for name, code in vars(pynvml).items() if name.startswith("NVML_ERROR_")} | {12345})
ROOM = Path(pacecar.monitor.gpu.__file__).parent
NAMES = {
    node.value
    for path in ROOM.rglob("*.py")
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"nvml[A-Z]\w+", node.value)
}
"""Every name of a function of pynvml or of the driver in the daemon's source, read by its syntax tree."""

DOCTOR = {"nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetP2PStatus", "nvmlDeviceGetPersistenceMode"}
"""What `pacecar doctor` alone asks."""


OLDER = [
    *(
        Odd(name, code=FUNCTION_NOT_FOUND)
        for name in (
            "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetSupportedClocksEventReasons",
            "nvmlDeviceGetTemperature", "nvmlDeviceGetPerformanceState", "nvmlDeviceGetMemoryInfo_v2",
            "nvmlDeviceGetGpuFabricInfoV",
        )
    ),
    *(Odd((FIELDS, number), code=pynvml.NVML_ERROR_NOT_SUPPORTED) for number in (83, 91)),
]  # fmt: skip
"""What an older driver lacks, so that the daemon asks what was there before."""

READ_ONLY = {
    "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceRegisterEvents",
    "nvmlEventSetCreate", "nvmlEventSetWait_v2", "nvmlGpmSampleAlloc", "nvmlGpmSampleGet", "nvmlGpmMigSampleGet",
    "nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetSupportedClocksThrottleReasons",
    "nvmlDeviceGetTemperatureV", "nvmlDeviceGetPowerState", *FREE,
}  # fmt: skip
"""What gives handles, buffers or nothing, or is not in the stand-in, can be refused, and has no value to be odd."""


class Run:
    """Ticks of the real collector over the stand-in, whose answers are odd."""

    def __init__(self, control, library, kernel_log, odd=(), victim=0, since=0):
        page = control.page
        # GPU 6, and GPU 7, which is cut into MIG instances; the driver calls them 0 and 1.
        page.count, page.first, page.links, page.mig, page.fans, page.c2c = 2, 6, 2, 1, 1, 2
        self.library = OddLibrary(library, odd, victim)
        pynvml.nvmlLib, pynvml._nvmlGetFunctionPointer_cache = self.library, {}
        self.victim, self.since, self.odd = victim, since, odd
        self._kernel_log = kernel_log
        self.ticks = []
        self.refused = []

    def go(self):
        clock = FakeClock(monotonic_ns=5 * SECOND)
        self.collector = GpuCollector(PyNvml(), clock, deadline_seconds=20.0, kernel_log=self._kernel_log)
        sampler = Sampler([self.collector], SystemClock(), deadline_seconds=60.0)
        try:
            for number, seconds in enumerate(STEPS):
                self.library.armed = number >= self.since
                clock.advance(seconds * SECOND)
                self.collector.glance()
                self.library.refused.clear()
                self.ticks.append(sampler.sample(SamplingTick(0, 0, 0, 0)).outcomes["gpu"])
                self.refused.append(set(self.library.refused))
        finally:
            self.library.armed = False
            sampler.close()
        return self

    def of_gpu(self, tick, gpu):
        return {(s.metric, *s.labels[1:]): s.value for s in samples(self.ticks[tick]) if s.labels[:1] == (str(gpu),)}


def samples(outcome):
    return () if isinstance(outcome, Absent) else outcome.samples


@pytest.fixture(scope="module")
def driver(driver_library, tmp_path_factory):
    """The stand-in's page and library, and a clean run; pynvml's own library is put back at the end."""
    folder = tmp_path_factory.mktemp("surface")
    control = Control(folder / "control")
    before = pynvml.nvmlLib, pynvml._nvmlGetFunctionPointer_cache, os.environ.get("PACECAR_STANDIN")
    patch = pytest.MonkeyPatch()
    # However busy this machine is, a tick that opens the driver waits until every GPU has answered.
    patch.setattr("pacecar.monitor.collectors.gpu.OPEN_SECONDS", 60.0)
    os.environ["PACECAR_STANDIN"] = str(control.path)
    library = ctypes.CDLL(shutil.copy(driver_library / "libnvidia-ml.so.1", folder))
    kernel_log = str(folder / "kmsg")
    clean = Run(control, library, kernel_log).go()

    def run(*odd, victim=0, since=0):
        return Run(control, library, kernel_log, odd, victim, since).go()

    older = run(*OLDER).library, run(*OLDER, victim=1).library
    run.clean = clean
    run.targets = sorted({target for one in (clean.library, *older) for target in one.asked} - SESSION, key=str)
    run.writing = {target for one in (clean.library, *older) for target, count in one.written.items() if count}
    yield run
    patch.undo()
    pynvml.nvmlLib, pynvml._nvmlGetFunctionPointer_cache, was = before
    if was is None:
        del os.environ["PACECAR_STANDIN"]
    else:
        os.environ["PACECAR_STANDIN"] = was


# --- what holds, whatever the driver says -----------------------------------------------------------

OURS = re.compile(r"\b(?!Nvml|Unsupported|GpuLost|DriverStopped|DriverMissing)[A-Z]\w*(?:Error|Exception)\b")
"""An exception that is none of the driver's: nothing of ours may be raised by an answer."""

CHANGING = ("energy_joules", "power_mean", "clock_event", "driver_call", "last_success", "read_failures",
            "failures_total", "consecutive", "refused_numbers", "read_interval", "mps_processes")  # fmt: skip
HEALTH = ("gpu_up", "gpu_down", "failures", "refused_numbers", "driver_", "last_success", "read_interval", "reliable")

GENTLE = {
    "nvmlDeviceGetVbiosVersion", "nvmlDeviceGetNvLinkVersion", "nvmlDeviceGetNvLinkRemoteDeviceType",
    "nvmlDeviceGetNvLinkRemotePciInfo_v2",
}  # fmt: skip
"""Constant facts whose label is empty where the driver does not say them."""

AGAIN = {
    "nvmlDeviceGetArchitecture", "nvmlDeviceGetNumFans", "nvmlGpmQueryDeviceSupport", "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetSupportedClocksEventReasons", "nvmlDeviceGetMigMode", (FIELDS, 91), (FIELDS, 170),
    "nvmlDeviceRegisterEvents",
}  # fmt: skip
"""What only a probe or an opening asks, and what it is refused is asked again at once, or shows in what is missing."""

READ_ELSEWHERE = {(FIELDS, 83), (FIELDS, 165)}
"""A query reads the same number."""

HAVE_OLDER = {
    "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetPlatformInfo", "nvmlDeviceGetGpuFabricInfoV",
    "nvmlDeviceGetTemperature", *(str(number.calls[0][0]) for number in Number if len(number.calls) > 1),
}  # fmt: skip
MIG_HANDLE = "nvmlDeviceGetMigDeviceHandleByIndex"
NO_SUCH_STRUCTURE = (FUNCTION_NOT_FOUND, 25)


UNSUPPORTED = {2, 3, 4, 13, 25, 26}
TOGETHER = {(FIELDS, number) for number in (171, 172, 231, 232, 233)}
"""Of all links in one number, which a driver that lacks it does not have."""


def answer_key(one, victim):
    """Return what `OddLibrary.answered` calls the answer to the target of `one`."""
    return one.target if isinstance(one.target, tuple) else (one.target, victim)


def is_no_failure(one, clean, victim):
    """Return whether the daemon has a reason not to count that refusal."""
    if one.target in GENTLE | AGAIN | FREE | READ_ELSEWHERE:
        return True
    if answer_key(one, victim) not in clean.library.answered:  # as ever
        return True
    if one.target in TOGETHER and one.code in UNSUPPORTED:
        return True
    if one.target in HAVE_OLDER and one.code in NO_SUCH_STRUCTURE:
        return True
    if one.target == MIG_HANDLE:  # so the driver says that the place is empty
        return one.code in (pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_INVALID_ARGUMENT)
    if one.target == "nvmlDeviceGetProcessUtilization":  # so it says that there is nothing new
        return one.code in (pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_SUCCESS)
    return one.target in LISTS and one.code == pynvml.NVML_ERROR_INSUFFICIENT_SIZE


def openings(outcome):
    return next((s.value for s in samples(outcome) if s.metric == "pacecar_gpu_driver_openings_total"), None)


def failures(read):
    return sum(value for key, value in read.items() if key[0] == "pacecar_gpu_failures_total")


def is_of_all(run):
    """Return whether an odd answer was about the driver and no GPU."""
    return any(
        one.target.startswith(("nvmlSystem", "nvmlInit", "nvmlEvent", "nvmlGpmSampleAlloc", "nvmlGpmSampleFree"))
        or one.target in ("nvmlDeviceGetCount_v2", "nvmlShutdown")
        for one in run.odd
        if isinstance(one.target, str)
    )


def check(run, clean):
    highest = {}
    for number, outcome in enumerate(run.ticks):
        at = f"tick {number}"
        assert not OURS.search(getattr(outcome, "reason", None) or ""), (at, outcome.reason)
        served = [(s.metric, s.labels) for s in samples(outcome)]
        assert len(served) == len(set(served)), (at, sorted(one for one in served if served.count(one) > 1))
        for sample in samples(outcome):
            limits = RANGES.get(sample.metric, ANYTHING)
            assert limits.low <= sample.value <= limits.high, (at, sample)
            assert len(sample.labels) == len(by_name(sample.metric).labels), (at, sample)
            if by_name(sample.metric).kind is MetricKind.COUNTER:
                series = sample.metric, sample.labels
                assert sample.value >= highest.get(series, 0), (at, sample, highest[series])
                highest[series] = sample.value
        check_neighbour(run, clean, number)
        check_refusals(run, clean, number)


def check_neighbour(run, clean, number):
    """The GPU whose answers are as always has all its series, but for the tick in which the driver is opened anew."""
    before = openings(run.ticks[number - 1]) if number else 1
    if is_of_all(run) or not before == openings(run.ticks[number]) == 1:
        return
    other = 1 - run.victim
    lost = clean.of_gpu(number, other).keys() - run.of_gpu(number, other).keys()
    assert not lost, (number, "neighbour", sorted(lost))


def check_refusals(run, clean, number):
    """What was refused has no series, and is counted with its source."""
    refused = run.refused[number]
    if not refused or is_of_all(run):
        return
    outcome, gpu = run.ticks[number], str(run.victim)
    if isinstance(outcome, Absent):
        return
    read, whole = run.of_gpu(number, run.victim), clean.of_gpu(number, run.victim)
    of_numbers = "pacecar_gpu_refused_numbers"
    counts = {
        since: read.get((of_numbers, since), 0) - whole.get((of_numbers, since), 0) for since in ("probe", "later")
    }
    # Where all of the performance monitor is refused, the one metric that the stand-in lacks is not.
    is_monitor = any("Gpm" in str(one.target) for one in refused)
    # What the clean run was refused and this one is answered is one refusal less.
    answered = {answer_key(one, run.victim) for one in run.odd if not one.is_refusal}
    fewer = len(answered - clean.library.answered)
    fewer += ("nvmlDeviceGetMigMode", run.victim) in answered  # of a cut GPU less is asked
    counted = max(counts.values()) > -fewer or (is_monitor and counts["probe"] + counts["later"] == 0)
    # A session that began later, of the driver or of a GPU that came back, has not asked all that the clean run's has.
    if openings(outcome) > 1 or failures(read):
        counted = counted or any(read.get((of_numbers, since), 0) for since in counts)
    # A GPU can go down and come back within a tick; its count of failures has grown.
    failed = failures(read) > (failures(run.of_gpu(number - 1, run.victim)) if number else 0)
    is_down = read.get(("pacecar_gpu_up",)) != 1
    told = f"gpu {gpu}" in (getattr(outcome, "reason", None) or "")
    failing = {one.target for one in refused if not is_no_failure(one, clean, run.victim)}
    if not whole.keys() - read.keys():
        failing -= {FIELDS}  # each number of the list was read by another call
    if failing:
        is_told = is_down or told or counted or failed or isinstance(outcome, Failed)
        assert is_told, (number, refused, outcome.reason, "is not counted")
    # Where the driver says that there is no instance, none has a process, either.
    is_empty = any(one.target == MIG_HANDLE and is_no_failure(one, clean, run.victim) for one in run.odd)
    if all(one.is_refusal for one in run.odd) and not is_empty:
        for key, value in read.items():
            is_made_up = value == 0 and whole.get(key, 0) != 0 and not any(word in key[0] for word in HEALTH + CHANGING)
            assert not is_made_up, (number, key, "0 of what was not answered")


def odd_answers(targets):
    """Return a strategy of odd answers to these functions, fields and metrics."""
    edges = st.sampled_from(
        [0, 1, 2, 100, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]
    )
    return st.builds(
        Odd,
        target=st.sampled_from(targets),
        code=st.none() | st.sampled_from(CODES),
        bits=edges | st.integers(0, 2**64 - 1),
        real=st.floats() | st.sampled_from([0.0, -0.0, -1.0, 1e308]),
        text=st.sampled_from([b"", b"\xff\xfe\x80", b'a\n"\\', b"x" * 200]) | st.binary(max_size=8),
        kind=st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 2**32 - 1]),
        length=st.sampled_from([0, 1, 2, 3, 17, 1000, 2**30, 2**31 - 1, 2**32 - 1]),
        after=st.integers(0, 4),
        period=st.sampled_from([1, 1, 2, 3]),
        times=st.none() | st.integers(1, 3),
    )


def check_drawn(driver, data):
    clean = driver.clean
    odd = data.draw(st.lists(odd_answers(driver.targets), min_size=1, max_size=4), "odd answers")
    victim = data.draw(st.integers(0, 1), "victim")
    since = data.draw(st.sampled_from([0, 2]), "armed since tick")
    check(driver(*odd, victim=victim, since=since), clean)


@pytest.mark.slow
def test_every_call_field_and_metric_of_the_source_is_asked_and_can_be_answered_oddly(driver):
    functions = {target for target in driver.targets if isinstance(target, str)}
    reached = {re.sub(r"_v\d$", "", name) for name in functions} | {"nvmlInit", "nvmlShutdown"}
    assert {name for name in NAMES if re.sub(r"_v\d$", "", name) not in reached} == DOCTOR
    assert functions - driver.writing - SESSION == READ_ONLY & functions
    of_fields = {target[1] for target in driver.targets if target[0] == FIELDS}
    assert of_fields == {number for number in DEFINED if is_defined(number, "599.77")}
    of_monitor = {target[1] for target in driver.targets if target[0] == METRICS}
    assert of_monitor == {metric.number for metric in (*GPM_METRICS, *INSTANCE_PARTS)}


FOUND = {
    "a name that is not UTF-8": (Odd("nvmlDeviceGetName", text=b"\xff"), 0),
    "a UUID that is not UTF-8": (Odd("nvmlDeviceGetUUID", text=b"\xff"), 0),
    "a list of a billion shares": (Odd("nvmlDeviceGetProcessUtilization", length=2**30), 0),
    "a list of a billion processes": (Odd("nvmlDeviceGetComputeRunningProcesses_v3", length=2**30), 0),
    "one metric of the monitor": (Odd((METRICS, 2), code=999), 0),
    "one metric of an instance": (Odd((METRICS, 2), code=999), 1),
    "a number of all links": (Odd((FIELDS, 172), code=999), 0),
    "how many instances there can be": (Odd("nvmlDeviceGetMaxMigDeviceCount", code=999), 1),
    "that there is no instance": (Odd(MIG_HANDLE, code=pynvml.NVML_ERROR_INVALID_ARGUMENT), 1),
    "which instance is in a slot": (Odd("nvmlDeviceGetMigDeviceHandleByIndex", code=999), 1),
    "the number of an instance": (Odd("nvmlDeviceGetGpuInstanceId", code=999), 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("found", FOUND)
def test_what_was_found(driver, found):
    """Answers that cost a GPU all its series, made a 0 of what was not known, or were missing and nowhere counted."""
    odd, victim = FOUND[found]
    run = driver(odd, victim=victim)
    check(run, driver.clean)
    assert all(("pacecar_gpu_up",) in run.of_gpu(tick, gpu) for tick in range(len(STEPS)) for gpu in (0, 1))
    assert run.of_gpu(len(STEPS) - 1, victim)["pacecar_gpu_up",] == 1


def test_a_gpu_whose_errors_are_not_reported_has_no_count_of_them(driver):
    """Not 0 of them; the other GPU, whose events the driver reports, has."""
    run = driver(Odd("nvmlDeviceRegisterEvents", code=999))
    counted = {s.labels[0] for s in samples(run.ticks[-1]) if s.metric == "pacecar_gpu_xid_errors_total"}
    assert counted == {"1"}


given_answers = given(data=st.data())
FEW = settings(max_examples=reduced(50), suppress_health_check=list(HealthCheck))
MANY = settings(max_examples=3000, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@FEW
@given_answers
def test_whatever_the_driver_answers_what_is_served_can_be_true(driver, data):
    check_drawn(driver, data)


@pytest.mark.full
@MANY
@given_answers
def test_whatever_the_driver_answers_what_is_served_can_be_true_of_many_more(driver, data):
    check_drawn(driver, data)
