"""Starts ranks by forking: torch is imported once for all of them, which takes longer than most of their jobs.

Reads one request a line from stdin and answers each with one line, when all of its ranks have ended:

    {"script": "job.py", "arguments": ["..."], "seconds": 120,
     "ranks": [{"environment": {"RANK": "0"}, "output": "/a/file", "errors": "/a/file"}]}
    [0, -9]
               each rank's exit code as `subprocess` tells it; null for a rank that was killed after `seconds`

A rank is a process of its own that runs the script as `python job.py ARGUMENT...` would.  Nothing here starts a thread
or a process group, so what is forked is as good as new.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import sys
import time
import traceback
from typing import Any, NoReturn

import torch._dynamo  # the first step of any optimizer does
import torch.distributed.fsdp  # noqa: F401  as is all below: here, and never again
from torch.nn.parallel import DistributedDataParallel  # noqa: F401

import pacecar.controller.baselines.make
import pacecar.pacer  # noqa: F401

POLL_SECONDS = 0.01


def run(request: dict[str, Any], rank: dict[str, Any]) -> NoReturn:
    """Be a rank."""
    code = 1
    try:
        for stream, name in ((1, "output"), (2, "errors")):
            file = os.open(rank[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(file, stream)
            os.close(file)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(rank["environment"])
        sys.argv = [request["script"], *request["arguments"]]
        sys.path[0] = os.path.dirname(request["script"])
        gc.enable()
        runpy.run_path(request["script"], run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1 if ended.code else 0
    except BaseException:  # noqa: BLE001  as the interpreter does
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def answer(request: dict[str, Any]) -> list[int | None]:
    """Start the request's ranks and wait for them."""
    pids = []
    for rank in request["ranks"]:
        pid = os.fork()
        if pid == 0:
            run(request, rank)
        pids.append(pid)
    codes: dict[int, int | None] = {}
    deadline = time.monotonic() + request["seconds"]
    while len(codes) < len(pids):
        for pid in pids:
            if pid in codes:
                continue
            is_late = time.monotonic() > deadline
            if is_late:
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, 0 if is_late else os.WNOHANG)
            if ended:
                codes[pid] = None if is_late else os.waitstatus_to_exitcode(status)
        time.sleep(POLL_SECONDS)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    gc.collect()
    gc.disable()
    gc.freeze()  # a child's collector would touch, and so copy, every page
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)  # noqa: T201  the answer
