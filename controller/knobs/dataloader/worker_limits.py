"""Computes how many worker processes fit on this machine, and whether several may read a dataset at all.

"As many as there are cores" ignores that the ranks of a node share them, that batches travel through /dev/shm (64 MiB
in a container by default; a worker that writes past its end dies of SIGBUS), and that each worker keeps a copy of what
it touches.  So the numbers come from this machine: cores, shared memory, available memory and what the present workers
hold, each divided by the ranks of the node.

A dataset that only one process has ever read may not support two: an open file has one position for all readers; a lock
may be held while the process forks.  Such objects cannot be pickled.  So the dataset is walked as pickle would, without
writing anything, and the first object that cannot be shared is named.

Ignored: what the workers' reads do to a file server, and container limits other than cgroup v2.
"""

from __future__ import annotations

import os
import pickle
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from pacecar.kernel_files.cgroups import parse_memory_limit
from pacecar.kernel_files.memory import rows_bytes
from pacecar.kernel_files.reader import KernelFiles, whole

__all__ = ["WorkerRoom", "available_bytes", "entangled", "read_room", "workers_max"]

SHARE_MAX = 0.5
"""Share of the free shared memory and of the available memory that all workers of a node may take."""

WORKER_BYTES_PRIOR = 256 * 2**20
"""Memory that a worker is assumed to take if none runs yet: torch, and the parent's pages that it writes."""

WORKERS_FLOOR = 4
"""Workers offered on any machine: those that only wait, for a disk or a network, need no core."""

WORKERS_PER_CORE = 2

WALK_BYTES_MAX = 16 * 2**20
"""A dataset is walked up to this many bytes of pickle (about 0.1 s); a larger one counts as not shareable."""

HANDLES = frozenset({"h5py", "lmdb", "sqlite3", "_io", "socket"})
"""Modules whose objects hold a position or a connection."""


@dataclass(frozen=True, slots=True)
class WorkerRoom:
    """What this machine has for one rank's workers; None: unknown, and no limit."""

    cores: int
    shared_bytes: int | None
    memory_bytes: int | None
    worker_bytes: int | None
    ranks: int = 1


def read_room(
    pids: Sequence[int], *, environ: Mapping[str, str] = os.environ, root: Path = Path("/"), shm: str = "/dev/shm"
) -> WorkerRoom:
    """Return what is available now; `pids` are this rank's workers, whose own memory is read."""
    ranks = environ.get("LOCAL_WORLD_SIZE", "")
    try:
        stat = os.statvfs(shm)
        shared: int | None = stat.f_bavail * stat.f_frsize
    except OSError:
        shared = None
    files = KernelFiles(root / "proc", root / "sys")
    own = [size for pid in pids if (size := _private_bytes(files, pid)) is not None]
    return WorkerRoom(
        cores=len(os.sched_getaffinity(0)),
        shared_bytes=shared,
        memory_bytes=available_bytes(files),
        worker_bytes=max(own, default=None),
        ranks=max(1, int(ranks)) if ranks.isdecimal() else 1,
    )


def available_bytes(files: KernelFiles) -> int | None:
    """Return the memory that this process could still take, by the machine's and its cgroup's counts; None: unknown."""
    available = _rows_bytes(files, files.proc / "meminfo", "MemAvailable")
    return min((size for size in (available, _cgroup_bytes(files)) if size is not None), default=None)


def workers_max(room: WorkerRoom, *, present: int, prefetch: int, batch_bytes: int | None) -> int:
    """Return the largest number of workers that fits, at least `present`, with `prefetch` batches ready in each."""
    ceiling = max(WORKERS_FLOOR, WORKERS_PER_CORE * room.cores // room.ranks)
    more: list[int] = []
    if room.memory_bytes is not None:
        each = (WORKER_BYTES_PRIOR if room.worker_bytes is None else room.worker_bytes) + prefetch * (batch_bytes or 0)
        more.append(int(SHARE_MAX * room.memory_bytes / room.ranks) // max(1, each))
    if room.shared_bytes is not None and batch_bytes:
        more.append(int(SHARE_MAX * room.shared_bytes / room.ranks) // (prefetch * batch_bytes))
    return max(present, min([ceiling, *(present + m for m in more)]))


def entangled(*parts: object) -> str | None:
    """Return what in `parts` several processes must not use at once, or None."""
    walk = _Walk(_Sink())
    try:
        walk.dump(parts)
    except _Found as found:
        return str(found)
    except Exception as error:  # noqa: BLE001  an object that cannot be walked may not be shareable
        return f"it holds something that cannot be checked ({type(error).__name__}: {str(error)[:80]})"
    return None


class _Found(Exception):  # noqa: N818  it carries the answer
    pass


class _Sink:
    def __init__(self) -> None:
        self._written = 0

    def write(self, data: Any) -> int:  # noqa: ANN401  bytes-like
        self._written += len(data)
        if self._written > WALK_BYTES_MAX:
            raise _Found(f"it is too large to check (over {WALK_BYTES_MAX >> 20} MiB)")
        return len(data)


class _Walk(pickle.Pickler):
    """Visits what pickle would, and gives up at the first object that must not be shared."""

    def persistent_id(self, obj: object) -> object:
        """Skip what is harmless and large: values of tensors and arrays, and code."""
        if isinstance(obj, torch.Tensor):
            if obj.device.type != "cpu":
                raise _Found(f"it holds a tensor on {obj.device}, which a worker process cannot read")
            return 0
        if isinstance(obj, types.FunctionType):
            for cell in obj.__closure__ or ():
                self._into(cell)
            return 0
        if isinstance(obj, type | types.ModuleType | types.BuiltinFunctionType | bytes | bytearray | torch.Generator):
            return 0
        if type(obj).__module__ == "numpy" and type(obj).__name__ in ("ndarray", "memmap"):
            if str(getattr(obj, "dtype", "object")) != "object":
                return 0
        elif callable(getattr(obj, "fileno", None)) or callable(getattr(obj, "cursor", None)):
            _refuse(obj)
        return None

    def reducer_override(self, obj: Any) -> Any:  # noqa: ANN401  pickle's protocol
        """Name what pickle cannot copy: it belongs to this process.

        Pickle does not copy a handle that `__getstate__` omits, but fork shares it all the same.
        """
        for inside in getattr(obj, "__dict__", {}).values():
            if callable(getattr(inside, "fileno", None)) or type(inside).__module__.partition(".")[0] in HANDLES:
                _refuse(inside)
        try:
            obj.__reduce_ex__(4)
        except Exception:  # noqa: BLE001  locks, handles and generators raise different errors
            _refuse(obj)
        return NotImplemented

    def _into(self, cell: types.CellType) -> None:
        try:
            inside = cell.cell_contents
        except ValueError:  # empty
            return
        if callable(getattr(inside, "fileno", None)):
            _refuse(inside)


def _refuse(obj: object) -> NoReturn:
    kind = type(obj)
    raise _Found(f"it holds a {kind.__module__}.{kind.__qualname__}, which processes must not share")


def _private_bytes(files: KernelFiles, pid: int) -> int | None:
    return _rows_bytes(files, files.proc / str(pid) / "smaps_rollup", "Private_Clean", "Private_Dirty")


def _rows_bytes(files: KernelFiles, path: Path, *keys: str) -> int | None:
    text = files.text(path)
    with suppress(ValueError):
        return None if text is None else rows_bytes(text, *keys)
    return None


def _cgroup_bytes(files: KernelFiles) -> int | None:
    """Return what this process's cgroup (v2, as a container sees its own) may still take; None without a limit."""
    group = files.sys / "fs" / "cgroup"
    try:
        limit, used = files.read(group / "memory.max").strip(), files.read(group / "memory.current").strip()
        allowed = parse_memory_limit(limit)
        return None if allowed is None else max(0, allowed - whole(used))
    except (OSError, ValueError):
        return None
