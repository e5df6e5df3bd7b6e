"""Ranks of `pacecar bench net` as torchrun would start them, but each in the hands of the test."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def start(
    ranks: int,
    *arguments: str,
    address: str = "127.0.0.1",
    prefixes: Sequence[Sequence[str]] | None = None,
    program: Sequence[str] = ("-m", "pacecar", "bench", "net"),
    device: str = "lo",
    present: Sequence[int] | None = None,
) -> list[subprocess.Popen[str]]:
    """Start the ranks in `present` (all, unless said) of a job of `ranks`."""
    port = free_port()
    started = []
    for rank in range(ranks) if present is None else present:
        environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PACECAR_")},
            "RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": address, "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": device, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        command = [*(prefixes[rank] if prefixes else ()), sys.executable, *program, *arguments]
        started.append(
            subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    return started


def finish(started: Sequence[subprocess.Popen[str]], seconds: float = 120.0) -> list[tuple[int, str, str]]:
    """Return exit code, output and errors of each; kills what does not end."""
    ended = []
    try:
        for process in started:
            out, err = process.communicate(timeout=seconds)
            ended.append((process.returncode, out, err))
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return ended
