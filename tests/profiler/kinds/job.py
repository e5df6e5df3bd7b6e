"""One rank of a gloo job that trains loops of several kinds, one after the other; started by test_kinds.py.

Arguments: rank, world size, store, output folder, kinds.  Of each kind: a run without pacecar, one with it, and one
with torch's own profiler, which says independently how often it communicates.
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
from pacecar.profiler.window import WindowProfiler

sys.path.insert(0, str(Path(__file__).parent))
from loops import KINDS

STEPS = 20
PROFILED = 6
SEEN = []


def watch_windows():
    """Return a list that gets the gloo rows of each window as torch gave them: start, end, is_finished."""
    seen = []
    close = WindowProfiler.close

    def watched(self):
        found, names_threads = close(self)
        rows = [row for row in found if row.name().startswith("gloo:")]
        ended = [
            (r.timestamp(), r.timestamp() + r.duration(), '"finished": false' not in r.metadata_json()) for r in rows
        ]
        seen.append(ended)
        return found, names_threads

    WindowProfiler.close = watched
    return seen


def build(kind, rank):
    torch.manual_seed(11)
    torch._dynamo.reset()
    return KINDS[kind](rank)


def losses_of(loop):
    """Return each step's loss, to the bit, or None where this rank has none."""
    losses = [loop.step(n) for n in range(STEPS)]
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


def look_at(kind, rank, folder):
    loop = build(kind, rank)
    plain = losses_of(loop)
    independent = collectives_of_a_step(loop)
    del loop
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
    hooked = losses_of(loop)
    assert pacer.is_active, pacer.inert_because
    pacer.close()
    updates = sum(1 if loop.updates is None else loop.updates(n) for n in range(STEPS))
    return {
        "is_identical": hooked == plain,
        "collectives": independent,
        "updates": updates,
        "micro_batches": loop.micro_batches,
        "windows": list(SEEN),
    }


def main(rank, world_size, store, folder, kinds):
    torch.set_num_threads(1)
    global SEEN
    SEEN = watch_windows()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    for kind in kinds:
        try:
            result = look_at(kind, rank, folder)
        except Exception:  # noqa: BLE001  the other kinds are to be looked at too
            result = {"error": traceback.format_exc()}
        with open(f"{folder}/{kind}-{rank}.json", "w") as stream:
            json.dump(result, stream)
        dist.barrier()
    os._exit(0)  # torch aborts at exit now and then (pytorch issue 190489)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:])
