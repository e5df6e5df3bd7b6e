"""What do the dashboards look at when they are checked?  Two nodes, one as it is and one as bad as it gets.

    here      this machine: `pacecar demo`, that is a real daemon, a real torchrun and a tuner at work
    planted   a real daemon on a recorded machine with RDMA ports and eight stand-in GPUs, on which a test plants what
              no machine has on demand: a lost GPU, Xids, throttling, a straggler, a hang, frames that are no frames

Values on the planted node are wrong on purpose (a GPU with 150 kB of memory): what they are is tested elsewhere, here
it matters that they arrive.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import msgspec

from pacecar.monitor.gpu.known_gpus import KnownGpu, known_gpus_path
from pacecar.records import (
    Decision,
    DeviceMemory,
    HangSuspicion,
    HangVerdict,
    JobLedger,
    JobRecord,
    StepRecord,
    TunerOrder,
    Verdict,
    Vitals,
)
from pacecar.records.hangs import HangKind
from pacecar.records.measurements.ledger import Ledger
from tests.kit.machines import machine as recorded
from tests.monitor.nvml_standin.standin import GPUS, Control, build
from tests.monitor.showcase import MS, ShowJob
from tests.monitor.testimony import everything

__all__ = ["Here", "Planted", "PlantedJob"]

PATIENCE_SECONDS = 60.0
STEP_SECONDS = 0.25
GPU_IS_LOST = 15
"""NVML_ERROR_GPU_IS_LOST"""
SLOW, SLOW_FOR_HEAT = 0x8, 0x20
"""nvmlClocksEventReasonHwSlowdown, of which no driver counts the time, and nvmlClocksEventReasonSwThermalSlowdown"""

MOVING = {
    "proc/stat": r"^(cpu\d* +)(\d+)",  # user
    "proc/net/snmp": r"^(Tcp: (?:\S+ ){6})(\d+)",  # OutSegs
    "proc/diskstats": r"^( +\d+ +\d+ \w+ )(\d+)",  # reads completed
    "sys/fs/cgroup/pods/pod7/cpu.stat": r"^(nr_periods )(\d+)",
}
"""Files of the recorded machine -> the number in them that goes up: a share of what stands still is unknown."""

RUN = """
import json, logging, sys
from pacecar.config import DaemonConfig
from pacecar.monitor.service import run
logging.basicConfig(level="INFO")
sys.exit(run(DaemonConfig(**json.loads(sys.argv[1]))))
"""


def _wait(claim: Callable[[], Any], why: Callable[[], str]) -> Any:
    limit = time.monotonic() + PATIENCE_SECONDS
    while not (found := claim()):
        assert time.monotonic() < limit, why()
        time.sleep(0.05)
    return found


class Here:
    """`make run` in a small size: the address that its daemon serves, and the job's name.  A context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / "demo.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.address = self.job = ""

    def __enter__(self) -> Self:
        base = {name: value for name, value in os.environ.items() if not name.startswith("PACECAR_")}
        environ = {
            **base, "PACECAR_HOOK_WINDOW_INTERVAL_STEPS": "5", "PACECAR_HOOK_VITALS_INTERVAL_STEPS": "5",
            "PACECAR_HOOK_OVERHEAD_BUDGET": "1.0", "PACECAR_TUNE_WARMUP_STEPS": "10",
        }  # fmt: skip
        command = [sys.executable, "-m", "pacecar", "demo", "--run-dir", str(self._folder / "runs"), "--port", "0"]
        command += ["--batch", "2", "--micro-batch", "1", "--seconds", "600"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environ, cwd=self._folder, start_new_session=True
            )
        try:
            found = _wait(self._found, self._log.read_text)
        except BaseException:
            self.__exit__()
            raise
        self.job, self.address = found[1], found[2]
        return self

    def _found(self) -> re.Match[str] | None:
        assert self._process is not None
        text = self._log.read_text()
        assert self._process.poll() is None, text
        return re.search(r"pacecar demo (\S+):.*?http://(127\.0\.0\.1:\d+)/metrics", text, re.DOTALL)

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self._process.kill()
        self._process.wait()


class PlantedJob(ShowJob):
    """A job on the stand-in GPUs that says one of everything, and goes on stepping until it is told to hang."""

    def __init__(self, path: str, name: str, ranks: int) -> None:
        super().__init__(path, name=name, ranks=ranks)
        said = [msgspec.structs.replace(record, job=name) for record in everything(0)]
        verdict = next(record for record in said if isinstance(record, Verdict))
        others = [msgspec.structs.replace(verdict, outcome=how) for how in ("rolled_back", "barred", "abandoned")]
        self._said = [*said, *others]
        # Vitals come with every fifth step, the hang at the end, and the rest of the records once.
        self._say(0, *(record for record in self._said if not isinstance(record, (Vitals, HangSuspicion, HangVerdict))))

    def _record(self, rank: int, ledger: Ledger) -> StepRecord:
        """Return the step of one rank; the last rank's windows cost more than its budget has earned."""
        record: StepRecord = super()._record(rank, ledger)
        if rank < self.ranks - 1:
            return record
        return msgspec.structs.replace(
            record, calibration_age_steps=None, uncalibrated="price", window_price_ns=310 * MS
        )

    def step(self) -> None:
        super().step()
        phases = {"forward": self.number * 100 * MS, "tail": self.number * 40 * MS}
        ledger = JobLedger(
            job=self.name, ranks=self.ranks, step=self.number, pace_ns=478 * MS, median_ns=410 * MS,
            total_steps=self.number, total_wall_ns=sum(phases.values()), total_phases_ns=phases,
        )  # fmt: skip
        self._say(0, ledger)

    def turn(self) -> None:
        """Say that the tuner tried something, and that somebody gave it an order."""
        self._say(0, *(record for record in self._said if isinstance(record, (Decision, Verdict, TunerOrder))))

    def _hello(self, rank: int) -> JobRecord:
        hello: JobRecord = msgspec.structs.replace(
            super()._hello(rank),
            launch="3f2a9c01d4e5b678",
            device_uuid=f"GPU-{rank}",
            world_size=self.ranks,
            parallel={"data": self.ranks},
        )
        return hello

    def _utilization(self, rank: int) -> JobRecord:
        memory = DeviceMemory(
            allocated_bytes=71 << 30, reserved_bytes=84 << 30, allocated_peak_bytes=80 << 30,
            interval_peak_bytes=80 << 30, inactive_split_bytes=3 << 30, total_allocation_retries=self.number,
            total_out_of_memory=1,
        )  # fmt: skip
        saved = self.number // 5
        vitals: JobRecord = msgspec.structs.replace(
            super()._utilization(rank), memory=memory, total_checkpoints=saved, total_checkpoint_ns=saved * 100 * MS
        )
        return vitals

    def hang(self) -> None:
        """Let rank 0 suspect a hang and judge; the others say nothing, as stopped processes do."""
        suspicion = HangSuspicion(
            job=self.name, rank=0, step=self.number + 1, phase="tail", wall_ns=time.time_ns(), silent_ns=130_000 * MS,
            last_collective=None, collectives=None, stack=None,
        )  # fmt: skip
        verdict = HangVerdict(
            job=self.name, rank=0, wall_ns=time.time_ns(), kind=HangKind.NO_ANSWER, waiting=(0,),
            culprits=tuple(range(1, self.ranks)), waited_ns=130_000 * MS, summary="the others do not answer",
            step=self.number + 1,
        )  # fmt: skip
        self._say(0, suspicion, verdict)


def _remember_a_gpu_that_is_gone(recordings: Path) -> None:
    """Let the daemon find a list of an earlier one, with a GPU more than there are."""
    recordings.mkdir(mode=0o700)
    gone = KnownGpu("GPU-gone", "Stand-in", "00000000:99:00.0", str(GPUS), 1)
    known_gpus_path(recordings, platform.node()).write_bytes(msgspec.json.encode({"version": 1, "gpus": [gone]}))


class Planted:
    """A daemon process with stand-in GPUs and a recorded machine, and a job on it.  A context manager."""

    job = "planted"

    def __init__(self, folder: Path, mounts: Sequence[str] = ("/",)) -> None:
        self._folder = folder
        self._mounts = mounts
        self._log = folder / "daemon.log"
        self._until = ExitStack()
        self._socket = str(folder / "s")
        self._stop = threading.Event()
        self._process: subprocess.Popen[bytes]
        self._job: PlantedJob
        self._control: Control
        self._machine: Path
        self.address = ""

    def __enter__(self) -> Self:
        with ExitStack() as until:
            machine = self._machine = recorded("training_host", self._folder / "machine")
            (machine / "proc" / str(os.getpid())).symlink_to("4242")  # who speaks for the ranks, in a pod with limits
            self._control = Control(build(self._folder) / "control")
            self._control.page.mig = 1
            self._control.page.fans = 2
            self._control.page.c2c = 1
            settings = {
                "port": 0, "socket": self._socket, "proc_root": str(machine / "proc"), "sys_root": str(machine / "sys"),
                "recordings": str(self._folder / "recordings"), "mounts": self._mounts, "cpu_budget": 1.0,
            }  # fmt: skip
            _remember_a_gpu_that_is_gone(Path(str(settings["recordings"])))
            environ = {**os.environ, **self._control.environment()}
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", RUN, json.dumps(settings)], stdout=log, stderr=log, env=environ
                )
            until.callback(self._end)
            port = _wait(self._port, self._log.read_text)
            self.address = f"127.0.0.1:{port[1]}"
            self._job = PlantedJob(self._socket, self.job, ranks=GPUS - 1)
            until.callback(self._job.close)
            thread = threading.Thread(target=self._train)
            thread.start()
            until.callback(thread.join)
            until.callback(self._stop.set)
            self._until = until.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._until.close()

    def plant(self) -> None:
        """Let happen what a node can suffer, while the job goes on."""
        control = self._control
        control.page.lost[GPUS - 2] = GPU_IS_LOST
        control.page.reasons[1] = SLOW | SLOW_FOR_HEAT
        control.xid(0, 63)
        control.xid(2, 79)
        control.page.ecc[3] += 2
        control.page.link_down[4] = 7
        self._job.turn()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(self._socket)
            stranger.send(b"no frame at all")

    def starve(self) -> None:
        """Let a port of the RDMA card go down, the kernel kill two processes, and all GPUs stand idle."""
        self._write("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE", "1: DOWN")
        self._write("proc/vmstat", "oom_kill 76", "oom_kill 78")
        self._control.page.zero = 1

    def kill(self) -> None:
        """Let the daemon end as by a fault of the machine."""
        self._process.kill()

    def stall(self) -> None:
        """Let the job stop stepping, and its first rank say that it suspects a hang; the driver comes with NVLink 5."""
        self._control.page.nvlink5 = 1
        self._control.page.driver_life += 1
        self._stop.set()
        time.sleep(2 * STEP_SECONDS)
        self._job.hang()

    def _train(self) -> None:
        while not self._stop.wait(STEP_SECONDS):
            self._job.step()
            self._spend()

    def _spend(self) -> None:
        """Let the recorded machine work."""
        for name, line in MOVING.items():
            self._write(name, line, lambda found: f"{found[1]}{int(found[2]) + 20}")

    def _write(self, name: str, line: str, instead: str | Callable[[re.Match[str]], str]) -> None:
        file = self._machine / name
        new = file.with_name("new")
        # Under another name first: the daemon must never read half of a file.
        new.write_text(re.sub(line, instead, file.read_text(), flags=re.MULTILINE))
        new.replace(file)

    def _port(self) -> re.Match[str] | None:
        text = self._log.read_text()
        assert self._process.poll() is None, text
        return re.search(r"http://[^ ]*?:(\d+)/metrics", text)

    def _end(self) -> None:
        self._process.terminate()
        self._process.wait(20)
