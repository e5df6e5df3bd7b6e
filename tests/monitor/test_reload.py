"""Settings change under a running daemon; invalid ones change nothing and are named."""

import http.client
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pacecar.config import ConfigError, DaemonConfig, load_config
from pacecar.monitor.reload import LIVE, ReloadWatch, changes, in_force
from tests.kit.daemons import DaemonProcess
from tests.kit.net import basic, get
from tests.kit.waiting import until

ROOT = Path(__file__).resolve().parents[2]


class Reader:
    """Reads a TOML file as the daemon does, and records the results."""

    def __init__(self, file):
        self.file = file
        self.got = []
        self.watch = ReloadWatch(self.read, lambda: (file,), (ConfigError,))

    def read(self):
        self.got.append(load_config(self.file, environ={}).daemon)


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "pacecar.toml"
    file.write_text("[daemon]\njobs_max = 5\n")
    return file


def test_a_change_is_read_once_and_only_when_it_has_settled(file):
    reader = Reader(file)
    assert not reader.watch.is_due()
    file.write_text("[daemon]\njobs_max = 16\n")
    assert not reader.watch.is_due(), "it may still be written"
    assert reader.watch.is_due()
    assert reader.watch.reload("because")
    assert [config.jobs_max for config in reader.got] == [16]
    assert not reader.watch.is_due()
    assert not reader.watch.is_due()


def test_a_half_written_file_is_named_keeps_what_was_and_is_tried_again_when_it_changes(file, caplog):
    reader = Reader(file)
    file.write_text("[daemon]\njobs_max = 16\nranks_m")
    assert [reader.watch.is_due(), reader.watch.is_due()] == [False, True]
    assert not reader.watch.reload("the configuration could not be reloaded")
    (record,) = caplog.records
    assert re.search(
        rf"not be reloaded: {re.escape(str(file))}: not valid TOML: .*at end of document", record.getMessage()
    )
    assert not reader.got
    assert not reader.watch.is_due(), "once is enough for one state of the file"
    file.write_text("[daemon]\njobs_max = 16\nranks_max = 9\n")
    assert [reader.watch.is_due(), reader.watch.is_due()] == [False, True]
    assert reader.watch.reload("")
    assert reader.watch.is_good
    assert reader.got[-1].ranks_max == 9


def test_a_file_that_is_gone_is_an_error_and_not_the_defaults(file, caplog):
    reader = Reader(file)
    file.unlink()
    assert not reader.watch.reload("no")
    assert "is gone" in caplog.text
    file.write_text("[daemon]\njobs_max = 6\n")
    assert [reader.watch.is_due(), reader.watch.is_due()] == [False, True]
    assert reader.watch.reload("")


def test_a_file_that_changes_while_it_is_read_is_read_again(file):
    reader = Reader(file)

    def read_and_meddle():
        reader.got.append(1)
        if len(reader.got) == 1:
            file.write_text("[daemon]\njobs_max = 77\n")

    reader.watch._read = read_and_meddle
    file.write_text("[daemon]\njobs_max = 16\n")
    reader.watch.reload("")
    assert reader.watch.is_due()


def test_what_is_live_and_what_waits_for_a_restart():
    before = DaemonConfig(port=1, jobs_max=4)
    after = DaemonConfig(port=2, jobs_max=8, log_level="debug")
    assert changes(before, after) == (("jobs_max", "log_level"), ("port",))
    assert in_force(before, after) == DaemonConfig(port=1, jobs_max=8, log_level="debug")
    assert set(DaemonConfig.__struct_fields__) >= LIVE


def test_the_documentation_says_the_same():
    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    (sentence,) = re.findall(r"take effect at once: ([^.]*)\.", text)
    assert set(re.findall(r"`(\w+)`", sentence)) == LIVE


class Running(DaemonProcess):
    """The command itself, as systemd starts it."""

    def __init__(self, folder, text):
        super().__init__(folder, text, WATCHDOG_USEC="3000000")
        self.folder = folder

    def scrape(self):
        return {s.name: s.value for s in self.samples() if not s.labels}


@pytest.fixture
def run(tmp_path):
    started = []

    def start(text):
        started.append(Running(tmp_path, text))
        return started[-1]

    yield start
    for running in started:
        running.close()


HEAD = '[daemon]\nport = 0\nsocket = "{}"\nperiod_seconds = 0.2\n'


@pytest.mark.distributed
def test_sighup_and_changed_files_reload_with_no_gap_and_systemd_hears_of_it(run, tmp_path):
    text = HEAD.format(tmp_path / "s")
    daemon = run(text + "cpu_budget = 0.5\n")
    assert daemon.told("READY=1")
    assert daemon.told("WATCHDOG=1")
    assert daemon.scrape()["pacecar_daemon_cpu_budget_ratio"] == 0.5
    missed, stop, scrapes = [], threading.Event(), []

    def scrape_on():
        while not stop.wait(0.02):
            try:
                scrapes.append(daemon.scrape()["pacecar_daemon_ticks_total"])
            except (OSError, http.client.HTTPException, AssertionError) as error:
                missed.append(error)

    scraper = threading.Thread(target=scrape_on)
    scraper.start()
    try:
        daemon.file.write_text(text + 'cpu_budget = 0.25\nlog_level = "debug"\njitter_ratio = 0.2\n')
        daemon.process.send_signal(signal.SIGHUP)
        assert "MONOTONIC_USEC" in daemon.told("RELOADING=1")
        assert daemon.told("READY=1")
        assert daemon.scrape()["pacecar_daemon_cpu_budget_ratio"] == 0.25
        assert "applied only after a restart: jitter_ratio" in daemon.logged()

        good = daemon.scrape()["pacecar_daemon_config_last_reload_success_timestamp_seconds"]
        daemon.file.write_text(text + "cpu_budget = 0.")
        until(lambda: daemon.scrape()["pacecar_daemon_config_last_reload_successful"] == 0, "the half is refused")
        while "cannot be used" not in daemon.told("READY=1"):
            pass  # it had looked at the file by itself before the signal came, and said so
        assert daemon.scrape()["pacecar_daemon_cpu_budget_ratio"] == 0.25
        assert daemon.scrape()["pacecar_daemon_config_last_reload_success_timestamp_seconds"] == good

        daemon.file.write_text(text + "cpu_budget = 0.125\n")
        until(lambda: daemon.scrape()["pacecar_daemon_cpu_budget_ratio"] == 0.125, "the whole is taken by itself")
        assert daemon.scrape()["pacecar_daemon_config_last_reload_successful"] == 1
    finally:
        stop.set()
        scraper.join()
    assert not missed
    assert scrapes == sorted(scrapes), "one daemon all the time"
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.told("STOPPING=1")
    assert daemon.process.wait(30) == 0


def status(port, password=None):
    return get(port, **({} if password is None else {"Authorization": basic("me", password)})).status


@pytest.mark.distributed
def test_passwords_change_under_a_running_daemon_and_no_bad_file_opens_it(run, tmp_path):
    pytest.importorskip("yaml", reason="the extra `secure` is not installed")
    bcrypt = pytest.importorskip("bcrypt", reason="the extra `secure` is not installed")
    web = tmp_path / "web.yml"

    def users(password):
        return f"basic_auth_users:\n  me: {bcrypt.hashpw(password.encode(), bcrypt.gensalt(4)).decode()}\n"

    web.write_text(users("first"))
    daemon = run(HEAD.format(tmp_path / "s") + f'web_config_file = "{web}"\n')
    assert daemon.told("READY=1")
    port = daemon.port
    assert [status(port), status(port, "first"), status(port, "second")] == [401, 200, 401]
    web.write_text("basic_auth_us")
    until(lambda: "web configuration could not be reloaded" in daemon.logged(), "the half is refused")
    assert [status(port), status(port, "first")] == [401, 200]
    web.write_text(users("second"))
    until(lambda: status(port, "second") == 200, "the new one is in force")
    assert [status(port), status(port, "first")] == [401, 401]
    web.unlink()
    daemon.process.send_signal(signal.SIGHUP)
    until(lambda: "is gone" in daemon.logged(), "a file that is gone is named")
    assert [status(port), status(port, "second")] == [401, 200]


@pytest.mark.distributed
def test_a_bad_web_configuration_at_the_start_ends_the_daemon(tmp_path):
    pytest.importorskip("yaml", reason="the extra `secure` is not installed")
    (tmp_path / "web.yml").write_text("tls_server_config: {cert_file: a, key_file: b}\n")
    command = [sys.executable, "-m", "pacecar", "daemon", "--port", "0", "--socket", str(tmp_path / "s")]
    command += ["--web-config-file", str(tmp_path / "web.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert "web.yml: tls_server_config: cert_file" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "s").exists()
