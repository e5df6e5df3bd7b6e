"""`pacecar preflight` on real ranks, each in a network namespace and with a fifth of a processor of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.kit.cpu_quota import can_limit, cpu_group
from tests.kit.forking_python import forking_python
from tests.kit.ranks import ROOT, Ended, Rank, finish, start_ranks
from tests.kit.shaping import Link, shaped, why_not
from tests.kit.waiting import until

pytest.importorskip("torch", reason="the extra `torch` is not installed")

RANK = Path(__file__).with_name("rank_preflight.py")
LINK, SLOW_LINK = Link(400), Link(100)
SHARE, SLOW_SHARE = 0.2, 0.1
RANKS = 8
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
TIMES = int(os.environ.get("PREFLIGHT_TIMES", "1"))
"""How often each case is run."""


def begin(folder: Path, started: Sequence[Rank], groups: Sequence[Path] = ()) -> list[int]:
    """Put each rank into its group, and let them begin; return their process ids."""
    files = [folder / f"pid{rank}" for rank in range(len(started))]
    until(lambda: all(file.exists() for file in files))
    pids = [int(file.read_text()) for file in files]
    for group, pid in zip(groups, pids, strict=False):
        group.write_text(str(pid))
    (folder / "go").touch()
    return pids


def examine(
    folder: Path, *, slow_link: int | None = None, slow_processor: int | None = None
) -> tuple[Any, list[Ended]]:
    """Return the document and how the ranks ended."""
    with shaped(RANKS, LINK) as net, ExitStack() as limits:
        shares = [SLOW_SHARE if rank == slow_processor else SHARE for rank in range(RANKS)]
        groups = [
            limits.enter_context(cpu_group(str(rank), share, period_us=20_000)) for rank, share in enumerate(shares)
        ]
        if slow_link is not None:
            net.change(SLOW_LINK, only=slow_link)
        environ = {"GLOO_SOCKET_IFNAME": net.device}
        program = [RANK, folder, "--json"]
        started = start_ranks(program, RANKS, environ=environ, address=net.address, prefixes=net.prefixes)
        begin(folder, started, groups)
        ended = finish(started, 120.0)
        until(lambda: not any(group.read_text() for group in groups))
    assert ended[0].out, ended[0].err[-2000:]
    return json.loads(ended[0].out), ended


def named(document: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(fault["check"], tuple(fault["ranks"])) for fault in document["faults"]]


@pytest.mark.alone
@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None or not can_limit(), reason="it needs root, namespaces and control groups")
@pytest.mark.parametrize("case", ["link", "processor", "even"])
def test_the_slow_one_of_eight_nodes_is_named(case: str, tmp_path: Path) -> None:
    for turn in range(TIMES):
        (folder := tmp_path / str(turn)).mkdir()
        bad = turn % RANKS
        slow: Mapping[str, int] = {"link": {"slow_link": bad}, "processor": {"slow_processor": bad}}.get(case, {})
        document, ended = examine(folder, **slow)
        checks = [fault[1] for fault in named(document)]
        print(case, bad, named(document), f"{document['wall_ns'] / 1e9:.0f} s", document["rounds"])  # noqa: T201
        assert document["wall_ns"] < 60e9
        if case == "even":
            assert checks == []
            assert {rank.code for rank in ended} == {0}
        else:
            assert set(checks) == {(bad,)}
            assert ("link", (bad,)) in named(document) if case == "link" else ("compute", (bad,)) in named(document)
            assert [rank.code for rank in ended[1:]] == [int(rank == bad) for rank in range(1, RANKS)]


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.slow
def test_a_rank_that_stands_still_is_named_within_the_limit(tmp_path: Path) -> None:
    (tmp_path / "stop2").touch()
    started = start_ranks([RANK, tmp_path, "--json", "--tolerance", "0.9"], 3, environ=LOOPBACK)
    pids = begin(tmp_path, started)
    try:
        started[0].process.wait(60.0)
    finally:
        os.kill(pids[2], signal.SIGKILL)
    ended = finish(started, 30.0)
    document = json.loads(ended[0].out)
    assert [(fault["check"], fault["ranks"]) for fault in document["faults"] if not fault["is_between"]] == [
        ("silent", [2])
    ]
    assert document["exclude"] != []
    assert document["wall_ns"] < 60e9


@pytest.mark.distributed
@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    """Under torchrun the store is the agent's, so the ranks know who is there; gloo alone would not say."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    started = start_ranks([RANK, tmp_path, "--seconds", "5"], 3, environ=LOOPBACK | agent, present=(0, 2))
    until(lambda: all((tmp_path / f"pid{rank}").exists() for rank in (0, 2)))
    (tmp_path / "go").touch()
    ended = finish(started, 60.0)
    assert [rank.code for rank in ended] == [1, 1]
    assert all("not all of 3 ranks met at 127.0.0.1:" in rank.err for rank in ended)
    assert all("within 15 s: no sign of rank 1\n" in rank.err for rank in ended)


@pytest.mark.slow
def test_alone_it_says_what_it_cannot_compare() -> None:
    ended = subprocess.run(
        [forking_python(), "-m", "pacecar", "preflight", "--local"], cwd=ROOT, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 0
    assert "compute of cpu: no peer to compare with" in ended.stdout


@pytest.mark.slow
def test_without_ranks_it_says_how_to_start_it() -> None:
    plain = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    ended = subprocess.run(
        [forking_python(), "-m", "pacecar", "preflight"], cwd=ROOT, env=plain, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert "torchrun" in ended.stderr
    assert "--local" in ended.stderr
