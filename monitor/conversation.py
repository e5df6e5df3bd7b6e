"""May this peer say this?  What one connection of the inbox may carry, decided frame by frame.

The wire says whether bytes are a record.  That is not enough: any local process may connect, and a record in another
job's name, or a label of 60 KiB, is well-formed too.  So the first frame must be a hello, the hello must come from
the process that it names, everything after speaks for that rank of that job only, and text is bounded.  Whoever is
no hook may send requests and nothing else; whom they reach is decided where they are passed on.

Everything here is pure but for one question to the kernel, which is passed in: which pid a process has in its own pid
namespace (a job in a container knows itself as 17 where the kernel tells us 40213).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from pacecar.records import (
    Answer,
    CollectiveWindow,
    Command,
    Decision,
    DumpRequest,
    EstimateCheck,
    Goodbye,
    HangSuspicion,
    JobHello,
    JobLedger,
    JobRecord,
    Knobs,
    KnobSwitch,
    Request,
    StepRecord,
    Straggler,
    Throttling,
    TunerOrder,
    TunerReport,
    TunerStatus,
    Verdict,
    Vitals,
    WhatIf,
)
from pacecar.signals import HostSignals
from pacecar.wire import FrameError, Message, Refusal, decode_frame

__all__ = ["Conversation", "Peer", "Said", "own_pid"]

Said = tuple[JobRecord | Answer, JobHello] | tuple[Request | DumpRequest, None]
"""A hook's record or answer, with its hello; or a request of somebody who is no hook."""

LABEL_CHARACTERS_MAX = 256
"""Text that becomes a label.  Longer ones cost every scrape and the memory of every Prometheus."""

TEXT_CHARACTERS_MAX = 4096
"""Text that people read: reasons and details."""

KNOBS_MAX = 32
"""Knobs of one rank; each is a series."""

OPERATIONS_MAX = 16
"""Operations of collectives of one rank: each is four series."""

RUNGS_MAX = 16
"""Rungs of a what-if ladder; each is a series."""


class Peer(NamedTuple):
    """Who is at the other end, by the kernel's word (SO_PEERCRED).  A pid of 0: in a pid namespace that is not ours."""

    pid: int
    uid: int
    gid: int


def own_pid(pid: int) -> int | None:
    """Return the pid that process `pid` has in its own namespace; None when the kernel does not say."""
    try:
        status = Path("/proc", str(pid), "status").read_text("ascii", "replace")
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("NSpid:"):  # proc(5): outermost to innermost
            return int(line.split()[-1])
    return None


class Conversation:
    """One connection: takes frames, remembers the hello."""

    def __init__(self, peer: Peer, *, own_pid: Callable[[int], int | None] = own_pid) -> None:
        self.peer = peer
        self.hello: JobHello | None = None
        self._own_pid = own_pid

    def take(self, frame: bytes) -> Said:
        """Return what is in `frame` and the hello that it belongs to.

        Raises:
            FrameError: as `decode_frame`; NO_HELLO before a hello; IDENTITY for a foreign pid, job or rank;
                MALFORMED for values that no hook sends (negative counters, endless labels).
        """
        record = decode_frame(frame)
        if isinstance(record, JobHello):
            self._check_hello(record)
            self.hello = record
        elif isinstance(record, Request) and self.hello is None:
            _check_request(record)
            return record, None
        elif isinstance(record, DumpRequest) and self.hello is None:
            _check_text(TEXT_CHARACTERS_MAX, (record.note,))
            return record, None
        elif isinstance(record, Request | DumpRequest | Command | Throttling | HostSignals):
            raise FrameError(Refusal.MALFORMED, f"a hook sends no {_kind(record)}")
        elif self.hello is None:
            raise FrameError(Refusal.NO_HELLO, f"a {_kind(record)} came before any hello")
        else:
            _check_record(record, self.hello)
        return record, self.hello

    def _check_hello(self, hello: JobHello) -> None:
        if self.hello is not None and (self.hello.job, self.hello.rank) != (hello.job, hello.rank):
            raise FrameError(
                Refusal.IDENTITY,
                f"this connection is rank {self.hello.rank} of job {self.hello.job!r} already, and now says to be"
                f" rank {hello.rank} of job {hello.job[:LABEL_CHARACTERS_MAX]!r}",
            )
        if not hello.job:
            raise FrameError(Refusal.MALFORMED, "a job needs a name")
        if not 0 <= hello.rank < hello.world_size or hello.local_rank < 0:
            raise FrameError(
                Refusal.MALFORMED,
                f"rank {hello.rank} (local {hello.local_rank}) is not one of a world of {hello.world_size}",
            )
        _check_text(
            LABEL_CHARACTERS_MAX,
            (hello.job, hello.host, hello.device, hello.device_uuid, hello.backend, hello.framework, hello.interface),
        )
        _check_text(LABEL_CHARACTERS_MAX, (hello.pacecar_version, *hello.parallel))
        _check_text(LABEL_CHARACTERS_MAX, (hello.slurm_job, hello.pod_name, hello.pod_namespace))
        if len(hello.parallel) > KNOBS_MAX:
            raise FrameError(Refusal.MALFORMED, f"{len(hello.parallel)} parallel dimensions is over {KNOBS_MAX}")
        # SO_PEERCRED gives 0 for a process whose pid namespace we do not see into: nothing to compare with.
        if self.peer.pid not in (0, hello.pid) and self._own_pid(self.peer.pid) != hello.pid:
            raise FrameError(Refusal.IDENTITY, f"hello names pid {hello.pid}, the peer is pid {self.peer.pid}")


def _check_request(request: Request) -> None:
    if len(request.arguments) > KNOBS_MAX:
        raise FrameError(Refusal.MALFORMED, f"{len(request.arguments)} arguments is over {KNOBS_MAX}")
    _check_text(LABEL_CHARACTERS_MAX, (request.job, request.action, *request.arguments))
    _check_text(TEXT_CHARACTERS_MAX, (value for value in request.arguments.values() if isinstance(value, str)))


def _check_record(record: JobRecord | Answer, hello: JobHello) -> None:
    """Raise FrameError unless `record` is of the job and rank of `hello` and its values are possible."""
    rank = getattr(record, "rank", hello.rank)  # decisions and verdicts are the job's, not a rank's
    if (record.job, rank) != (hello.job, hello.rank):
        raise FrameError(
            Refusal.IDENTITY,
            f"rank {hello.rank} of job {hello.job!r} sent a {_kind(record)} for rank {rank}"
            f" of job {record.job[:LABEL_CHARACTERS_MAX]!r}",
        )
    match record:
        case StepRecord():
            _check_counters(record)
            _check_knobs(record.knobs)
        case Vitals():
            _check_vitals(record)
        case EstimateCheck():
            if record.estimate.wall_ns != record.exact.wall_ns:
                raise FrameError(Refusal.MALFORMED, "an estimate and an exact ledger of different steps")
        case CollectiveWindow():
            _check_collectives(record)
        case KnobSwitch():
            _check_knobs(record.knobs)
        case Decision() | Verdict():
            _check_text(LABEL_CHARACTERS_MAX, (record.knob,))
            _check_text(TEXT_CHARACTERS_MAX, (record.reason,))
        case Straggler():
            if record.late_rank is not None and not 0 <= record.late_rank < hello.world_size:
                raise FrameError(Refusal.MALFORMED, f"rank {record.late_rank} is not one of {hello.world_size}")
            _check_text(LABEL_CHARACTERS_MAX, (record.phase,))
            _check_text(TEXT_CHARACTERS_MAX, (record.evidence,))
        case JobLedger():
            _check_job_ledger(record)
        case WhatIf():
            _check_what_if(record, hello)
        case HangSuspicion():
            _check_text(LABEL_CHARACTERS_MAX, (record.phase,))
            _check_text(TEXT_CHARACTERS_MAX, (record.last_collective, record.stack))
        case TunerStatus():
            _check_text(TEXT_CHARACTERS_MAX, (record.detail,))
        case TunerOrder():
            _check_knobs(Knobs(values=dict(record.values)))
            _check_text(TEXT_CHARACTERS_MAX, (record.detail,))
        case Goodbye():
            _check_text(TEXT_CHARACTERS_MAX, (record.reason,))
        case Answer():
            _check_text(TEXT_CHARACTERS_MAX, (record.detail,))
            if record.report is not None:
                _check_report(record.report)
        case JobHello():
            pass


def _check_counters(step: StepRecord) -> None:
    counters = {
        "total_steps": step.total_steps,
        "total_samples": step.total_samples,
        "total_tokens": step.total_tokens,
        "total_overhead_ns": step.total_overhead_ns,
        "total_windows": step.total_windows,
        "window_price_ns": step.window_price_ns,
        "dropped_records": step.dropped_records,
    }
    _check_not_negative(counters)


def _check_not_negative(counters: Mapping[str, int | None]) -> None:
    for name, value in counters.items():
        if value is not None and value < 0:
            raise FrameError(Refusal.MALFORMED, f"{name} is {value}: a counter does not go below zero")


def _check_vitals(vitals: Vitals) -> None:
    _check_text(LABEL_CHARACTERS_MAX, (vitals.arithmetic,))
    _check_text(TEXT_CHARACTERS_MAX, (vitals.flops_reason,))
    memory = vitals.memory
    counters = {
        "total_checkpoints": vitals.total_checkpoints,
        "total_checkpoint_ns": vitals.total_checkpoint_ns,
        "total_allocation_retries": None if memory is None else memory.total_allocation_retries,
        "total_out_of_memory": None if memory is None else memory.total_out_of_memory,
    }
    _check_not_negative(counters)


def _check_job_ledger(ledger: JobLedger) -> None:
    if len(ledger.total_phases_ns) > KNOBS_MAX:
        raise FrameError(Refusal.MALFORMED, f"{len(ledger.total_phases_ns)} phases is over {KNOBS_MAX}")
    if min(ledger.total_phases_ns.values(), default=0) < 0:
        raise FrameError(Refusal.MALFORMED, "a phase's total is below zero: a counter does not go there")
    _check_text(LABEL_CHARACTERS_MAX, ledger.total_phases_ns)


def _check_report(report: TunerReport) -> None:
    """A report goes to a person's terminal: bounded like all text, and its frame is bounded already."""
    _check_knobs(Knobs(values=dict(report.knobs)))
    _check_text(LABEL_CHARACTERS_MAX, (report.mode, report.policy, report.state, *report.by_hand))
    _check_text(TEXT_CHARACTERS_MAX, (report.detail, *report.refused.values(), *report.advice, *report.node))
    _check_text(TEXT_CHARACTERS_MAX, (change.reason for change in report.changes))
    _check_text(TEXT_CHARACTERS_MAX, (order.detail for order in report.orders))


def _check_what_if(ladder: WhatIf, hello: JobHello) -> None:
    if ladder.of_rank not in (None, hello.rank):
        raise FrameError(Refusal.IDENTITY, f"rank {hello.rank} sent the ladder of rank {ladder.of_rank}")
    if len(ladder.rungs) > RUNGS_MAX:
        raise FrameError(Refusal.MALFORMED, f"{len(ladder.rungs)} rungs is over {RUNGS_MAX}")
    _check_text(LABEL_CHARACTERS_MAX, (rung.name for rung in ladder.rungs))


def _check_collectives(window: CollectiveWindow) -> None:
    names = {one.operation for one in window.sums}
    if len(window.sums) > OPERATIONS_MAX or len(names) < len(window.sums):
        raise FrameError(Refusal.MALFORMED, f"{len(window.sums)} operations, {len(names)} of them different")
    _check_text(LABEL_CHARACTERS_MAX, names)


def _check_knobs(knobs: Knobs) -> None:
    if len(knobs.values) > KNOBS_MAX:
        raise FrameError(Refusal.MALFORMED, f"{len(knobs.values)} knobs is over {KNOBS_MAX}")
    _check_text(LABEL_CHARACTERS_MAX, knobs.values)
    _check_text(LABEL_CHARACTERS_MAX, (value for value in knobs.values.values() if isinstance(value, str)))


def _check_text(most: int, texts: Iterable[str | None]) -> None:
    for text in texts:
        if text is not None and len(text) > most:
            raise FrameError(Refusal.MALFORMED, f"a text of {len(text)} characters is over {most}: {text[:40]!r}...")


def _kind(record: Message) -> str:
    return type(record).__name__
