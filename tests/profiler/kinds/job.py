"""One rank of a gloo job that trains loops of several kinds, one after the other; started by test_kinds.py.

Arguments: output folder, kinds.  Of each kind: a run with pacecar, as long as it takes until every rank has had its
windows; one without it, of as many steps; and one with torch's own profiler, which says independently how often it
communicates.
"""

import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import pacecar
from pacecar.profiler.windows.kineto_window import WindowProfiler
from pacecar.profiler.windows.window_reader import WindowReader

sys.path.insert(0, str(Path(__file__).parent))
from loops import KINDS

STEPS = 20
MORE_STEPS = 10
STEPS_MAX = 100
WINDOWS_MIN = 3
PROFILED = 6
SEEN = []


def watch_windows():
    """Keep each window's gloo rows as torch gave them (start, end, is_finished), and when its step began and ended.

    A record says when its step ended a little later, much later where the machine was busy with something else.
    """
    rows = []
    close_profiler, close_window = WindowProfiler.close, WindowReader.close

    def profiler_closed(self):
        found, names_threads = close_profiler(self)
        rows[:] = [
            (row.timestamp(), row.timestamp() + row.duration(), '"finished": false' not in row.metadata_json())
            for row in found
            if row.name().startswith("gloo:")
        ]
        return found, names_threads

    def window_closed(self, step, *stops, **known):
        rows.clear()
        measured = close_window(self, step, *stops, **known)
        if measured is not None:
            offset = wall_offset_ns()
            SEEN.append({"start": step.start_ns + offset, "end": step.end_ns + offset, "rows": list(rows)})
        return measured

    WindowProfiler.close, WindowReader.close = profiler_closed, window_closed


def wall_offset_ns():
    """Return what the wall clock is ahead of the monotonic one, by the closest of some readings."""
    readings = []
    for _ in range(5):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after - before, wall - (before + after) // 2))
    return min(readings)[1]


def build(kind, rank):
    torch.manual_seed(11)
    torch._dynamo.reset()
    return KINDS[kind](rank)


class Quorum:
    """Asks all ranks by the store: a collective would be one more in their windows."""

    def __init__(self, kind, rank, world_size):
        self.store, self.kind, self.rank, self.world_size = (
            dist.distributed_c10d._get_default_store(),
            kind,
            rank,
            world_size,
        )

    def all_say(self, question, answer):
        self.store.set(f"{self.kind}/{question}/{self.rank}", "yes" if answer else "no")
        answers = [self.store.get(f"{self.kind}/{question}/{rank}") for rank in range(self.world_size)]
        return answers == [b"yes"] * self.world_size


def losses_of(loop, steps, is_over=lambda done: True):
    """Return each step's loss, to the bit, or None where this rank has none.

    Runs `steps` steps, and some more as long as it is not over.
    """
    losses = [loop.step(n) for n in range(steps)]
    while not is_over(len(losses)) and len(losses) < STEPS_MAX:
        losses += [loop.step(n) for n in range(len(losses), len(losses) + MORE_STEPS)]
    parameters = b"".join(
        (p.detach().to_local() if hasattr(p, "to_local") else p.detach()).numpy().tobytes()
        for p in loop.model.parameters()
    )
    return [None if loss is None else float(loss).hex() for loss in losses] + [parameters.hex()]


def collectives_of_a_step(loop):
    """Return how many collectives gloo works at in a step, by the user's own profiler and nothing of ours."""
    for n in range(3):
        loop.step(n)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        dist.barrier()
        begun = time.time_ns()
        for n in range(3, 3 + PROFILED):
            loop.step(n)
        ended = time.time_ns()
        dist.barrier()
    starts = [e.start_ns() for e in prof.profiler.kineto_results.events() if e.name().startswith("gloo:")]
    return sum(begun <= start <= ended for start in starts) / PROFILED


def look_at(kind, rank, world_size, folder):
    quorum = Quorum(kind, rank, world_size)
    loop = build(kind, rank)
    SEEN.clear()
    pacer = pacecar.attach(
        loop.model,
        loop.optimizer,
        tune="off",
        job=kind,
        run_dir=f"{folder}/{kind}",
        socket=f"{folder}/none",
        overhead_budget=1.0,
        window_interval_steps=4,
    )
    hooked = losses_of(loop, STEPS, lambda done: quorum.all_say(f"had windows by {done}", len(SEEN) >= WINDOWS_MIN))
    assert pacer.is_active, pacer.inert_because
    pacer.close()
    windows = list(SEEN)
    steps = len(hooked) - 1
    updates = sum(1 if loop.updates is None else loop.updates(n) for n in range(steps))
    del loop
    loop = build(kind, rank)
    plain = losses_of(loop, steps)
    return {
        "is_identical": hooked == plain,
        "collectives": collectives_of_a_step(loop),
        "steps": steps,
        "updates": updates,
        "micro_batches": loop.micro_batches,
        "windows": windows,
    }


def main(folder, kinds):
    torch.set_num_threads(1)
    watch_windows()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for kind in kinds:
        begun = time.process_time()
        try:
            result = look_at(kind, rank, world_size, folder)
        except Exception:  # noqa: BLE001  the other kinds are to be looked at too
            result = {"error": traceback.format_exc()}
        result["cpu"] = time.process_time() - begun
        with open(f"{folder}/{kind}-{rank}.json", "w") as stream:
            json.dump(result, stream)
        dist.barrier()
    os._exit(0)  # torch aborts at exit now and then (pytorch issue 190489)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
