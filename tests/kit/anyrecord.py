"""Make records of any type with values drawn from the ranges of their fields, the bounds above all.

The types say themselves what is allowed (msgspec's introspection), so a new record or field is drawn without a word
here.  Where the numbers come from is a `Source`: `random` for a million of them, hypothesis where a failure should be
made small.
"""

from __future__ import annotations

import functools
import random
import string
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, get_args

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from pacecar.knobs import by_name
from pacecar.records import PHASES_OF_JOBS, JobHello, JobRecord, Rung
from pacecar.records.measurements.collectives import OPERATIONS
from pacecar.records.measurements.device_utilization import ARITHMETICS
from pacecar.records.measurements.ledger import LEDGER_HEADINGS, Ledger
from pacecar.records.measurements.what_if import RUNG_NAMES
from pacecar.records.ranges import INT64_MAX

__all__ = ["JOB_RECORDS", "Drawn", "Rolled", "Source", "make", "mutated"]

T = TypeVar("T")

CLOSED: dict[str, Sequence[str]] = {
    "knob": sorted(by_name), "values": sorted(by_name), "total_phases_ns": PHASES_OF_JOBS,
    "operation": sorted(OPERATIONS), "arithmetic": sorted(ARITHMETICS),
}  # fmt: skip
"""Field -> what its value, or its keys, may be."""

JOB_RECORDS: tuple[type, ...] = tuple(kind for kind in get_args(JobRecord) if kind is not JobHello)
"""Everything that a hook sends after its hello."""


class Source(Protocol):
    """Where choices come from."""

    def integer(self, low: int, high: int) -> int:
        """Return a whole number in the closed range."""
        ...

    def real(self, low: float, high: float) -> float:
        """Return a number in the closed range."""
        ...

    def pick(self, among: Sequence[T]) -> T:
        """Return one of `among`."""
        ...


class Rolled:
    """A source that is fast."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self.chance.randint(low, high)

    def real(self, low: float, high: float) -> float:
        return min(high, max(low, low + (high - low) * self.chance.random()))

    def pick(self, among: Sequence[T]) -> T:
        return self.chance.choice(among)


class Drawn:
    """A source that hypothesis can make smaller."""

    def __init__(self, draw: Callable[..., Any]) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        return int(self._draw(st.integers(low, high)))

    def real(self, low: float, high: float) -> float:
        return float(self._draw(st.floats(low, high)))

    def pick(self, among: Sequence[T]) -> T:
        return among[self._draw(st.integers(0, len(among) - 1))]


def make(kind: type, source: Source, **given: Any) -> dict[str, Any]:
    """Return a valid record of type `kind` as a dict of plain values; `given` are fields that are not drawn."""
    if kind is Ledger:
        return _ledger(source)
    if kind is JobHello:
        given = {
            "launch": source.pick(["", "3f2a9c01d4e5b678"]),
            **given,
        }  # not any text: `pacecar.records.job_identity.LAUNCH`
    info = _described(kind)
    fields = {f.encode_name: given.get(f.name) if f.name in given else _value(f.type, source) for f in info.fields}
    _name(kind, fields, source)
    if info.array_like:
        raise AssertionError("no record is an array")
    return fields if info.tag is None else {info.tag_field: info.tag, **fields}


def _name(kind: type, fields: dict[str, Any], source: Source) -> None:
    """Take labels that name a kind of thing from their closed sets, which the daemon checks beside the types."""
    closed = CLOSED | ({"name": sorted(RUNG_NAMES)} if kind is Rung else {})
    for field in sorted(fields.keys() & closed.keys()):
        value = fields[field]
        if isinstance(value, str):
            fields[field] = source.pick(closed[field])
        elif isinstance(value, dict):
            fields[field] = {source.pick(closed[field]): one for one in value.values()}


@functools.cache
def _described(kind: type) -> inspect.StructType:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType), "a record is a struct"
    return info


def _value(kind: inspect.Type, source: Source) -> Any:
    match kind:
        case inspect.UnionType():
            return _value(source.pick(kind.types), source)
        case inspect.NoneType():
            return None
        case inspect.BoolType():
            return source.pick([False, True])
        case inspect.IntType():
            low, high = kind.ge, kind.le
            assert isinstance(low, int), "an integer without a range"
            assert isinstance(high, int), "an integer without a range"
            edges = [low, high, low + 1, high - 1, max(low, min(0, high))]
            return source.pick(edges) if source.integer(0, 1) else source.integer(low, high)
        case inspect.FloatType():
            low, high = kind.ge, kind.le
            assert low is not None, "a number without a range"
            assert high is not None, "a number without a range"
            edges = [low, high, max(low, min(0.0, high)), max(low, min(5e-324, high)), max(low, min(1, high))]
            return source.pick(edges) if source.integer(0, 1) else source.real(low, high)
        case inspect.StrType():
            assert kind.max_length is not None, "text without a bound"
            return _text(kind.max_length, source)
        case inspect.EnumType():
            return source.pick([one.value for one in kind.cls])
        case inspect.LiteralType():
            return source.pick(kind.values)
        case inspect.DictType():
            count = source.integer(0, min(3, kind.max_length or 0))
            return {_value(kind.key_type, source): _value(kind.value_type, source) for _ in range(count)}
        case inspect.VarTupleType():
            return [_value(kind.item_type, source) for _ in range(source.integer(0, min(3, kind.max_length or 0)))]
        case inspect.StructType():
            return make(kind.cls, source)
    raise AssertionError(f"no values of {kind} are known")


def _text(most: int, source: Source) -> str:
    how = source.integer(0, 5)
    if how == 0:
        return source.pick(["x", "é", "\U0001f600"]) * most
    if how == 1:
        return source.pick(["", '"', "\\", "\n", "\0", "a\r\nb", "{}", "\u202e", "# EOF\n", 'x"} 1\ny{z="'])[:most]
    return "".join(source.pick(string.printable) for _ in range(source.integer(0, 5)))


def _ledger(source: Source, wall_ns: int | None = None) -> dict[str, Any]:
    wall = source.pick([0, 1, INT64_MAX, source.integer(0, INT64_MAX)]) if wall_ns is None else wall_ns
    left, parts = wall, {}
    for heading in LEDGER_HEADINGS[:-1]:
        parts[heading] = source.pick([0, left, source.integer(0, left)])
        left -= parts[heading]
    parts[LEDGER_HEADINGS[-1]] = left
    exposed = parts["exposed_communication"]
    overlapped = source.integer(0, INT64_MAX - exposed)
    fields = {f"{heading}_ns": value for heading, value in parts.items()}
    return {
        "wall_ns": wall, **fields,
        "communication_ns": exposed + overlapped, "overlapped_communication_ns": overlapped,
    }  # fmt: skip


ODD: tuple[Any, ...] = (
    float("nan"), float("inf"), -float("inf"), -1, 0, -0.0, 0.4, 2**63, 2**64 - 1, -(2**63), 1e400, 5e-324, None, True,
    "", "x" * 5000, [], {}, [[[[[]]]]], {"a": {"b": {}}}, b"\xff", "NaN", msgspec.msgpack.Ext(1, b""),
)  # fmt: skip
"""What no field should hold, or one should and others not."""


def mutated(record: dict[str, Any], source: Source) -> dict[str, Any]:
    """Return `record` with one value, at any depth, that may not be allowed there."""
    names = list(record)
    name = source.pick(names)
    value = record[name]
    if isinstance(value, dict) and value and source.integer(0, 1):
        return {**record, name: mutated(value, source)}
    if isinstance(value, list) and value and isinstance(value[0], dict) and source.integer(0, 1):
        return {**record, name: [mutated(value[0], source), *value[1:]]}
    return {**record, name: source.pick(ODD)}
