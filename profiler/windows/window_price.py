"""Predicts the cost of a job's first exact window.

A window's cost is proportional to its rows: recording, ending and reading take ROW_NS per row, whether the row's
operator took a microsecond or ten.  So profiling costs a hundredth of a step with few large operators, and several
times the length of a step with tens of thousands of small ones.  Counting a step's operators is expensive, but three
things are known:

- A *ceiling*: no step writes rows faster than one per DENSEST_NS of the training thread's processor time.  A window
  whose ceiling is affordable needs no other prediction.
- *Slices*: a session over a few milliseconds of the forward or the optimizer (`row_density_probe`) shows how densely
  that part of the step writes rows.  The phase lengths, in sum at most the processor time, extend this to a whole step;
  time outside phases, and phases without a slice, are assumed to be as dense as possible.
- A *floor*: a slice covers the beginning of a phase, which may be pure Python (gathering sharded parameters, collecting
  an optimizer's gradients).  But autograd numbers its nodes, each of which has a few rows in forward and backward, and
  so has each parameter in the optimizer.

The cost of a row depends on the current speed of the machine: beside other programs it is two to three times higher.
The ceiling is a ratio and unaffected; for a slice, the time it took to end shows the factor.

On a device slices show little: a session's first launches take a millisecond or two of a slice's three, and it sees a
twentieth of the expected rows.  So the floor is the prediction there, unless a slice predicts more.

After the first window its own price is the better prediction (`overhead_budget`).  Pure: numbers in, nanoseconds out.
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
"""Beginning and ending a session with hardly any rows: 0.5 to 0.8 ms."""

ROW_NS = 4_000
"""The total cost of a row.  Measured on torch 2.13 (2 cores, `bench/bench_budget.py`): 3.2 to 4.1 us in steps with more
than a thousand rows, half for the session's end, a quarter for reading, and SLOWED_NS for the operator."""

SLOWED_NS = 400
"""How much slower the operator of a row is while it is recorded."""

END_NS = 300_000
END_ROW_NS = 2_000
"""Ending a session: the fixed part, and the part of ROW_NS for each row."""

ROWS_MIN = 200
"""With fewer rows, the time to end a session shows little about the cost of a row."""

DENSEST_NS = 500
"""The least unprofiled processor time per row: `x.mul_(1.0)` on four numbers takes 2.5 us and has 5 rows."""

CEILING_RATIO = ROW_NS / DENSEST_NS
"""A window costs at most this many times the processor time of its step."""

CEILING_MARGIN = 1.25
"""The profiled step may be longer than the mean of earlier ones."""

MARGIN = 1.5
"""A slice is a small part of a step, and the rest of it may be denser."""

NODE_ROWS = 15
PARAMETER_ROWS = 50
"""Rows per autograd node, and per parameter in the optimizer's step.  Measured (`bench/bench_budget.py`): 12 to 16 for
plain, sharded and tensor-parallel layers; 35 to 50 with AdamW on a CPU.  A fused optimizer has hardly any: its first
window then comes a few seconds late."""

DEVICE_FACTOR = 3
"""A launch writes rows on host and device, and a device job's window is open for two steps."""

DEVICE_ROW_NS = 13_000
DEVICE_STEPS = 2
"""The cost of a row in a device job's window.  Measured on an H200 (docs/measurements/gpu.md): in windows of 8261 and
23 648 rows (NODE_ROWS and PARAMETER_ROWS predict 45 and 32 % more) a row took 11.6 and 16.3 us, 4.7 of it for the
session's end, 3.3 for reading, and the rest for recording."""

COUNT_ROW_NS = 8_000
"""The cost of counting FLOPs per row that an operator would write: 20 us for one that writes two or three."""

SLICE_NS = 3_000_000
"""A slice ends after this much processor time of the thread."""

SLICE_NS_MIN = 1_000_000
"""A shorter slice is not used, because it consists mostly of a session's slow first operators."""

SLICE_PRICE_NS = OPEN_NS + ROW_NS * SLICE_NS // DENSEST_NS
"""The most that a slice costs, unless it cannot end during a long call below Python."""

OTHER_NODES_RATIO = 2.0
"""If the number of autograd nodes changes by this factor, the step has changed and its old slices are dropped."""

Part = Literal["forward", "optimizer"]
"""A phase of which a slice can be taken."""


@dataclass(frozen=True, slots=True)
class Slice:
    """`rows` in `cpu_ns` of the training thread with the profiler on; ending it took `end_ns` of that (0: unknown)."""

    rows: int
    cpu_ns: int
    end_ns: int = 0

    @property
    def slowness(self) -> float:
        """The current cost of a row as a multiple of ROW_NS, as far as it is known; at least 1."""
        if self.rows < ROWS_MIN:
            return 1.0
        return max(1.0, self.end_ns / (END_NS + END_ROW_NS * self.rows))

    @property
    def slowed_ns(self) -> int:
        """How much slower the operators were while they were recorded."""
        return int(SLOWED_NS * self.slowness * self.rows)

    @property
    def rows_per_ns(self) -> float:
        """The density of rows without the profiler's own part of the time; the highest density for short slices."""
        if self.cpu_ns < SLICE_NS_MIN:
            return 1.0 / DENSEST_NS
        undisturbed_ns = max(self.cpu_ns - self.slowed_ns, DENSEST_NS * self.rows)
        return self.rows / undisturbed_ns if undisturbed_ns > 0 else 0.0

    @property
    def price_ratio(self) -> float:
        """The cost of profiling relative to the profiled time."""
        return min(CEILING_RATIO, ROW_NS * self.slowness * self.rows_per_ns)


@dataclass(frozen=True, slots=True)
class StepShape:
    """What is known about a step that was not profiled.

    `cpu_ns`: the training thread's processor time, or the wall time if unknown.  `phases`: host timers, None if none
    was ever measured.  `nodes`: the number of autograd nodes of a step, None if unknown.  `forwards`: the number of
    calls of the model.  `parameters`: the number of tensors in the optimizer.
    """

    cpu_ns: int
    phases: Mapping[str, int] | None
    nodes: int | None = None
    forwards: int = 1
    parameters: int = 0


class WindowPrice:
    """Predicts an upper bound of a window's cost for a step shape, and which slice would lower it."""

    def __init__(self, *, on_device: bool = False) -> None:
        self._on_device = on_device
        self._slices: dict[Part, Slice] = {}
        self._nodes: int | None = None

    def learn(self, part: Part, found: Slice, nodes: int | None) -> None:
        """Add a slice of `part` of a step with `nodes` autograd nodes."""
        self._slices[part], self._nodes = found, nodes

    def ceiling_ns(self, shape: StepShape) -> int:
        """Return an upper bound of the window's cost for the densest possible step."""
        return OPEN_NS + int(CEILING_MARGIN * self._factor * CEILING_RATIO * shape.cpu_ns)

    def predict_ns(self, shape: StepShape) -> int:
        """Return the predicted cost of the window, with a margin; the ceiling if there is no slice."""
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
        if self._on_device:  # in the rest of the step the host waits for the device and writes no rows
            seen_price_ns = int(self._factor * sum(ratio * length_ns for ratio, length_ns in parts))
            return min(ceiling_ns, OPEN_NS + max(seen_price_ns, self._floor_ns(shape)))
        # A phase is longer than its processor time: it also waits for other ranks and other programs.
        price_ns, left_ns = 0.0, shape.cpu_ns
        for ratio, length_ns in sorted(parts, reverse=True):
            taken_ns = min(length_ns, left_ns)
            price_ns, left_ns = price_ns + ratio * taken_ns, left_ns - taken_ns
        price_ns += CEILING_RATIO * left_ns  # the densest possible, so without a margin
        return min(ceiling_ns, OPEN_NS + max(int(price_ns), self._floor_ns(shape)))

    def _floor_ns(self, shape: StepShape) -> int:
        """Return the cost of a step with this many nodes and parameters, with a margin."""
        rows = NODE_ROWS * (shape.nodes or 0) + PARAMETER_ROWS * shape.parameters
        if self._on_device:
            return DEVICE_ROW_NS * DEVICE_STEPS * rows
        slowness = max((found.slowness for found in self._slices.values()), default=1.0)
        return int(MARGIN * ROW_NS * slowness * rows)

    def wanted_slice(self, shape: StepShape) -> Part | None:
        """Return the part whose slice would lower the prediction most; None: no slice would."""
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
        """Return the cost of counting the operators of one forward, with a margin."""
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
