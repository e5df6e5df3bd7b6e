"""Reads one dump of torch's flight recorder, JSON or pickle, into a `RankAccount`.

The pickles are those of NCCL's watchdog (`_dump_nccl_trace`), the JSON that of `_dump_fr_trace_json`; both have the
same fields (torch/csrc/distributed/c10d/FlightRecorder.hpp).  What is not obvious about them:

- `pg_status` is keyed by a number that counts the groups of this process, `pg_config` by the group's name.  Entries
  have both.  The names of other groups follow from their order, since torch numbers groups in the order of creation.
- gloo calls its entries "scheduled" for good; those that are finished are `retired`.  It also leaves `pg_config` empty
  and does not record sends and receives.
- `last_completed_collective` of gloo may stay one behind, since two threads write it (seen in 2 of 9 dumps of torch
  2.13).  So a collective is finished if its entry or the counter says so.
- NCCL's counters are those of the latest call, and sends and receives have a numbering of their own.  In a group with
  sends and receives the counters are read from the entries.
- The sends and receives of a batch never finish on their own; the "coalesced" entry with their number does.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import msgspec

from pacecar.formatting.plain_text import clean
from pacecar.records.hangs import CALLS_MAX, GROUPS_MAX, CallOrder, CollectiveCall, GroupState, RankAccount
from pacecar.records.ranges import COUNT_MAX, INT64_MAX, LABEL_CHARACTERS_MAX, LIST_MAX

from .call_order import Called, call_order

__all__ = ["DumpError", "read_dump"]

ENTRIES_MAX = 1_000_000
"""Entries of one dump; torch keeps 2000 unless TORCH_FR_BUFFER_SIZE says otherwise."""

TENSORS_MAX = 16
DIMENSIONS_MAX = 8
"""Sizes kept of one call; a coalesced one lists hundreds of tensors."""

SIZES_CHARACTERS_MAX = 400


class DumpError(ValueError):
    """The bytes are not a dump that can be read; the message says why."""


class _PlainUnpickler(pickle.Unpickler):
    """Makes numbers, texts, lists, tuples and dicts, and refuses everything else: no class, function or object."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401  pickle's signature
        raise DumpError(f"refused: it names {clean(module, 60)}.{clean(name, 60)}, and dumps have only plain values")

    def persistent_load(self, _: object) -> Any:  # noqa: ANN401  pickle's signature
        raise DumpError("refused: it refers to objects outside the file")


def read_dump(data: bytes, rank: int, operations: Mapping[str, int] = {}) -> RankAccount:
    """Return what the dump of `rank` says; its `world_size` is the least that fits.

    `operations` are torch's own counters of the groups, which include sends and receives that gloo does not record.
    Raises DumpError if `data` is not a dump.  Entries that cannot be read are left out and counted in `problems`.
    """
    dump = _decoded(data)
    config = _mapping(dump.get("pg_config"))
    entries, unreadable = _entries(dump)
    names = _group_names(dump, entries)
    order = _order(dump, entries, operations)
    groups = [
        _group(name, _mapping(config.get(name)), _mapping(names.get(name)), entries.get(name, []))
        for name in sorted({*filter(None, map(_label, config)), *entries, *names}, key=_in_order)
    ]
    problems = [] if not unreadable else [f"{unreadable} entries could not be read"]
    if len(groups) > GROUPS_MAX:
        problems.append(f"{len(groups) - GROUPS_MAX} of {len(groups)} groups are left out")
        groups = sorted(groups, key=lambda group: all(call.is_finished for call in group.calls))[:GROUPS_MAX]
    world_size = 1 + max([rank, *(one for group in groups for one in group.ranks)])
    return RankAccount(rank=rank, world_size=world_size, groups=tuple(groups), problems=tuple(problems), order=order)


def _order(
    dump: Mapping[str, Any], entries: Mapping[str, list[dict[str, Any]]], operations: Mapping[str, int]
) -> CallOrder | None:
    """Return the order of all calls; `entries` are those of each group."""
    every = _list(dump.get("entries"), ENTRIES_MAX)
    records = {_integer(entry.get("record_id")) for entry in every if isinstance(entry, dict)}
    is_whole = 0 in records
    called: list[tuple[int, Called]] = []
    since: dict[str, int] = {}
    for name, of_group in entries.items():
        before = 0 if is_whole else _unrecorded(of_group[0])
        for entry in of_group:
            unrecorded = _unrecorded(entry)
            one = Called(name, _call(entry, None, set()), max(0, unrecorded - before))
            called.append((_integer(entry.get("record_id")) or 0, one))
            before = unrecorded
        if name in operations:
            since[name] = max(0, operations[name] - before - (_number(of_group[-1]) or 0))
    called.sort(key=lambda each: each[0])
    return call_order([one for _, one in called], is_whole=is_whole, unrecorded_since=since)


def _unrecorded(entry: Mapping[str, Any]) -> int:
    """Return how many operations the group had begun before this one that gloo does not record."""
    number = _integer(entry.get("collective_seq_id")) or 0
    return (_integer(entry.get("op_id")) or 0) - number if _counts_others(entry) else 0


def _decoded(data: bytes) -> dict[str, Any]:
    """Return the dump as plain values."""
    try:
        is_json = data.lstrip()[:1] == b"{"
        dump = msgspec.json.decode(data) if is_json else _PlainUnpickler(io.BytesIO(data)).load()
    except DumpError:
        raise
    except (EOFError, msgspec.DecodeError) as error:
        raise DumpError(f"truncated, or not a dump: {clean(error, 100) or 'it ends too early'}") from None
    except Exception as error:  # noqa: BLE001  pickle raises nearly anything for bytes that are not a pickle
        if data[:1] == b"\x80":
            raise DumpError(f"truncated or damaged: {clean(error, 100)}") from None
        raise DumpError("not a dump") from None
    if not isinstance(dump, dict) or not {"entries", "pg_status"} & dump.keys():
        raise DumpError("not a dump: it has neither entries nor pg_status")
    version = _text(dump.get("version"))
    if version.partition(".")[0] != "2":
        raise DumpError(f"version {clean(version, 20) or 'unknown'} of the format: only 2.x is known")
    return dump


def _entries(dump: Mapping[str, Any]) -> tuple[dict[str, list[dict[str, Any]]], int]:
    """Return the entries of each group in order of their calls, and how many could not be read.

    Groups without a name are pacecar's own.
    """
    by_group: dict[str, list[dict[str, Any]]] = {}
    unreadable = 0
    for entry in _list(dump.get("entries"), ENTRIES_MAX):
        place = entry.get("process_group") if isinstance(entry, dict) else None
        name = _label(place[0]) if isinstance(place, list | tuple) and place else None
        if name is None or _number(entry) is None:
            unreadable += 1
        elif name:
            by_group.setdefault(name, []).append(entry)
    for entries in by_group.values():
        entries.sort(key=lambda entry: _integer(entry.get("record_id")) or 0)
    return by_group, unreadable


def _group_names(dump: Mapping[str, Any], entries: Mapping[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the counters of each group by its name."""
    status = {_integer(key): _mapping(value) for key, value in _mapping(dump.get("pg_status")).items()}
    ids = sorted(one for one in status if one is not None)
    names = {one: name for name, found in entries.items() if (one := _integer(found[0].get("pg_id"))) is not None}
    ordered = sorted(filter(None, map(_label, _mapping(dump.get("pg_config")))), key=_in_order)
    if len(ordered) == len(ids) and all(map(str.isdecimal, ordered)):
        by_order = dict(zip(ids, ordered, strict=True))
        if all(by_order.get(key) == name for key, name in names.items()):
            names |= by_order
    return {names[one]: status[one] for one in ids if one in names}


def _group(
    name: str, config: Mapping[str, Any], status: Mapping[str, Any], entries: list[dict[str, Any]]
) -> GroupState:
    has_p2p = any(entry.get("is_p2p") or _counts_others(entry) for entry in entries)
    completed = None if has_p2p else _counter(status.get("last_completed_collective"))
    finished_batches = {
        (bool(entry.get("is_p2p")), _number(entry))
        for entry in entries
        if "coalesced" in _text(entry.get("profiling_name")) and _is_finished(entry, completed)
    }
    calls = [_call(entry, completed, finished_batches) for entry in entries]
    collectives = [call for call in calls if not call.is_p2p]
    counted = [entry for entry in entries if entry.get("is_p2p")]
    numbers = [call.number for call in collectives] + [_integer(one.get("collective_seq_id")) or 0 for one in counted]
    enqueued = None if has_p2p else _counter(status.get("last_enqueued_collective"))
    enqueued = max([*numbers, *(() if enqueued is None else (enqueued,))], default=None)
    if has_p2p:
        completed = min((call.number for call in collectives if not call.is_finished), default=(enqueued or 0) + 1) - 1
    elif finished := [call.number for call in collectives if call.is_finished]:
        completed = max(completed or 0, *finished)
    place: list[Any] = list(entries[0]["process_group"]) if entries else []
    description = _label(config.get("desc") or (place[1] if len(place) > 1 else "")) or ""
    return GroupState(
        name=name,
        description="" if description == "undefined" else description,
        ranks=_ranks(config.get("ranks")),
        enqueued=enqueued,
        started=_counter(status.get("last_started_collective")) or None,
        completed=completed,
        calls=_kept(calls),
    )


def _counts_others(entry: Mapping[str, Any]) -> bool:
    """Return whether the group's counters include operations that gloo does not record, as sends and receives."""
    number = entry.get("collective_seq_id")
    return _text(entry.get("profiling_name")).startswith("gloo:") and entry.get("op_id", number) != number


def _call(
    entry: dict[str, Any], completed: int | None, finished_batches: set[tuple[bool, int | None]]
) -> CollectiveCall:
    number, is_p2p = _number(entry) or 0, bool(entry.get("is_p2p"))
    created_ns = _integer(entry.get("time_created_ns"), INT64_MAX)
    return CollectiveCall(
        number=number,
        operation=_label(entry.get("profiling_name")) or "unknown",
        sizes=_sizes(entry.get("input_sizes")),
        dtypes=clean(", ".join(map(str, filter(_is_text, _list(entry.get("input_dtypes"), TENSORS_MAX)))), 400),
        is_p2p=is_p2p,
        is_finished=(is_p2p, number) in finished_batches or _is_finished(entry, completed),
        created_ns=created_ns or None,
        state=_label(entry.get("state")) or "",
    )


def _is_finished(entry: Mapping[str, Any], completed: int | None) -> bool:
    if entry.get("retired") is True or entry.get("state") == "completed":
        return True
    return completed is not None and not entry.get("is_p2p") and (_number(entry) or 0) <= completed


def _kept(calls: list[CollectiveCall]) -> tuple[CollectiveCall, ...]:
    """Return at most CALLS_MAX calls: those that began to wait first, or the latest if fewer are unfinished."""
    first = next((index for index, call in enumerate(calls) if not call.is_finished), len(calls))
    start = max(0, min(first - CALLS_MAX // 4, len(calls) - CALLS_MAX))
    return tuple(calls[start : start + CALLS_MAX])


def _number(entry: Mapping[str, Any]) -> int | None:
    return _integer(entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id"))


def _counter(value: object) -> int | None:
    """Return a counter of `pg_status`: -1 is none so far."""
    return 0 if value in (-1, "-1") else _integer(value)


def _integer(value: object, most: int = COUNT_MAX) -> int | None:
    """Return a number of 0 to `most` that is written as such or as text; else None."""
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most else None


def _ranks(value: object) -> tuple[int, ...]:
    """Return the ranks of "[0, 1]" or [0, 1] in their order; empty if it is neither."""
    parts: Iterable[object] = value.strip("[] ").split(",") if isinstance(value, str) else _list(value, LIST_MAX)
    ranks = [_integer(one.strip() if isinstance(one, str) else one, 2**31 - 1) for one in islice(parts, LIST_MAX)]
    return () if None in ranks else tuple(one for one in ranks if one is not None)


def _sizes(value: object) -> str:
    """Return [[4096, 5120]] as text; lists inside lists are cut, since a pickle may nest and share them at will."""
    tensors = [", ".join(str(_integer(one)) for one in _list(tensor, DIMENSIONS_MAX)) for tensor in _first(value)]
    return clean("[" + ", ".join(f"[{tensor}]" for tensor in tensors) + "]", SIZES_CHARACTERS_MAX)


def _first(value: object) -> Iterator[object]:
    return islice(iter(_list(value, TENSORS_MAX)), TENSORS_MAX)


def _list(value: object, most: int) -> list[Any]:
    return list(value[:most]) if isinstance(value, list | tuple) else []


def _mapping(value: object) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _label(value: object) -> str | None:
    return clean(value, LABEL_CHARACTERS_MAX) if isinstance(value, str) else None


def _text(value: object) -> str:
    """Return a text; empty for anything else, since the words for nested lists may have no end."""
    return value if isinstance(value, str) else ""


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _in_order(name: str) -> tuple[int, str]:
    """Sort numbers as numbers, before other names."""
    return (int(name), "") if name.isdecimal() and len(name) < 20 else (COUNT_MAX, name)
