"""What do votes on a group of our own cost, against votes on the job's?  Real ranks on this machine's loopback.

    python bench/bench_votes.py --ranks 2 4 8 16

For each number of ranks: what it takes to make the group (once, in `attach`), what it holds (memory, threads, sockets),
and what one vote costs the training thread of a rank: to send it, and to read it a step later, when it is there.  The
vote of before, an all-reduce of five numbers on the job's own group, beside it.  Medians of rank 0, which has the
machine's cores to share with the others: with more ranks than cores a wait says little, processor time more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

VOTES, STEP_SECONDS = 200, 0.01
NAMES = ("send_us", "read_us", "cpu_us")


def rank() -> None:
    import torch
    import torch.distributed as dist

    from pacecar.controller.consensus.channels import VoteChannel, VoteSubject
    from pacecar.profiler.transport.side_group import job_store
    from pacecar.profiler.transport.store_rendezvous import meet

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
    """Return microseconds: of the thread that sends and reads, and of all of this process."""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    sys.stdout.write(f"{'ranks':>5} {'made ms':>9} {'memory kB':>10} {'threads':>8} {'sockets':>8}")
    sys.stdout.write("".join(f" {whose + ' ' + what:>12}" for whose in ("own", "job") for what in NAMES) + "\n")
    for world in parser.parse_args().ranks:
        port = 20000 + os.getpid() % 20000 + world
        environ = {**os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [
            subprocess.Popen([sys.executable, __file__], env={**environ, "RANK": str(r)}, stdout=subprocess.PIPE)
            for r in range(world)
        ]
        said = json.loads(ranks[0].communicate(timeout=600)[0])
        for other in ranks[1:]:
            other.communicate(timeout=60)
        sys.stdout.write(
            f"{world:5d} {said['made_ms']:9.1f} {said['kb']:10d} {said['threads']:8d} {said['sockets']:8d}"
        )
        sys.stdout.write("".join(f" {said[whose][what]:12.0f}" for whose in ("own", "job") for what in NAMES) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    rank() if "RANK" in os.environ else main()
