"""How do pace, ledger and decisions get into the experiment's own log?  `attach(..., loggers=[TensorBoard(writer)])`.

    TensorBoard(SummaryWriter("runs/x"))       scalars; events as text
    Wandb(wandb.init(...))                     scalars and events in the run's rows, without steps of their own
    Mlflow(run_id)                             metrics; events as tags

Give them on rank 0, or each rank one of its own.  What the caller opened stays his: nothing here closes a writer or a
run.  Libraries write to disks and servers, so it is done on a thread with a bounded queue (`Courier`); one that
raises ends its own logging with one line and nothing else.

The obvious call for Weights & Biases, `run.log`, would begin a new row and so count the caller's steps up; with
`commit=False` what we say waits for the row that he writes next.  His steps stay his.

Left out: what is logged (`journal`); OpenTelemetry, which is the daemon's.
"""

from __future__ import annotations

from typing import Any, Protocol

from pacecar.adapters.journal import PERIOD_SECONDS, Entry, Journal
from pacecar.profiler.courier import Courier
from pacecar.records import Answer, JobRecord

__all__ = ["Mlflow", "TensorBoard", "Wandb"]

TAG_CHARS_MAX = 500
"""MLflow's servers refuse longer values of tags in some versions."""


class _Writer(Protocol):
    """One library: where an entry goes."""

    @property
    def place(self) -> str: ...

    def write(self, entry: Entry) -> None: ...


class _Carrier:
    def __init__(self, writer: _Writer, period_seconds: float) -> None:
        self._writer = writer
        self._journal = Journal(period_seconds)

    @property
    def destination(self) -> str:
        return self._writer.place

    def deliver(self, record: JobRecord | Answer, timeout_seconds: float) -> None:
        entry = None if isinstance(record, Answer) else self._journal.take(record)
        if entry is not None:
            self._writer.write(entry)

    def listen(self) -> None:
        """A log says nothing."""

    def close(self) -> None:
        """The writer is the caller's."""


class TensorBoard(Courier):
    """Logs into a `torch.utils.tensorboard.SummaryWriter`, or what has its `add_scalar` and `add_text`."""

    def __init__(self, writer: Any, *, period_seconds: float = PERIOD_SECONDS) -> None:  # noqa: ANN401  no types
        if not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(f"TensorBoard(writer): a SummaryWriter is needed, not {type(writer).__name__}")
        super().__init__(_Carrier(_TensorBoard(writer), period_seconds))


class _TensorBoard:
    place = "TensorBoard"

    def __init__(self, writer: Any) -> None:  # noqa: ANN401  no types
        self._writer = writer

    def write(self, entry: Entry) -> None:
        for name, value in entry.scalars.items():
            self._writer.add_scalar(name, value, entry.step, walltime=entry.wall_seconds)
        if entry.event is not None:
            self._writer.add_text("pacecar/events", entry.event, entry.step, walltime=entry.wall_seconds)


class Wandb(Courier):
    """Logs into a `wandb` run, the one that `wandb.init` returned."""

    def __init__(self, run: Any, *, period_seconds: float = PERIOD_SECONDS) -> None:  # noqa: ANN401  no types
        if not callable(getattr(run, "log", None)):
            raise TypeError(f"Wandb(run): what wandb.init returned is needed, not {type(run).__name__}")
        super().__init__(_Carrier(_Wandb(run), period_seconds))


class _Wandb:
    place = "Weights & Biases"

    def __init__(self, run: Any) -> None:  # noqa: ANN401  no types
        self._run = run

    def write(self, entry: Entry) -> None:
        row: dict[str, Any] = {**entry.scalars, "pacecar/step": entry.step}
        if entry.event is not None:
            row["pacecar/event"] = entry.event
        self._run.log(row, commit=False)


class Mlflow(Courier):
    """Logs into the MLflow run `run_id`, on the server or folder that MLflow is set to, or on `client`'s."""

    def __init__(self, run_id: str, *, client: Any = None, period_seconds: float = PERIOD_SECONDS) -> None:  # noqa: ANN401
        if client is None:
            try:
                from mlflow import MlflowClient
            except ImportError as error:
                raise ImportError("pacecar.adapters.loggers.Mlflow needs mlflow: pip install mlflow-skinny") from error
            client = MlflowClient()
        super().__init__(_Carrier(_Mlflow(client, run_id), period_seconds))


class _Mlflow:
    place = "MLflow"

    def __init__(self, client: Any, run_id: str) -> None:  # noqa: ANN401  no types
        self._client = client
        self._run_id = run_id
        self._events = 0

    def write(self, entry: Entry) -> None:
        at_ms = int(entry.wall_seconds * 1000)
        for name, value in entry.scalars.items():
            self._client.log_metric(self._run_id, name, value, timestamp=at_ms, step=entry.step)
        if entry.event is not None:
            self._events += 1
            tag = f"pacecar.event.{self._events:04d}"
            self._client.set_tag(self._run_id, tag, f"step {entry.step}: {entry.event}"[:TAG_CHARS_MAX])
