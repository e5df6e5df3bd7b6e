"""One of two gloo ranks with four groups and one of ours: rank 0 prints what it waits in, and what came last."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.kit.ranks import finish, start_ranks


def run_groups(folder: Path) -> tuple[str, str]:
    """Run both ranks; return what rank 0 said while rank 1 had not joined, and when all was finished."""
    ranks = finish(start_ranks([__file__], 2, folder=folder))
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].err + ranks[1].err
    waiting, after = json.loads(ranks[0].out)
    return waiting, after


def main() -> None:
    import torch
    import torch.distributed as dist

    from pacecar.profiler.hangs.torch_flight_recorder import last_collective
    from pacecar.profiler.transport.side_group import SideGroup, job_store
    from tests.kit.waiting import until

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    store = job_store()
    plain, tensor_parallel = dist.new_group([0, 1]), dist.new_group([0, 1], group_desc="tp")
    for group in (None, plain, tensor_parallel):
        dist.all_reduce(torch.ones(8), group=group)
    until(lambda: "completed" in str(last_collective()))  # gloo's thread retires an entry after the call has returned
    if rank == 1:
        store.wait(["looked"])
    work = dist.all_reduce(torch.ones(8), group=tensor_parallel, async_op=True)
    waiting = last_collective()
    if rank == 0:
        store.set("looked", "")
    work.wait()
    last = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(4), group=last)
    ours = SideGroup(rank, 2)
    ours.open(store, "flight-recorder", "127.0.0.1")
    ours.post([rank])
    until(lambda: ours.receive() is not None)
    if rank == 0:
        until(lambda: "completed" in str(last_collective()))
        sys.stdout.write(json.dumps([waiting, last_collective()]))
    dist.barrier()
    ours.close()


if __name__ == "__main__":
    main()
