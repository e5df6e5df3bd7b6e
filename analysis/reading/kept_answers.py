"""Encodes what a file's analysis gave, to send it from a worker or to keep it, and keeps it in a folder (`--cache`).

Nothing is rounded: the ranks compared from these bytes give the same document.  Columns are differences whose bytes lie
by significance, because most high bytes are zero; a rank then takes a tenth of its columns.

An answer is found again by its file's path, size and time of change (for URLs the store's version), the options, and
pacecar's version.  One that cannot be decoded is read anew.

Left out: answers with tables, and those without a report, whose reason may have gone.
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from pacecar.safe_files import FOLDER_MODE, replacing

from ..document.report import TraceReport
from ..trace import columns
from ..trace.columns import DeviceRows, HostRows, SyncRows, Trace
from ..trace.decoding.remote_file import Url
from .one_file import FileTask, WorkerAnswer, read_one

__all__ = ["AnswerCache", "decode_answer", "encode_answer", "read_encoded"]

FORMAT = 1
"""Changes with what `encode_answer` writes."""

_ROWS: dict[str, type[Any]] = {"device": DeviceRows, "host_rows": HostRows, "syncs": SyncRows}
_HINTS = get_type_hints(Trace, vars(columns) | {"TraceDetails": object})
_Header = msgspec.defstruct(
    "_Header", [(field.name, _HINTS[field.name]) for field in fields(Trace) if field.name not in (*_ROWS, "details")]
)


class _Kept(msgspec.Struct, array_like=True):
    report: TraceReport
    header: bytes | None
    groups: list[tuple[int, ...]]
    """The ranks of collectives, each set once: otherwise a rank's bytes and memory would grow with the job."""
    rows: dict[str, dict[str, bytes]]


@cache
def _decoders() -> tuple[msgspec.msgpack.Decoder[_Kept], msgspec.msgpack.Decoder[Any]]:
    return msgspec.msgpack.Decoder(_Kept), msgspec.msgpack.Decoder(_Header)


def encode_answer(answer: WorkerAnswer) -> bytes | None:
    """Return the bytes of an answer, None if it has no report, or tables."""
    trace = answer.table
    if answer.report is None or answer.report.tables is not None or (trace is not None and trace.details is not None):
        return None
    header, rows, groups = None, {}, dict[tuple[int, ...], int]()
    if trace is not None:
        plain = {each: getattr(trace, each) for each in _Header.__struct_fields__}
        plain["collectives"] = [
            each if each.ranks is None else replace(each, ranks=(groups.setdefault(each.ranks, len(groups)),))
            for each in trace.collectives
        ]
        header = msgspec.msgpack.encode(plain)
        rows = {each: _packed(getattr(trace, each)) for each in _ROWS}
    return zlib.compress(msgspec.msgpack.encode(_Kept(answer.report, header, list(groups), rows)), 1)


def decode_answer(data: bytes) -> WorkerAnswer:
    """Return the answer.  Raises ValueError if `data` is not from `encode_answer`."""
    kept_decoder, header_decoder = _decoders()
    try:
        kept = kept_decoder.decode(zlib.decompress(data))
        if kept.header is None:
            return WorkerAnswer(report=kept.report)
        header = header_decoder.decode(kept.header)
        rows = {each: _unpacked(kind, kept.rows[each]) for each, kind in _ROWS.items()}
        header.collectives = tuple(
            each if each.ranks is None else replace(each, ranks=kept.groups[each.ranks[0]])
            for each in header.collectives
        )
    except (zlib.error, msgspec.MsgspecError, LookupError, TypeError) as error:
        raise ValueError(f"not an answer that was kept: {error}") from error
    return WorkerAnswer(report=kept.report, table=Trace(**msgspec.structs.asdict(header), **rows))


def _packed(rows: Any) -> dict[str, bytes]:  # noqa: ANN401  one of three dataclasses of columns
    found = {}
    for each in fields(rows):
        values: NDArray[np.int64] = getattr(rows, each.name).astype(np.int64)
        found[each.name] = np.diff(values, prepend=0).view(np.uint8).reshape(-1, 8).T.tobytes()
    return found


def _unpacked(kind: type[Any], parts: dict[str, bytes]) -> Any:  # noqa: ANN401
    found = {}
    for each, hint in get_type_hints(kind).items():
        planes = np.frombuffer(parts[each], dtype=np.uint8)
        values = np.ascontiguousarray(planes.reshape(8, -1).T).view(np.int64).reshape(-1).cumsum()
        found[each] = values.astype(hint.__args__[1].__args__[0])
    return kind(**found)


def read_encoded(task: FileTask) -> WorkerAnswer | bytes:
    """Return a file's answer, encoded if that is possible; runs on a worker."""
    answer = read_one(task)
    return encode_answer(answer) or answer


class AnswerCache:
    """Answers of earlier runs of pacecar's `version` in `folder`, which is made with the first one.

    `failed` is why one could not be kept.
    """

    def __init__(self, folder: Path, version: str) -> None:
        self._folder = folder
        self._version = version
        self._paths: dict[FileTask, Path | None] = {}
        self.failed: str | None = None

    def get(self, task: FileTask) -> WorkerAnswer | None:
        """Return the answer for a task, None if there is none; to be called before its file is read."""
        path = self._paths[task] = self._path(task)
        if path is None:
            return None
        try:
            return decode_answer(path.read_bytes())
        except (OSError, ValueError):
            return None

    def keep(self, task: FileTask, answer: WorkerAnswer) -> None:
        """Write an answer, as that of what the file was before: it may have grown while it was read.

        A folder that cannot be written is said once, in `failed`.
        """
        path = self._paths[task]
        if path is None or self.failed is not None or (data := encode_answer(answer)) is None:
            return
        try:
            with replacing(path, make_mode=FOLDER_MODE) as file:
                file.write(data)
        except OSError as error:
            self.failed = f"{self._folder}: nothing is kept: {(error.strerror or str(error)).lower()}"

    def _path(self, task: FileTask) -> Path | None:
        """Return where a task's answer is; None if its content is not known without reading, or it has tables."""
        mark = _content(task)
        if mark is None or task.makes_tables:
            return None
        key = (self._version, FORMAT, str(task.path), mark, task.window, task.steps, task.returns_table)
        return self._folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.answer"


def _content(task: FileTask) -> tuple[int, str] | None:
    if isinstance(task.path, Url):
        return (task.path.size, task.path.version) if task.path.version else None
    try:
        status = task.path.stat()
    except OSError:
        return None
    return (status.st_size, str(status.st_mtime_ns)) if status.st_size else None
