"""Reads from torch which collectives this rank has begun but not finished; nothing has to be switched on.

Torch has two sources.  Every process group counts its operations (`_get_sequence_number_for_group`, 4 us): ranks whose
counts differ are not in the same one.  And torch keeps flight recorders: rings of the latest collectives with their
names, sizes and states (TORCH_FR_BUFFER_SIZE, 2000 entries; 0 turns them off).  There are several of them:

    _dump_nccl_trace_json()             ProcessGroupNCCL's own, where torch is built with NCCL
    _dump_fr_trace_json()               gloo's, since torch 2.9
    _dump_fr_trace_json(backend=...)    since torch 2.14 one for each other backend that has recorded anything

Torch 2.15 resolves "nccl" to `nccl2`, which records into the third kind, and the first two are empty.  So all are read.
It takes milliseconds and is done once a hang.

Entries of groups that have no name in torch's registry are not the job's: pacecar's own groups are made beside it
(`side_group`).

`analysis.hang.dumps` reads them, as it does those in files.  A group's counters come from them where it has calls
there; torch's own counter includes sends and receives, of which ranks make different numbers (torch 2.13).

Left out: the recorder of torchcomms, which torch attaches to its communicators and offers no way to read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import structs

from pacecar.analysis.hang.dumps.flight_recorder import DumpError, read_dump
from pacecar.records.hangs import GROUPS_MAX, CallOrder, CollectiveCall, GroupState, RankAccount
from pacecar.records.ranges import LABEL_CHARACTERS_MAX
from pacecar.torch_internals import find, lacking, need

__all__ = ["dumps", "group_counters", "group_states", "last_collective", "sequence", "unfinished", "with_calls"]

TEXT_MAX = 400
"""Characters of the answer: three groups with the sizes of their collectives."""

SIZES_MAX = 60
"""Characters of one collective's sizes; a coalesced one lists hundreds of tensors."""

OF_GLOO = "/gloo"
"""What is added to the name of a group of two backends for its collectives on the host ("cpu:gloo,cuda:nccl")."""

_C10D = "torch._C._distributed_c10d."


def sequence() -> int | None:
    """Return how many collectives were called on the default group; None where it does not count."""
    if lacking("last_collective") is not None:
        return None
    with contextlib.suppress(Exception):  # private API: whatever differs in this torch, we do without
        group: Any = need("torch.distributed.distributed_c10d._get_default_group")()
        return int(group._get_sequence_number_for_group())
    return None


def last_collective() -> str | None:
    """Return `unfinished` for this process; None if no flight recorder has a collective of the job."""
    with contextlib.suppress(Exception):  # private API, as above
        return unfinished(_own_dumps())
    return None


def group_states() -> tuple[tuple[GroupState, ...], CallOrder | None]:
    """Return the process groups of torch's registry as this rank sees them, with their latest calls, and their order.

    Calls that are in several recorders have no order.
    """
    states = group_counters()
    read = _read(_own_dumps(), {state.name: state.operations or 0 for state in states})
    orders = [account.order for account in read if any(group.calls for group in account.groups)]
    calls = with_calls(states, [account.groups for account in read], _mixed_groups())
    return tuple(calls), orders[0] if len(orders) == 1 else None


def group_counters() -> tuple[GroupState, ...]:
    """Return the process groups of torch's registry with torch's own counter of each; costs 4 us a group."""
    world: Any = find("torch.distributed.distributed_c10d._world")
    states: list[GroupState] = []
    for group in () if world is None else tuple(world.pg_map)[:GROUPS_MAX]:
        with contextlib.suppress(Exception):  # a group that is being destroyed
            begun = int(group._get_sequence_number_for_group())
            description = str(getattr(group, "group_desc", ""))
            places = world.pg_group_ranks[group]
            states.append(
                GroupState(
                    name=str(world.pg_names[group])[:LABEL_CHARACTERS_MAX],
                    description="" if description == "undefined" else description[:LABEL_CHARACTERS_MAX],
                    ranks=tuple(sorted(places, key=places.__getitem__)),
                    enqueued=begun,
                    operations=begun,
                )
            )
    return tuple(states)


def with_calls(
    states: Sequence[GroupState], recorders: Sequence[Sequence[GroupState]], mixed: Container[str] = ()
) -> Iterator[GroupState]:
    """Yield each of `states` with the calls and counters that the flight recorders have of it.

    Groups in `mixed` count gloo's collectives and those of the device by themselves, and are yielded as two.
    """
    for state in states:
        recorded = [one for groups in recorders for one in groups if one.name == state.name and one.calls]
        if state.name in mixed:
            of_gloo = [one for one in recorded if one.calls[-1].operation.startswith("gloo:")]
            recorded = [one for one in recorded if one not in of_gloo]
            if of_gloo:
                name = f"{state.name[: LABEL_CHARACTERS_MAX - len(OF_GLOO)]}{OF_GLOO}"
                yield _with_latest(structs.replace(state, name=name, operations=None), of_gloo)
        if recorded:
            yield _with_latest(state, recorded)
        elif recorders and state.enqueued:  # its calls may have left the ring, and its counter is another one
            yield structs.replace(state, enqueued=None)
        else:
            yield state


def _with_latest(state: GroupState, recorded: Sequence[GroupState]) -> GroupState:
    """Return `state` as recorded; a recorder with older calls of that name has those of an earlier group."""
    latest = max(recorded, key=lambda one: _at(one.calls[-1]))
    return structs.replace(
        state,
        enqueued=latest.enqueued,
        started=latest.started,
        completed=latest.completed,
        calls=latest.calls,
    )


def _own_dumps() -> Iterator[bytes]:
    return dumps(find(_C10D + "_dump_nccl_trace_json"), find(_C10D + "_dump_fr_trace_json"), _backends())


def dumps(
    legacy: Callable[..., bytes] | None, current: Callable[..., bytes] | None, backends: Iterable[str]
) -> Iterator[bytes]:
    """Yield the JSON of each flight recorder: `legacy` is NCCL's own dump, `current` the one that takes a backend.

    If a recorder raises, only its own dump is missing.
    """
    if legacy is not None:
        with contextlib.suppress(Exception):
            yield legacy()
    if current is None:
        return
    with contextlib.suppress(Exception):
        yield current()
    for backend in backends:
        with contextlib.suppress(Exception):  # TypeError before torch 2.14, where there is only the one read above
            yield current(backend=backend)


def _backends() -> list[str]:
    """Return the backend names of the job's process groups without gloo, whose recorder is the default one."""
    names = dict.fromkeys(name for of_group in _group_backends().values() for name in of_group)
    return [name for name in names if name != "gloo"]


def _mixed_groups() -> set[str]:
    """Return the names of groups with gloo for tensors of the host beside another backend for those of a device."""
    return {group for group, names in _group_backends().items() if "gloo" in names and len(names) > 1}


def _group_backends() -> dict[str, dict[str, None]]:
    """Return the names of the backends of each process group, by its name."""
    world: Any = find("torch.distributed.distributed_c10d._world")
    found: dict[str, dict[str, None]] = {}
    for group in () if world is None else tuple(world.pg_map):
        with contextlib.suppress(Exception):  # a group that is being destroyed, or one without devices
            names = dict.fromkeys(group._get_backend(device).name() for device in group._device_types)
            found[str(world.pg_names[group])[:LABEL_CHARACTERS_MAX]] = names
    return found


def _read(recorders: Iterable[bytes], operations: Mapping[str, int] = {}) -> list[RankAccount]:
    """Return what each dump says that has any groups; a malformed one has none."""
    found: list[RankAccount] = []
    for dump in recorders:
        with contextlib.suppress(DumpError):
            found.append(read_dump(dump, 0, operations))
    return [account for account in found if account.groups]


def unfinished(recorders: Iterable[bytes]) -> str | None:
    """Return the first unfinished collective of each process group, oldest first, or else the latest collective.

    `recorders` are JSON dumps of flight recorders.  None if they have no collective of the job.
    """
    groups = [group for account in _read(recorders) for group in account.groups if group.calls]
    if not groups:
        return None
    waiting = [(call, group) for group in groups if (call := _first_unfinished(group)) is not None]
    if not waiting:
        latest = max(groups, key=lambda group: _at(group.calls[-1]))
        return _described(latest.calls[-1], latest)[:TEXT_MAX]
    said = (
        _described(call, group) + (f", and {behind} more behind it" if (behind := _behind(call, group)) else "")
        for call, group in sorted(waiting, key=lambda found: _at(found[0]))
    )
    return "; ".join(said)[:TEXT_MAX]


def _first_unfinished(group: GroupState) -> CollectiveCall | None:
    return next((call for call in group.calls if not call.is_finished), None)


def _behind(call: CollectiveCall, group: GroupState) -> int:
    """Return how many calls came after `call`."""
    if not call.is_p2p and group.enqueued is not None:
        return max(0, group.enqueued - call.number)
    return sum(one.is_p2p and not one.is_finished for one in group.calls) - 1


def _at(call: CollectiveCall) -> int:
    return call.created_ns or 0


def _described(call: CollectiveCall, group: GroupState) -> str:
    name = "/".join(part for part in (group.name, group.description) if part)
    sizes = call.sizes if len(call.sizes) <= SIZES_MAX else call.sizes[: SIZES_MAX - 3] + "..."
    state = "completed" if call.is_finished else call.state or "state unknown"
    return f"{call.operation} #{call.number} on group {name}, sizes {sizes}, {state}"
