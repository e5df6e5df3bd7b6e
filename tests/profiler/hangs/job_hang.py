"""One rank of a gloo job in which something happens at one step: `job_hang.py FOLDER FAULT RANK STEPS`.

Each step has an all-reduce on a group of its own beside DDP's.  What happens is a function below; those in `HEALTHY`
only take long.  The rank to which it happens writes the time to FOLDER/begun.  The ranks' records are in FOLDER.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pacecar

STEP = 25
"""At which it happens."""

LONG = 600.0
LONG_PAUSE_SECONDS = 60.0
PAUSE_SECONDS = float(os.environ.get("PAUSE_SECONDS", "9"))
DEVICE = torch.device(os.environ.get("HANG_DEVICE", "cpu"))

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Job:
    """The parts that faults use."""

    def __init__(self, folder: Path, fault: str, rank: int) -> None:
        self.folder, self.fault, self.rank = folder, fault, rank
        wire = os.environ.get("GLOO_SOCKET_IFNAME")
        os.environ |= {"GLOO_SOCKET_IFNAME": os.environ["JOB_WIRE"]} if "JOB_WIRE" in os.environ else {}
        dist.init_process_group("gloo")
        self.group = dist.new_group(list(range(WORLD)), group_desc="dp")
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(DEVICE)
        self.model = DistributedDataParallel(self.net)
        os.environ |= {"GLOO_SOCKET_IFNAME": wire} if wire is not None else {}
        self.pacer: pacecar.Pacer | None = None
        self.step = 0

    def is_now(self, *faults: str) -> bool:
        """Return whether one of `faults` happens to this rank now; note when it does."""
        is_now = self.fault in faults and self.rank in (RANK, -1) and self.step == STEP
        if is_now:
            (self.folder / f"begun{RANK}").write_text(str(time.time_ns()))
        return is_now

    def batches(self, steps: int) -> Iterator[Tensor]:
        for step in range(steps):
            self.step = step
            time.sleep(0.0 if self.fault == "long" else 0.03)
            if self.is_now("pause_loader"):
                time.sleep(PAUSE_SECONDS)
            if self.is_now("loader"):
                time.sleep(LONG)
            if self.is_now("loader_pipe"):
                os.read(os.pipe()[0], 1)
            yield torch.ones(4, 64, device=DEVICE)

    def outside(self) -> None:
        """Do what happens after the optimizer's step."""
        if self.is_now("stop"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.is_now("sleep", "sleep_all"):
            time.sleep(LONG)
        if self.is_now("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.is_now("exit"):
            os._exit(3)
        if self.is_now("gil"):
            ctypes.PyDLL(None).usleep(int(LONG * 1e6) if LONG < 2000 else 0)
        if self.is_now("c_call"):
            ctypes.CDLL(None).usleep(int(LONG * 1e6))  # without Python's lock
        if self.is_now("c_lock", "c_lock_gil"):
            library = ctypes.CDLL(None) if self.fault == "c_lock" else ctypes.PyDLL(None)
            mutex = ctypes.create_string_buffer(128)  # a pthread_mutex_t, PTHREAD_MUTEX_INITIALIZER
            for _ in range(2):
                library.pthread_mutex_lock(mutex)
        if self.is_now("lock"):
            lock = threading.Lock()
            with lock:
                lock.acquire()
        if self.is_now("busy"):
            while True:
                pass
        if self.is_now("leave"):
            assert self.pacer is not None
            self.pacer.close()
            time.sleep(LONG)
        if self.is_now("finish"):  # the main thread ends, and Python waits for the other one
            threading.Thread(target=time.sleep, args=(LONG,)).start()
            sys.exit(0)
        if self.is_now("nobody"):
            service, _ = socket.socketpair()
            service.recv(1)
        if self.is_now("pause", "pause_all"):
            time.sleep(PAUSE_SECONDS)
        if self.is_now("write"):
            end = time.monotonic() + PAUSE_SECONDS
            with (self.folder / "saved").open("wb") as stream:
                while time.monotonic() < end:
                    stream.write(bytes(100_000))
                    stream.flush()
                    time.sleep(0.05)
                    stream.seek(0)
        if self.is_now("compute"):
            end = time.monotonic() + PAUSE_SECONDS
            numbers = torch.ones(256, 256)
            while time.monotonic() < end:
                numbers = torch.tanh(numbers @ numbers)
        if self.is_now("checkpoint"):
            assert self.pacer is not None
            with self.pacer.checkpoint():
                time.sleep(PAUSE_SECONDS)
        if self.is_now("evaluate"):
            self.evaluate()
        if self.fault == "long":
            self.pause_now_and_then()

    def evaluate(self) -> None:
        end = time.monotonic() + PAUSE_SECONDS
        self.net.eval()
        with torch.no_grad():
            while time.monotonic() < end:
                self.net(torch.ones(4, 64, device=DEVICE))
                time.sleep(0.2)
        self.net.train()

    def pause_now_and_then(self) -> None:
        """Evaluate and save once in a thousand steps, and once do nothing at all for a minute."""
        assert self.pacer is not None
        if self.step % 1000 == 500:
            self.evaluate()
        if self.step % 1000 == 999:
            with self.pacer.checkpoint():
                time.sleep(PAUSE_SECONDS)
        if self.step == 2500:
            time.sleep(LONG_PAUSE_SECONDS)

    def own_collective(self) -> None:
        """Take part in the all-reduce of the group, or do something else."""
        size = 5 if self.is_now("shape") else 16
        if self.is_now("skip"):
            return
        if self.is_now("extra"):
            dist.all_reduce(torch.ones(16, device=DEVICE), group=self.group)
        if self.is_now("other"):
            dist.broadcast(torch.ones(16, device=DEVICE), 0, group=self.group)
            return
        if self.is_now("late"):
            time.sleep(LONG)
        if self.is_now("receive"):
            dist.recv(torch.ones(4), (RANK + 1) % WORLD)
        dist.all_reduce(torch.ones(size, device=DEVICE), group=self.group)


class Late(nn.Module):
    """Is where something happens within forward or backward."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job

    def forward(self, inputs: Tensor) -> Tensor:
        if self.job.is_now("forward"):
            time.sleep(LONG)
        if self.job.is_now("kernel"):
            compute_for_long()
        return inputs


def compute_for_long() -> None:
    """Keep the device busy for LONG: a GPU with one kernel, which the host does not wait for."""
    if DEVICE.type == "cuda":
        torch.cuda._sleep(int(LONG * 2e9))  # cycles
        return
    end = time.monotonic() + LONG
    numbers = torch.ones(256, 256)
    while time.monotonic() < end:
        numbers = torch.tanh(numbers @ numbers)


def main(folder: Path, fault: str, rank: int, steps: int) -> None:
    logging.basicConfig(level=os.environ.get("HANG_LOG", "WARNING"))
    torch.set_num_threads(1)
    job = Job(folder, fault, rank)
    (folder / f"pid{RANK}").write_text(str(os.getpid()))
    job.net.append(Late(job))
    optimizer = torch.optim.SGD(job.net.parameters(), lr=1e-3)
    job.pacer = pacecar.attach(
        job.model, optimizer, tune="off", run_dir=folder, socket=str(folder / "nobody"), job="hang",
        overhead_budget=0.05, windows=False,
    )  # fmt: skip
    for batch in job.pacer.data(job.batches(steps)):
        job.model(batch).square().mean().backward()
        job.own_collective()
        optimizer.step()
        optimizer.zero_grad()
        (folder / f"step{RANK}").write_text(str(job.step))
        job.outside()
    job.pacer.close()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # torch aborts at exit now and then (pytorch issue 190489)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
