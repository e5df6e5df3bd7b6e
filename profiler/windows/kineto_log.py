"""Keeps Kineto silent while one of pacecar's sessions begins or ends, without changing its log level for the job.

Since torch 2.13 Kineto writes a line ("USDT ... profiler_start") to stderr when a session begins and another when it
ends.  A user expects them only from their own profiler, so our sessions must not write any, whatever KINETO_LOG_LEVEL
is.  Kineto reads that variable once, when the first session of the process is prepared, and keeps the level in a
variable exported by torch's library, which we set for our calls and restore afterwards.  For the first session the
environment is set as well, because with a level of 0 or 1 Kineto would write a page during preparation.

If torch does not export the variable, the environment is set while Kineto reads it, unless the job has set it.  Kineto
then omits its own error lines in that process too.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

__all__ = ["KINETO_LOG_VARIABLE", "kineto_level", "quiet"]

KINETO_LOG_VARIABLE = "KINETO_LOG_LEVEL"
QUIET_LEVEL = 1000
"""Above USDT (5): Kineto prints severities >= the level.  No job uses this level, so it cannot be the job's own."""

UNREAD_LEVEL = 0
"""Before Kineto has read the variable, or when it read this."""

LEVELS = range(-1, 11)
"""The possible levels; any other number means that this is a different variable."""

_LEVEL = "_ZN9libkineto6Logger14severityLevel_E"


@functools.cache
def kineto_level() -> ctypes.c_int | None:
    """Return the variable that holds Kineto's log level; None if this torch does not export it."""
    try:
        path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
        library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD)  # never a second copy, where torch is another file
        level = ctypes.c_int.in_dll(library, _LEVEL)
    except (OSError, ValueError, AttributeError):  # another name of the library, no such variable in it, another system
        return None
    return level if level.value in LEVELS else None


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Kineto silent inside."""
    level = kineto_level()
    if level is None:
        with _quiet_environment():
            yield
        return
    before = level.value
    wanted = os.environ.get(KINETO_LOG_VARIABLE) if before == UNREAD_LEVEL else None
    level.value = QUIET_LEVEL
    if wanted:  # an empty one counts as unset
        os.environ[KINETO_LOG_VARIABLE] = str(QUIET_LEVEL)
    try:
        yield
    finally:
        if wanted:
            os.environ[KINETO_LOG_VARIABLE] = wanted
            before = _read_level(wanted)
        if level.value == QUIET_LEVEL:  # otherwise Kineto has set its default because the job named no level
            level.value = before


def _read_level(text: str) -> int:
    """Return the level as Kineto reads it, with C's `atoi`: the number at the start of `text`, or 0."""
    number = re.match(r"\s*[+-]?[0-9]+", text)
    return int(number[0]) if number is not None else 0


@contextmanager
def _quiet_environment() -> Iterator[None]:
    restore = KINETO_LOG_VARIABLE not in os.environ
    if restore:
        os.environ[KINETO_LOG_VARIABLE] = str(QUIET_LEVEL)
    try:
        yield
    finally:
        if restore:
            os.environ.pop(KINETO_LOG_VARIABLE, None)
