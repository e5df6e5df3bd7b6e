"""One rank of a gloo DDP job that is slowed at will; run by test_crew_ranks.py, its settings one JSON argument.

A stretch of slowness: {"from": step, "until": step, "rank": r, "how": "compute" | "data" | "link"}.  A link is shaped
by the rank itself, which has a network namespace of its own then.  Prints a JSON line a record, and at the end what
the crew cost.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pacecar.config import HookConfig
from pacecar.profiler.crew.crew import Crew, sees_waits_in_forward
from pacecar.profiler.hook import Hook, make_hello
from pacecar.profiler.outbox import Outbox
from pacecar.records import HangSuspicion, JobLedger, JobRecord, Straggler

TBF = "tc qdisc add dev eth0 root tbf rate 60mbit burst 32kb latency 200ms"


class Stretches:
    def __init__(self, rank: int, stretches: list[dict[str, object]]) -> None:
        self.mine = [s for s in stretches if s["rank"] == rank]
        self.step = 0

    def has(self, how: str) -> bool:
        return any(s["how"] == how and s["from"] <= self.step < s["until"] for s in self.mine)

    def shape(self) -> None:
        for s in self.mine:
            if s["how"] == "link" and s["from"] == self.step:
                subprocess.run(TBF.split(), check=True)
            if s["how"] == "link" and s["until"] == self.step:
                subprocess.run(["tc", "qdisc", "del", "dev", "eth0", "root"], check=True)


class Extra(nn.Module):
    """Computes more when it is told to, and then meets the other ranks if the job does so in its forward."""

    def __init__(self, stretches: Stretches, *, meets: bool) -> None:
        super().__init__()
        self.stretches = stretches
        self.meets = meets
        self.weight = torch.randn(384, 384)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        end = time.thread_time() + 0.02
        while self.stretches.has("compute") and time.thread_time() < end:
            self.weight @ self.weight
        if self.meets:
            dist.all_reduce(torch.zeros(64))
        return x


def main() -> None:
    settings = json.loads(sys.argv[1])
    rank, world = settings["rank"], settings["world"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=settings["store"], rank=rank, world_size=world)
    torch.manual_seed(3)
    stretches = Stretches(rank, settings["stretches"])
    net = nn.Sequential(
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        Extra(stretches, meets=settings.get("meets", False)),
        nn.Linear(256, 8),
    )
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    steps: list[tuple[int, float]] = []

    def emit(record: JobRecord) -> None:
        if isinstance(record, Straggler | HangSuspicion | JobLedger):
            row = msgspec.to_builtins(record) | {"heard_at": hook.step}
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
        for outbox in outboxes:
            outbox.put(record)

    config = HookConfig(
        windows=settings.get("windows", True),
        hang_seconds=settings.get("hang_seconds", 120.0),
        overhead_budget=settings.get("overhead_budget", 0.01),
    )
    hello = make_hello(model, environ={}, job="crew")
    outboxes = [Outbox(settings["socket"], hello)] if "socket" in settings else []
    hook = Hook(model, optimizer, hello=hello, config=config, sinks=outboxes)
    for outbox in outboxes:
        outbox.put(hello)
        outbox.before_look = hook.look
    crew = Crew(
        hello,
        config,
        hook,
        emit=emit,
        charge=hook.charge,
        waits_in_forward=lambda: sees_waits_in_forward(hook.calibrations.find(hook.knobs)),
    )
    hook.on_timed = crew.note
    hook.start()
    crew.start()
    draw = torch.Generator().manual_seed(rank)

    def batches() -> Iterator[torch.Tensor]:
        for step in range(settings["steps"]):
            stretches.step = step
            stretches.shape()
            time.sleep(settings.get("pause", 0.015) + (0.02 if stretches.has("data") else 0.0))
            yield torch.randn(64, 256, generator=draw)

    begun = time.monotonic()
    for batch in hook.data(batches()):
        if stretches.has("hang"):
            time.sleep(3.0)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        steps.append((stretches.step, time.monotonic()))
    took = time.monotonic() - begun
    was_alive = hook.is_alive
    crew.close()
    hook.close()
    for outbox in outboxes:
        outbox.close(2.0)
    summary = {
        "type": "summary", "off": crew.off_because, "cpu_ratio": crew.cpu_ns / 1e9 / took,
        "cpu_us_a_step": crew.cpu_ns / 1e3 / len(steps), "gathers": crew.gathers,
        "step_ms": 1000 * took / len(steps), "closed": True, "is_alive": was_alive,
        "forward_waits": sees_waits_in_forward(hook.calibrations.find(hook.knobs)),
    }  # fmt: skip
    sys.stdout.write(json.dumps(summary) + "\n")
    sys.stdout.flush()
    os._exit(0)  # torch aborts at exit now and then (pytorch issue 190489)


if __name__ == "__main__":
    main()
