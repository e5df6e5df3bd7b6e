"""Predicts what an exact window will cost, before the first one of a job was taken.

A window costs by the row that the profiler writes: recording, ending and reading it take ROW_NS together, whether the
row's operator took a microsecond or ten.  So a step of few large operators is profiled for a hundredth of its time,
and one of tens of thousands of small ones for several times its length.  How many operators a step has nobody counts
cheaply, but two things are known:

- a *ceiling*: nothing writes rows faster than one in DENSEST_NS of the training thread's processor time.  A window
  whose ceiling can be paid needs no other prediction;
- *slices*: a session that is open for a few milliseconds of the forward, or of the optimizer (`probe`), says how many
  rows that part of the step writes a microsecond.  The phases' lengths, no longer in sum than the processor time,
  make a whole step of it; what lies in no phase, and a phase without a slice, is taken to be as dense as can be;
- a *floor*: a slice is the head of a phase, and that may be python alone (sharded parameters are gathered there, an
  optimizer collects its gradients).  But autograd numbers its nodes, and each has some rows in forward and backward; so
  has each parameter in the optimizer.

How much a row costs depends on how fast the machine is just now: beside other programs all of it takes two to three
times as long.  To the ceiling, a ratio, that makes no difference; of a slice, what ending it took says by how much.

On a device the slices say little: a session's first launches take it a millisecond or two, of the three that a slice
lasts, and it sees a twentieth of the rows that it should.  So there the floor is the prediction, unless a slice says
more.

After the first window its own price is the better prediction (`budget`).  Pure: numbers in, nanoseconds out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "CEILING_RATIO",
    "OPEN_NS",
    "ROW_NS",
    "SLICE_NS",
    "SLICE_PRICE_NS",
    "SLOWED_NS",
    "Part",
    "Slice",
    "StepShape",
    "WindowPrice",
]

OPEN_NS = 1_000_000
"""Beginning and ending a session with hardly a row: 0.5 to 0.8 ms."""

ROW_NS = 4_000
"""A row in all.  Measured on torch 2.13 (2 cores, `bench/bench_budget.py`): 3.2 to 4.1 us where a step has more
than a thousand rows, of which half is the session's end, a quarter the reading, and SLOWED_NS the operator."""

SLOWED_NS = 400
"""By how much the operator of a row is slower while it is recorded."""

END_NS = 300_000
END_ROW_NS = 2_000
"""Ending a session: in any case, and of ROW_NS for each of its rows."""

ROWS_MIN = 200
"""What ending a session of fewer rows took says little of a row."""

DENSEST_NS = 500
"""A row, at the least, takes this of the processor unprofiled: `x.mul_(1.0)` on four numbers, 2.5 us, 5 rows."""

CEILING_RATIO = ROW_NS / DENSEST_NS
"""A window costs at most so many times the processor time of its step."""

CEILING_MARGIN = 1.25
"""The step that is profiled may be longer than the mean of those before it."""

MARGIN = 1.5
"""A slice is a small part of a step, and the rest of it may be denser."""

NODE_ROWS = 15
PARAMETER_ROWS = 50
"""Of each autograd node, and of each parameter in the optimizer's step.  Measured (`bench/bench_budget.py`): 12 to 16
for plain, sharded and tensor-parallel layers; 35 to 50 with AdamW on a CPU.  A fused optimizer has hardly any: then the
first window comes some seconds late."""

DEVICE_FACTOR = 3
"""A launch writes rows on both sides, and a device's window is open for two steps."""

DEVICE_ROW_NS = 13_000
DEVICE_STEPS = 2
"""A row of a device's window, which is open for so many steps.  Measured on an H200 (docs/measurements/gpu.md): in
windows of 8261 and 23 648 rows (NODE_ROWS and PARAMETER_ROWS say 45 and 32 % more) one took 11.6 and 16.3 us; of that
the session's end 4.7, the reading 3.3, and recording it the rest."""

COUNT_ROW_NS = 8_000
"""What counting FLOPs costs per row that the operator would write: 20 us for one that writes two or three."""

SLICE_NS = 3_000_000
"""Processor time of the thread after which a slice is ended."""

SLICE_NS_MIN = 1_000_000
"""A shorter slice is not used: the slower first operators of a session are most of it."""

SLICE_PRICE_NS = OPEN_NS + ROW_NS * SLICE_NS // DENSEST_NS
"""What a slice costs at most, except for one long call below python in which it cannot be ended."""

OTHER_NODES_RATIO = 2.0
"""This many times the autograd nodes mean that the step has changed: the slices of the old one are dropped."""

Part = Literal["forward", "optimizer"]
"""A phase that a slice can be taken of."""


@dataclass(frozen=True, slots=True)
class Slice:
    """`rows` in `cpu_ns` of the training thread with the profiler on, whose end took `end_ns` of it; 0: unknown."""

    rows: int
    cpu_ns: int
    end_ns: int = 0

    @property
    def slowness(self) -> float:
        """How many times ROW_NS a row costs here and now, as far as that can be told; never less than once."""
        if self.rows < ROWS_MIN:
            return 1.0
        return max(1.0, self.end_ns / (END_NS + END_ROW_NS * self.rows))

    @property
    def slowed_ns(self) -> int:
        """By how much the operators were slower while they were recorded."""
        return int(SLOWED_NS * self.slowness * self.rows)

    @property
    def rows_per_ns(self) -> float:
        """How densely rows are written without the profiler's own part in that time; where it was short, as densest."""
        if self.cpu_ns < SLICE_NS_MIN:
            return 1.0 / DENSEST_NS
        undisturbed_ns = max(self.cpu_ns - self.slowed_ns, DENSEST_NS * self.rows)
        return self.rows / undisturbed_ns if undisturbed_ns > 0 else 0.0

    @property
    def price_ratio(self) -> float:
        """What profiling costs over the time of what is profiled."""
        return min(CEILING_RATIO, ROW_NS * self.slowness * self.rows_per_ns)


@dataclass(frozen=True, slots=True)
class StepShape:
    """What is known of a step that nobody profiled.

    `cpu_ns` is what the training thread takes of the processor, where that is unknown the wall time.  `phases` are host
    timers, None where none was ever measured.  `nodes` is how many autograd nodes a step makes, None: unknown;
    `forwards` how often it calls the model; `parameters` how many tensors the optimizer has.
    """

    cpu_ns: int
    phases: Mapping[str, int] | None
    nodes: int | None = None
    forwards: int = 1
    parameters: int = 0


class WindowPrice:
    """Predicts an upper bound of a window's cost for a step shape, and says which slice would lower it."""

    def __init__(self, *, on_device: bool = False) -> None:
        self._on_device = on_device
        self._slices: dict[Part, Slice] = {}
        self._nodes: int | None = None

    def learn(self, part: Part, found: Slice, nodes: int | None) -> None:
        """Add a slice of `part` of a step with `nodes` autograd nodes."""
        self._slices[part], self._nodes = found, nodes

    def ceiling_ns(self, shape: StepShape) -> int:
        """Return an upper bound of the window's cost, however dense its step."""
        return OPEN_NS + int(CEILING_MARGIN * self._factor * CEILING_RATIO * shape.cpu_ns)

    def predict_ns(self, shape: StepShape) -> int:
        """Return what the window will cost, with a margin; the ceiling where no slice is known."""
        self._forget_another_step(shape)
        ceiling_ns = self.ceiling_ns(shape)
        forward = self._slices.get("forward")
        if shape.phases is None or forward is None:
            return ceiling_ns
        optimizer = self._slices.get("optimizer")
        seen_ns = sum(shape.phases.get(name, 0) for name in ("forward", "backward", "backward_tail"))
        optimizer_ns = shape.phases.get("optimizer", 0)
        parts = [
            (MARGIN * forward.price_ratio, seen_ns),
            (CEILING_RATIO if optimizer is None else MARGIN * optimizer.price_ratio, optimizer_ns),
        ]
        if self._on_device:  # the host waits for the device in what is left, and writes no rows then
            seen_price_ns = int(self._factor * sum(ratio * length_ns for ratio, length_ns in parts))
            return min(ceiling_ns, OPEN_NS + max(seen_price_ns, self._floor_ns(shape)))
        # A phase is longer than what it takes of the processor: it waits for other ranks, and for other programs.
        price_ns, left_ns = 0.0, shape.cpu_ns
        for ratio, length_ns in sorted(parts, reverse=True):
            taken_ns = min(length_ns, left_ns)
            price_ns, left_ns = price_ns + ratio * taken_ns, left_ns - taken_ns
        price_ns += CEILING_RATIO * left_ns  # nothing is denser: it needs no margin
        return min(ceiling_ns, OPEN_NS + max(int(price_ns), self._floor_ns(shape)))

    def _floor_ns(self, shape: StepShape) -> int:
        """Return what a step of so many nodes and parameters costs, with a margin."""
        rows = NODE_ROWS * (shape.nodes or 0) + PARAMETER_ROWS * shape.parameters
        if self._on_device:
            return DEVICE_ROW_NS * DEVICE_STEPS * rows
        slowness = max((found.slowness for found in self._slices.values()), default=1.0)
        return int(MARGIN * ROW_NS * slowness * rows)

    def wanted_slice(self, shape: StepShape) -> Part | None:
        """Return of which part a slice would lower the prediction most; None: none would."""
        self._forget_another_step(shape)
        if shape.phases is None:
            return None
        lengths: dict[Part, int] = {
            "forward": sum(shape.phases.get(name, 0) for name in ("forward", "backward", "backward_tail")),
            "optimizer": shape.phases.get("optimizer", 0),
        }
        missing = [part for part, duration_ns in lengths.items() if duration_ns > 0 and part not in self._slices]
        return missing[0] if missing else None

    def count_ns(self, shape: StepShape) -> int:
        """Return what counting the operators of one forward will cost, with a margin."""
        self._forget_another_step(shape)
        forward_ns = shape.cpu_ns if shape.phases is None else shape.phases.get("forward", shape.cpu_ns)
        found = self._slices.get("forward")
        ratio = CEILING_RATIO if found is None else MARGIN * found.price_ratio
        return int(COUNT_ROW_NS / ROW_NS * ratio * forward_ns / max(1, shape.forwards))

    @property
    def _factor(self) -> int:
        return DEVICE_FACTOR if self._on_device else 1

    def _forget_another_step(self, shape: StepShape) -> None:
        if self._nodes is None or shape.nodes is None:
            return
        if shape.nodes > OTHER_NODES_RATIO * max(1, self._nodes):
            self._slices.clear()
            self._nodes = None
