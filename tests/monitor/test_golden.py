"""The whole page, letter by letter: from recorded files through collectors, tick, exporter and HTTP.

A change of a name, a label, a unit or an order shows up as a change of one file that people read in review.  Write it
anew, after a change that was meant, with

    PACECAR_GOLDEN=write python -m pytest tests/monitor/test_golden.py

GPUs are not in it: their numbers come from a compiled stand-in, and their own tests compare each of them.
"""

import difflib
import os
import re
import time
from pathlib import Path

import pytest

from pacecar.clock import NS_PER_SECOND
from pacecar.config import DaemonConfig
from pacecar.metrics.catalog import CATALOG, MetricSubject
from pacecar.monitor.catalog_sample import sample
from pacecar.monitor.collectors.cgroup import CgroupCollector, CgroupMember
from pacecar.monitor.collectors.clock_sync import ClockState
from pacecar.monitor.collectors.cpu import CpuCollector
from pacecar.monitor.collectors.disk import DiskCollector
from pacecar.monitor.collectors.hwmon import HwmonCollector
from pacecar.monitor.collectors.identity import IdentityCollector
from pacecar.monitor.collectors.memory import MemoryCollector
from pacecar.monitor.collectors.network import NetworkCollector
from pacecar.monitor.collectors.numa import NumaCollector
from pacecar.monitor.collectors.rdma import RdmaCollector
from pacecar.monitor.collectors.system import SystemCollector
from pacecar.monitor.collectors.tcp import TcpCollector
from pacecar.monitor.daemon import Daemon
from pacecar.records import Ok
from tests.kit.fake_clock import FakeClock
from tests.kit.net import scrape
from tests.monitor.testimony import everything

LAUNCH = "3f2a9c01d4e5b678"
GOLDEN = Path(__file__).parent / "golden" / "metrics.txt"


class Own:
    """The daemon's own figures, of no real process."""

    name = "daemon"

    def collect(self):
        return Ok(
            (
                sample("pacecar_daemon_cpu_seconds_total", 1_230_000_000),
                sample("pacecar_daemon_resident_memory_bytes", 45_000_000),
                sample("pacecar_daemon_threads", 24),
                sample("pacecar_daemon_open_files", 17),
            )
        )

    def close(self):
        """Hold nothing."""


def statvfs(path):
    size = {"/": 1000, "/mnt/big disk": 2000, "/dev/shm": 500}[path]
    return os.statvfs_result((8192, 4096, size, size // 2, size // 4, 7 * size, 6 * size, 5 * size, 4, 255))


@pytest.fixture
def collectors(files, machine, make_hello):
    """Collectors that have read the machine once, a second ago; since then it moved on."""
    clock = FakeClock(monotonic_ns=5 * NS_PER_SECOND)
    ranks = [CgroupMember("4242", "rank", "run-7", "0", LAUNCH), CgroupMember("4243", "rank", "run-7", "1", LAUNCH)]
    made = [
        CpuCollector(files, ticks_per_second=100),
        MemoryCollector(files),
        NumaCollector(files),
        DiskCollector(files, statvfs=statvfs),
        NetworkCollector(files, clock),
        TcpCollector(files),
        SystemCollector(
            files,
            clock=lambda: ClockState(True, -651, 652_000, 653_000),
            os_release=machine / "etc/os-release",
            architecture="x86_64",
        ),
        HwmonCollector(files),
        RdmaCollector(files, clock),
        CgroupCollector(files, lambda: ranks),
        IdentityCollector(
            files, clock, lambda: [(4242, make_hello(launch=LAUNCH))], lambda: [4243], pod_logs=str(machine / "pods")
        ),
        Own(),
    ]
    for collector in made:
        collector.collect()
    clock.advance(NS_PER_SECOND)
    for path, before, after in (
        ("proc/stat", "cpu  1001 1002 1003 1004", "cpu  1031 1002 1003 1074"),
        ("proc/stat", "cpu3 511 512 513 514", "cpu3 541 512 513 524"),
        ("proc/net/dev", "eth0:401", "eth0:312500401"),
        ("sys/class/infiniband/mlx5_0/ports/1/counters/port_xmit_data", "1002", "1250001002"),
    ):
        text = (machine / path).read_text()
        assert before in text
        (machine / path).write_text(text.replace(before, after))
    return made, clock


def speak(hook, make_hello, make_step):
    """One rank of a tuned job says one of everything."""
    step = make_step(uncalibrated="price", window_price_ns=310_000_000)
    hook.say(make_hello(pid=os.getpid(), launch=LAUNCH), step, *everything(0))


def steady(page):
    """Take out what is of this process and this moment."""
    page = re.sub(r'pid="\d+"', 'pid="PID"', page)
    running = r"^(pacecar_recorder_(?:memory_bytes|span_seconds|entries_total|triggers_total\{.*\})) .*$"
    page = re.sub(running, r"\1 N", page, flags=re.MULTILINE)
    page = re.sub(r"(pacecar_build_info)\{.*\}", r'\1{python="PYTHON",version="VERSION"}', page)
    return re.sub(r"^(pacecar_daemon_scrapes?(?:_seconds)?_total) .*$", r"\1 N", page, flags=re.MULTILINE)


@pytest.mark.slow
def test_the_page_is_the_golden_one(collectors, tmp_path, hooks, make_hello, make_step):
    made, clock = collectors
    config = DaemonConfig(
        port=0,
        socket=str(tmp_path / "s"),
        recordings=str(tmp_path / "rec"),
        period_seconds=60.0,
        jitter_ratio=0.0,
        glances_per_second=0.0,
    )
    daemon = Daemon(config, clock=clock, collectors=made)
    daemon.start()
    try:
        speak(hooks(daemon.socket), make_hello, make_step)
        limit = time.monotonic() + 10
        page = ""
        due = ("pacecar_job_hangs_total", "pacecar_cgroup", "pacecar_recorder_files_bytes", "collector_outcome{")
        while not all(name in page for name in due):
            assert time.monotonic() < limit, "the tick and the job's last record"
            page = steady(scrape(daemon.port))
    finally:
        daemon.close()
    if os.environ.get("PACECAR_GOLDEN") == "write":
        GOLDEN.write_text(page)
    golden = GOLDEN.read_text()
    difference = list(difflib.unified_diff(golden.splitlines(), page.splitlines(), "golden", "served", lineterm=""))
    assert not difference, "\n".join(difference)


def test_every_metric_of_the_catalog_but_the_gpus_is_on_the_golden_page():
    page = GOLDEN.read_text()
    once = {"pacecar_daemon_cpu_utilization_ratio", "pacecar_collector_glances_total"}  # after a window, with glances
    once |= {"pacecar_collector_glance_failures_total"}
    once |= {m.name for m in CATALOG if "_otlp_" in m.name}  # where [otlp] names an endpoint
    once |= {m.name for m in CATALOG if m.name.startswith("pacecar_job_energy_")}  # of GPUs
    missing = {m.name for m in CATALOG if m.subject is not MetricSubject.GPU and f"# TYPE {m.name} " not in page}
    lacking = sorted(missing - once)
    assert not lacking, (
        f"not on the golden page: {lacking}; their source belongs into tests/machines/training_host.txt, a new "
        "collector into `collectors` above, what jobs say into tests/monitor/testimony.py; then write the page anew"
    )
