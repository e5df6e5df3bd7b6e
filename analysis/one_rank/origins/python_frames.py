"""Finds the module and the python line of each host row, from the rows of python functions.

`with_stack` writes a row for each python call, "nn.Module: Linear_0" or "train.py(12): step".  The classes of the
modules around an operator, outermost first, are its path in the model.  torch numbers the instances of a class; the
numbers are dropped, so that forty equal layers share one row of a table.  The innermost frame outside torch is the line
that a user can change.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pacecar.analysis.trace.columns import NONE, Trace
from pacecar.analysis.trace.details.detail_columns import FrameRows, TraceDetails

from .nesting import Nesting, values_at

__all__ = ["Frames", "frames_of", "own_line"]

MODULE_PREFIX = "nn.Module: "

_INSTANCE = re.compile(r"_\d+$")

DEPTH_MAX = 100
"""The most modules of one path; deeper ones count as their parent."""

Index = NDArray[np.int64]


class Frames(NamedTuple):
    """The module and python line of each host row, indices into `modules` and `lines`, NONE for none."""

    module: Index
    line: Index
    modules: tuple[str, ...]
    lines: tuple[str, ...]


def frames_of(details: TraceDetails, trace: Trace) -> Frames:
    """Return the module and the line of each host row of `trace`."""
    host, frames = trace.host_rows, details.frames
    modules: dict[str, int] = {text: number for number, text in enumerate(details.hierarchies)}
    own = details.hierarchy.astype(np.int64)
    lines: dict[str, int] = {}
    if len(frames.start_ns) == 0:
        return Frames(own, np.full(len(own), NONE, dtype=np.int64), tuple(modules), ())
    nesting = Nesting(frames.start_ns, frames.end_ns, frames.thread)
    module_of, line_of = _resolve(frames, nesting, modules, lines)
    inside = nesting.innermost(host.thread, host.start_ns)
    module, line = values_at(module_of, inside), values_at(line_of, inside)
    return Frames(np.where(own == NONE, module, own), line, tuple(modules), tuple(lines))


def _resolve(
    frames: FrameRows, nesting: Nesting, modules: dict[str, int], lines: dict[str, int]
) -> tuple[Index, Index]:
    """For each frame, return the numbers of its module path and of its innermost line outside torch."""
    words = [
        _INSTANCE.sub("", name.removeprefix(MODULE_PREFIX)) if name.startswith(MODULE_PREFIX) else None
        for name in frames.names
    ]
    is_own = [is_own_frame(name) for name in frames.names]
    paths: dict[tuple[int, str], int] = {}
    texts = list(modules)
    depth = [0] * len(texts)
    module: list[int] = [NONE] * len(frames.start_ns)
    line: list[int] = [NONE] * len(frames.start_ns)
    parent, names = nesting.parent.tolist(), frames.name.tolist()
    # A parent begins no later than its child; of two with one start, the longer is the parent.
    for at in np.lexsort((-frames.end_ns, frames.start_ns)).tolist():
        name, above = names[at], parent[at]
        outer, outer_line = (module[above], line[above]) if above != NONE else (NONE, NONE)
        word = words[name]
        if word is not None and (outer == NONE or depth[outer] < DEPTH_MAX):
            key = (outer, word)
            if key not in paths:
                text = word if outer == NONE else f"{texts[outer]}/{word}"
                paths[key] = modules.setdefault(text, len(modules))
                if paths[key] == len(texts):
                    texts.append(text)
                    depth.append(1 if outer == NONE else depth[outer] + 1)
            outer = paths[key]
        module[at] = outer
        line[at] = lines.setdefault(frames.names[name], len(lines)) if is_own[name] else outer_line
    return np.array(module, dtype=np.int64), np.array(line, dtype=np.int64)


def is_own_frame(name: str) -> bool:
    """Return whether a frame is a line of a file outside torch and python's threading library."""
    path, bracket, _ = name.partition(".py(")
    if not bracket:
        return False
    return not (path.startswith(("torch/", "threading", "<")) or "/torch/" in path)


def own_line(frames: Iterable[str]) -> str | None:
    """Return the first of `frames`, innermost first, that is outside torch."""
    return next((frame for frame in frames if is_own_frame(frame)), None)
