"""Runs `pacecar preflight` in one rank; rank 0 collects, judges after each round, and prints.

Results go through the ranks' store, so that a rank that stands still is named and holds nobody up: whoever waits for it
gives up after a limit, and rank 0 judges what there is.  The checks run on a thread of their own, because a backend may
block for minutes and Python handles no signal meanwhile: the main thread watches the deadline, and SIGTERM, which
torchrun sends as soon as one rank is gone.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

import pacecar

from ..joining_ranks import first_line, join_ranks
from .document import LinkMeeting, NodeChecks, PreflightFault, PreflightResult
from .link_checks import meet
from .node_checks import check_node, checked_again
from .pairing import Pair, again, first_rounds, rounds_left
from .text import lines
from .verdict import judge_links, judge_nodes, nodes_to_exclude

__all__ = ["FIT", "FOUND", "PreflightOptions", "run_alone", "run_preflight"]

FIT, FOUND = 0, 1
"""Exit codes.  What could not be told is no reason to fail: a prolog would take every node without a peer away."""

ANSWER_SECONDS = 15.0
"""Limit of one operation between two ranks, and for the last rank to end a round after the first."""

MEET_SHARE = 0.5
"""Of the limit for all, for the ranks to come: importing torch from a file server may take half a minute longer."""

END_SECONDS = 5.0
"""The other ranks wait for rank 0's verdict so long after the deadline."""

LOOK_SECONDS = 0.05

T = TypeVar("T", NodeChecks, LinkMeeting)
U = TypeVar("U")


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightOptions:
    """The command's options, parsed; `reference` are the checks of an earlier run."""

    backend: str | None = None
    seconds: float = 60.0
    tolerance: float = 0.25
    folder: Path | None = None
    reference: tuple[NodeChecks, ...] = ()
    as_json: bool = False


class _LateError(Exception):
    """A rank did not come to the end of a round in time."""


class _Board:
    """Where ranks leave what they found, and wait for each other."""

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self._store, self.rank, self.ranks = store, rank, ranks
        self.phase = "begin"
        """What this rank waits for the end of, or ended last."""

    def come(self, host: str) -> None:
        """Say where this rank is, so that it can be named if nothing more is heard of it."""
        self._store.set(f"preflight/host/{self.rank}", host)

    def hosts(self) -> dict[int, str]:
        """Return where each rank is that said so."""
        keys = {rank: f"preflight/host/{rank}" for rank in range(self.ranks)}
        return {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}

    def leave(self, phase: str, found: NodeChecks | LinkMeeting | None) -> None:
        """Leave what was found, and wait until all ranks have; raises _LateError."""
        self.phase = phase
        if found is not None:
            self._store.set(f"preflight/{phase}/{self.rank}", _json(found))
        self._store.set(f"preflight/{phase}/{self.rank}/done", "1")
        if self._store.add(f"preflight/{phase}", 1) == self.ranks:
            self._store.set(f"preflight/{phase}/all", "1")
        self._await(f"preflight/{phase}/all")

    def silent(self) -> list[int]:
        """Return the ranks that are not at the end of the present phase."""
        return [rank for rank in range(self.ranks) if not self._store.check([f"preflight/{self.phase}/{rank}/done"])]

    def found(self, phase: str, ranks: Sequence[int], kind: type[T]) -> list[T]:
        """Return what these ranks left, where they did."""
        keys = {rank: f"preflight/{phase}/{rank}" for rank in ranks}
        return [
            msgspec.json.decode(self._store.get(key), type=kind) for key in keys.values() if self._store.check([key])
        ]

    def tell(self, what: str, value: object) -> None:
        """Leave what all ranks read."""
        self._store.set(f"preflight/{what}", _json(value))

    def told(self, what: str, kind: type[U], seconds: float = ANSWER_SECONDS) -> U:
        """Wait for what rank 0 tells; raises _LateError."""
        self._await(f"preflight/{what}", seconds)
        return msgspec.json.decode(self._store.get(f"preflight/{what}"), type=kind)

    def _await(self, key: str, seconds: float = ANSWER_SECONDS + 5.0) -> None:
        """Wait for a key; by looking, because the store's own wait keeps this rank's other threads from the store."""
        end = time.monotonic() + seconds
        while not self._store.check([key]):
            if time.monotonic() > end:
                raise _LateError(key)
            time.sleep(LOOK_SECONDS)


@dataclass
class _Findings:
    """What rank 0 knows so far."""

    nodes: list[NodeChecks] = field(default_factory=list)
    links: list[LinkMeeting] = field(default_factory=list)
    rounds: int = 0
    failure: str | None = None


class _Ended(BaseException):
    """SIGTERM came."""


def run_preflight(options: PreflightOptions, *, environ: Mapping[str, str] = os.environ) -> NoReturn:
    """Check as one of the ranks, and end the process with FIT, or FOUND, on rank 0 and on ranks to leave out.

    Raises:
        JoinError: the ranks did not meet.
    """
    begun_ns = time.monotonic_ns()
    meet_seconds = max(MEET_SHARE * options.seconds, ANSWER_SECONDS)
    store, device, backend = join_ranks(options.backend, ANSWER_SECONDS, environ, meet_seconds=meet_seconds)
    board = _Board(store, dist.get_rank(), dist.get_world_size())
    findings = _Findings()
    ended = threading.Event()

    def work() -> None:
        try:
            _check_all(board, findings, device, options, environ)
        except _LateError:
            pass
        except Exception as error:  # noqa: BLE001  said with the verdict
            findings.failure = f"rank {board.rank}: {first_line(error)}"
        ended.set()

    signal.signal(signal.SIGTERM, _end)
    threading.Thread(target=work, name="pacecar-preflight", daemon=True).start()
    with suppress(_Ended):
        while not ended.wait(0.2) and time.monotonic_ns() - begun_ns < options.seconds * 1e9:
            pass
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = FIT
    if board.rank == 0:
        result = _result(board, findings, options, time.monotonic_ns() - begun_ns)
        _print(result, backend, options, environ)
        at_fault = sorted({rank for fault in result.faults if not fault.is_between for rank in fault.ranks})
        code = FOUND if result.faults else FIT
        with suppress(RuntimeError):
            board.tell("end", at_fault)
            time.sleep(0.5)  # the store is this process's
    else:
        with suppress(_LateError, RuntimeError):
            code = FOUND if board.rank in board.told("end", list[int], END_SECONDS) else FIT
    sys.stdout.flush()
    os._exit(code)  # gloo may abort a process that exits while it still releases its last work (pytorch issue 190489)


def run_alone(options: PreflightOptions, *, environ: Mapping[str, str] = os.environ) -> int:
    """Check this machine only, its GPUs one after the other, each for as long as the limit; return the exit code.

    What does not end in time goes on, on a thread that may hold up the end of the interpreter.
    """
    begun_ns = time.monotonic_ns()
    host = _host(environ)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.device("cuda", index) for index in range(count)] or [torch.device("cpu")]
    findings = _Findings()
    ended = threading.Event()

    def work() -> None:
        try:
            for index, device in enumerate(devices):
                one = check_node(index, host, host, device, is_first_here=index == 0, folder=options.folder)
                findings.nodes = [*findings.nodes, one]
        except Exception as error:  # noqa: BLE001  said with the verdict
            findings.failure = f"{type(error).__name__}: {first_line(error)}"
        ended.set()

    threading.Thread(target=work, name="pacecar-preflight", daemon=True).start()
    found, is_whole = -1, False
    while not is_whole and len(findings.nodes) > found:  # another one has ended in time
        found = len(findings.nodes)
        end = time.monotonic() + options.seconds
        while not (is_whole := ended.wait(LOOK_SECONDS)) and len(findings.nodes) == found and time.monotonic() < end:
            pass
    nodes = findings.nodes
    faults, untold = judge_nodes(nodes, options.tolerance, options.reference)
    if len(nodes) < len(devices):
        words = f"its checks did not end within {options.seconds:g} s" if not is_whole else findings.failure or ""
        faults.append(PreflightFault(check="silent", ranks=(len(nodes),), hosts=(host,), detail=words))
        untold += [f"rank {index} on {host}: not checked" for index in range(len(nodes) + 1, len(devices))]
    passed_ns = time.monotonic_ns() - begun_ns
    result = _document(findings, faults, untold, passed_ns, len(devices))
    _print(result, None, options, environ)
    return FOUND if faults else FIT


def _host(environ: Mapping[str, str]) -> str:
    """Return the name by which the launcher knows this node: Slurm's, a pod's `NODE_NAME`, else the host's."""
    return environ.get("SLURMD_NODENAME") or environ.get("NODE_NAME") or socket.gethostname()


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise _Ended


def _check_all(
    board: _Board, findings: _Findings, device: torch.device, options: PreflightOptions, environ: Mapping[str, str]
) -> None:
    """Take part in all phases; on rank 0 also collect, and decide who meets again."""
    host = _host(environ)
    board.come(host)
    board.leave("begin", None)  # so that all measure under the same load
    is_first_here = environ.get("LOCAL_RANK", "0") == "0"
    node = environ.get("GROUP_RANK", host)
    own = check_node(board.rank, node, host, device, is_first_here=is_first_here, folder=options.folder)
    board.leave("checks", own)
    if board.rank == 0:
        findings.nodes = board.found("checks", range(board.ranks), NodeChecks)
        faults, _ = judge_nodes(findings.nodes, options.tolerance, options.reference)
        board.tell("is doubtful", any(fault.ratio is not None for fault in faults))
    if board.told("is doubtful", bool):
        board.leave("checks again", checked_again(own, device, options.folder))
        if board.rank == 0:
            findings.nodes = board.found("checks again", range(board.ranks), NodeChecks)
    if board.rank == 0:
        board.tell("first rounds", first_rounds([one.node for one in findings.nodes]))
    first = board.told("first rounds", list[list[Pair]])
    for pairs in first:
        _round(board, findings, pairs, device)
    for number in range(rounds_left(board.ranks, len(first))):
        if board.rank == 0:
            verdict = judge_links(findings.nodes, findings.links, options.tolerance)
            met = Counter(meeting.ranks for meeting in findings.links)
            pairs = again([one.node for one in findings.nodes], verdict.slow, verdict.doubted, met)
            board.tell(f"again/{number}", pairs)
        pairs = board.told(f"again/{number}", list[Pair])
        if not pairs:
            break
        _round(board, findings, pairs, device)


def _round(board: _Board, findings: _Findings, pairs: Sequence[Pair], device: torch.device) -> None:
    findings.rounds += 1
    phase = f"round/{findings.rounds}"
    mine = next((pair for pair in pairs if board.rank in pair), None)
    found = None
    if mine is not None:
        try:
            found = meet(findings.rounds, mine, board.rank, device)
        except RuntimeError as error:
            found = LinkMeeting(round=findings.rounds, ranks=mine, error=first_line(error))
    try:
        board.leave(phase, found)
    finally:
        if board.rank == 0:
            findings.links += board.found(phase, [low for low, _ in pairs], LinkMeeting)


def _result(board: _Board, findings: _Findings, options: PreflightOptions, passed_ns: int) -> PreflightResult:
    """Judge what there is; ranks that did not come to the end of the present phase are silent."""
    silent: list[int] = []
    hosts: dict[int, str] = {}
    with suppress(RuntimeError):
        silent, hosts = board.silent(), board.hosts()
        if not findings.nodes:
            findings.nodes = board.found("checks", range(board.ranks), NodeChecks)
    heard = [one for one in findings.nodes if one.rank not in silent]
    faults, untold = judge_nodes(heard, options.tolerance, options.reference)
    verdict = judge_links(heard, findings.links, options.tolerance)
    if silent:
        faults += [
            PreflightFault(
                check="silent", ranks=(rank,), hosts=(hosts[rank],) if rank in hosts else (),
                detail=f"did not come to the end of {board.phase!r}",
            )
            for rank in silent
        ]  # fmt: skip
    untold += verdict.untold + ([] if findings.failure is None else [findings.failure])
    return _document(findings, [*faults, *verdict.faults], untold, passed_ns, board.ranks)


def _document(
    findings: _Findings, faults: Sequence[PreflightFault], untold: Sequence[str], passed_ns: int, ranks: int
) -> PreflightResult:
    return PreflightResult(
        ranks=ranks, rounds=findings.rounds, nodes=tuple(findings.nodes), links=tuple(findings.links),
        faults=tuple(faults), exclude=nodes_to_exclude(faults), untold=tuple(untold), wall_ns=passed_ns,
        pacecar_version=pacecar.__version__, torch_version=str(torch.__version__),
    )  # fmt: skip


def _print(result: PreflightResult, backend: str | None, options: PreflightOptions, environ: Mapping[str, str]) -> None:
    if options.as_json:
        text = msgspec.json.format(msgspec.json.encode(result), indent=2).decode()
    else:
        text = "\n".join(lines(result, backend, environ))
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
