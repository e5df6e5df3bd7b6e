"""One rank that makes a group of pacecar's own and gathers once; run by test_rendezvous.py.

Its job has no group of its own, so that its interfaces and names matter to nobody else.  STORE is a file for the store;
without it the store is at MASTER_ADDR.  OLD_TORCH: "eager", as before torch 2.7, or "no options" for a group's making.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta

import torch.distributed as dist

from pacecar import torch_internals
from pacecar.profiler.transport.rendezvous import RendezvousError, prove_address
from pacecar.profiler.transport.side_group import SideGroup

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CREATE = "torch.distributed.ProcessGroupGloo.create_device"
if os.environ.get("OLD_TORCH") == "no options":
    torch_internals.suppose_missing([CREATE])
elif "OLD_TORCH" in os.environ:
    create = torch_internals.need(CREATE)
    torch_internals._found[CREATE] = lambda hostname: create(hostname=hostname)
store: dist.Store
if "STORE" in os.environ:
    store = dist.FileStore(os.environ["STORE"], WORLD)
else:
    master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit = timedelta(seconds=60)
    store = dist.TCPStore(*master, WORLD, RANK == 0, timeout=limit, wait_for_workers=False)
for rank in range(WORLD):  # as init_process_group: nobody is far ahead of the others
    store.set(f"here{RANK}", "")
    store.wait([f"here{rank}"], timedelta(seconds=60))
side = SideGroup(RANK, WORLD)
begun = time.monotonic()
answer: dict[str, object] = {}
try:
    answer["address"] = prove_address(dist.PrefixStore("default", store), RANK, WORLD, name="0")
    side.open(store, "0", str(answer["address"]))
    side.post([RANK])
    while (heard := side.receive()) is None:
        time.sleep(0.001)
    answer["heard"] = heard
except RendezvousError as error:
    answer["refused"] = str(error)
answer["seconds"] = time.monotonic() - begun
sys.stdout.write(json.dumps(answer))
sys.stdout.flush()
store.set(f"done{RANK}", "")
for rank in range(WORLD):  # rank 0 serves the store, and a rank that ends ends its connections
    store.wait([f"done{rank}"], timedelta(seconds=60))
if RANK == 0:
    time.sleep(0.2)
os._exit(0)
