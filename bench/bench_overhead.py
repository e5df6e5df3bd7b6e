"""Measures pacecar's overhead in a real DDP job, from outside and by pacecar's own account.

Two gloo ranks train with and without the hook in turns of a few steps (A B B A).  Both arms run in one process, because
two processes differ by more than the overhead, and turns are short, because a shared machine drifts.  For the turns
without, the hook's entries are removed from torch's tables.

Two clocks: the processor time of the training thread shows pacecar's work and is hardly disturbed by other programs;
wall time includes waiting and noise.  A difference is the trimmed mean over A B B A groups, with a bootstrap interval.
Windows are so rare that short turns would cut them, so there turns are long and plain means count.

The long job is a narrower network with a device that works for 100 ms, simulated by a sleep in backward: the host is as
idle as beside a GPU, its caches are cold, and the overhead shows above the noise of the arithmetic.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORLD = 2
TIMEOUT_SECONDS = 900
TURN_STEPS = 4
"""The tuner's period, so that each turn has one vote."""
LONG_TURN_STEPS = 20
WARM_STEPS = 40
"""Steps with the hook before the measurement: the first ones all differ."""
TUNED_STEPS = 200
"""Steps for the tuner's trials, so that mostly its watching is measured."""
HOST_NS_MAX = 50_000
STEP_RATIO_MAX = 0.001
SELF_RATIO_MAX = 0.2
JOBS = {"short": (0.0, 384), "long": (0.1, 64)}
"""Device seconds per step, and the network's width: steps of about 12 and 105 ms."""
SHARES = {
    "short": {
        "hook": 4.0,
        "tuner": 1.0,
        "windows 0.01": 2.0,
        "windows 0.002": 8.0,
        "torch.profiler": 0.3,
        "TraceML": 0.5,
    },
    "long": {"hook": 6.0, "tuner": 0.5, "TraceML": 0.3},
}
"""Length of an arm relative to --seconds; at a budget of 0.002 a window takes over a minute to pay back."""
ON_SHARE = 0.5
"""Share of an arm with windows that runs without turns, before the hook's own account is read."""
LAYERS, BATCH = 6, 64
TRACEML = Path(__file__).resolve().parents[1] / ".tools" / "traceml" / "bin" / "python"


@dataclass
class Figure:
    """A difference in nanoseconds a step and its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, differences: Sequence[float]) -> Figure:
        draw = random.Random(0)
        means = sorted(trimmed_mean(draw.choices(differences, k=len(differences))) for _ in range(2000))
        return cls(trimmed_mean(differences), means[50], means[1949])

    def __str__(self) -> str:
        return f"{self.value / 1000:8.1f} us ({self.low / 1000:.1f} to {self.high / 1000:.1f})"


@dataclass
class Arm:
    """The cost of one arm on rank 0."""

    name: str
    step_ns: float
    cpu: Figure
    wall: Figure
    steps: int
    own_mean_ns: float | None = None
    ratio: float | None = None
    windows: int = 0
    threads_ns: float = 0.0
    on_seconds: float = 0.0
    """Time with the hook when `ratio` was read."""


def now() -> tuple[int, int]:
    """Return wall time and the training thread's processor time."""
    return time.perf_counter_ns(), time.thread_time_ns()


def trimmed_mean(values: Sequence[float], cut: float = 0.2) -> float:
    """Return the mean without the lowest and highest share `cut`: other programs disturb whole groups."""
    ordered = sorted(values)
    out = int(len(ordered) * cut)
    return statistics.fmean(ordered[out : len(ordered) - out] or ordered)


class Device(torch.autograd.Function):
    """Does nothing in forward, and waits in backward as for a device."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Loop:
    """The job: one step of a small network under DDP."""

    def __init__(self, job: str) -> None:
        torch.manual_seed(1)
        self.device_seconds, width = JOBS[job]
        self.net = nn.Sequential(*[part for _ in range(LAYERS) for part in (nn.Linear(width, width), nn.ReLU())])
        self.model = DistributedDataParallel(self.net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batch = torch.randn(BATCH, width)

    def step(self) -> tuple[int, int]:
        """Train one step; return its wall time and the training thread's processor time."""
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        output = self.model(self.batch)
        if self.device_seconds:
            output = Device.apply(output, self.device_seconds)
        output.square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter_ns() - wall, time.thread_time_ns() - cpu


class Tables:
    """Removes the hooks registered since the start from torch's tables, and puts them back."""

    def __init__(self, loop: Loop) -> None:
        model, optimizer = loop.model, loop.optimizer
        self._tables: list[dict[Any, Any]] = [
            model._forward_pre_hooks,
            model._forward_pre_hooks_with_kwargs,
            model._forward_hooks,
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
        ]
        self._before = [set(table) for table in self._tables]
        self._ours: list[dict[Any, Any]] = []
        self._is_on = True

    def remember(self) -> None:
        self._ours = [
            {key: table[key] for key in table if key not in before}
            for table, before in zip(self._tables, self._before, strict=True)
        ]

    def put(self, is_on: bool) -> None:
        if is_on == self._is_on:
            return  # the remembered entries may have been replaced
        if not is_on:
            self.remember()  # on short steps, the hook itself removes and restores some
        for table, ours in zip(self._tables, self._ours, strict=True):
            for key in ours:
                table.pop(key, None)
            if is_on:
                table.update(ours)
        self._is_on = is_on


Turn = Callable[[bool], object]


def measure(
    name: str, loop: Loop, switch: Turn, *, seconds: float, turn_steps: int, end: Callable[[], object] | None = None
) -> Arm:
    """Measure the arm that `switch(is_on)` switches, with as many groups of turns as fit into `seconds`.

    `end` ends a turn, and its time counts for the turn.
    """
    groups: list[dict[bool, list[tuple[int, int]]]] = []
    for number in range(max(4, steps_in(loop, seconds) // (4 * turn_steps))):
        group: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        first = number % 2 == 0
        for is_on in (first, not first, not first, first):
            begun = now()
            switch(is_on)
            spent = tuple(b - a for a, b in zip(begun, now(), strict=True))
            steps = [loop.step() for _ in range(turn_steps)]
            if end is not None:
                ending = now()
                end()
                spent = tuple(b - a + c for a, b, c in zip(ending, now(), spent, strict=True))
            if turn_steps > TURN_STEPS:  # switching a profiler takes time
                steps[-1] = steps[-1][0] + spent[0], steps[-1][1] + spent[1]
            group[is_on] += steps
        groups.append(group)
    switch(False)

    def differences(clock: int) -> list[float]:
        level = statistics.fmean if name != "hook" else statistics.median
        return [level([s[clock] for s in g[True]]) - level([s[clock] for s in g[False]]) for g in groups]

    plain = statistics.median(s[0] for g in groups for s in g[False])
    cpu, wall = Figure.of(differences(1)), Figure.of(differences(0))
    return Arm(name, plain, cpu, wall, steps=2 * turn_steps * len(groups))


def steps_in(loop: Loop, seconds: float) -> int:
    """Return how many steps fit into `seconds`, the same on all ranks."""
    step_ns = min(loop.step()[0] for _ in range(5))
    count = torch.tensor([int(seconds * 1e9 / step_ns)])
    dist.broadcast(count, 0)
    return int(count)


@contextlib.contextmanager
def attached(loop: Loop, folder: Path, **options: Any) -> Iterator[tuple[Any, Tables]]:
    import pacecar

    tables = Tables(loop)
    pacer = pacecar.attach(loop.model, loop.optimizer, run_dir=folder, socket=str(folder / "none.sock"), **options)
    assert pacer.is_active, pacer.inert_because
    tables.remember()
    try:
        yield pacer._hook, tables
    finally:
        pacer.close()


def pacecar_arm(loop: Loop, name: str, seconds: float, **options: Any) -> Arm:
    """Measure one way to attach, and read the hook's own account in the records of the same steps."""
    with tempfile.TemporaryDirectory() as path, attached(loop, Path(path), **options) as (hook, tables):
        is_on = True

        def switch(on: bool) -> None:
            nonlocal is_on
            while is_on and not on and hook.windows.is_open:
                loop_step_alone(loop)
            tables.put(on)
            if on and not is_on:
                hook._timer.start_ns = time.monotonic_ns()  # the steps in between do not belong to the next one
                hook._timer.events.clear()
            is_on = on

        ratio: float | None = None
        on_seconds = 0.0
        if options.get("windows"):  # no turns: without its entries, the hook's threads would still run
            for _ in range(steps_in(loop, ON_SHARE * seconds)):
                loop.step()
            hook.records.flush()
            ratio, on_seconds = hook.budget.ratio, hook.budget.wall_ns / 1e9
            seconds *= 1.0 - ON_SHARE
        turn_steps = LONG_TURN_STEPS if options.get("windows") else TURN_STEPS
        for _ in range(WARM_STEPS if options["tune"] == "off" else TUNED_STEPS):
            loop.step()
        before, step = hook.budget._cost_ns, hook.step
        threads = thread_ns()
        begun = time.perf_counter_ns()
        arm = measure(name, loop, switch, seconds=seconds, turn_steps=turn_steps)
        share = (thread_ns() - threads) / (time.perf_counter_ns() - begun)
        arm.threads_ns = share * arm.step_ns
        hook.records.flush()
        # Without its threads, which the figure from outside does not include either.
        arm.own_mean_ns = (hook.budget._cost_ns - before) / (hook.step - step)
        if not options.get("windows"):
            time.sleep(0.6)  # the courier looks four times a second
            lines = (Path(path) / f"rank{dist.get_rank()}.jsonl").read_bytes().splitlines()
            records = [record for record in map(json.loads, lines) if record["type"] == "step"]
            own = [r["overhead_ns"] / r["measured_every"] for r in records if r["step"] >= step and not r["disturbed"]]
            arm.own_mean_ns = trimmed_mean(own)  # its clock also counts time that other programs take
        arm.ratio, arm.on_seconds, arm.windows = ratio, on_seconds, hook.budget.windows
    return arm


def loop_step_alone(loop: Loop) -> None:
    """Let an open window end: a step without the other rank, which may be at another place."""
    with loop.model.no_sync():
        loop.model(loop.batch).square().mean().backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=True)


def thread_ns() -> int:
    """Return the processor time of pacecar's own threads so far (proc(5), schedstat)."""
    total = 0
    for thread in threading.enumerate():
        if thread.name.startswith("pacecar"):
            with contextlib.suppress(OSError, IndexError):
                total += int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0])
    return total


def torch_profiler_arm(loop: Loop, seconds: float) -> Arm:
    """Measure torch.profiler over every step, including stopping it, without exporting."""
    taken: list[Any] = []

    def switch(on: bool) -> None:
        if on:
            taken.append(torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]))
            taken[0].start()

    def end() -> None:
        if taken:
            taken.pop().stop()

    return measure("torch.profiler", loop, switch, seconds=seconds, turn_steps=LONG_TURN_STEPS, end=end)


def traceml_arm(loop: Loop, seconds: float) -> Arm:
    """Measure TraceML's step instrumentation, without its separate processes."""
    import traceml_ai as traceml  # type: ignore[import-not-found]

    traceml.init(mode="auto")
    plain = loop.step
    inside = False

    def switch(on: bool) -> None:
        nonlocal inside
        inside = on

    def step() -> tuple[int, int]:
        if not inside:
            return plain()
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        with traceml.trace_step(loop.model):
            plain()
        return time.perf_counter_ns() - wall, time.thread_time_ns() - cpu

    loop.step = step  # type: ignore[method-assign]
    try:
        return measure("TraceML", loop, switch, seconds=seconds, turn_steps=TURN_STEPS)
    finally:
        loop.step = plain  # type: ignore[method-assign]


ARMS: dict[str, Callable[[Loop, float], Arm]] = {
    "hook": lambda loop, s: pacecar_arm(loop, "hook", s, tune="off", windows=False),
    "tuner": lambda loop, s: pacecar_arm(loop, "tuner", s, tune="exact", windows=False),
    "windows 0.01": lambda loop, s: pacecar_arm(
        loop, "windows 0.01", s, tune="off", windows=True, overhead_budget=0.01
    ),
    "windows 0.002": lambda loop, s: pacecar_arm(
        loop, "windows 0.002", s, tune="off", windows=True, overhead_budget=0.002
    ),
    "torch.profiler": torch_profiler_arm,
    "TraceML": traceml_arm,
}


def rank_main(rank: int, store: str, job: str, arms: Sequence[str], seconds: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    loop = Loop(job)
    for name in arms:
        arm = ARMS[name](loop, seconds * SHARES[job].get(name, 1.0))
        dist.barrier()
        if rank == 0:
            sys.stdout.write(json.dumps(asdict(arm)) + "\n")
            sys.stdout.flush()
    dist.destroy_process_group()


def run(job: str, arms: Sequence[str], seconds: float, python: str = sys.executable) -> list[Arm]:
    with tempfile.TemporaryDirectory() as folder:
        command = [python, os.path.abspath(__file__), "--store", str(Path(folder) / "store"), "--seconds", str(seconds)]
        command += ["--job", job, "--arms", *arms]
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(r)], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for r in range(WORLD)
        ]
        try:
            said = [process.communicate(timeout=TIMEOUT_SECONDS) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    out, errors = said[0]
    if ranks[0].returncode:
        sys.stderr.write(errors[-2000:])
    found = []
    for line in filter(None, (line.strip() for line in out.splitlines())):
        if line.startswith("{"):
            raw = json.loads(line)
            found.append(Arm(**{**raw, "cpu": Figure(**raw["cpu"]), "wall": Figure(**raw["wall"])}))
    return found


@dataclass(frozen=True)
class Aim:
    """A limit and its measurement; an interval that contains the limit decides nothing."""

    job: str
    text: str
    value: float
    low: float
    high: float
    limit: float
    unit: str = "us"

    @property
    def verdict(self) -> str:
        if self.high <= self.limit:
            return "met"
        return "NOT MET" if self.low > self.limit else "not decided"

    def row(self) -> str:
        scale, digits = (1000.0, 1) if self.unit == "us" else (0.01, 2) if self.unit == "%" else (1.0, 4)
        value, low, high, limit = (f"{x / scale:.{digits}f}" for x in (self.value, self.low, self.high, self.limit))
        between = "" if low == high else f"{low} to {high}"
        return f"{self.job:6} {self.text:52} {value:>9} {between:>18} {limit:>9} {self.unit:5} {self.verdict}"


HEAD = f"{'job':6} {'aim':52} {'measured':>9} {'95 % interval':>18} {'limit':>9} {'':5} verdict"


def aims_of(job: str, arm: Arm) -> list[Aim]:
    """Return the aims of `arm`."""
    cpu, own, step_ns = arm.cpu, arm.own_mean_ns, arm.step_ns
    aims: list[Aim] = []

    def seen(text: str, limit: float, unit: str, scale: float = 1.0) -> None:
        aims.append(
            Aim(job, f"{text}, from outside", cpu.value / scale, cpu.low / scale, cpu.high / scale, limit, unit)
        )

    def said(text: str, value: float, limit: float, unit: str) -> None:
        aims.append(Aim(job, f"{text}, by its own account", value, value, value, limit, unit))

    if arm.name == "hook" and own is not None:
        seen("always on: host time a step", HOST_NS_MAX, "us")
        said("always on: host time a step", own, HOST_NS_MAX, "us")
        if job == "long":
            seen("always on: part of the step", STEP_RATIO_MAX, "%", step_ns)
            said("always on: part of the step", own / step_ns, STEP_RATIO_MAX, "%")
        if cpu.low > 0:
            errors = sorted(abs(own - edge) / edge for edge in (cpu.low, cpu.high))
            nearest = 0.0 if cpu.low <= own <= cpu.high else errors[0]
            error = abs(own - cpu.value) / cpu.value
            aims.append(Aim(job, "its own account, off by", error, nearest, errors[1], SELF_RATIO_MAX, "%"))
    if arm.name.startswith("windows") and arm.ratio is not None:
        budget = float(arm.name.split()[1])
        said(f"budget {budget}, after {arm.on_seconds:.0f} s", arm.ratio, budget, "")
        seen(f"budget {budget}, training thread", budget, "", step_ns)
    return aims


def show(job: str, arm: Arm) -> None:
    lines = [
        f"{job}, {arm.name}: step {arm.step_ns / 1e6:.1f} ms plain, {arm.steps} steps each way",
        f"  training thread, processor  {arm.cpu} a step = {arm.cpu.value / arm.step_ns:.4%} of it",
        f"  wall                        {arm.wall} a step = {arm.wall.value / arm.step_ns:.4%} of it",
    ]
    if arm.own_mean_ns is not None:
        lines.append(f"  the hook says of the same   {arm.own_mean_ns / 1000:8.1f} us")
        lines.append(f"  pacecar's threads           {arm.threads_ns / 1000:8.1f} us of processor a step, beside it")
    if arm.windows and arm.ratio is not None:
        lines.append(f"  windows {arm.windows}, ratio by the hook's own account {arm.ratio:.4f}, its threads included")
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", choices=JOBS, action="append")
    parser.add_argument("--arms", nargs="*")
    parser.add_argument("--seconds", type=float, default=28.0, help="base length of an arm (see SHARES)")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--store")
    options = parser.parse_args()
    jobs = options.job or list(JOBS)
    if options.rank is not None:
        rank_main(options.rank, options.store, jobs[0], options.arms, options.seconds)
        return
    aims: list[Aim] = []
    for job in jobs:
        arms = options.arms or [name for name in SHARES[job] if name != "TraceML"]
        found = run(job, arms, options.seconds)
        if "hook" in arms and os.access(TRACEML, os.X_OK):
            with tempfile.TemporaryDirectory() as folder:
                serve = [str(TRACEML), "-m", "traceml_ai.launcher.cli", "serve", "--nproc-per-node", str(WORLD)]
                server = subprocess.Popen(serve, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                try:
                    time.sleep(3.0)
                    found += run(job, ["TraceML"], options.seconds, python=str(TRACEML))
                finally:
                    server.terminate()
                    server.wait(10)
        for arm in found:
            show(job, arm)
            aims += aims_of(job, arm)
    sys.stdout.write("\n".join(["", HEAD, *(aim.row() for aim in aims)]) + "\n")


if __name__ == "__main__":
    main()
