"""A real Prometheus scrapes a real daemon: the target is up, and what it stored is what was served."""

import json
import re
import subprocess
import time
import urllib.parse
import urllib.request

import pytest

from pacecar.config import DaemonConfig
from pacecar.monitor.daemon import Daemon
from tests.kit.tools import find_tool

CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: pacecar
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


def ask(port, query):
    url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": query})
    with urllib.request.urlopen(url, timeout=5) as answer:
        return json.load(answer)["data"]["result"]


def served_at(log, process):
    """Return the port that Prometheus took."""
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        found = re.search(r'msg="Listening on" address=127\.0\.0\.1:(\d+)', log.read_text())
        if found and "Server is ready to receive web requests" in log.read_text():
            return int(found[1])
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    raise AssertionError(log.read_text())


@pytest.mark.slow
@pytest.mark.distributed
def test_prometheus_takes_in_every_series(tmp_path):
    prometheus = find_tool("prometheus")
    daemon = Daemon(DaemonConfig(port=0, socket=str(tmp_path / "s"), period_seconds=0.5))
    daemon.start()
    log, settings = tmp_path / "log", tmp_path / "prometheus.yml"
    settings.write_text(CONFIG.format(port=daemon.port))
    command = [prometheus, f"--config.file={settings}", f"--storage.tsdb.path={tmp_path / 'tsdb'}"]
    command += ["--web.listen-address=127.0.0.1:0", "--log.format=logfmt"]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            port = served_at(log, process)
            limit = time.monotonic() + 30
            while not ask(port, "rate(pacecar_daemon_ticks_total[10s]) > 0"):  # two scrapes, and it ticked in between
                assert time.monotonic() < limit, log.read_text()
                time.sleep(0.2)
            (up,) = ask(port, "up")
            assert up["value"][1] == "1"
            (scraped,) = ask(port, "scrape_samples_scraped")
            (stored,) = ask(port, 'count({__name__=~"pacecar_.+"})')
            assert int(stored["value"][1]) >= int(scraped["value"][1]) > 100  # a series that came later counts as well
            (cpus,) = ask(port, "pacecar_host_cpus_online")
            assert float(cpus["value"][1]) >= 1
            assert cpus["metric"]["job"] == "pacecar"
            while not (highest := ask(port, "pacecar_host_cpu_utilization_window_max_ratio")):  # needs two ticks
                assert time.monotonic() < limit, log.read_text()
                time.sleep(0.2)
            assert 0 <= float(highest[0]["value"][1]) <= 1
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/metadata", timeout=5) as answer:
                metadata = json.load(answer)["data"]
            assert metadata["pacecar_host_cpu_seconds"][0]["type"] == "counter"  # a family's name, as in OpenMetrics
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/targets", timeout=5) as answer:
                (target,) = json.load(answer)["data"]["activeTargets"]
            assert target["lastError"] == ""
        finally:
            process.terminate()
            process.wait(20)
            daemon.close()
