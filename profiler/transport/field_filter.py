"""Removes from a record the fields that its reader would reject.

A daemon rejects a record with any field out of range (`pacecar.records.ranges`), and a reader of a run folder skips its
line.  So one impossible figure, from a clock set back or FLOPs beyond 64 bits, would cost all others in the record.
Therefore each record is decoded once before it leaves, as its reader will do.  An optional field that is out of range
is removed, text that is too long is cut, and a record that cannot be repaired this way is not sent.  This is logged
once per kind of record and field.

It runs on the delivering thread, never on the step path; a valid record costs one encoding and one decoding in C.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import msgspec
from msgspec import inspect

from pacecar.records import Answer, JobRecord

__all__ = ["FieldFilter"]

MENDS_MAX = 8
"""The most fields repaired in one record; a record with more is not worth sending."""

_FIELD = re.compile(r"\$\.(\w+)")
"""The record's own field in a path named by msgspec: `$.memory.allocated_bytes`."""

_CUT = "..."

_log = logging.getLogger(__name__)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(JobRecord | Answer)


class FieldFilter:
    """Makes records valid for their readers.  One thread at a time."""

    def __init__(self, destination: str) -> None:
        """`destination` names the readers in a log line."""
        self._destination = destination
        self._said: set[tuple[str, str]] = set()

    def make(self, record: JobRecord | Answer) -> JobRecord | Answer | None:
        """Return `record`, or a copy without what is out of range; None if it cannot be repaired."""
        for _ in range(MENDS_MAX):
            try:
                _decoder.decode(_encoder.encode(record))
            except (msgspec.ValidationError, OverflowError, UnicodeEncodeError, TypeError) as error:
                mended = self._mend(record, error)
                if mended is None:
                    return None
                record = mended
            else:
                return record
        return None

    def _mend(self, record: JobRecord | Answer, error: Exception) -> JobRecord | Answer | None:
        field = self._culprit(record, error)
        kind = type(record).__name__
        value: Any = None if field is None else getattr(record, field)
        if field is None:
            self._say(kind, "", "pacecar does not send a %s to %s: %s", kind, self._destination, error)
            return None
        if isinstance(value, str):
            replacement: Any = self._cut(record, field, value)
        elif _is_optional(type(record), field):
            replacement = None
        else:
            self._say(kind, field, "pacecar does not send a %s to %s: %s: %s", kind, self._destination, field, error)
            return None
        how = "leaves out" if replacement is None else "cuts"
        self._say(kind, field, "pacecar %s %s of a %s for %s: %s", how, field, kind, self._destination, error)
        return msgspec.structs.replace(record, **{field: replacement})

    @staticmethod
    def _culprit(record: JobRecord | Answer, error: Exception) -> str | None:
        """Return the field that caused the error; None if the error does not name it."""
        if isinstance(error, msgspec.ValidationError):
            found = _FIELD.search(str(error))
            return None if found is None else found[1]
        for field in record.__struct_fields__:
            try:
                _encoder.encode(getattr(record, field))
            except (OverflowError, UnicodeEncodeError, TypeError):
                return field
        return None

    @staticmethod
    def _cut(record: JobRecord | Answer, field: str, text: str) -> str:
        text = text.encode("utf-8", "replace").decode()
        limits = [one.max_length for one in _types(type(record), field) if isinstance(one, inspect.StrType)]
        limit = min((limit for limit in limits if limit is not None), default=len(text))
        return text if len(text) <= limit else text[: limit - len(_CUT)] + _CUT

    def _say(self, kind: str, field: str, message: str, *arguments: object) -> None:
        if (kind, field) not in self._said:
            self._said.add((kind, field))
            _log.warning(message, *arguments)


def _types(kind: type, field: str) -> tuple[inspect.Type, ...]:
    """Return the types that `field` of the record `kind` may have."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType), "a record is a struct"
    (found,) = [one.type for one in info.fields if one.name == field]
    return found.types if isinstance(found, inspect.UnionType) else (found,)


def _is_optional(kind: type, field: str) -> bool:
    return any(isinstance(one, inspect.NoneType) for one in _types(kind, field))
