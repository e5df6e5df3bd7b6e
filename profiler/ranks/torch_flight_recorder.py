"""Reads from torch which collectives this rank has begun but not finished; nothing has to be switched on.

Torch has two sources.  Every process group counts its collectives (`_get_sequence_number_for_group`, 4 us): ranks whose
counts differ are not in the same one.  And torch keeps flight recorders: rings of the latest collectives with their
names, sizes and states (TORCH_FR_BUFFER_SIZE, 2000 entries; 0 turns them off).  There are several of them:

    _dump_nccl_trace_json()             ProcessGroupNCCL's own, where torch is built with NCCL
    _dump_fr_trace_json()               gloo's, since torch 2.9
    _dump_fr_trace_json(backend=...)    since torch 2.14 one for each other backend that has recorded anything

Torch 2.15 resolves "nccl" to `nccl2`, which records into the third kind, and the first two are empty.  So all are read.
It takes milliseconds and is done once a hang.

An entry is finished when it is `retired`: gloo calls its entries "scheduled" for good (torch 2.13).  Entries of groups
that have no name in torch's registry are not the job's: pacecar's own groups are made beside it (`side_group`).

Left out: the recorder of torchcomms, which torch attaches to its communicators and offers no way to read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from pacecar.torch_internals import find, lacking, need

__all__ = ["dumps", "last_collective", "sequence", "unfinished"]

TEXT_MAX = 400
"""Characters of the answer: three groups with the sizes of their collectives."""

SIZES_MAX = 60
"""Characters of one collective's sizes; a coalesced one lists hundreds of tensors."""

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
        legacy, current = find(_C10D + "_dump_nccl_trace_json"), find(_C10D + "_dump_fr_trace_json")
        return unfinished(dumps(legacy, current, _backends()))
    return None


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
    world: Any = find("torch.distributed.distributed_c10d._world")
    names: dict[str, None] = {}
    for group in () if world is None else tuple(world.pg_map):
        with contextlib.suppress(Exception):  # a group that is being destroyed, or one without devices
            names |= dict.fromkeys(group._get_backend(device).name() for device in group._device_types)
    return [name for name in names if name != "gloo"]


def unfinished(recorders: Iterable[bytes]) -> str | None:
    """Return the first unfinished collective of each process group, oldest first, or else the latest collective.

    `recorders` are JSON dumps of flight recorders; of a malformed one only its own entries are missing.  None if they
    have no collective of the job.
    """
    first: dict[tuple[int, str], dict[str, Any]] = {}
    behind: dict[tuple[int, str], int] = {}
    latest: dict[str, Any] | None = None
    for number, dump in enumerate(recorders):
        with contextlib.suppress(Exception):  # another version's format
            for entry in sorted(msgspec.json.decode(dump).get("entries", []), key=_created):
                name = entry["process_group"][0]
                if not name:
                    continue
                if latest is None or _created(entry) >= _created(latest):
                    latest = entry
                if not _is_finished(entry):
                    behind[number, name] = behind.get((number, name), -1) + 1
                    first.setdefault((number, name), entry)
    if latest is None:
        return None
    if not first:
        return _described(latest)[:TEXT_MAX]
    said = (
        _described(entry) + (f", and {behind[group]} more behind it" if behind[group] else "")
        for group, entry in sorted(first.items(), key=lambda item: _created(item[1]))
    )
    return "; ".join(said)[:TEXT_MAX]


def _created(entry: dict[str, Any]) -> int:
    return int(entry.get("time_created_ns", 0))


def _is_finished(entry: dict[str, Any]) -> bool:
    return bool(entry.get("retired", False)) or entry.get("state") == "completed"


def _described(entry: dict[str, Any]) -> str:
    group = "/".join(part for part in entry["process_group"] if part and part != "undefined")
    number = entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id")
    state = "completed" if _is_finished(entry) else entry.get("state", "state unknown")
    sizes = str(entry.get("input_sizes"))
    sizes = sizes if len(sizes) <= SIZES_MAX else sizes[: SIZES_MAX - 3] + "..."
    return f"{entry.get('profiling_name', 'unknown')} #{number} on group {group}, sizes {sizes}, {state}"
