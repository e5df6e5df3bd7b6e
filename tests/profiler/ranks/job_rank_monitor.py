"""One rank of a gloo DDP job in which ranks are slowed, as `ranks.py` starts it; its settings are one JSON argument.

An act is {"rank": r, "how": "compute" | "data" | "link" | "hang"} with "from" and "until" steps.  Where an act has no
"until" it lasts until rank 0 has named its rank; one without "from" begins when the one before is over; and a job
without "steps" ends after its last act, when a file `end` appears, or when rank 0 has told of "told_steps".  Rank 0
decides and writes down what all do some steps later.  So a machine that is busy with something else makes the job
longer and changes nothing else.

Prints a JSON line a record, and at the end what the crew cost, what was played, and when this rank came to meet the
others in each step.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pacecar.config import HookConfig
from pacecar.profiler.hook.hook import Hook, make_hello
from pacecar.profiler.ranks.exchange.subgroups import subgroup_of
from pacecar.profiler.ranks.rank_monitor import RankMonitor
from pacecar.profiler.transport.daemon_socket import DaemonSocket
from pacecar.records import HangSuspicion, JobLedger, JobRecord, Straggler
from tests.kit.listeners import HeardSteps
from tests.kit.long_collection import collect_for
from tests.kit.ranks import RANKS_SECONDS_MAX
from tests.kit.waiting import until

TBF = "tc qdisc add dev eth0 root tbf rate 60mbit burst 32kb latency 200ms"
CLONE_NEWNET = 0x40000000

FIRST_STEP = 62
"""Of the first act: nobody is named in the first ranges, and what is usual has been seen by then."""

AHEAD = 3
"""Steps from rank 0's word until all do as it says: DDP lets no rank be more than one ahead."""

QUIET = 24
"""Steps between an act that is over for everybody and the next one: six ranges."""

STEPS_MAX = 4000
"""Of a job that waits for something."""

USUAL_STEPS = 32
"""The latest steps, without an act, of which a usual one is the median."""

STACKS_SECONDS = RANKS_SECONDS_MAX - 20.0
"""When a rank that still runs writes its threads' stacks to stderr: before the test kills it."""

SLOW_SECONDS = {"compute": 0.05, "data": 0.05, "gc": 0.05, "hang": 3.0}
"""How long a slow rank sleeps at least: awake it would make others slow, too, on a machine with few cores."""

SLOW_STEPS = 3
"""It sleeps this many usual steps at least: on a busy machine steps differ by as much as they last, and nobody is named
for less than that."""


class Play:
    """Who is slow when.  Rank 0 writes it, all read it at each step."""

    def __init__(self, path: Path, acts: list[dict], steps: int | None) -> None:
        self.path = path
        self.acts = [{"from": None, "until": None} | act for act in acts]
        self.end = steps
        self.at = 0  # the first act that is not over

    def write(self) -> None:
        self.path.with_suffix(".new").write_text(json.dumps([self.acts, self.end]))
        self.path.with_suffix(".new").rename(self.path)

    def read(self) -> None:
        self.acts, self.end = json.loads(self.path.read_text())

    def open_next(self, step: int) -> None:
        """Let the next act begin, or the job end, after `step`."""
        while self.at < len(self.acts):
            act = self.acts[self.at]
            if act["from"] is None:
                act["from"] = step + QUIET
                if "steps" in act:
                    act["until"] = act["from"] + act["steps"]
            if act["until"] is None:
                return
            step = max(step, act["until"])
            self.at += 1
        if self.end is None and self.acts:
            self.end = step + AHEAD

    def heard(self, record: Straggler, step: int) -> None:
        """Go on with the play when its rank was named, and again when that is over."""
        act = self.acts[self.at] if self.at < len(self.acts) else None
        if act is None or record.late_rank != act["rank"] or step < act["from"]:
            return
        if not record.ended:
            act["until"] = step + AHEAD
        elif act["until"] is not None:
            is_right = record.cause == {"data": "data_wait"}.get(act["how"], act["how"])
            self.at += 1
            if not is_right:  # the machine starved it meanwhile: what was played is played again
                self.acts.insert(self.at, {**act, "from": None, "until": None})
            self.open_next(step)
        self.write()


class Part:
    """What this rank plays."""

    def __init__(self, rank: int, play: Play) -> None:
        self.rank, self.play, self.step = rank, play, 0
        self.is_shaped = False
        self.begun: float | None = None
        self.usual: deque[float] = deque(maxlen=USUAL_STEPS)

    def is_on(self, act: dict) -> bool:
        return act["from"] is not None and act["from"] <= self.step < (act["until"] or STEPS_MAX)

    def has(self, how: str) -> bool:
        return any(act["rank"] == self.rank and act["how"] == how and self.is_on(act) for act in self.play.acts)

    def begin(self, step: int) -> None:
        now = time.monotonic()
        if self.begun is not None and not self.is_playing:
            self.usual.append(now - self.begun)
        self.step, self.begun = step, now
        self.play.read()
        if self.has("link") != self.is_shaped:
            self.is_shaped = not self.is_shaped
            subprocess.run((TBF if self.is_shaped else "tc qdisc del dev eth0 root").split(), check=True)
        self.be_slow("data")

    def be_slow(self, how: str) -> None:
        if not self.has(how):
            return
        seconds = max(SLOW_SECONDS[how], SLOW_STEPS * median(self.usual or [0.0]))
        if how == "gc":
            collect_for(seconds)
        else:
            time.sleep(seconds)

    @property
    def is_playing(self) -> bool:
        """Whether a rank is slow in the step under way, which so tells nothing of usual ones."""
        return any(map(self.is_on, self.play.acts))

    @property
    def is_over(self) -> bool:
        return self.step >= (STEPS_MAX if self.play.end is None else self.play.end)


class Extra(nn.Module):
    """Is slow when it is told to, and then meets the other ranks if the job does so in its forward."""

    def __init__(self, part: Part, *, meets: bool) -> None:
        super().__init__()
        self.part = part
        self.meets = meets
        self.arrivals: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.part.be_slow("compute")
        self.part.be_slow("gc")
        self.arrivals.append(time.monotonic_ns())  # one clock for all ranks of a host
        if self.meets:
            dist.all_reduce(torch.zeros(64))
        return x


def enter(namespace: str) -> None:
    """Go on in another network namespace; before there are threads."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace) as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def main() -> None:
    faulthandler.dump_traceback_later(STACKS_SECONDS)
    settings = json.loads(sys.argv[1])
    rank, folder = int(os.environ["RANK"]), Path(settings["folder"])
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    if "namespaces" in settings:
        enter(settings["namespaces"][rank])
    torch.set_num_threads(1)
    play = Play(folder / "play", settings.get("acts", []), settings.get("steps"))
    if rank == 0:
        play.open_next(FIRST_STEP - QUIET)
        play.write()
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    part = Part(rank, play)
    extra = Extra(part, meets=settings.get("meets", False))
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), extra, nn.Linear(256, 8))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def emit(record: JobRecord) -> None:
        if isinstance(record, Straggler | HangSuspicion | JobLedger):
            row = msgspec.to_builtins(record) | {"heard_at": hook.step}
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
        if isinstance(record, Straggler):
            director.heard(record, part.step)
        if isinstance(record, JobLedger) and director.end is None and is_enough(record):
            director.end = part.step + AHEAD
            director.write()
        for outbox in outboxes:
            outbox.put(record)

    def is_enough(ledger: JobLedger) -> bool:
        """Return whether so many steps are told of as the job is for, of which less than half were measured."""
        wanted = settings.get("told_steps")
        measured = ledger.total_measured_steps
        return wanted is not None and ledger.step >= wanted and measured is not None and measured < ledger.total_steps

    director = Play(play.path, [], None)
    director.acts, director.end, director.at = play.acts, play.end, play.at
    config = HookConfig(
        windows=settings.get("windows", True),
        hang_seconds=settings.get("hang_seconds", 120.0),
        overhead_budget=settings.get("overhead_budget", 0.01),
    )
    hello = make_hello(model, environ={}, job="crew")
    outboxes = [DaemonSocket(settings["socket"], hello)] if "socket" in settings else []
    hook = Hook(model, optimizer, hello=hello, config=config, sinks=outboxes)
    for outbox in outboxes:
        outbox.put(hello)
        outbox.serve(hook)
    size = settings.get("compared", hello.world_size)
    subgroup = subgroup_of(rank, hello.world_size, whole_max=size, subgroup_ranks=size)
    crew = RankMonitor(hello, config, hook, emit=emit, subgroup=subgroup)
    hook.start(HeardSteps(on_timed=crew.note))
    crew.start()
    draw = torch.Generator().manual_seed(rank)

    def batches() -> Iterator[torch.Tensor]:
        for step in range(STEPS_MAX):
            time.sleep(settings.get("pause", 0.01))
            part.begin(step)
            if rank == 0 and (folder / "end").exists() and director.end is None:
                director.end = step + AHEAD
                director.write()
            if part.is_over:
                return
            yield torch.randn(64, 256, generator=draw)

    begun = time.monotonic()
    for batch in hook.loop.data(batches()):
        part.be_slow("hang")
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    took = time.monotonic() - begun
    was_alive = hook.is_alive
    crew.close()
    hook.close()
    for outbox in outboxes:
        outbox.close(2.0)
    summary = {
        "type": "summary", "off": crew.off_because, "cpu_ratio": crew.cpu_ns / 1e9 / took,
        "gathers": crew.gathers, "step_ms": 1000 * took / part.step, "closed": True, "is_alive": was_alive,
        "meets_in": sorted(hook.meeting_phases()),
        "acts": play.acts, "steps": part.step, "arrivals": extra.arrivals,
    }  # fmt: skip
    sys.stdout.write(json.dumps(summary) + "\n")
    sys.stdout.flush()
    # Who ends while another still receives the last gradients, as behind a slow link, resets the connection under it.
    (folder / f"through{rank}").touch()
    until(
        lambda: all((folder / f"through{each}").exists() for each in range(dist.get_world_size())),
        "a rank is not through",
    )
    os._exit(0)  # torch aborts at exit now and then (pytorch issue 190489)


if __name__ == "__main__":
    main()
