"""Which collective did this rank enter last?  What torch knows by itself, nothing switched on for it.

Two sources.  Every process group counts its collectives (`_get_sequence_number_for_group`, 4 us): ranks whose numbers
differ do not stand in the same one.  And torch keeps a flight recorder, a ring of the latest collectives with name,
shapes and state (TORCH_FR_BUFFER_SIZE, 2000 entries unless somebody set 0), for NCCL and since 2.9 for gloo; torch
2.13's gloo notes entries when they are queued and calls them "scheduled" for good, so only that it is the last is told.
Reading it takes milliseconds and is done once a hang.

The group that carries our own messages is among the recorder's entries, and is left out by its size: no group of a job
gathers exactly that.
"""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from pacecar.torch_internals import find, lacking, need

from .phase_sums_message import MESSAGE_WORDS

__all__ = ["describe_last", "last_collective", "sequence"]

TEXT_MAX = 200


def sequence() -> int | None:
    """Return how many collectives the default group has been given; None where it does not count."""
    if lacking("last_collective") is not None:
        return None
    with contextlib.suppress(Exception):  # private ground: whatever is different there, we do without
        group: Any = need("torch.distributed.distributed_c10d._get_default_group")()
        return int(group._get_sequence_number_for_group())
    return None


def last_collective() -> str | None:
    """Return the latest collective of this process in words; None where no recorder is on."""
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump: Any = find(f"torch._C._distributed_c10d.{name}")
        if dump is None:
            continue
        with contextlib.suppress(Exception):  # as above
            text = describe_last(dump())
            if text is not None:
                return text
    return None


def describe_last(dump: bytes) -> str | None:
    """Return the last entry of a flight recorder's JSON that is not ours: what, on which group, which sizes."""
    entries = msgspec.json.decode(dump).get("entries", [])
    for entry in reversed(entries):
        sizes = entry.get("input_sizes")
        if sizes == [[MESSAGE_WORDS]]:
            continue
        group = "/".join(part for part in entry.get("process_group", []) if part and part != "undefined")
        text = f"{entry.get('profiling_name', 'unknown')} #{entry.get('collective_seq_id')} on group {group or '0'}"
        return f"{text}, sizes {sizes}, {entry.get('state', 'state unknown')}"[:TEXT_MAX]
    return None
