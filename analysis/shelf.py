"""Keeps columns in a file without a name once they exceed a room in memory, and reads them as if they were there.

Comparing thousands of ranks goes through their columns one rank after the other, a few times.  So most of them can lie
in a file that is mapped: the kernel keeps what fits and drops the rest, since it can be read again, and the pages of
ranks that were passed are given back.  Nothing else changes: arrays are equal to the bit, but cannot be written.

The file lies in TMPDIR, else /var/tmp (/tmp may be memory itself), and has no name, so that it ends with the process.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = ["Derived", "Shelf", "ShelfError"]

T = TypeVar("T")
U = TypeVar("U")

ROOM_BYTES = 2**28
"""Columns kept in memory before the file is begun: those of some 80 ranks of 20 000 events."""

ARRAY_BYTES_MIN = 4096
"""Smaller arrays stay in memory."""

PASSED_MAX = 32
"""So many values of a sequence are read before the pages of those before are given back."""

FILE_BYTES = 2**32
"""Files are of this size, so that thousands of ranks take few; what is not written takes no room."""

ALIGNMENT = 64


class ShelfError(Exception):
    """The file cannot be written; the message is one line for users."""


class Shelf:
    """Arrays beyond a room in memory lie in a file; not for several threads."""

    def __init__(self) -> None:
        self._room = ROOM_BYTES
        self._file: _File | None = None
        self._in_room = weakref.WeakValueDictionary[int, NDArray[Any]]()

    def put(self, value: T) -> T:
        """Return a copy of `value` whose large arrays are in the file, if the room is used up; else `value` itself.

        Looks into dataclasses, tuples, lists and dicts.  Raises ShelfError if the file cannot be written.
        """
        found = {
            id(array): array
            for array in _arrays(value)
            if array.nbytes >= ARRAY_BYTES_MIN
            and not array.dtype.hasobject
            and _map_of(array) is None
            and self._in_room.get(id(array)) is not array
        }
        size = sum(array.nbytes for array in found.values())
        if size == 0:
            return value
        if self._file is None and size <= self._room:
            self._room -= size
            self._in_room.update(found)
            return value
        copy: T = _with(value, self._written(found, size))
        return copy

    def _written(self, arrays: dict[int, NDArray[Any]], size: int) -> dict[int, NDArray[Any]]:
        """Append arrays to the file, and return them as they are mapped."""
        folder = os.environ.get("TMPDIR") or _VAR_TMP
        size += ALIGNMENT * len(arrays)
        try:
            if self._file is None or self._file.used + size > self._file.bytes:
                self._file = _File(folder, max(size, FILE_BYTES))
            return {key: self._file.append(array) for key, array in arrays.items()}
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            message = f"{folder}: no place for columns that do not fit in memory: {why} (TMPDIR names another folder)"
            raise ShelfError(message) from error

    def keep(self, values: Iterable[T]) -> Sequence[T]:
        """Put all `values`; they are read best in their order."""
        kept = [self.put(value) for value in values]
        return kept if self._file is None else Derived(range(len(kept)), _Reader(kept))


_VAR_TMP = "/var/tmp" if os.access("/var/tmp", os.W_OK) else None


class _File:
    """A file without a name, its pages read through one mapping; it ends with the last array in it."""

    def __init__(self, folder: str | None, size: int) -> None:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            os.truncate(file.fileno(), size)  # takes no room until it is written
            self._number = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._number)
        self.bytes, self.used = size, 0
        self._mapped = mmap.mmap(self._number, size, access=mmap.ACCESS_READ)

    def append(self, array: NDArray[Any]) -> NDArray[Any]:
        begin, left = self.used, np.ascontiguousarray(array).data.cast("B")
        while left:
            written = os.pwrite(self._number, left, self.used)
            self.used, left = self.used + written, left[written:]
        self.used += -self.used % ALIGNMENT
        return np.frombuffer(self._mapped, array.dtype, array.size, begin).reshape(array.shape)


class _Reader(Generic[T]):
    """Reads values of a shelf by their place; the pages of those that were read give way to those of later ones."""

    def __init__(self, values: Sequence[T]) -> None:
        self._values = values
        self._pages = [_pages_of(value) for value in values]
        self._read: set[int] = set()

    def __call__(self, at: int) -> T:
        if len(self._read) >= PASSED_MAX:
            for each in self._read:
                for mapped, begin, end in self._pages[each]:
                    mapped.madvise(mmap.MADV_DONTNEED, begin, end - begin)
            self._read.clear()
        self._read.add(at)
        return self._values[at]


class Derived(Sequence[U]):
    """`function` of each of `values`, made anew whenever one is read."""

    def __init__(self, values: Sequence[T], function: Callable[[T], U]) -> None:
        self._at: Callable[[int], U] = lambda at: function(values[at])
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, at: int) -> U: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[U]: ...

    def __getitem__(self, at: int | slice) -> U | Sequence[U]:
        return [self._at(each) for each in range(len(self))[at]] if isinstance(at, slice) else self._at(at)


def _map_of(array: NDArray[Any]) -> mmap.mmap | None:
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base.obj if isinstance(base, memoryview) and isinstance(base.obj, mmap.mmap) else None


def _parts(value: Any) -> Iterable[object]:  # noqa: ANN401  looks into values of any type
    if is_dataclass(value):
        return [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, dict):
        return value.values()
    if not isinstance(value, (tuple, list)) or not value or isinstance(value[0], (str, msgspec.Struct)):
        return ()
    return value


def _arrays(value: object) -> Iterator[NDArray[Any]]:
    if isinstance(value, np.ndarray):
        yield value
    else:
        for part in _parts(value):
            yield from _arrays(part)


class _Pages(NamedTuple):
    mapped: mmap.mmap
    begin: int
    end: int


def _pages_of(value: object) -> list[_Pages]:
    """Return the pages in which the arrays of a value lie."""
    found: list[_Pages] = []
    for array in {id(array): array for array in _arrays(value)}.values():
        mapped = _map_of(array)
        if mapped is not None:
            begin = array.ctypes.data - np.frombuffer(mapped, np.uint8, 1).ctypes.data
            end, begin = begin + array.nbytes, begin - begin % mmap.PAGESIZE
            if found and found[-1].mapped is mapped and found[-1].begin <= begin <= found[-1].end + mmap.PAGESIZE:
                found[-1] = _Pages(mapped, found[-1].begin, max(end, found[-1].end))
            else:
                found.append(_Pages(mapped, begin, end))
    return found


def _with(value: Any, moved: dict[int, NDArray[Any]]) -> Any:  # noqa: ANN401  of any type, and returned as the same
    if isinstance(value, np.ndarray):
        return moved.get(id(value), value)
    if isinstance(value, dict):
        return {key: _with(part, moved) for key, part in value.items()}
    if is_dataclass(value):
        parts = {field.name: _with(getattr(value, field.name), moved) for field in fields(value) if field.init}
        changed = {name: part for name, part in parts.items() if part is not getattr(value, name)}
        return replace(value, **changed) if changed else value  # type: ignore[type-var]
    if not isinstance(value, (tuple, list)) or _parts(value) == ():
        return value
    items = [_with(part, moved) for part in value]
    if all(one is other for one, other in zip(items, value, strict=True)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
