"""How do tests of the crew run a job of several ranks, in one network or in a namespace each?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

JOB = Path(__file__).parent / "job_crew.py"
TIMEOUT_SECONDS = 120
PORT = 29533


def run_job(
    store: str,
    stretches: list[dict],
    *,
    prefixes: list[list[str]] | None = None,
    world: int = 4,
    meddle: Callable[[list[subprocess.Popen]], None] = lambda ranks: None,
    **settings,
):
    """Run all ranks to their end; return each rank's records, the summary last.  `meddle` gets the running ranks."""
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    if prefixes is not None:
        environ["GLOO_SOCKET_IFNAME"] = "eth0"
    ranks = []
    for rank in range(world):
        given = {"rank": rank, "world": world, "store": store, "stretches": stretches, **settings}
        command = [*(prefixes[rank] if prefixes else []), sys.executable, str(JOB), json.dumps(given)]
        ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ))
    try:
        meddle(ranks)
        heard = []
        for process in ranks:
            output, errors = process.communicate(timeout=TIMEOUT_SECONDS)
            assert process.returncode == 0, errors
            heard.append([json.loads(line) for line in output.splitlines()])
        return heard
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.communicate()


@contextmanager
def namespaces(count: int) -> Iterator[list[list[str]]]:
    """Make `count` network namespaces on one bridge; yield what to put before each rank's command."""
    stem = f"pc{uuid.uuid4().hex[:6]}"

    def sh(command: str) -> None:
        done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"network namespaces cannot be made here: {done.stderr.strip()}")

    made = []
    try:
        for name in (f"{stem}b", *(f"{stem}{rank}" for rank in range(count))):
            sh(f"ip netns add {name}")
            made.append(name)
        sh(f"ip -n {stem}b link add br0 type bridge")
        sh(f"ip -n {stem}b link set br0 up")
        for rank in range(count):
            name, port = f"{stem}{rank}", f"p{rank}"
            sh(f"ip -n {name} link add eth0 type veth peer name {port} netns {stem}b")
            sh(f"ip -n {stem}b link set {port} master br0 up")
            sh(f"ip -n {name} addr add 10.77.0.{rank + 1}/24 dev eth0")
            sh(f"ip -n {name} link set eth0 up")
            sh(f"ip -n {name} link set lo up")
        yield [["ip", "netns", "exec", f"{stem}{rank}"] for rank in range(count)]
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False)
