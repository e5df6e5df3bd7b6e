"""The daemon as its users see it: scraped, queried, stopped, and started where it cannot start."""

import errno
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_prometheus

from pacecar.clock import NS_PER_SECOND
from pacecar.config import DaemonConfig
from pacecar.kernel_files.reader import KernelFiles
from pacecar.metrics.catalog import CATALOG, MetricSubject, by_name
from pacecar.monitor.collectors.cpu import CpuCollector
from pacecar.monitor.collectors.network import NetworkCollector
from pacecar.monitor.daemon import Daemon, DaemonError
from pacecar.monitor.http.server import WEB_CONNECTIONS_MAX
from pacecar.monitor.sampling.collector_registry import default_collectors, sample_once
from pacecar.monitor.sampling.sampler import Sampler
from pacecar.monitor.sampling.ticker import SamplingTick
from pacecar.records import Failed, Ok, Sample
from pacecar.records.status_document import StatusDocument
from tests.kit.daemons import running_daemon
from tests.kit.fake_clock import FakeClock
from tests.kit.net import get, scrape
from tests.kit.tools import find_tool
from tests.kit.waiting import until
from tests.monitor.testimony import everything

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def families(port):
    """Scrape and return {name of the catalog: samples}."""
    return {
        family.name + ("_total" if family.type == "counter" else ""): family.samples
        for family in parse_prometheus(scrape(port))
    }


@pytest.fixture
def make_config(tmp_path):
    def make(**changes):
        given = {"port": 0, "socket": str(tmp_path / "s"), "period_seconds": 0.1, "jitter_ratio": 0.0}
        return DaemonConfig(**(given | changes))

    return make


@pytest.fixture
def start(tmp_path):
    with ExitStack() as stack:
        yield lambda collectors=None, **changes: stack.enter_context(running_daemon(tmp_path, collectors, **changes))


@pytest.fixture
def job(hooks, make_hello, make_step):
    """Let two ranks of a tuned job send every kind of record to a daemon."""

    def speak(daemon):
        for rank in (0, 1):
            hook = hooks(daemon.socket)
            step = make_step(rank=rank, uncalibrated="price", window_price_ns=310_000_000)
            hook.say(make_hello(rank=rank, pid=os.getpid()), step)
        hook.say(*everything(1))
        until(lambda: "pacecar_job_hangs_total" in families(daemon.port), "the job's last record")

    return speak


@pytest.mark.slow
def test_served_and_catalogued_are_the_same(start, job):
    """Every family is in the catalog with its labels, and every entry that this machine can have is served."""
    daemon = start()
    job(daemon)
    until(lambda: "pacecar_process_info" in families(daemon.port), "the tick after their hellos")
    for name, samples in families(daemon.port).items():
        entry = by_name(name)
        assert {tuple(sorted(s.labels.keys() - {"le"})) for s in samples} == {tuple(sorted(entry.labels))}, name
    due = {
        entry.name
        for entry in CATALOG
        if entry.subject in (MetricSubject.JOB, MetricSubject.TUNER, MetricSubject.DAEMON)
    }
    due -= {"pacecar_daemon_cpu_utilization_ratio"}  # known when the budget was looked at, after a window
    due = {name for name in due if "_otlp_" not in name}  # where [otlp] names an endpoint: test_otlp.py
    due -= {name for name in due if name.startswith("pacecar_job_energy_")}  # of GPUs
    until(
        lambda: due <= families(daemon.port).keys(), f"{due} are served"
    )  # a collector may be late for its first tick
    host = {entry.name for entry in CATALOG if entry.subject is MetricSubject.HOST}
    depends = re.compile(
        "pressure|disk|swap|link|filesystem|available|numa|frequency|huge|network_.*(utili|carrier)"
        "|sensor|tracked|clock_|hung|corrupted"
    )  # on the kernel and the hardware
    always = {name for name in host if not depends.search(name)}
    until(lambda: always <= families(daemon.port).keys(), f"{always} are served")  # utilization from the second tick


@pytest.mark.slow
def test_a_rank_that_hung_up_keeps_its_age_and_loses_its_process(start, hooks, make_hello, make_step):
    """For the alert about stalled jobs: an ended job stays for a while without new records."""
    daemon = start()
    hook = hooks(daemon.socket)
    hook.say(make_hello(pid=os.getpid()), make_step())

    def has_process():
        served = families(daemon.port)
        assert any(s.labels["training_job"] == "run-7" for s in served["pacecar_job_last_record_age_seconds"])
        return any(s.labels["training_job"] == "run-7" for s in served.get("pacecar_process_info", ()))

    until(lambda: "pacecar_job_last_record_age_seconds" in families(daemon.port), "its first tick")
    until(has_process, "it is connected")
    hook.close()
    until(lambda: not has_process(), "it hung up")


@pytest.mark.slow
def test_promtool_has_no_complaint(start, job):
    promtool = find_tool("promtool")
    daemon = start()
    job(daemon)
    text = scrape(daemon.port)
    done = subprocess.run([str(promtool), "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
def test_other_pages(start, job):
    daemon = start()
    job(daemon)
    assert 'href="metrics"' in scrape(daemon.port, "/")
    assert scrape(daemon.port, "/-/healthy") == "ok\n"
    assert get(daemon.port, "/nowhere").status == 404
    answer = get(daemon.port, "/api/snapshot")
    node = json.loads(answer.text)
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
    assert node["version"] == 1
    assert [rank["step"] for rank in node["jobs"][0]["ranks"]] == [41, 41]
    (move,) = node["jobs"][0]["moves"]
    assert (move["outcome"], move["reason"]) == ("kept", 'a "quoted"\nreason')
    msgspec.json.decode(answer.body, type=StatusDocument)


@pytest.mark.slow
def test_series_of_a_forgotten_job_vanish(start, job):
    daemon = start(job_forget_seconds=1.0)
    job(daemon)
    until(lambda: "pacecar_job_steps_total" not in families(daemon.port), "the job is forgotten")
    assert "pacecar_rank_info" not in families(daemon.port)


class Hanging:
    name = "hanging"

    def __init__(self):
        self.release = threading.Event()
        self.hang = False

    def collect(self):
        if self.hang:
            self.release.wait(60)
        return Ok((Sample("pacecar_host_cpus_online", (), 3),))


@pytest.mark.slow
def test_a_hanging_collector_stops_neither_the_scrape_nor_the_others_nor_the_end(start, steady):
    hanging, other = Hanging(), steady("gpu")
    daemon = start([hanging, other])
    assert daemon.is_healthy()
    hanging.hang = True

    def outcome():
        served = families(daemon.port)["pacecar_collector_outcome"]
        return {(s.labels["collector"], s.labels["outcome"]) for s in served if s.value == 1}

    until(lambda: outcome() == {("hanging", "failed"), ("gpu", "ok")}, "the hanging one is failed, the other is ok")
    begun = time.monotonic()
    for _ in range(20):
        scrape(daemon.port)
    assert time.monotonic() - begun < 2  # 30 ms; had a scrape to wait for the one that hangs it were a minute
    calls = other.calls
    until(lambda: other.calls >= calls + 3, "the other one ticks on")
    begun = time.monotonic()
    daemon.close()
    assert time.monotonic() - begun < 5
    hanging.release.set()


@pytest.mark.slow
def test_stopping_does_not_wait_for_the_deadline_of_a_long_period(make_config):
    hanging = Hanging()
    hanging.hang = True
    daemon = Daemon(make_config(period_seconds=60.0), collectors=[hanging])
    daemon.start()
    begun = time.monotonic()
    daemon.close()
    assert time.monotonic() - begun < 10  # the deadline would be 48 s
    hanging.release.set()


@pytest.mark.slow
def test_a_scrape_reads_nothing(start, machine):
    """Between two ticks every scrape returns the same numbers."""
    reads = []

    class Counting(KernelFiles):
        def read(self, path):
            reads.append(path)
            return super().read(path)

    daemon = start(
        [CpuCollector(Counting(machine / "proc", machine / "sys"))], period_seconds=60.0, glances_per_second=0.0
    )
    before = len(reads)
    for _ in range(5):
        assert families(daemon.port)["pacecar_host_cpus_online"][0].value == 3
    assert len(reads) == before


@pytest.mark.slow
def test_over_its_budget_the_daemon_glances_less_and_says_so(start, caplog):
    caplog.set_level(logging.INFO)
    daemon = start([CpuCollector(KernelFiles())], cpu_budget=0.0, window_seconds=1.0)

    def value(name):
        return families(daemon.port)[name][0].value

    until(lambda: value("pacecar_daemon_glance_frequency_hertz") == 5.0, "the first step down")
    assert value("pacecar_daemon_cpu_utilization_ratio") > 0
    assert value("pacecar_daemon_cpu_budget_ratio") == 0
    assert value("pacecar_collector_glances_total") > 0
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "the budget is 0.0 %: glancing 5 instead of 10 times a second" in line]


@pytest.mark.slow
def test_scrapes_do_not_change_the_window(start):
    """Two scrapers read the same extremes: reading does not reset them."""
    daemon = start([CpuCollector(KernelFiles())], glances_per_second=0.0)
    name = "pacecar_host_cpu_utilization_window_max_ratio"
    until(lambda: name in families(daemon.port), "a window")
    # On a busy machine no processor time may pass between two ticks; then there is no utilization.
    seen = [families(daemon.port).get(name, []) for _ in range(20)]
    highest = [samples[0].value for samples in seen if samples]
    assert len(highest) >= 10
    assert highest == sorted(highest)  # ticks may raise it, scrapes never lower it


@pytest.mark.slow
def test_the_control_group_of_a_rank_is_served_under_its_name(start, job):
    daemon = start()
    job(daemon)

    def members():
        samples = families(daemon.port).get("pacecar_cgroup_member_info", [])
        return {(s.labels["member"], s.labels["training_job"], s.labels["rank"]) for s in samples}

    until(
        lambda: members() == {("daemon", "", ""), ("rank", "run-7", "0"), ("rank", "run-7", "1")},
        "the groups of this process, which is daemon and both ranks",
    )


def test_when_the_wall_clock_jumps_only_the_time_of_day_changes(machine):
    clock = FakeClock(monotonic_ns=5 * NS_PER_SECOND)
    files = KernelFiles(machine / "proc", machine / "sys")
    collector = NetworkCollector(files, clock)
    sampler = Sampler([collector], clock, deadline_seconds=5.0)
    sampler.start()
    dev = machine / "proc/net/dev"
    text = dev.read_text()
    try:
        ratios = []
        for second, jump in enumerate((0, 86_400, -172_800, 0)):
            clock.advance(NS_PER_SECOND)
            clock.jump_wall(jump * NS_PER_SECOND)
            dev.write_text(text.replace("eth0:401", f"eth0:{401 + second * 312_500_000}"))
            snapshot = sampler.sample(SamplingTick(second, clock.monotonic_ns(), 0, 0))
            ratios += [s.value for s in snapshot.samples() if s.metric.endswith("receive_utilization_window_max_ratio")]
    finally:
        sampler.close()
    assert ratios == [0.1, 0.1, 0.1]


@pytest.mark.slow
def test_more_slow_clients_than_there_are_places_do_not_shut_out_the_scraper(start, steady):
    daemon = start([steady()])
    before = threading.active_count()
    idle = []
    try:
        for _ in range(WEB_CONNECTIONS_MAX + 20):
            idle.append(socket.create_connection(("127.0.0.1", daemon.port)))
            idle[-1].send(b"GET /metrics HTTP/1.1\r\n")
        assert get(daemon.port, "/-/healthy").status == 200
        served = families(daemon.port)
        assert served["pacecar_web_connections"][0].value <= WEB_CONNECTIONS_MAX
        refused = {s.labels["refusal"]: s.value for s in served["pacecar_web_refused_total"]}
        assert refused["connections"] >= 20
        assert threading.active_count() <= before
    finally:
        for connection in idle:
            connection.close()


def test_a_port_in_use_is_named_and_nothing_is_left_behind(make_config, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DaemonError, match=rf"cannot listen on 127.0.0.1:{port}: .*in use.*--port"):
            Daemon(make_config(port=port)).start()
    assert not (tmp_path / "s").exists()


def test_a_host_that_is_not_ours_is_named(make_config):
    with pytest.raises(DaemonError, match=r"cannot listen on 192\.0\.2\.1:0: .*--host"):
        Daemon(make_config(host="192.0.2.1")).start()


@pytest.mark.slow
def test_a_socket_in_use_is_named_and_the_port_given_back(make_config, start):
    first = start()
    second = Daemon(make_config())
    with pytest.raises(DaemonError, match=r"a daemon is listening on .* already: stop it, or choose another path"):
        second.start()
    assert get(first.port, "/-/healthy").status == 200


@pytest.mark.slow
def test_closing_frees_port_socket_and_threads(make_config, tmp_path):
    before = set(threading.enumerate())
    daemon = Daemon(make_config())
    daemon.start()
    port = daemon.port
    daemon.close()
    assert not (tmp_path / "s").exists()
    assert set(threading.enumerate()) == before
    with socket.socket() as again:
        assert again.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED
    daemon.close()  # twice is once


@pytest.mark.slow
def test_name_parameter_restricts_the_scrape(start, steady):
    daemon = start([steady()])
    text = scrape(daemon.port, "/metrics?name[]=pacecar_daemon_ticks_total")
    assert {family.name for family in parse_prometheus(text)} == {"pacecar_daemon_ticks"}


def test_an_unknown_collector_in_disable_is_an_error(make_config):
    with pytest.raises(
        DaemonError,
        match=r"unknown collector gpus; known are cpu, .*, gpu, daemon",
    ):
        Daemon(make_config(disable=("gpus",)))


def test_disabled_collectors_do_not_run(make_config):
    everything = [c.name for c in default_collectors(make_config(), None)]
    assert {"cpu", "disk", "gpu", "daemon"} < set(everything)
    names = [c.name for c in default_collectors(make_config(disable=("gpu", "disk")), None)]
    assert names == [name for name in everything if name not in ("gpu", "disk")]


@pytest.mark.slow
def test_sample_once_has_rates(make_config):
    snapshot = sample_once(make_config())
    names = {sample.metric for sample in snapshot.samples()}
    assert "pacecar_host_cpu_utilization_ratio" in names
    assert not [outcome for outcome in snapshot.outcomes.values() if isinstance(outcome, Failed)]


RUN = """
import sys
from pacecar.config import DaemonConfig
from pacecar.records.status_document import StatusDocument
from pacecar.monitor.service import run
sys.exit(run(DaemonConfig(port=0, socket=sys.argv[1], period_seconds=0.2)))
"""


def launch(path):
    return subprocess.Popen([sys.executable, "-c", RUN, str(path)], stderr=subprocess.PIPE, text=True)


def served_port(process):
    for line in process.stderr:
        if found := re.search(r"http://127\.0\.0\.1:(\d+)/metrics", line):
            return int(found[1])
    raise AssertionError("the daemon did not say where it serves")


@pytest.mark.distributed
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(tmp_path, number):
    with launch(tmp_path / "s") as process:
        port = served_port(process)
        until(lambda: get(port, "/-/healthy").status == 200, "it ticks")
        begun = time.monotonic()
        process.send_signal(number)
        rest = process.stderr.read()
        assert process.wait(10) == 0
        assert time.monotonic() - begun < 5  # it takes 0.3 s; the bound is for a busy machine
    assert not (tmp_path / "s").exists()
    assert "Traceback" not in rest
    assert rest.count("collector gpu: absent") <= 1


@pytest.mark.distributed
def test_after_kill_9_the_next_daemon_takes_over_the_stale_socket(tmp_path, hooks, make_hello, make_step):
    path = tmp_path / "s"
    with launch(path) as process:
        served_port(process)
        process.kill()
    assert path.exists()
    with launch(path) as process:
        port = served_port(process)
        hooks(path).say(make_hello(pid=os.getpid()), make_step())
        until(lambda: "pacecar_job_steps_total" in families(port), "records again")
        process.terminate()
        process.stderr.read()
        assert process.wait(10) == 0


@pytest.mark.distributed
def test_the_daemon_loads_neither_torch_nor_the_controller():
    code = "import sys, pacecar.monitor.daemon; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = done.stdout.split()
    assert "pacecar.monitor.daemon" in loaded
    assert {"torch", "numpy", "pacecar.controller", "pacecar.profiler", "pacecar.job.attach"}.isdisjoint(loaded)
