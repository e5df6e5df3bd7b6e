"""Reads traces on the workers of an existing dask cluster, for more files than one machine can hold.

The cluster must exist (`dask scheduler` and `dask worker`, or one from dask-jobqueue, dask-kubernetes or Coiled), its
workers must see the files under the same paths, or open their URLs, and have `pacecar[analyze]` installed.  Each file
is a task with the same result as in a local process.

Left out: the comparison of ranks, which needs all columns in one place and happens in this process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from importlib.util import find_spec
from typing import Any

from ..trace.columns import TraceWarning
from .kept_answers import decode_answer, read_encoded
from .one_file import EngineError, FileTask, WorkerAnswer
from .trace_paths import printable

__all__ = ["run_on_cluster"]

CONNECT_SECONDS_MAX = 10.0
"""How long the scheduler may take to answer, and a first worker to connect."""


def run_on_cluster(tasks: Sequence[FileTask], address: str) -> Iterator[tuple[int, WorkerAnswer]]:
    """Yield each task's index and answer as they arrive.  Raises EngineError without a working cluster."""
    if find_spec("distributed") is None:
        raise EngineError("--engine dask needs dask's distributed: pip install 'pacecar[dask]'")
    client = _connect(address)
    try:
        # Not pure: the path may hold another file tomorrow, and dask would return today's answer.
        futures = {client.submit(read_encoded, task, pure=False): index for index, task in enumerate(tasks)}
        from distributed import as_completed

        for future in as_completed(list(futures), loop=client.loop):
            index = futures.pop(future)
            yield index, _answer(future, tasks[index])
            future.release()
    finally:
        client.close()


def _connect(address: str) -> Any:  # noqa: ANN401  distributed is not typed
    from distributed import Client
    from distributed.comm import parse_address, parse_host_port

    try:
        scheme, place = parse_address(address)
        if scheme in ("tcp", "tls"):
            parse_host_port(place)  # a client that fails on it takes 20 s to give up and prints a traceback
        client = Client(address, timeout=CONNECT_SECONDS_MAX, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise EngineError(f"{address}: no dask scheduler answers there ({_first_line(error)})") from error
    try:
        client.wait_for_workers(1, timeout=CONNECT_SECONDS_MAX)
    except TimeoutError as error:
        client.close()
        raise EngineError(f"{address}: the dask scheduler has no workers") from error
    return client


def _answer(future: Any, task: FileTask) -> WorkerAnswer:  # noqa: ANN401
    error = future.exception()
    if error is None:
        try:
            answer: WorkerAnswer | bytes = future.result()
        except (CancelledError, OSError) as gone:
            raise EngineError(f"the dask scheduler is gone: {_first_line(gone)}") from gone
        try:
            return decode_answer(answer) if isinstance(answer, bytes) else answer
        except ValueError as other:
            raise EngineError(f"the dask workers have another version of pacecar than this one ({other})") from other
    if type(error).__name__ == "KilledWorker":
        how = "the dask workers that read it died"
    elif isinstance(error, ImportError):
        raise EngineError(f"the dask workers cannot import pacecar: pip install 'pacecar[analyze]' there ({error})")
    else:
        how = f"failed on a dask worker: {_first_line(error)}"
    return WorkerAnswer(error=TraceWarning("worker_died", f"{printable(task.path)}: {how}"))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
