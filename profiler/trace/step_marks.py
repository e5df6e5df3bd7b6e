"""Finds the steps that a trace marks: the rows called ProfilerStep#N on host threads.

A GPU's track has the same marks, which begin when the step's work does; those are not taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .columns import HostKind, HostRows, StepMark

__all__ = ["steps_of"]

_STEP = "ProfilerStep#"


def steps_of(names: Sequence[str], host: HostRows) -> tuple[StepMark, ...]:
    """Return the marks among `host`, in the order of their start; `names` are those of the trace."""
    numbers = {
        number: int(text[len(_STEP) :])
        for number, text in enumerate(names)
        if text.startswith(_STEP) and text[len(_STEP) :].isdecimal() and len(text) < len(_STEP) + 16
    }
    marks = np.flatnonzero(np.isin(host.name, list(numbers)) & (host.kind == HostKind.ANNOTATION))
    return tuple(
        StepMark(numbers[int(host.name[row])], int(host.start_ns[row]), int(host.end_ns[row])) for row in marks.tolist()
    )
