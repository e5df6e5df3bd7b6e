"""Implements the knob "gc_interval": Python's garbage collector runs at every n-th step boundary, on all ranks at once.

Left to itself, the collector stops a process whenever enough objects were made.  A full collection of a job with
millions of objects takes 0.3 to 1.5 s.  It comes at another step on each rank, and every time all other ranks wait.
So training frameworks collect by hand (torchtitan's `gc_freq`, Megatron's `--manual-gc-interval`).  Here, in place of
automatic collections:

    at every n-th boundary     only the objects made since the last collection are looked at (`gc.collect(1)`)
    at every FULL_EVERY-th     everything is, on a rank whose objects became GROWTH_RATIO_MAX more: about Python's own
                               rule for full collections

The first intervals after a switch are 2, 4, 8 ... steps, so a trial sees collections at once, and memory that grows is
noticed while it is small.

`gc.freeze` is not used: old objects are not looked at anyway, and a frozen cycle would never be freed, not even by a
`gc.collect()` of the script.  `gc.disable` is not used either: during an evaluation there are no boundaries.  The
thresholds are raised instead, to BACKSTOP_OBJECTS new objects.

Only the time of collections changes, so every number stays the same to the last bit, and ranks may differ for a while.
A rank whose script touches the collector, or whose memory fills with garbage, puts its thresholds back at once, and
rank 0 then has all ranks turn the knob back (`guards.collection_cost`).
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping

import torch

from pacecar.config import TuneConfig
from pacecar.kernel_files.reader import KernelFiles
from pacecar.knobs import AUTOMATIC_GC

from .actuator import NOTHING_BESIDE, Actuator, ActuatorError, Objection
from .dataloader.worker_limits import available_bytes

__all__ = ["CollectionSchedule", "GcIntervalActuator", "gc_knobs"]

logger = logging.getLogger(__name__)

INTERVALS = (16, 64, 256)
"""Steps between collections.  What a collection costs grows with the interval, so the choice matters little: a longer
one spares the fixed part, a shorter one keeps less garbage.  Left to itself, pacecar takes the shortest."""

DEFAULT_THRESHOLDS = (700, 2000)
"""Python's first threshold, up to 3.12 and since; any other one was set by the script."""

BLOCKS_MIN = 1_500_000
"""With fewer blocks of memory, or half a million objects, a full collection takes less than some 0.1 s, and comes too
rarely to matter.  torch alone takes 0.6 million blocks, with its compiler one million."""

BACKSTOP_OBJECTS = 100_000
"""With this many more objects, Python looks at the new ones before the next boundary, which takes some milliseconds."""

NEVER = 1_000_000
"""Automatic collections of middle-aged objects before an automatic full one."""

FULL_EVERY = 16
GROWTH_RATIO_MAX = 0.1

FIRST_INTERVAL = 2

CHECK_BOUNDARIES = 4
"""Boundaries between two looks at memory, which take 20 us."""

GROWTH_SHARE_MAX = 0.1
"""Memory may grow by this share of what is free between two collections.  Beyond it everything is collected, and if
that frees half of the growth, the knob is turned back: the growth was garbage."""


def gc_knobs(config: TuneConfig, device: torch.device) -> list[Actuator]:
    """Return the knob, unless the user left it out."""
    return [GcIntervalActuator(HostAndDeviceMemory(device))] if "gc_interval" in config.knobs else []


class CollectionSchedule:
    """The steps after a switch behind which garbage is collected: 2, 6, 14 ..., then every `interval`."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._gap = min(FIRST_INTERVAL, interval)
        self._left = 1 + self._gap

    def is_due(self) -> bool:
        """Pass one boundary, first that of the switch itself; return whether garbage is collected there."""
        self._left -= 1
        if self._left:
            return False
        self._gap = self._left = min(2 * self._gap, self._interval)
        return True


class HostAndDeviceMemory:
    """What this process holds, and what is free, on the host and on its CUDA device; None for what is not known."""

    def __init__(self, device: torch.device, files: KernelFiles | None = None) -> None:
        self._device = device
        self._files = KernelFiles() if files is None else files

    def used_bytes(self) -> list[int | None]:
        """Return the resident memory of this process, and the device's memory in tensors."""
        text = self._files.text(self._files.proc / "self/statm")
        resident = None if text is None else int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")
        is_cuda = self._device.type == "cuda"
        return [resident, int(torch.cuda.memory_allocated(self._device)) if is_cuda else None]

    def free_bytes(self) -> list[int | None]:
        """Return what the host could still give, and the device with what torch's allocator holds unused."""
        return [available_bytes(self._files), self._device_free_bytes() if self._device.type == "cuda" else None]

    def _device_free_bytes(self) -> int:
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(torch.cuda.mem_get_info(self._device)[0]) + unused


class GcIntervalActuator(Actuator):
    """The knob "gc_interval": steps between collections, 0 for Python's own choice.

    `memory` tells what is used and free, host and device, in bytes.
    """

    knob = "gc_interval"

    def __init__(self, memory: HostAndDeviceMemory, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._memory = memory
        self._now_ns = now_ns
        self._value = AUTOMATIC_GC
        self._found: tuple[int, int, int] | None = None
        """The thresholds to put back; None while they are in force."""
        self._raised: tuple[int, int, int] | None = None
        """What Python answers for those in force instead; 3.14 answers 0 for the third, whatever was set."""
        self._schedule: CollectionSchedule | None = None
        self._boundaries = self._collections = 0
        self._population: int | None = None
        self._grown = 0
        self._after: list[int | None] = []
        self._objection: Objection | None = None

    def value(self) -> int:
        """Return the interval that all ranks agreed on."""
        return self._value

    def domain(self) -> tuple[int, ...]:
        """Return 0 and `INTERVALS`."""
        return (AUTOMATIC_GC, *INTERVALS)

    def refusal(self) -> str | None:
        """Return who else decides when garbage is collected, or that there is too little to look at; else None."""
        if sys.getallocatedblocks() < BLOCKS_MIN:
            return f"Python holds fewer than {BLOCKS_MIN} blocks of memory: full collections are short"
        return self._script_decides()

    def _script_decides(self) -> str | None:
        thresholds = gc.get_threshold()
        if not gc.isenabled():
            return "the script has turned Python's automatic garbage collection off"
        if thresholds[0] not in DEFAULT_THRESHOLDS:
            return f"the script has set the garbage collector's thresholds, to {thresholds}"
        if gc.get_freeze_count():
            return "the script has frozen its objects (gc.freeze)"
        return None

    def apply(self, value: int) -> None:
        """Collect at every `value`-th boundary from now on; 0 puts the thresholds back.

        Raises:
            ActuatorError: it is no interval, or the script decides about the collector by now.
        """
        if value not in self.domain():
            raise ActuatorError(f"gc_interval {value} is none of {self.domain()}")
        if value == AUTOMATIC_GC:
            self._put_back()
        else:
            reason = self._script_decides() if self._found is None else None
            if reason is not None or self._objection is not None:
                raise ActuatorError(reason or str(self._objection))
            self._take_over(value)
        self._value = value

    def is_barred(self, value: int, beside: Mapping[str, int] = NOTHING_BESIDE) -> bool:
        """Return whether this rank objected; only 0 is possible then."""
        return value != AUTOMATIC_GC and self._objection is not None

    def on_boundary(self) -> int:
        """Collect if it is due; return the ns that this took in place of automatic collections."""
        if self._found is None or self._schedule is None:
            return 0
        if not gc.isenabled() or gc.get_threshold() != self._raised:
            self._object(Objection.SCRIPT)
            return 0
        self._boundaries += 1
        is_due = self._schedule.is_due()
        begun_ns = self._now_ns()
        if is_due:
            self._collect()
        elif self._boundaries % CHECK_BOUNDARIES == 0 and self._has_outgrown(self._memory.used_bytes()):
            self._collect_outgrown()
        else:
            return 0
        return self._now_ns() - begun_ns

    def objection(self) -> Objection | None:
        """Return why automatic collections must come back on all ranks; None if they need not, or are back."""
        return None if self._value == AUTOMATIC_GC else self._objection

    def close(self) -> None:
        """Put the thresholds back on this rank: no boundary comes any more."""
        self._put_back()

    # --- collections ---

    def _collect(self) -> None:
        self._collections += 1
        young, swept, _ = gc.get_count()  # the backstop may have swept the new ones before
        made = young + swept * BACKSTOP_OBJECTS
        self._grown += made - gc.collect(1)
        if self._collections % FULL_EVERY == 0:
            population = self._population
            if population is None or self._grown > GROWTH_RATIO_MAX * population:
                self._collect_all()
        self._after = self._memory.used_bytes()

    def _collect_all(self) -> None:
        gc.collect()
        self._population, self._grown = len(gc.get_objects()), 0

    def _has_outgrown(self, used: list[int | None]) -> bool:
        pairs = zip(self._after, used, self._memory.free_bytes(), strict=True)
        return any(
            before is not None and now is not None and free is not None and now - before > GROWTH_SHARE_MAX * free
            for before, now, free in pairs
        )

    def _collect_outgrown(self) -> None:
        before = self._memory.used_bytes()
        self._collect_all()
        after = self._memory.used_bytes()
        for begun, full, left in zip(self._after, before, after, strict=True):
            if begun is not None and full is not None and left is not None and 2 * (full - left) >= full - begun > 0:
                self._object(Objection.MEMORY)
        self._after = after

    # --- thresholds ---

    def _take_over(self, value: int) -> None:
        self._schedule = CollectionSchedule(value)
        self._boundaries = self._collections = 0
        self._after = self._memory.used_bytes()
        if self._found is None:
            self._population, self._grown = None, 0
            self._found = gc.get_threshold()
            gc.set_threshold(BACKSTOP_OBJECTS, self._found[1], NEVER)
            self._raised = gc.get_threshold()
            _turned.add(self)

    def _put_back(self) -> None:
        """Put the thresholds back, unless the script has set others meanwhile."""
        if self._found is None:
            return
        if gc.get_threshold() == self._raised:
            gc.set_threshold(*self._found)
        self._found = self._schedule = None
        _turned.discard(self)

    def _object(self, objection: Objection) -> None:
        self._objection = objection
        self._put_back()
        logger.warning("pacecar: gc_interval goes back to %d: %s", AUTOMATIC_GC, objection.words)


_turned: weakref.WeakSet[GcIntervalActuator] = weakref.WeakSet()


def _restore_in_child() -> None:
    """Give a forked child, such as a worker of a data loader, automatic collections: it has no boundaries."""
    for actuator in tuple(_turned):
        actuator.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restore_in_child)
