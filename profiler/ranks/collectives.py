"""Reads from torch which collective this rank entered last, with nothing switched on for it.

There are two sources.  Every process group counts its collectives (`_get_sequence_number_for_group`, 4 us): ranks whose
numbers differ are not in the same one.  And torch keeps a flight recorder for NCCL, and since 2.9 for gloo: a ring of
the latest collectives with name, shapes and state (TORCH_FR_BUFFER_SIZE, 2000 entries unless somebody set 0).  The gloo
of torch 2.13 adds entries when they are queued and calls them "scheduled" for good, so only the last one is reported.
Reading it takes milliseconds and is done once a hang.

The group that carries our own messages is among the recorder's entries.  It is left out by its size: no group of a job
gathers exactly that many words.
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
    """Return how many collectives were called on the default group; None where it does not count."""
    if lacking("last_collective") is not None:
        return None
    with contextlib.suppress(Exception):  # private API: whatever differs in this torch, we do without
        group: Any = need("torch.distributed.distributed_c10d._get_default_group")()
        return int(group._get_sequence_number_for_group())
    return None


def last_collective() -> str | None:
    """Return a description of the latest collective of this process; None where no flight recorder is on."""
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
