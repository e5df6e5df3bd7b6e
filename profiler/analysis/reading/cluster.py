"""Reads traces on the workers of an existing dask cluster, for more files than one machine can hold.

Nothing is started here.  The cluster is there already (`dask scheduler` and `dask worker`, or one from dask-jobqueue,
dask-kubernetes, Coiled), its workers see the files under the same paths, and pacecar with its extra `analyze` is
installed on them.  Each file is a task; its result is what a local process would have sent back.

Left out: who stores the files, and the comparison of ranks, which needs all columns in one place and happens here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from ...trace.columns import TraceWarning
from .one_file import EngineError, FileTask, WorkerAnswer, read_one

__all__ = ["run_on_cluster"]

CONNECT_SECONDS_MAX = 10.0
"""How long the scheduler may take to answer, and again how long a first worker may take to be there."""


def run_on_cluster(tasks: Sequence[FileTask], address: str) -> Iterator[tuple[int, WorkerAnswer]]:
    """Yield each task's index and answer as they come.  Raises EngineError when there is no cluster to work on."""
    if find_spec("distributed") is None:
        raise EngineError("--engine dask needs dask's distributed: pip install 'pacecar[dask]'")
    client = _connect(address)
    try:
        # Not pure: the same path may hold another file tomorrow, and dask would remember today's answer.
        futures = {client.submit(read_one, task, pure=False): index for index, task in enumerate(tasks)}
        from distributed import as_completed

        for future in as_completed(list(futures), loop=client.loop):
            index = futures.pop(future)
            yield index, _answer(future, tasks[index])
            future.release()
    finally:
        client.close()


def _connect(address: str) -> Any:  # noqa: ANN401  distributed is not typed
    from distributed import Client

    try:
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
        answer: WorkerAnswer = future.result()
        return answer
    if type(error).__name__ == "KilledWorker":
        return WorkerAnswer(error=TraceWarning("worker_died", f"{task.path}: the dask workers that read it died"))
    if isinstance(error, ImportError):
        raise EngineError(f"the dask workers cannot import pacecar: pip install 'pacecar[analyze]' there ({error})")
    return WorkerAnswer(
        error=TraceWarning("worker_died", f"{task.path}: failed on a dask worker: {_first_line(error)}")
    )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
