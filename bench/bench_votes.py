"""Compares votes on pacecar's own process group with votes on the job's, with real ranks on loopback.

    python bench/bench_votes.py --ranks 2 4 8 16

For each number of ranks it prints the time to make the group (once, in `attach`), its memory, threads and sockets, and
the cost of one vote for the training thread: sending it, and reading it a step later.  Beside it is the former vote, an
all-reduce of five numbers on the job's group.  Figures are medians of rank 0; with more ranks than cores, only
processor time is meaningful.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script, it has only its own folder on the path

VOTES, STEP_SECONDS = 200, 0.01
NAMES = ("send_us", "read_us", "cpu_us")


def rank() -> None:
    import torch
    import torch.distributed as dist

    from pacecar.controller.consensus.channels import VoteChannel, VoteSubject
    from pacecar.profiler.transport.rendezvous import meet
    from pacecar.profiler.transport.side_group import job_store

    torch.set_num_threads(1)
    me, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    store: Any = job_store()
    meet(store, me, world, "bench", name="bench", seconds=300)
    dist.barrier()
    before = held()
    begun = time.perf_counter()
    road = VoteChannel(me, world)
    road.open(store, "bench", "127.0.0.1")
    made_ms = (time.perf_counter() - begun) * 1e3
    after = held()
    least = dist.AllreduceOptions()
    least.reduceOp = dist.ReduceOp.MIN
    group: Any = dist.group.WORLD
    dist.barrier()

    def own() -> Any:
        return road.post(VoteSubject.VOTE, [1, 2, 3, 4, 5, 6])

    def jobs() -> Any:
        return group.allreduce([torch.tensor([1, 2, 3, 4, 5], dtype=torch.int64)], least)

    figures = {
        "ranks": world, "made_ms": made_ms, **{name: after[name] - before[name] for name in after},
        "own": timed(own, road.receive), "job": timed(jobs, lambda work: work.wait()),
    }  # fmt: skip
    road.leave()
    dist.barrier()
    if me == 0:
        sys.stdout.write(json.dumps(figures) + "\n")
        sys.stdout.flush()
        time.sleep(0.2)
    os._exit(0)


def held() -> dict[str, int]:
    own = Path("/proc/self")
    sockets = sum(os.readlink(link).startswith("socket:") for link in (own / "fd").iterdir() if link.is_symlink())
    pages = int((own / "statm").read_text().split()[1])
    return {"kb": pages * 4, "threads": len(list((own / "task").iterdir())), "sockets": sockets}


def timed(send: Any, read: Any) -> dict[str, float]:
    """Return microseconds per vote of the thread that sends and reads, and of the whole process."""
    sends, reads, process = [], [], time.process_time()
    for _ in range(VOTES):
        begun = time.perf_counter()
        sent = send()
        sends.append(time.perf_counter() - begun)
        time.sleep(STEP_SECONDS)
        begun = time.perf_counter()
        read(sent)
        reads.append(time.perf_counter() - begun)
    cpu = (time.process_time() - process) / VOTES
    return {"send_us": statistics.median(sends) * 1e6, "read_us": statistics.median(reads) * 1e6, "cpu_us": cpu * 1e6}


def main() -> None:
    from tests.kit.ranks import finish, start_ranks

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    sys.stdout.write(f"{'ranks':>5} {'made ms':>9} {'memory kB':>10} {'threads':>8} {'sockets':>8}")
    sys.stdout.write("".join(f" {whose + ' ' + what:>12}" for whose in ("own", "job") for what in NAMES) + "\n")
    for world in parser.parse_args().ranks:
        ended = finish(start_ranks([__file__], world, python=sys.executable))
        if any(one.code != 0 for one in ended):
            raise SystemExit(f"a rank failed: {ended}")
        said = json.loads(ended[0].out)
        sys.stdout.write(
            f"{world:5d} {said['made_ms']:9.1f} {said['kb']:10d} {said['threads']:8d} {said['sockets']:8d}"
        )
        sys.stdout.write("".join(f" {said[whose][what]:12.0f}" for whose in ("own", "job") for what in NAMES) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    rank() if "RANK" in os.environ else main()
