"""Lists every knob with its class, kind and values, for configuration, controller, page and docs.

A knob's value is a whole number everywhere: on the wire, in votes, in records.  A *scale* is a quantity whose
neighbours are about half and twice of it.  A *choice* numbers its `choices` from 0 and has no order, so every other
choice is a neighbour.

The class says what a change may do to the result.  The user chooses how far pacecar may go:

    exact      only the order of summation changes
    lossy      gradients are rounded or sparsified in transit; watched by loss and gradient norm
    adaptive   the global batch changes, and the learning rate by the rule that the user names

Left out: how a knob is turned (actuators), and its bounds (configuration).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = [
    "AUTOMATIC_GC",
    "KNOBS",
    "Knob",
    "KnobClass",
    "KnobKind",
    "KnobName",
    "allows",
    "by_name",
    "read_setting",
    "setting",
]

AUTOMATIC_GC = 0
"""The value of gc_interval under which Python collects by itself, as the script has it."""

KnobClass = Literal["exact", "lossy", "adaptive"]
KnobKind = Literal["scale", "choice"]
KnobName = Literal[
    "micro_batch",
    "micro_tokens",
    "work_share",
    "bucket_bytes",
    "first_bucket_bytes",
    "loader_workers",
    "loader_prefetch",
    "gc_interval",
    "fsdp_prefetch",
    "fsdp_reshard",
    "checkpointed_blocks",
    "zero_bucket_bytes",
    "zero_prefetch_bytes",
    "compression",
    "batch_samples",
]
"""Every knob; the order is that of the list below."""


@dataclass(frozen=True, slots=True)
class Knob:
    """One knob.  Value i of a choice is named `choices[i]`; a scale has no choices."""

    name: KnobName
    knob_class: KnobClass
    kind: KnobKind
    help: str
    choices: tuple[str, ...] = ()


KNOBS = (
    Knob("micro_batch", "exact", "scale", "samples in one forward and backward of a rank, at a constant batch"),
    Knob("micro_tokens", "exact", "scale", "padded tokens in one forward and backward of a rank, at a constant batch"),
    Knob(
        "work_share",
        "exact",
        "choice",
        "samples of the global batch that each rank computes: an equal number, or shares by their measured speed",
        ("equal", *(f"share {number}" for number in range(1, 8))),
    ),
    Knob("bucket_bytes", "exact", "scale", "size to which DDP fills a gradient bucket before it is reduced"),
    Knob("first_bucket_bytes", "exact", "scale", "size of DDP's first bucket, which starts communication"),
    Knob("loader_workers", "exact", "scale", "processes of the data loader"),
    Knob("loader_prefetch", "exact", "scale", "batches that each process of the data loader keeps ready"),
    Knob(
        "gc_interval",
        "exact",
        "scale",
        "steps between garbage collections, at once on all ranks; 0 is Python's own choice",
    ),
    Knob("fsdp_prefetch", "exact", "scale", "FSDP2 modules whose parameters are gathered ahead; 0 is FSDP2's own rule"),
    Knob(
        "fsdp_reshard",
        "exact",
        "scale",
        "FSDP2 modules that free gathered parameters after forward (less memory); the last ones keep them",
    ),
    Knob(
        "checkpointed_blocks",
        "exact",
        "scale",
        "repeated blocks that compute their activations again in backward (less memory); the last ones keep them",
    ),
    Knob("zero_bucket_bytes", "exact", "scale", "size to which DeepSpeed's ZeRO fills a gradient bucket"),
    Knob("zero_prefetch_bytes", "exact", "scale", "parameters that DeepSpeed's ZeRO 3 gathers ahead"),
    Knob(
        "compression",
        "lossy",
        "choice",
        "how DDP's gradients are compressed on their way",
        ("none", "bf16", "fp16", "powersgd", "topk"),
    ),
    Knob("batch_samples", "adaptive", "scale", "samples of the global batch"),
)

by_name: dict[str, Knob] = {knob.name: knob for knob in KNOBS}
assert tuple(by_name) == get_args(KnobName), "the names and the list are in one order"

_REACH: dict[str, tuple[KnobClass, ...]] = {
    "off": (),
    "advise": ("exact", "lossy"),
    "exact": ("exact",),
    "lossy": ("exact", "lossy"),
    "adaptive": ("exact", "lossy", "adaptive"),
}


def allows(mode: str, knob: str) -> bool:
    """Return whether `mode` may turn `knob` (or, if "advise", mention it); an unknown knob counts as exact."""
    known = by_name.get(knob)
    return ("exact" if known is None else known.knob_class) in _REACH[mode]


def setting(knob: str, value: int | str) -> str:
    """Return a value as text: the name of a choice, bytes in MiB, counts and texts unchanged."""
    if isinstance(value, str):
        return value
    known = by_name.get(knob)
    if known is not None and known.choices:
        return known.choices[value] if 0 <= value < len(known.choices) else str(value)
    return f"{value / 2**20:.4g} MiB" if knob.endswith("_bytes") else str(value)


_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def read_setting(knob: str, text: str) -> int:
    """Return the value of `knob` that `text` means; `text` is a plain number or in the form of `setting`.

    Raises:
        ValueError: there is no such knob, or it has no such value.  The message lists what there is.
    """
    known = by_name.get(knob)
    if known is None:
        raise ValueError(f"there is no knob {knob!r}; there are {', '.join(by_name)}")
    text = text.strip()
    if known.choices:
        if text not in known.choices:
            raise ValueError(f"{knob} cannot be {text!r}; it can be {', '.join(known.choices)}")
        return known.choices.index(text)
    is_bytes = knob.endswith("_bytes")
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?) ?(B|KiB|MiB|GiB)?" if is_bytes else r"(\d{1,15})()", text, re.ASCII)
    value = None if found is None else float(found[1]) * _UNITS[found[2] or ""]
    if value is None or value != int(value):
        wanted = "bytes, as in 4194304 or 4MiB" if is_bytes else "a whole number"
        raise ValueError(f"{knob} cannot be {text!r}; it wants {wanted}")
    return int(value)
