"""Runs `pacecar bench net` in one rank: joins the process group, measures, and prints the result on rank 0.

When a rank is lost, the results so far are printed.  The ranks that wait for it get "connection closed by peer" or a
time-out from the backend; each sets a key in the store and exits.  Rank 0 names the ranks that set no key.

torchrun sends SIGTERM to every rank as soon as one is gone, so rank 0 must print before it exits.  A thread waits for
the signal: gloo may block the main thread until the time-out, and Python runs no handler until then.

Left out: continuing without the lost rank, which would be another group over other links.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

import click
import msgspec
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

import pacecar
from pacecar.ledger.bus_bandwidth import bus_bandwidth_factor

from ..joining_ranks import JoinError, first_line, join_ranks
from .alpha_beta_fit import METHOD, fit_line
from .document import BenchPlace, LineFit, MeasuredOperation, NetBench, Rated, Row
from .measure import MeasurementPlan, measure, why_missing
from .operations import BenchOperation
from .rated_bandwidth import RatedLinks, rate, rated_links
from .text import closing_lines, heading_lines, operation_lines, row_line, summary_lines

__all__ = ["NetOptions", "run_net"]

MARK = "pacecar-bench/left/"

MARK_SECONDS = 2.0
"""Time for the other ranks to notice: some see a closed connection only when the first one to notice exits."""

LOST_SHOWN = 8
"""Lost ranks to name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetOptions:
    """The command's options, parsed."""

    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    backend: str | None
    plan: MeasurementPlan
    timeout_seconds: float
    rated_bytes_per_second: int | None
    as_json: bool
    store_prefix: str = ""
    """Where these ranks meet, if other processes of the same ranks use the store too."""


def run_net(options: NetOptions, *, environ: Mapping[str, str] = os.environ) -> int:
    """Measure as one of the ranks and return the exit code; raises JoinError.

    0: everything was measured and correct.  1: a result was wrong, or a rank was lost.
    """
    store, device, backend = join_ranks(options.backend, options.timeout_seconds, environ, prefix=options.store_prefix)
    run = _Run(store, options)
    _end_at_sigterm(run)
    try:
        run.result = _prepare(options, backend, device, environ)
        for line in heading_lines(
            run.result.places, run.result.rated, backend, options.plan.warmup, options.plan.iterations
        ):
            run.say(line)
        for name in options.operations:
            new = MeasuredOperation(
                operation=name, bus_factor=bus_bandwidth_factor(name, run.result.ranks) or 0.0, rows=()
            )
            for operation in _measured(new, options, device, run.say):
                run.result = _with(run.result, operation)
            for line in summary_lines(run.result.operations[-1], run.result.rated):
                run.say(line)
        # gloo may abort a process that exits while another still releases the last work (pytorch issue 190489).
        dist.barrier()
    except RuntimeError as error:
        run.end_early(error)
    run.end(run.result)
    dist.destroy_process_group()
    return 1 if any(row.wrong for operation in run.result.operations for row in operation.rows) else 0


class _Run:
    """The results of this rank so far; it is ended once, by whichever thread comes first."""

    def __init__(self, store: Store, options: NetOptions) -> None:
        self._store = store
        self._prints = dist.get_rank() == 0
        self._as_json = options.as_json
        self._ending = threading.Lock()  # acquired by the thread that ends the run, and never released
        self.result: NetBench | None = None

    def say(self, line: str) -> None:
        """Print a line of the table on rank 0."""
        if self._prints and not self._as_json:
            _print(line)

    def end(self, result: NetBench) -> None:
        """Print the document with --json."""
        self._ending.acquire()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._say_document(result)

    def end_early(self, error: RuntimeError) -> NoReturn:
        """Report the lost ranks and exit; raises JoinError if nothing was measured yet."""
        self._ending.acquire()  # blocks forever if the other thread is exiting
        lost = _describe_loss(self._store, error)
        if self.result is None:
            raise JoinError(lost) from error
        result = msgspec.structs.replace(self.result, failure=lost)
        for line in closing_lines(result):
            self.say(line)
        self._say_document(result)
        _exit(1)  # destroying the group may wait for the lost ranks

    def _say_document(self, result: NetBench) -> None:
        if self._prints and self._as_json:
            _print(msgspec.json.format(msgspec.json.encode(result), indent=2).decode())


def _end_at_sigterm(run: _Run) -> None:
    """Start a thread that ends the run at SIGTERM."""
    signalled, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.set_blocking(signalled, True)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _do_nothing)

    def wait() -> None:
        while signal.SIGTERM not in os.read(signalled, 64):
            pass
        try:
            run.end_early(RuntimeError("ended by SIGTERM"))
        except JoinError as error:
            click.echo(f"pacecar: bench net: rank {dist.get_rank()}: {error}", err=True)
            _exit(1)

    threading.Thread(target=wait, name="pacecar-bench-end", daemon=True).start()


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Python has already written the signal's number into the pipe."""


def _prepare(options: NetOptions, backend: str, device: torch.device, environ: Mapping[str, str]) -> NetBench:
    """Gather the place of each rank and the rated speed of its link."""
    own = rated_links(backend, environ.get("MASTER_ADDR", "127.0.0.1"))
    gathered: list[tuple[RatedLinks, int, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (own, os.getpid(), _device_name(device)))
    said = [one for one in gathered if one is not None]
    sites = [site for site, _, _ in said]
    elsewhere = next((site for site in sites if site.network != sites[0].network and site.address), None)
    if elsewhere is not None and dist.get_rank() == 0:
        # Rank 0 reaches itself over loopback; look up the route to another rank.
        sites[0] = rated_links(backend, elsewhere.address or "")
    rated = rate(backend, sites)
    if options.rated_bytes_per_second is not None:
        rated = Rated(bytes_per_second=options.rated_bytes_per_second, basis="as given by --rated-gigabits")
    places = tuple(
        BenchPlace(
            rank=rank, host=site.host, pid=pid, device=name, interface=None if elsewhere is None else site.interface
        )
        for rank, (site, (_, pid, name)) in enumerate(zip(sites, said, strict=True))
    )
    return NetBench(
        backend=backend, ranks=len(said), places=places, rated=rated, operations=(), warmup=options.plan.warmup,
        iterations=options.plan.iterations, pacecar_version=pacecar.__version__, torch_version=str(torch.__version__),
    )  # fmt: skip


def _measured(
    operation: MeasuredOperation, options: NetOptions, device: torch.device, say: Callable[[str], None]
) -> Iterator[MeasuredOperation]:
    """Yield the operation again after each row, and with its fit at the end."""
    collective = BenchOperation(operation.operation, max(options.sizes), device)
    for line in operation_lines(operation.operation):
        say(line)
    missing = why_missing(collective)
    if missing is not None:
        yield msgspec.structs.replace(operation, missing=missing)
        return
    rows: tuple[Row, ...] = ()
    for size in options.sizes:
        row = measure(collective, size, options.plan, device)
        if rows and row.bytes == rows[-1].bytes:
            continue  # rounded to the previous size
        rows = (*rows, row)
        say(row_line(row, operation.operation))
        yield msgspec.structs.replace(operation, rows=rows)
    yield msgspec.structs.replace(operation, rows=rows, fit=_fit(rows, operation.bus_factor))


def _fit(rows: tuple[Row, ...], factor: float) -> LineFit | None:
    found = fit_line([row.bytes for row in rows], [row.time_ns for row in rows])
    if found is None:
        return None
    speed = found.bytes_per_second
    return LineFit(
        alpha_ns=found.alpha_ns, beta_ns_per_byte=found.ns_per_byte, half_bandwidth_bytes=found.half_bytes,
        bus_bytes_per_second=None if speed is None else speed * factor, residual_ratio=found.residual_ratio,
        worst_residual_ratio=found.worst_residual_ratio, worst_bytes=found.worst_bytes, method=METHOD,
    )  # fmt: skip


def _with(result: NetBench, operation: MeasuredOperation) -> NetBench:
    """Append `operation`, or replace it if it is there."""
    others = tuple(one for one in result.operations if one.operation != operation.operation)
    return msgspec.structs.replace(result, operations=(*others, operation))


def _describe_loss(store: Store, error: RuntimeError) -> str:
    """Set this rank's key in the store; on rank 0, name the ranks without a key."""
    with suppress(RuntimeError):  # the store may be on the lost machine
        store.set(f"{MARK}{dist.get_rank()}", "1")
    if dist.get_rank() != 0:
        return first_line(error)
    time.sleep(MARK_SECONDS)
    silent = []
    with suppress(RuntimeError):
        silent = [rank for rank in range(dist.get_world_size()) if not store.check([f"{MARK}{rank}"])]
    named = ", ".join(map(str, silent[:LOST_SHOWN])) + (", ..." if len(silent) > LOST_SHOWN else "")
    who = f"no word from rank {named}" if silent else "all ranks answer, but the backend gave up"
    return f"{who}: {first_line(error)}"


def _device_name(device: torch.device) -> str:
    return f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu"


def _exit(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
