"""Writes pace, ledger and decisions into an experiment's own log: `attach(..., loggers=[TensorBoard(writer)])`.

    TensorBoard(SummaryWriter("runs/x"))       scalars; events as text
    Wandb(wandb.init(...))                     scalars and events in the run's rows, without steps of their own
    Mlflow(run_id)                             metrics; events as tags

They write on rank 0 and are silent on the others, so a script may create them on every rank; `every_rank=True` is for
scripts that keep one log for each rank.  They never close the caller's writer or run.  Libraries write to disks and
servers, so a thread with a bounded queue does it (`RecordQueue`), whose processor time is charged to the overhead
budget. A library that hangs blocks that thread only.  One that raises loses the entry, and logging ends after several
failures in a row.

The obvious call for Weights & Biases, `run.log`, would begin a new row and increment the caller's steps: a script that
passes `step=` itself would then have its own rows refused.  With `commit=False` our entry waits for the script's next
row, and its steps stay its own.

`metric_log` decides what is logged.  The daemon exports OpenTelemetry.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol

_unloaded: Exception | None = None
try:
    from pacecar.profiler.transport.record_queue import RecordQueue, Sendable
    from pacecar.records import Answer, StepRecord
    from pacecar.records.job_orders import JobAnswer

    from .metric_log import PERIOD_SECONDS, MetricEntry, MetricLog
except Exception as error:  # noqa: BLE001  a broken install: nothing is logged, and `attach` says why
    _unloaded = error

__all__ = ["Mlflow", "TensorBoard", "Wandb"]

FAILURES_MAX = 5
"""Failures in a row after which logging ends: a server may be restarted, but a closed writer stays closed."""

EVENTS_MAX = 32
"""Most events that wait for the script's next row of Weights & Biases; the newest are kept."""

TAG_CHARS_MAX = 500
"""MLflow's servers refuse longer values of tags in some versions."""

_log = logging.getLogger("pacecar")

if not TYPE_CHECKING and _unloaded is not None:
    PERIOD_SECONDS = 0.0

    class RecordQueue:
        """Accepts records and drops them, in place of the class that could not be imported."""

        dropped = 0
        has_logged = False

        def __init__(self, *_: object) -> None:
            """Accept what the real one accepts."""

        def put(self, record: object) -> None:
            """Drop `record`; log why, once for all loggers."""
            if not RecordQueue.has_logged:
                RecordQueue.has_logged = True
                _log.warning("pacecar does not write into experiment logs: %s: %s", type(_unloaded).__name__, _unloaded)

        def close(self, timeout_seconds: float) -> None:
            """Do nothing."""

    MetricLog = RecordQueue


class _Writer(Protocol):
    """Writes entries into one library's log."""

    @property
    def place(self) -> str: ...

    def write(self, entry: MetricEntry) -> None: ...


class _Carrier:
    def __init__(self, writer: _Writer, period_seconds: float, *, every_rank: bool) -> None:
        self._writer = writer
        self._log = MetricLog(period_seconds)
        self._every_rank = every_rank
        self._is_silent = False
        self._failures = 0

    @property
    def destination(self) -> str:
        return self._writer.place

    def deliver(self, record: Sendable, timeout_seconds: float) -> None:
        if isinstance(record, StepRecord) and record.rank != 0 and not self._every_rank:
            self._is_silent = True
        if self._is_silent or isinstance(record, Answer | JobAnswer):
            return
        entry = self._log.entry_for(record)
        if entry is not None:
            self._write(entry)

    def _write(self, entry: MetricEntry) -> None:
        try:
            self._writer.write(entry)
        except Exception as error:  # noqa: BLE001  the library's: an experiment's log is not worth a training
            self._failures += 1
            self._is_silent = self._failures >= FAILURES_MAX
            if self._failures == 1 or self._is_silent:
                what = "stops writing" if self._is_silent else "could not write"
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                _log.warning("pacecar %s to %s (%s)", what, self.destination, reason)
        else:
            self._failures = 0

    def listen(self) -> None:
        """Do nothing: a log sends no messages."""

    def close(self) -> None:
        """Do nothing: the writer is the caller's."""


class TensorBoard(RecordQueue):
    """Logs into a `torch.utils.tensorboard.SummaryWriter`, or anything with its `add_scalar` and `add_text`."""

    def __init__(
        self,
        writer: Any,  # noqa: ANN401  no types
        *,
        period_seconds: float = PERIOD_SECONDS,
        every_rank: bool = False,
    ) -> None:
        if not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(f"TensorBoard(writer): a SummaryWriter is needed, not {type(writer).__name__}")
        super().__init__(_Carrier(_TensorBoard(writer), period_seconds, every_rank=every_rank))


class _TensorBoard:
    place = "TensorBoard"

    def __init__(self, writer: Any) -> None:  # noqa: ANN401  no types
        self._writer = writer

    def write(self, entry: MetricEntry) -> None:
        for name, value in entry.scalars.items():
            self._writer.add_scalar(name, value, entry.step, walltime=entry.wall_seconds)
        if entry.event is not None:
            self._writer.add_text("pacecar/events", entry.event, entry.step, walltime=entry.wall_seconds)


class Wandb(RecordQueue):
    """Logs into a `wandb` run, as returned by `wandb.init`, with the script's own rows.

    `own_rows` writes separate rows instead: for scripts that write none, or only with `step=None`.
    """

    def __init__(
        self,
        run: Any,  # noqa: ANN401  no types
        *,
        period_seconds: float = PERIOD_SECONDS,
        every_rank: bool = False,
        own_rows: bool = False,
    ) -> None:
        if not callable(getattr(run, "log", None)):
            raise TypeError(f"Wandb(run): what wandb.init returned is needed, not {type(run).__name__}")
        super().__init__(_Carrier(_Wandb(run, own_rows=own_rows), period_seconds, every_rank=every_rank))


class _Wandb:
    place = "Weights & Biases"

    def __init__(self, run: Any, *, own_rows: bool) -> None:  # noqa: ANN401  no types
        self._run = run
        self._own_rows = own_rows
        self._row: object = None
        self._events: list[str] = []

    def write(self, entry: MetricEntry) -> None:
        row: dict[str, Any] = {**entry.scalars, "pacecar/step": entry.step}
        if entry.event is not None:
            at = self._at()
            if self._own_rows or at != self._row:  # the waiting events are in a row by now
                self._row, self._events = at, []
            # A row has one value for each name, so events that wait for the same row share it.
            self._events = [*self._events, entry.event][-EVENTS_MAX:]
            row["pacecar/event"] = "\n".join(self._events)
        self._run.log(row, commit=self._own_rows)

    def _at(self) -> object:
        """Return the number of the script's next row, which wandb's own process knows."""
        try:
            return self._run.step
        except Exception:  # noqa: BLE001  the library's: a run that several processes share has none
            return None


class Mlflow(RecordQueue):
    """Logs into the MLflow run `run_id`, on the server or folder that MLflow or `client` is set to."""

    def __init__(
        self,
        run_id: str,
        *,
        client: Any = None,  # noqa: ANN401  no types
        period_seconds: float = PERIOD_SECONDS,
        every_rank: bool = False,
    ) -> None:
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric
        except ImportError as error:
            raise ImportError("pacecar.adapters.loggers.Mlflow needs mlflow: pip install mlflow-skinny") from error
        writer = _Mlflow(MlflowClient() if client is None else client, run_id, Metric)
        super().__init__(_Carrier(writer, period_seconds, every_rank=every_rank))


class _Mlflow:
    place = "MLflow"

    def __init__(self, client: Any, run_id: str, metric: Any) -> None:  # noqa: ANN401  no types
        self._client = client
        self._run_id = run_id
        self._metric = metric
        self._events = 0

    def write(self, entry: MetricEntry) -> None:
        at_ms = int(entry.wall_seconds * 1000)
        if entry.scalars:  # one request for all of them
            metrics = [self._metric(name, value, at_ms, entry.step) for name, value in entry.scalars.items()]
            self._client.log_batch(self._run_id, metrics=metrics)
        if entry.event is not None:
            self._events += 1
            tag = f"pacecar.event.{self._events:04d}"
            self._client.set_tag(self._run_id, tag, f"step {entry.step}: {entry.event}"[:TAG_CHARS_MAX])
