"""Validates the frames of one connection: whether this peer may send this record, for this job and rank.

The wire checks that bytes are a record, and the record's types check each value (`pacecar.records.ranges`).  But any
local process may connect, and a record in another job's name is well-formed, too.  So the first frame must be a hello,
it must come from the process that it names, and all later records must be of that rank of that job.  Values that depend
on each other are compared.  Labels that name a kind of thing (a knob, a phase, an operation) come from closed sets,
because new names would make new series without end.  A peer that is not a hook may only send requests; `authorization`
decides what they reach.

Pure except for one question to the kernel, which is passed in: the pid of a process in its own pid namespace (a job in
a container may be 17 to itself and 40213 to the daemon).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from importlib import metadata
from typing import NamedTuple

from pacecar.kernel_files.reader import KernelFiles, row
from pacecar.knobs import by_name
from pacecar.records import (
    PHASES_OF_JOBS,
    Answer,
    CollectiveWindow,
    Command,
    Decision,
    DumpRequest,
    EstimateCheck,
    HangVerdict,
    HealthRequest,
    HelloRefused,
    JobHello,
    JobLedger,
    JobRecord,
    KnobSwitch,
    Request,
    StepRecord,
    Straggler,
    Throttling,
    TunerOrder,
    Verdict,
    Vitals,
    WhatIf,
)
from pacecar.records.host_signals import HostSignals
from pacecar.records.job_identity import LAUNCH
from pacecar.records.job_orders import JobAnswer
from pacecar.records.measurements.collectives import OPERATIONS
from pacecar.records.measurements.device_utilization import ARITHMETICS
from pacecar.records.measurements.what_if import RUNG_NAMES
from pacecar.wire import FrameError, Message, Refusal, decode_frame

__all__ = ["FrameValidation", "Peer", "ValidatedFrame", "own_pid"]

Asked = Request | DumpRequest | HealthRequest
"""What people's commands send, on a connection without a hello."""

ValidatedFrame = tuple[JobRecord | Answer | JobAnswer, JobHello] | tuple[Asked, None]
"""A hook's record or answer with its hello, or a request from a peer that is not a hook."""


class Peer(NamedTuple):
    """The process at the other end, as the kernel reports it (SO_PEERCRED).  Pid 0: in a pid namespace out of sight."""

    pid: int
    uid: int
    gid: int


def own_pid(pid: int) -> int | None:
    """Return the pid of process `pid` in its own namespace; None if the kernel does not tell."""
    files = KernelFiles()
    pids = row(files.text(files.proc / str(pid) / "status") or "", "NSpid:")
    return int(pids[-1]) if pids else None  # proc(5): outermost to innermost


class FrameValidation:
    """Validates the frames of one connection and remembers its hello."""

    def __init__(self, peer: Peer, *, own_pid: Callable[[int], int | None] = own_pid) -> None:
        self.peer = peer
        self.hello: JobHello | None = None
        self._own_pid = own_pid

    def decode(self, frame: bytes) -> ValidatedFrame:
        """Return the record in `frame` and the hello that it belongs to.

        Raises:
            FrameError: as `decode_frame`; NO_HELLO before a hello; IDENTITY for another process's pid, job or rank;
                MALFORMED for values that no hook sends together (a rank beyond its world).
        """
        try:
            record = decode_frame(frame)
        except FrameError as error:
            if error.refusal is not Refusal.MALFORMED or self.hello is None:
                raise
            theirs, ours = self.hello.pacecar_version, metadata.version("pacecar")
            if theirs == ours:
                raise
            hint = f"the job runs pacecar {theirs}, this daemon {ours}: upgrade the older one"
            raise FrameError(error.refusal, f"{error}; {hint}") from error
        if isinstance(record, JobHello):
            self._check_hello(record)
            self.hello = record
        elif isinstance(record, Asked) and self.hello is None:
            return record, None
        elif isinstance(record, Asked | Command | Throttling | HostSignals | HelloRefused):
            raise FrameError(Refusal.MALFORMED, f"hooks do not send a {_kind(record)}")
        elif self.hello is None:
            raise FrameError(Refusal.NO_HELLO, f"a {_kind(record)} came before any hello")
        else:
            _check_record(record, self.hello)
        return record, self.hello

    def _check_hello(self, hello: JobHello) -> None:
        if not LAUNCH.fullmatch(hello.launch):
            raise FrameError(Refusal.MALFORMED, f"launch {hello.launch[:40]!r} is not 16 hexadecimal digits")
        before = self.hello
        if before is not None and (before.job, before.launch, before.rank) != (hello.job, hello.launch, hello.rank):
            raise FrameError(
                Refusal.IDENTITY,
                f"this connection is rank {before.rank} of job {before.job!r} and now claims to be"
                f" rank {hello.rank} of job {hello.job!r}, or of another launch",
            )
        if before is not None and before != hello:
            raise FrameError(Refusal.IDENTITY, f"rank {hello.rank} of job {hello.job!r} sent a different hello before")
        if not hello.job:
            raise FrameError(Refusal.MALFORMED, "a job needs a name")
        if hello.rank >= hello.world_size:
            raise FrameError(Refusal.MALFORMED, f"rank {hello.rank} is not one of a world of {hello.world_size}")
        # SO_PEERCRED gives 0 for a process in a pid namespace that we cannot see: there is nothing to compare.
        if self.peer.pid not in (0, hello.pid) and self._own_pid(self.peer.pid) != hello.pid:
            raise FrameError(Refusal.IDENTITY, f"the hello names pid {hello.pid}, but the peer is pid {self.peer.pid}")


def _check_record(record: JobRecord | Answer | JobAnswer, hello: JobHello) -> None:
    """Raise FrameError unless `record` is of the job and rank of `hello` and its values fit together."""
    rank = getattr(record, "rank", hello.rank)  # decisions and verdicts are the job's, not a rank's
    if (record.job, rank) != (hello.job, hello.rank):
        raise FrameError(
            Refusal.IDENTITY,
            f"rank {hello.rank} of job {hello.job!r} sent a {_kind(record)} for rank {rank} of job {record.job!r}",
        )
    _check_labels(record)
    match record:
        case EstimateCheck() if record.estimate.wall_ns != record.exact.wall_ns:
            raise FrameError(Refusal.MALFORMED, "an estimate and an exact ledger of different steps")
        case CollectiveWindow() if len({one.operation for one in record.sums}) < len(record.sums):
            raise FrameError(Refusal.MALFORMED, "an operation appears twice")
        case Straggler() if record.late_rank is not None and record.late_rank >= hello.world_size:
            raise FrameError(Refusal.MALFORMED, f"rank {record.late_rank} is not one of {hello.world_size}")
        case HangVerdict() if any(one >= hello.world_size for one in (*record.culprits, *record.waiting)):
            raise FrameError(Refusal.MALFORMED, f"a rank in it is not one of {hello.world_size}")
        case WhatIf() if record.of_rank not in (None, hello.rank):
            raise FrameError(Refusal.IDENTITY, f"rank {hello.rank} sent a WhatIf of rank {record.of_rank}")
        case _:
            pass


def _check_labels(record: JobRecord | Answer | JobAnswer) -> None:
    """Raise FrameError for a label that is not in its closed set."""
    match record:
        case StepRecord() | KnobSwitch():
            _check_known("knob", record.knobs.values, by_name)
        case Decision() | Verdict():
            _check_known("knob", (record.knob,), by_name)
        case TunerOrder():
            _check_known("knob", record.values, by_name)
        case Vitals() if record.arithmetic is not None:
            _check_known("arithmetic", (record.arithmetic,), ARITHMETICS)
        case JobLedger():
            _check_known("phase", record.total_phases_ns, PHASES_OF_JOBS)
        case WhatIf():
            _check_known("rung", (rung.name for rung in record.rungs), RUNG_NAMES)
        case CollectiveWindow():
            _check_known("operation", (one.operation for one in record.sums), OPERATIONS)
        case _:
            pass


def _check_known(kind: str, names: Iterable[str], known: Container[str]) -> None:
    for name in names:
        if name not in known:
            hint = "does a newer pacecar run in the job than in the daemon?"
            raise FrameError(Refusal.MALFORMED, f"there is no {kind} {name[:40]!r} here; {hint}")


def _kind(record: Message) -> str:
    return type(record).__name__
