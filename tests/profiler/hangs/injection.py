"""Makes something happen to a real gloo job, and returns what pacecar said of it and after how long."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.kit.hosts import SIDE, WIRE, Hosts, hosts
from tests.kit.ranks import Rank, finish, start_ranks
from tests.kit.shaping import Link, sh

__all__ = ["ALL", "Case", "Outcome", "inject"]

JOB = Path(__file__).with_name("job_hang.py")

NO_CULPRIT = frozenset({"link", "nobody"})
"""Kinds of verdicts that name no rank."""

NO_WAITING = "no rank waits for another"

SIDE_LINK = Link(1000, 1.0)
"""Of gloo's own wire, where it has one."""

ALL = -1
"""In place of a rank: it happens to all of them."""

WATCH_SECONDS = 26.0
"""How long to wait for a verdict from the moment when it happened."""

START_SECONDS = 240.0
HEALTHY_SECONDS = 600.0

LOG_CHARACTERS = 20_000
"""Of the end of a rank's stderr: a rank whose peer was killed adds a long error of torch to what it said before."""

ENDED_SECONDS = 10.0
"""How long to look for the record that a hang is over."""


@dataclass(frozen=True)
class Case:
    """What happens to which rank of how many; `kinds` are right answers, and () means that there is none to give."""

    fault: str
    rank: int
    world: int
    kinds: tuple[str, ...] = ()
    may_end: bool = False
    """Whether the job may fail by itself instead, as gloo's does when a process ends."""
    steps: int = 60
    """Of a healthy job."""
    pause_seconds: float = 9.0
    stop_all_seconds: float = 0.0
    device: str = "cpu"
    hosts: int = 0
    """Ranks are spread over so many network namespaces, and the link of the one with `rank` goes dead (needs root)."""

    @property
    def environ(self) -> dict[str, str]:
        """What the job needs to know of it; where gloo has a wire of its own, pacecar has another one."""
        links = {"GLOO_SOCKET_IFNAME": WIRE, "JOB_WIRE": SIDE if self.fault == "lossy" else WIRE} if self.hosts else {}
        level = {"HANG_LOG": "INFO"} if self.fault == "nobody" else {}
        return {"PAUSE_SECONDS": str(self.pause_seconds), "HANG_DEVICE": self.device, **links, **level}


@dataclass(frozen=True)
class Outcome:
    """`verdicts` as records, with `seconds` from the moment when it happened; whether the job ended by itself."""

    verdicts: list[dict[str, Any]]
    has_ended: bool
    log: str

    def judged(self, case: Case) -> str:
        """Return "right", "wrong", "unknown", "none", or "ended" where the job failed by itself.

        Of two ranks that called different things "pair" is right: which of them is wrong cannot be told.
        """
        begun = [verdict for verdict in self.verdicts if not verdict["ended"]]
        named = [verdict for verdict in begun if verdict["culprits"]]
        if not case.kinds:
            return "wrong" if begun else "right"
        if set(case.kinds) <= NO_CULPRIT:
            if named or any(verdict["kind"] not in (*case.kinds, "unknown") for verdict in begun):
                return "wrong"
            # A pause of all ranks is only logged for half an hour.
            is_said = any(verdict["kind"] in case.kinds for verdict in begun) or NO_WAITING in self.log
            return "right" if is_said else "unknown" if begun else self._unsaid(case)
        truth = [case.rank]
        if named and all(
            "cannot be told" in verdict["summary"] and case.rank in verdict["culprits"] for verdict in named
        ):
            return "pair"
        if any(sorted(verdict["culprits"]) != truth or verdict["kind"] not in case.kinds for verdict in named):
            return "wrong"
        if named:
            return "right"
        return "unknown" if begun else self._unsaid(case)

    def _unsaid(self, case: Case) -> str:
        return "ended" if self.has_ended and case.may_end else "none"


def inject(folder: Path, case: Case, watch: Callable[[], None] = lambda: None) -> Outcome:
    """Run the job of `case` until there is a verdict, it ends, or WATCH_SECONDS have passed; end it then."""
    side = SIDE_LINK if case.fault == "lossy" else None
    with hosts(case.hosts, side=side) if case.hosts else nullcontext() as net:
        return _inject(folder, case, watch, net)


def _inject(folder: Path, case: Case, watch: Callable[[], None], net: Hosts | None) -> Outcome:
    folder.mkdir(parents=True, exist_ok=True)
    steps = case.steps if not case.kinds else 100_000
    arguments = [JOB, str(folder), case.fault, str(case.rank), str(steps)]
    ranks = start_ranks(
        arguments,
        case.world,
        python=sys.executable if case.device == "cuda" else None,  # what is forked from another cannot use CUDA
        environ=case.environ,
        address="127.0.0.1" if net is None else net.address,
        prefixes=None if net is None else [net.prefixes[_host(case, rank)] for rank in range(case.world)],
    )
    try:
        if case.stop_all_seconds:
            _stop_all(folder, case)
        if net is not None:
            _cut(folder, case, net)
        if case.kinds:
            _wait_for_verdict(folder, case, ranks)
        else:
            end = time.monotonic() + HEALTHY_SECONDS
            while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < end:
                time.sleep(0.2)
        watch()
        has_ended = any(rank.process.poll() is not None for rank in ranks)
        begun_ns = _begun_ns(folder)
        verdicts = _verdicts(folder)
    finally:
        for path in folder.glob("pid*"):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(path.read_text()), signal.SIGKILL)
        ended = finish(ranks, 5.0)
    for verdict in verdicts:
        verdict["seconds"] = None if begun_ns is None else (verdict["wall_ns"] - begun_ns) / 1e9
    log = "\n".join(f"rank {number} ({end.code}): {end.err[-LOG_CHARACTERS:]}" for number, end in enumerate(ended))
    return Outcome(verdicts, has_ended, log)


def _wait_for_verdict(folder: Path, case: Case, ranks: list[Rank]) -> None:
    start = time.monotonic()
    begun: float | None = None
    while time.monotonic() - (begun or start) < (WATCH_SECONDS if begun else START_SECONDS):
        if begun is None and _begun_ns(folder) is not None:
            begun = time.monotonic()
        if len({verdict["rank"] for verdict in _verdicts(folder)}) >= (2 if case.hosts else 1):  # each side has one
            return
        if (
            case.may_end
            and begun
            and all(rank.process.poll() is not None for number, rank in enumerate(ranks) if number != case.rank)
        ):
            return
        time.sleep(0.2)


def _host(case: Case, rank: int) -> int:
    return rank * case.hosts // case.world


def _cut(folder: Path, case: Case, net: Hosts) -> None:
    """Take the link of the rank's host down; or, which it does not see, unplug it, or lose all on gloo's own wire."""
    _wait_for_steps(folder, case)
    host = _host(case, case.rank)
    (folder / f"begun{case.rank}").write_text(str(time.time_ns()))
    if case.fault == "unplug":
        net.unplug(host)
    elif case.fault == "lossy":
        net.change_side(replace(SIDE_LINK, loss_ratio=1.0))
    else:
        sh(f"ip -n {net.names[host]} link set {WIRE} down")


def _wait_for_steps(folder: Path, case: Case) -> None:
    end = time.monotonic() + START_SECONDS
    steps = [folder / f"step{rank}" for rank in range(case.world)]
    while time.monotonic() < end and not all(step.exists() and int(step.read_text() or 0) >= 12 for step in steps):
        time.sleep(0.05)


def _stop_all(folder: Path, case: Case) -> None:
    _wait_for_steps(folder, case)
    pids = [int((folder / f"pid{rank}").read_text()) for rank in range(case.world)]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            os.kill(pid, number)
        if number == signal.SIGSTOP:
            time.sleep(case.stop_all_seconds)


def _begun_ns(folder: Path) -> int | None:
    found = [int(text) for path in folder.glob("begun*") if (text := path.read_text())]
    return min(found, default=None)


def _verdicts(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in sorted(folder.glob("rank*.jsonl")):
        for line in path.read_text().splitlines():
            if '"hang_verdict"' in line:
                try:
                    found.append(json.loads(line))
                except ValueError:  # it is being written
                    continue
    return found
