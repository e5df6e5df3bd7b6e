"""Orders to a whole job, from each of its nodes: four ranks on two nodes with a daemon each, as far as ranks can see.

A rank is stopped, a daemon is killed, a stranger asks.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pacecar.analysis.hang.dumps.dump_folder import read_folder
from pacecar.commands.main import cli
from pacecar.monitor.daemon import Daemon
from tests.kit.daemons import running_daemon
from tests.kit.ranks import Rank, finish, start_ranks
from tests.kit.selection import decisive
from tests.kit.users import STRANGER, as_user, commons, needs_root
from tests.kit.waiting import until

JOB = Path(__file__).parent.parent / "jobs" / "small_ddp.py"

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

each_node = pytest.mark.parametrize("node", decisive(["a", "b"], "a"))


class Cluster:
    """Nodes `a` and `b`, with the ranks 0, 1 and 2, 3 of the job `both`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: dict[str, Daemon] = {}
        self.ranks: list[Rank] = []

    def socket(self, node: str) -> Path:
        return self.folder / node / "s"

    def order(self, node: str, *arguments: str, job: tuple[str, ...] = ("both",)) -> Result:
        return CliRunner().invoke(cli, ["job", *job, *arguments, "--socket", str(self.socket(node))])

    def shown(self, node: str) -> dict[str, Any]:
        said = self.order(node, "show", "--json")
        assert said.stdout, said.output
        document: dict[str, Any] = json.loads(said.stdout)
        return document

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to the process of `rank`, which is not the one that was started (`forking_python`)."""
        hello = (self.folder / "run" / f"rank{rank}.jsonl").read_bytes().split(b"\n")[0]
        os.kill(json.loads(hello)["pid"], number)

    def states(self, node: str) -> list[str]:
        return [reply["state"] for reply in self.shown(node)["replies"]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        made = Cluster(stack.enter_context(commons()))
        for node in ("a", "b"):
            (made.folder / node).mkdir()
            made.daemons[node] = stack.enter_context(running_daemon(made.folder / node, collectors=[]))
        options = {"overhead_budget": 0.5, "bucket_bytes_min": 65536, "knobs": ["bucket_bytes"], "warmup_steps": 10_000}
        arguments = [
            "--tune",
            "exact",
            "--pause",
            "0.01",
            "--until",
            made.folder / "end",
            "--run-dir",
            made.folder / "run",
        ]
        made.ranks = start_ranks(
            [JOB, "--steps", "50", *arguments, "--options", json.dumps(options)], 4,
            environ={"PACECAR_JOB": "both"},
            prefixes=[["env", f"PACECAR_HOOK_SOCKET={made.socket('ab'[rank // 2])}"] for rank in range(4)],
        )  # fmt: skip
        try:
            until(lambda: made.order("a", "tune", "status").exit_code == 0, "the tuner has begun", 60, 0.2)
            yield made
        finally:
            (made.folder / "end").touch()
            ended = finish(made.ranks, 60)
            print("\n".join(one.err[-2000:] for one in ended))  # noqa: T201  for a test that failed


@each_node
def test_each_node_shows_and_tunes_the_whole_job(cluster: Cluster, node: str) -> None:
    until(lambda: cluster.states(node) == ["done"] * 4, "all ranks answer")
    until(lambda: cluster.shown(node)["ledger"], "rank 0 has made a ledger")
    document = cluster.shown(node)
    assert [reply["rank"] for reply in document["replies"]] == [0, 1, 2, 3]
    assert document["ledger"]["ranks"] == 4
    text = cluster.order(node, "show", job=()).output
    assert "both: 4 of 4 ranks answer" in text
    value = {"a": "256KiB", "b": "512KiB"}[node]
    done = cluster.order(node, "tune", "set", "bucket_bytes", value)
    assert (done.exit_code, "done: bucket_bytes" in done.stdout) == (0, True), done.output
    bytes_set = {"a": 2**18, "b": 2**19}[node]
    until(
        lambda: {reply["knobs"]["values"]["bucket_bytes"] for reply in cluster.shown(node)["replies"]} == {bytes_set},
        "all ranks have switched",
    )
    refused = cluster.order(node, "tune", "set", "bucket_bytes", "3MiB")
    assert (refused.exit_code, "bucket_bytes 3 MiB is not possible here" in refused.output) == (1, True)


@each_node
def test_each_node_says_that_the_job_does_not_hang_and_dumps_what_its_ranks_do(cluster: Cluster, node: str) -> None:
    until(lambda: "the job does not hang: it went from step" in cluster.order(node, "hang").output, "steps end")
    dumped = cluster.order(node, "dump", "--directory", str(cluster.folder / "dumps" / node))
    assert dumped.exit_code == 0, dumped.output
    found = read_folder(Path(dumped.stdout.strip()))
    assert [account.rank for account in found.accounts] == [0, 1, 2, 3]
    assert all(account.stacks for account in found.accounts)


@each_node
def test_each_node_has_all_ranks_trace_the_same_steps(cluster: Cluster, node: str) -> None:
    folder = cluster.folder / "traces" / node
    traced = cluster.order(node, "trace", "--steps", "2", "--directory", str(folder), "--json")
    assert traced.exit_code == 0, traced.output
    files = json.loads(traced.stdout)
    assert [file["rank"] for file in files] == [0, 1, 2, 3]
    texts = [gzip.decompress(Path(file["file"]).read_bytes()).decode() for file in files]
    marks = [set(re.findall(r"ProfilerStep#\d+", text)) for text in texts]
    assert all(len(one) == 2 and one == marks[0] for one in marks), marks


@needs_root
def test_a_stranger_is_refused_and_told_why(cluster: Cluster) -> None:
    socket = cluster.socket("a")
    socket.chmod(0o666)
    socket.parent.chmod(0o755)
    said = as_user(STRANGER, lambda: cluster.order("a", "show").output)
    assert "job 'both' belongs to another user" in said, said
    assert "no job of yours is connected" in as_user(STRANGER, lambda: cluster.order("a", "show", job=()).output)


def test_a_stopped_rank_is_named_with_its_silence_and_the_others_answer(cluster: Cluster) -> None:
    cluster.signal(2, signal.SIGSTOP)
    try:
        for node in ("a", "b"):
            until(lambda node=node: cluster.states(node) == ["done", "done", "silent", "done"], "the others answer")
            silent = cluster.shown(node)["replies"][2]
            assert "is stopped by a signal" in silent["detail"], silent
            assert silent["silent_ns"] > 0
        first = cluster.shown("a")["replies"][2]["silent_ns"]
        assert cluster.shown("a")["replies"][2]["silent_ns"] > first, "its silence grows"
        said = cluster.order("b", "show")
        assert said.exit_code == 1
        assert "both: 3 of 4 ranks answer" in said.output
        hang = cluster.order("b", "hang")
        assert "rank 2 does not run" in hang.stdout.splitlines()[0], hang.output
        assert "is stopped by a signal" in hang.output
    finally:
        cluster.signal(2, signal.SIGCONT)
    until(lambda: cluster.states("a") == ["done"] * 4, "it goes on")


def test_rank_0_stopped_is_said_to_who_wants_to_tune(cluster: Cluster) -> None:
    cluster.signal(0, signal.SIGSTOP)
    try:
        said = cluster.order("b", "tune", "freeze")
        assert (said.exit_code, "rank 0, which tunes, does not answer" in said.output) == (1, True), said.output
        assert "no ledger: rank 0" in cluster.order("b", "show").output
    finally:
        cluster.signal(0, signal.SIGCONT)
    until(lambda: cluster.states("a") == ["done"] * 4, "it goes on")


def test_a_node_whose_daemon_is_gone_is_reached_by_the_others(cluster: Cluster) -> None:
    cluster.daemons["b"].close()
    until(lambda: [one.get("has_daemon", True) for one in cluster.shown("a")["replies"]] == [True, True, False, False])
    assert "without a daemon" in cluster.order("a", "show").output
    assert "cannot reach the daemon" in cluster.order("b", "show").output
