"""Times `pacecar job` from each node of a real gloo job: a network namespace and a daemon a node (root).

Every order is given on every node; then a daemon is closed, a rank stopped and a link cut, and node 0 asks again.
Prints exit codes, the least and the longest seconds of an order, and what `show` says of who is missing.

    python -m bench.bench_job_orders
    python -m bench.bench_job_orders --nodes 4 --ranks 4
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from click.testing import CliRunner, Result

from pacecar.commands.main import cli
from pacecar.monitor.daemon import Daemon
from tests.kit.daemons import running_daemon
from tests.kit.ranks import finish, start_ranks
from tests.kit.shaping import Link, Net, sh, shaped, why_not
from tests.kit.waiting import until

JOB = Path(__file__).parents[1] / "tests" / "jobs" / "small_ddp.py"

OPTIONS = {"overhead_budget": 0.5, "bucket_bytes_min": 65536, "knobs": ["bucket_bytes"], "warmup_steps": 10_000}

WAIT_SECONDS = 150


def order(folder: Path, node: int, *words: str) -> tuple[Result, float]:
    """Give an order on a node; return what came of it, and the seconds that it took."""
    begun = time.monotonic()
    result = CliRunner().invoke(cli, ["job", "orders", *words, "--socket", str(folder / str(node) / "s")])
    return result, time.monotonic() - begun


def say(what: str, results: Sequence[tuple[Result, float]]) -> None:
    """Print a line for an order."""
    codes, seconds = {result.exit_code for result, _ in results}, [taken for _, taken in results]
    print(f"{what:12} exit codes {sorted(codes)}, {min(seconds):.1f} to {max(seconds):.1f} s", flush=True)  # noqa: T201


def say_missing(what: str, folder: Path, words: str) -> None:
    """Print how many ranks answer on node 0, and the lines that hold `words`."""
    result, seconds = order(folder, 0, "show")
    first, *others = result.output.splitlines()
    print(f"{what}, {seconds:.1f} s: {first}")  # noqa: T201
    print("\n".join(f"    {line.strip()}" for line in others if words in line), flush=True)  # noqa: T201


def orders(folder: Path, nodes: int) -> None:
    """Give every order on every node."""
    for what in (
        ("show",),
        ("hang",),
        ("dump", "--directory", str(folder / "dump")),
        ("trace", "--steps", "1", "--directory", str(folder / "trace")),
        ("tune", "status"),
        ("tune", "set", "bucket_bytes", "256KiB"),
        ("tune", "set", "bucket_bytes", "512KiB"),
    ):
        say(" ".join(what[: 2 if what[0] == "tune" else 1]), [order(folder, node, *what) for node in range(nodes)])


def faults(folder: Path, net: Net, daemon: Daemon) -> None:
    """Close the daemon of node 1, stop its last rank, cut the link of node 2; the others answer."""
    daemon.close()
    say_missing("a daemon is closed", folder, "without a daemon")
    hello = (folder / "run" / "rank3.jsonl").read_bytes().split(b"\n")[0]
    os.kill(json.loads(hello)["pid"], signal.SIGSTOP)
    say_missing("rank 3 is stopped", folder, "rank 3")
    os.kill(json.loads(hello)["pid"], signal.SIGCONT)
    until(lambda: order(folder, 0, "show")[0].exit_code == 0, "rank 3 goes on", WAIT_SECONDS, 0.5)
    link = f"ip -n {net.prefixes[2][3]} link set {net.device}"
    sh(f"{link} down")
    say_missing("a link is down", folder, "last heard from")
    sh(f"{link} up")


def main() -> None:
    """Run the job and give the orders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=8, help="3 or more")
    parser.add_argument("--ranks", type=int, default=2, help="on each node, 2 or more")
    options = parser.parse_args()
    missing = why_not()
    if missing is not None:
        sys.exit(missing)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pacecar-orders-")))
        daemons = []
        for node in range(options.nodes):
            (folder / str(node)).mkdir()
            daemons.append(stack.enter_context(running_daemon(folder / str(node), collectors=[])))
        net = stack.enter_context(shaped(options.nodes, Link(None)))
        places = [node for node in range(options.nodes) for _ in range(options.ranks)]
        command = [JOB, "--steps", "50", "--pause", "0.05", "--tune", "exact", "--options", json.dumps(OPTIONS)]
        ranks = start_ranks(
            [*command, "--until", folder / "end", "--run-dir", folder / "run"], len(places),
            environ={"PACECAR_JOB": "orders", "GLOO_SOCKET_IFNAME": net.device}, address=net.address,
            prefixes=[[*net.prefixes[n], "env", f"PACECAR_HOOK_SOCKET={folder / str(n) / 's'}"] for n in places],
        )  # fmt: skip
        try:
            until(lambda: order(folder, 0, "tune", "status")[0].exit_code == 0, "the tuner has begun", WAIT_SECONDS, 1)
            until(lambda: order(folder, 0, "show")[0].exit_code == 0, "all ranks answer", WAIT_SECONDS, 0.5)
            orders(folder, options.nodes)
            faults(folder, net, daemons[1])
        finally:
            (folder / "end").touch()
            finish(ranks, 60)


if __name__ == "__main__":
    main()
