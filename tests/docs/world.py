"""A scratch folder in which the pages' commands run, with a daemon, a job, runs and traces.

Everything is started on first use, and once: the commands share it as a reader's do.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.analysis.tracefiles import write_trace
from tests.commands.report.runs import steady, tuned, untuned
from tests.dashboards.test_push import Standin
from tests.docs.pages import ROOT
from tests.kit.forking_python import TORCH, forking_python
from tests.kit.net import free_port
from tests.kit.waiting import until

__all__ = ["JOB", "LIMIT_SECONDS", "World"]

JOB = "steered"
"""The running job's name, in place of the pages' JOB."""

LIMIT_SECONDS = 240.0
"""For one command; only to end hanging ones."""

TRAIN = """\
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(30):
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
import os
os._exit(0)  # gloo may abort a process that ends in the ordinary way (pytorch issue 190489)
"""
"""A training script without pacecar."""

SCRIPTS = {
    "pacecar": "-m pacecar",
    "torchrun": "-m torch.distributed.run",
    "python": "",
    "python3": "",
}

LOADED = (
    *TORCH, "pacecar.commands.main", "pacecar.monitor.service", "pacecar.monitor.sampling.collector_registry",
    "pacecar.commands.sample_text",
    "pacecar.commands.demo.run_demo", "pacecar.commands.analyze",
    "pacecar.commands.daemon_client", "rich.console", "rich.table",
)  # fmt: skip
"""For pacecar and torchrun, which are forked: what nearly every command would load anew."""


class World:
    """A scratch folder with a home, a checkout, and on request a daemon, a job, a Prometheus and a Grafana."""

    def __init__(self) -> None:
        # Not pytest's folder: a socket's path has 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="pacecar-docs-"))
        self.port, self.prometheus_port = free_port(), free_port()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._grafana: Standin | None = None
        self._recording: Path | None = None
        self._furnish()

    def _furnish(self) -> None:
        here = self.folder
        for name in ("bin", "tmp", "traces", "before", "after", "recordings"):
            (here / name).mkdir()
        for name in ("deploy", "docs", "tests", "Makefile"):
            (here / name).symlink_to(ROOT / name)
        for name, arguments in SCRIPTS.items():
            script = here / "bin" / name
            python = forking_python(modules=LOADED) if arguments else sys.executable
            script.write_text(f'#!/bin/sh\nexec {python} {arguments} "$@"\n')
            script.chmod(0o755)
        (here / "train.py").write_text(TRAIN)
        (here / "nccl.log").write_text("node-a:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n")
        drawing = ("dccccmm...cccc..oo" * 2, "...AAAAAA........." * 2)
        steps = [(0, 18), (18, 36)]
        for rank in (0, 1):
            for where in ("traces", "before", "after"):
                write_trace(here / where / f"rank{rank}.json.gz", drawing, rank=rank, steps=steps)
        write_trace(here / "trace.json.gz", drawing, rank=0, steps=steps)
        shutil.copytree(ROOT / "tests/analysis/gloo_hangs/not_joined", here / "dumps")
        tuned(here / "runs/latest")
        untuned(here / "runs/one", pace=steady(noise=0.01, seed=1))
        untuned(here / "runs/two", pace=steady(noise=0.01, seed=2))

    @property
    def environ(self) -> dict[str, str]:
        """The commands' environment, without this user's settings, and with our daemon only."""
        path = os.pathsep.join([str(self.folder / "bin"), str(ROOT / ".tools/bin"), str(Path(sys.executable).parent)])
        return {
            "PATH": f"{path}{os.pathsep}{os.environ.get('PATH', '/usr/bin:/bin')}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.folder),
            "TMPDIR": str(self.folder / "tmp"),
            "XDG_RUNTIME_DIR": str(self.folder),
            "XDG_STATE_HOME": str(self.folder / "state"),
            "PACECAR_DAEMON_SOCKET": str(self.folder / "d.sock"),
            "PACECAR_HOOK_SOCKET": str(self.folder / "d.sock"),
            "PACECAR_DAEMON_PORT": str(self.port),
            "PACECAR_DAEMON_RECORDINGS": str(self.folder / "recordings"),
            "PET_MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "100",
            "LANG": "C.UTF-8",
        }

    def run(self, command: str, seconds: float = LIMIT_SECONDS) -> subprocess.CompletedProcess[str]:
        """Run one line in bash."""
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.folder, env=self.environ, text=True, capture_output=True, stdin=subprocess.DEVNULL,
            timeout=seconds, check=False,
        )  # fmt: skip

    def start(self, name: str, command: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start a server; its output goes to NAME.log."""
        log = (self.folder / f"{name}.log").open("wb")
        with log:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.folder, env=self.environ | variables, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        self._running[name] = process
        return process

    def log(self, name: str) -> str:
        """Its output so far."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def answers(self, port: int, path: str) -> bool:
        """Whether a server answers 200."""
        return self._asked(port, path)[0] == 200

    def _asked(self, port: int, path: str) -> tuple[int | None, bytes]:
        """Return status and body, or None without an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", path)
            with connection.getresponse() as response:
                return response.status, response.read()
        return None, b""

    def serving(self, name: str, command: str, port: int, path: str, **variables: str) -> None:
        """Start a server and wait until it answers."""
        if name in self._running:
            return
        process = self.start(name, command, **variables)
        until(
            lambda: self.answers(port, path) or process.poll() is not None,
            f"{command}: no answer at {path}",
            LIMIT_SECONDS,
        )
        assert process.poll() is None, f"{command} ended: {self.log(name)[-3000:]}"

    def environment(self) -> None:
        """A virtual environment to be activated."""
        if not (self.folder / "pacecar-env").exists():
            assert self.run("python3 -m venv pacecar-env --without-pip").returncode == 0

    def daemon(self) -> None:
        """The daemon of this node."""
        self.serving("daemon", "pacecar daemon", self.port, "/-/healthy")

    def job(self) -> None:
        """A tuned training job of two ranks that does not end."""
        if "job" in self._running:
            return
        self.daemon()
        script = ROOT / "tests/jobs/small_ddp.py"
        command = f"torchrun --standalone --nproc-per-node 2 {script} --steps 8 --pause 0.2 --tune exact"
        process = self.start("job", f"{command} --until stop --run-dir runs/job", PACECAR_JOB=JOB)

        def is_tuned() -> bool:
            assert process.poll() is None, self.log("job")[-3000:]
            said = self.run(f"pacecar tune status {JOB} --json")
            return said.returncode == 0 and '"bucket_bytes"' in said.stdout

        until(is_tuned, "the job's tuner never spoke", LIMIT_SECONDS)

    def rank_pid(self) -> int:
        """The pid of a rank of the job, from the daemon."""
        self.job()
        said = self.run(f"curl -s 127.0.0.1:{self.port}/metrics")
        found = re.search(r'pacecar_rank_info\{.*\bpid="(\d+)"', said.stdout)
        assert found is not None, said.stdout[-2000:]
        return int(found[1])

    def prometheus(self) -> None:
        """A Prometheus that scrapes the daemon."""
        self.daemon()
        (self.folder / "scraping.yml").write_text(
            "global: {scrape_interval: 1s}\nscrape_configs:\n"
            f"  - {{job_name: pacecar, static_configs: [{{targets: ['127.0.0.1:{self.port}']}}]}}\n"
        )
        options = f"--storage.tsdb.path=tsdb --web.listen-address=127.0.0.1:{self.prometheus_port}"
        self.serving("prometheus", f"prometheus --config.file=scraping.yml {options}", self.prometheus_port, "/-/ready")
        query = "/api/v1/query?query=pacecar_build_info"
        until(lambda: self.has_series(query), "Prometheus never scraped the daemon", LIMIT_SECONDS)

    def has_series(self, query: str) -> bool:
        """Whether Prometheus has a result for it."""
        return b'"value"' in self._asked(self.prometheus_port, query)[1]

    def grafana(self) -> str:
        """Address of a stand-in for Grafana that accepts dashboards."""
        if self._grafana is None:
            self._grafana = Standin(lambda *_: None)
        return self._grafana.url

    def recording(self) -> Path:
        """A file of the flight recorder."""
        if self._recording is None:
            self.daemon()
            said = self.run("pacecar dump")
            assert said.returncode == 0, said.stderr
            self._recording = Path(said.stdout.strip().splitlines()[-1])
        return self._recording

    def remembered(self) -> str:
        """Put an entry into the file of best knobs and return the key's first digits."""
        from pacecar.controller.memory.knob_store import KnobStore
        from tests.controller.test_knob_store import entry, put

        one = entry(1)
        put(KnobStore(self.folder / "state/pacecar/knobs.json", is_ours=True), one)
        return str(one.key)[:6]

    def close(self) -> None:
        """End everything and remove the folder."""
        (self.folder / "stop").touch()
        for name, process in reversed(self._running.items()):
            if name == "job":
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=60)
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self._grafana is not None:
            self._grafana.shutdown()
            self._grafana.server_close()
        shutil.rmtree(self.folder, ignore_errors=True)
