"""What pacecar reads of a GPU beside what the driver's own program says, and what reading it costs."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn

from pacecar.clock import SystemClock
from pacecar.metrics.catalog import by_name
from pacecar.monitor.collectors.gpu import DEADLINE_SECONDS, GpuCollector
from pacecar.monitor.gpu.device import CALLS_PER_TICK_MAX, Device
from pacecar.monitor.gpu.driver import ALL_LINKS, NothingNewError, Number, Nvml, NvmlError
from pacecar.monitor.gpu.driver_session import DriverSessions
from pacecar.monitor.gpu.nvml import PyNvml
from pacecar.profiler.hook.identity import make_hello
from pacecar.records import Absent, Sample
from tests.gpu.conftest import Figures
from tests.gpu.daemons import RunningDaemon, Series, running, running_daemon
from tests.gpu.nvml_counterparts import COUNTERPARTS, FACTS, NOT_COMPARED, Counterpart
from tests.gpu.nvml_driver import STANDIN_FACTS, Driver, Smi, find_driver
from tests.kit.waiting import until

pytestmark = [pytest.mark.gpu, pytest.mark.exclusive, pytest.mark.slow]

COLLECTS = 6
COLLECT_GAP_SECONDS = 0.12
"""More than the performance monitor needs between two readings."""

REPEATS = 25
TICKS = 25

DAEMON_BUDGET = 0.05
"""Share of a processor that [daemon] cpu_budget leaves to the daemon by default."""

SCRAPES = 100
SCRAPE_GAP_SECONDS = 0.04
WARM_SECONDS = 3.0
LOAD_START_SECONDS_MAX = 60.0

Labels = tuple[tuple[str, str], ...]
Values = dict[tuple[str, Labels], float]


@pytest.fixture(scope="module")
def driver(is_real: bool, tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """Return the GPU's driver or the stand-in."""
    return find_driver(tmp_path_factory.mktemp("nvml"), is_real=is_real)


# --- the readings -------------------------------------------------------------------------------


def load(driver: Driver, folder: Path, *, is_real: bool) -> AbstractContextManager[Any]:
    """Return the context in which another process keeps the device busy."""
    command = [sys.executable, "-m", "tests.gpu.nvml_load", "cuda" if is_real else "cpu", "--seconds", "140"]
    return running(command, driver.environ, folder / "load.log")


def wait_for_load(folder: Path) -> None:
    """Wait until the device is busy."""
    log = folder / "load.log"
    until(lambda: "ready" in log.read_text(), "the load does not start", LOAD_START_SECONDS_MAX, 0.1)
    time.sleep(0.5)


def collected(folder: Path) -> list[Sample]:
    """Return what the daemon's collector reads of the GPU after some ticks, in units inside."""
    collector = GpuCollector(PyNvml(), SystemClock(), kernel_log=str(folder / "no-kmsg"))
    try:
        for _ in range(COLLECTS):
            outcome = collector.collect()
            time.sleep(COLLECT_GAP_SECONDS)
        assert not isinstance(outcome, Absent), outcome
        return list(outcome.samples)
    finally:
        collector.close()


def labelled(sample: Sample) -> dict[str, str]:
    """Return the labels of a sample by name."""
    return dict(zip(by_name(sample.metric).labels, sample.labels, strict=True))


def values_of(samples: Sequence[Sample]) -> Values:
    """Return (metric, labels beside the GPU's) -> value of GPU 0, in the units of the metrics' names."""
    return {
        (sample.metric, tuple(sorted((k, v) for k, v in labels.items() if k != "gpu"))): by_name(
            sample.metric
        ).unit.convert(sample.value)
        for sample in samples
        if (labels := labelled(sample)).get("gpu", "0") == "0"
    }


def read(one: Counterpart, smi: Smi) -> list[float]:
    """Return what nvidia-smi says of it; nothing where it says nothing."""
    texts = [smi.text(path) for path in one.paths]
    if one.total and None in texts:
        return []
    found = [one.read(text) for text in texts if text is not None]
    return [sum(found)] if one.total else found


def judge(one: Counterpart, ours: float | None, readings: Sequence[float]) -> str:
    """Return the verdict on a value beside the readings before and after it."""
    if ours is None or not readings:
        return "only nvidia-smi" if readings else "only pacecar" if ours is not None else "neither"
    if all(reading == ours for reading in readings):
        return "equal"
    slack = one.absolute + one.ratio * max(map(abs, readings)) + 1e-9
    return "within tolerance" if min(readings) - slack <= ours <= max(readings) + slack else "differs"


def compare(samples: Sequence[Sample], before: Smi, after: Smi) -> list[dict[str, Any]]:
    """Return a row for each series that has a counterpart, and for each fact."""
    values = values_of(samples)
    rows: list[dict[str, Any]] = []
    for one in COUNTERPARTS:
        ours = values.get((one.metric, one.labels))
        readings = [*read(one, before), *read(one, after)]
        words = ",".join(f"{key}={value}" for key, value in one.labels)
        told = (
            None if not readings else readings[0] if len(set(readings)) == 1 else f"{min(readings)} to {max(readings)}"
        )
        verdict = judge(one, ours, readings)
        if verdict != "neither":
            name = f"{one.metric}{{{words}}}" if words else one.metric
            rows.append({"metric": name, "pacecar": ours, "nvidia_smi": told, "verdict": verdict})
    facts = {sample.metric: labelled(sample) for sample in samples if labelled(sample).get("gpu") == "0"}
    for metric, label, path in FACTS:
        ours_text = facts.get(f"pacecar_gpu_{metric}", {}).get(label) or None
        told_text = after.text(path)
        verdict = "differs"
        if ours_text is None or told_text is None:
            verdict = "only nvidia-smi" if told_text else "only pacecar" if ours_text else "neither"
        elif ours_text.lower() == told_text.lower():
            verdict = "equal"
        if verdict != "neither":
            name = f"pacecar_gpu_{metric} {label}"
            rows.append({"metric": name, "pacecar": ours_text, "nvidia_smi": told_text, "verdict": verdict})
    return rows


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_readings(state: str, driver: Driver, is_real: bool, tmp_path: Path, figures: Figures) -> None:
    """All that pacecar reads of the GPU is what nvidia-smi says of it at the same moment."""
    with load(driver, tmp_path, is_real=is_real) if state == "busy" else nullcontext():
        if state == "busy":
            wait_for_load(tmp_path)
        before = driver.smi()
        begun = time.monotonic()
        with driver.loaded(tmp_path):
            samples = collected(tmp_path)
        between = time.monotonic() - begun
        after = driver.smi()
    rows = compare(samples, before, after)
    verdicts: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        verdicts[row["verdict"]].append(row["metric"])
    compared = {one.metric for one in COUNTERPARTS} | {f"pacecar_gpu_{metric}" for metric, _, _ in FACTS}
    others = {sample.metric for sample in samples} - compared
    figures(
        rows=rows,
        not_compared=[
            {"metric": metric, "why": NOT_COMPARED.get(metric, "nvidia-smi -q does not print it")}
            for metric in sorted(others)
        ],
        **{verdict.replace(" ", "_").replace("-", "_"): len(names) for verdict, names in verdicts.items()},
        seconds_between=round(between, 2),
    )
    if is_real:
        assert not verdicts["differs"] + verdicts["only nvidia-smi"]
        assert len(verdicts["equal"]) + len(verdicts["within tolerance"]) > 50
        if state == "busy":
            assert values_of(samples)[("pacecar_gpu_utilization_ratio", ())] > 0
    else:  # what the stand-in answers is in its XML, and all else there is of another GPU
        given = {one.metric for one in COUNTERPARTS if set(one.paths) <= set(STANDIN_FACTS)}
        named = [row for row in rows if row["metric"].partition("{")[0] in given and row["nvidia_smi"] is not None]
        assert {row["verdict"] for row in named} & {"equal", "within tolerance"}
        assert "pacecar_gpu_info uuid" in verdicts["equal"]
        assert "pacecar_gpu_temperature_celsius" in verdicts["equal"]
        assert "pacecar_gpu_power_watts" in verdicts["within tolerance"]
        assert "pacecar_gpu_clock_hertz{clock=sm}" in verdicts["equal"]
        assert "pacecar_gpu_pcie_width" in verdicts["equal"]
        assert "pacecar_gpu_memory_size_bytes" in verdicts["differs"]


# --- their cost ---------------------------------------------------------------------------------


class TimedNvml:
    """A driver that times each call of the product's."""

    def __init__(self, inner: Nvml) -> None:
        self._inner = inner
        self.took_us: dict[str, list[float]] = defaultdict(list)
        self.refused: dict[str, str] = {}
        self.answered: set[str] = set()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self._inner, name)

        def timed(*arguments: Any, **more: Any) -> Any:
            call = _called(name, arguments)
            begun = time.perf_counter_ns()
            try:
                answer = method(*arguments, **more)
            except NvmlError as error:
                self.took_us[call].append((time.perf_counter_ns() - begun) / 1e3)
                if isinstance(error, NothingNewError):
                    self.answered.add(call)
                else:
                    self.refused[call] = str(error)
                raise
            self.took_us[call].append((time.perf_counter_ns() - begun) / 1e3)
            errors = [one for one in answer if isinstance(one, NvmlError)] if isinstance(answer, list) else []
            if errors and len(errors) == len(answer):
                self.refused[call] = str(errors[0])
            else:
                self.answered.add(call)
            return answer

        return timed

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each call, the most expensive first."""
        rows = [
            {
                "call": call,
                "median_us": round(median(found), 1),
                "p99_us": round(quantile(found, 0.99), 1),
                "times": len(found),
                "refused": None if call in self.answered else self.refused.get(call),
            }
            for call, found in self.took_us.items()
        ]
        return sorted(rows, key=lambda row: -float(row["median_us"]))


def _called(name: str, arguments: Sequence[Any]) -> str:
    """Return what tells a call from others in a table."""
    told: list[str] = []
    for argument in arguments:
        if isinstance(argument, Number):
            told.append(argument.value)
        elif isinstance(argument, (list, tuple)):
            told.append(_alone(name, argument[0]) if len(argument) == 1 else f"{len(argument)} together")
    return f"{name} {', '.join(told)}".strip()


def _alone(name: str, one: Any) -> str:
    if name == "fields":
        scope = "" if not one.scope else " of all links" if one.scope == ALL_LINKS else f" of link {one.scope}"
        return f"{one.number}{scope}"
    return str(one) if name == "gpm_metrics" else "one"


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which that share of `values` lies, the next higher one of them."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def ask(call: Callable[..., object], *arguments: object) -> None:
    """Call the driver, which may refuse."""
    for _ in range(REPEATS):
        try:
            call(*arguments)
        except NvmlError:
            continue


def time_all(device: Device, nvml: Any) -> None:
    """Make each query of the device's schedule, each of its fields and each of the monitor's metrics many times."""
    handle = device._handle
    for asked in list(device._schedule._asked.values()):
        if "monitor" not in asked.query.name:  # which rests between two readings

            def make(query: Any = asked.query) -> None:
                list(query.ask(nvml, handle))

            ask(make)
    reader = device._fields
    known = {field.field for field in [*reader.meanings.asked(), *reader._refused]}
    fields = sorted({field.number: field for field in sorted(known, reverse=True)}.values())  # of links the first
    for field in fields:
        ask(nvml.fields, handle, [field])
    fast, slow = ([field.field for field in part] for part in (reader.meanings.fast, reader.meanings.slow))
    for several in (fast, slow[:32]):
        if len(several) > 1:
            ask(nvml.fields, handle, several)
    for gpm in device._gpms:
        older, newer = gpm._pair
        ask(nvml.gpm_metrics, older, newer, [metric.number for metric in gpm._metrics])
        for metric in gpm._metrics:
            ask(nvml.gpm_metrics, older, newer, [metric.number])
        scratch = nvml.gpm_sample()
        ask(nvml.gpm_read, handle, scratch)
        nvml.gpm_free(scratch)
    ask(nvml.event)
    ask(nvml.device, 0)
    ask(nvml.identity, handle)


def test_cost_of_calls(driver: Driver, is_real: bool, tmp_path: Path, figures: Figures) -> None:
    """A tick makes at most twelve driver calls for a GPU, and they take less than a tenth of a second."""
    clock = SystemClock()
    with driver.loaded(tmp_path):
        nvml: Any = TimedNvml(PyNvml())
        sessions = DriverSessions(nvml, clock)
        found = sessions.open(stop_first=False).found[0]
        device = Device("0", nvml, clock)
        device.attach(found.handle, found.facts)
        probes, ticks = [], []
        try:
            while not probes or (device._schedule.has_unasked() and len(probes) < 10):
                probes.append(device.read())
            for _ in range(TICKS):
                time.sleep(0.11)
                ticks.append(device.read())
            in_ticks = {call: len(found) for call, found in nvml.took_us.items()}
            time_all(device, nvml)
        finally:
            sessions.close()
    calls = nvml.rows()
    tick_ms = [reading.took_ns / 1e6 for reading in ticks]
    figures(
        calls=calls,
        refused=[{"call": row["call"], "words": row["refused"]} for row in calls if row["refused"] is not None],
        probe_ms=[round(reading.took_ns / 1e6, 2) for reading in probes],
        probe_calls=[reading.calls for reading in probes],
        tick_median_ms=round(median(tick_ms), 3),
        tick_p99_ms=round(quantile(tick_ms, 0.99), 3),
        tick_calls_max=max(reading.calls for reading in ticks),
        tick_failures=sorted({failure for reading in ticks for failure in reading.failures}),
        calls_of_probe_and_ticks=sum(in_ticks.values()),
    )
    assert len(calls) > 40
    assert max(reading.calls for reading in ticks) <= CALLS_PER_TICK_MAX
    if is_real:
        assert median(tick_ms) < 100
        assert quantile(tick_ms, 0.99) < DEADLINE_SECONDS * 1e3


# --- identity -----------------------------------------------------------------------------------


def test_uuid(driver: Driver, device: torch.device, is_real: bool, tmp_path: Path, figures: Figures) -> None:
    """The driver, torch and a job's records call the GPU by the same UUID."""
    with driver.loaded(tmp_path):
        facts = [labelled(one) for one in collected(tmp_path) if one.metric == "pacecar_gpu_info"]
    of_torch = f"GPU-{torch.cuda.get_device_properties(0).uuid}" if is_real else None
    hello = make_hello(nn.Linear(2, 2).to(device), job="identity", environ={})
    by_nvml, names = [one["uuid"] for one in facts], [one["name"] for one in facts]
    figures(nvml=by_nvml, torch=of_torch, job=hello.device_uuid, name=names)
    assert facts
    if is_real:
        assert of_torch in by_nvml
        assert hello.device_uuid == of_torch
        assert torch.cuda.get_device_name(0) in names
    else:
        assert hello.device_uuid is None


# --- the daemon ---------------------------------------------------------------------------------


def gpu_value(page: Series, metric: str) -> float | None:
    """Return a metric of GPU 0 that has no other label."""
    return page.get((f"pacecar_gpu_{metric}", (("gpu", "0"),)))


def known(pages: Sequence[Series], metric: str) -> list[float]:
    """Return a metric of GPU 0 in all pages that have it."""
    return [value for page in pages if (value := gpu_value(page, metric)) is not None]


def scraped(daemon: RunningDaemon, seconds: float) -> Iterator[Series]:
    """Scrape once a second, as Prometheus does."""
    begun = time.monotonic()
    for number in range(int(seconds) + 1):
        time.sleep(max(0.0, begun + number - time.monotonic()))
        yield daemon.page()


@pytest.mark.parametrize("period", [1.0, 0.1])
def test_daemon(period: float, driver: Driver, is_real: bool, tmp_path: Path, figures: Figures) -> None:
    """The daemon beside a busy GPU keeps to 5 % of a processor at a tick a second, and what it serves adds up."""
    seconds, warm = (15.0, WARM_SECONDS) if is_real else (3.0, 1.0)
    with load(driver, tmp_path, is_real=is_real), running_daemon(tmp_path, driver.environ, period_seconds=period) as it:
        wait_for_load(tmp_path)
        time.sleep(warm)
        begun, cpu = time.monotonic(), it.cpu_seconds()
        pages = list(scraped(it, seconds))
        elapsed, cpu = time.monotonic() - begun, it.cpu_seconds() - cpu
        took = []
        for number in range(SCRAPES if is_real else SCRAPES // 2):
            time.sleep(SCRAPE_GAP_SECONDS * (0.5 + number % 7 / 6))  # at any moment between two ticks
            took.append(it.scrape_ms())
        log = it.log.read_text()
    first, last = pages[0], pages[-1]

    def grown(metric: str) -> float | None:
        before, after = gpu_value(first, metric), gpu_value(last, metric)
        return None if before is None or after is None else after - before

    joules, passed = grown("energy_joules_total"), grown("last_success_time_seconds")
    power = known(pages, "power_watts")
    by_energy = joules / passed if joules is not None and passed else None
    calls, driver_seconds = grown("driver_calls_total"), grown("driver_call_seconds_total")
    active = known(pages, "sm_active_ratio")
    utilization = known(pages, "utilization_ratio")
    times = known(pages, "last_success_time_seconds")
    figures(
        cpu_share=round(cpu / elapsed, 4), seconds=round(elapsed, 1), scrape_median_ms=round(median(took), 2),
        scrape_p99_ms=round(quantile(took, 0.99), 2), scrape_max_ms=round(max(took), 2), series=len(last),
        driver_calls_per_second=round(calls / elapsed, 1) if calls is not None else None,
        driver_call_us=round(driver_seconds / calls * 1e6, 1) if calls and driver_seconds is not None else None,
        utilization=utilization, sm_active=active, power_watts=power, power_by_energy_watts=by_energy,
        tensor_active=known(pages, "tensor_active_ratio"), temperature=known(pages, "temperature_celsius"),
        read_gaps_s=[round(after - before, 3) for before, after in pairwise(times)],
        ticks_missed=last.get(("pacecar_daemon_ticks_missed_total", ())),
        refused=last.get(("pacecar_gpu_refused_numbers", (("gpu", "0"), ("since", "probe")))),
    )  # fmt: skip
    assert "Traceback" not in log
    assert len(last) > 100
    assert power
    assert joules is not None
    assert joules > 0
    assert passed is not None
    assert passed > 0
    if is_real:
        assert active
        assert all(0 <= value <= 1 for value in active)
        assert median(active) > 0
        assert median(utilization) > 0
        assert by_energy is not None
        assert abs(by_energy / (sum(power) / len(power)) - 1) < 0.2
        assert median(took) < 100
        if period == 1.0:
            assert cpu / elapsed < DAEMON_BUDGET
