"""Describes a simulated job: model, links, noise, clocks and faults.  Values only; nothing runs here.

Times are nanoseconds, ratios are 0..1, speeds bytes a second.  What a number stands for in a real job is said beside
it; none was fitted to anything that pacecar computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from .layout import Layout

__all__ = [
    *("LOUD", "PROGRAM_KINDS", "QUIET", "Clocks", "Fault", "FaultKind", "Job", "Links", "Model", "Noise", "without"),
]


class FaultKind(StrEnum):
    """What can be wrong with a job.  `Fault.size` is a ratio (0.3: takes 30 % more) or, where said, nanoseconds."""

    SLOW_COMPUTE = "slow_compute"  # all kernels of the ranks
    SLOW_BACKWARD = "slow_backward"  # only their backward kernels
    EXTRA_LAYERS = "extra_layers"  # size: so many more layers on these ranks (an unbalanced pipeline stage)
    EXTRA_KERNEL = "extra_kernel"  # ns of one more kernel in each forward pass, which no other stage runs
    EXTRA_WORK = "extra_work"  # ratio: one more kernel after each pass, which takes so much of the pass's kernels
    SLOW_HOST = "slow_host"  # all that python and the framework do on the host
    SLOW_LAUNCH = "slow_launch"  # ns more for each call that launches a kernel
    DATA_WAIT = "data_wait"  # ns more a step in DataLoader.__next__
    OPTIMIZER_HOST = "optimizer_host"  # ns more a step on the host inside Optimizer.step
    CHECKPOINT = "checkpoint"  # ns in an annotation that names a checkpoint, at the end of the step
    COPY = "copy"  # ns more for the copy of the input to the device
    STALL = "stall"  # ns during which the host stands still, once in each of its steps, at a place drawn at random
    GC = "gc"  # ns of a garbage collection, as STALL; it comes in many steps
    SLOW_LINK = "slow_link"  # ratio: traffic of these ranks to other hosts
    SLOW_DEVICE_LINK = "slow_device_link"  # ratio: all traffic of these ranks
    IMBALANCE = "imbalance"  # ratio: standard deviation of the sequence lengths; nobody is to blame


CAUSES: dict[FaultKind, tuple[str, ...]] = {
    FaultKind.SLOW_COMPUTE: ("compute",),
    FaultKind.SLOW_BACKWARD: ("compute",),
    FaultKind.EXTRA_LAYERS: ("compute",),
    FaultKind.EXTRA_KERNEL: ("compute",),
    FaultKind.EXTRA_WORK: ("compute",),
    FaultKind.SLOW_HOST: ("host_bound",),
    FaultKind.SLOW_LAUNCH: ("host_bound",),
    FaultKind.DATA_WAIT: ("data_wait",),
    FaultKind.OPTIMIZER_HOST: ("optimizer_host",),
    FaultKind.CHECKPOINT: ("checkpoint",),
    FaultKind.COPY: ("exposed_copy",),
    FaultKind.STALL: ("host_bound", "unknown"),
    FaultKind.GC: ("gc", "host_bound"),
    FaultKind.SLOW_LINK: ("link",),
    FaultKind.SLOW_DEVICE_LINK: ("link",),
    FaultKind.IMBALANCE: ("imbalance",),
}
"""The causes in the words of `analyze` that are true of a fault.  A stall or a collection leaves no row in a trace of
torch.profiler: it is a host that launched nothing for a while."""


PROGRAM_KINDS = (FaultKind.EXTRA_LAYERS, FaultKind.EXTRA_KERNEL, FaultKind.EXTRA_WORK)
"""Faults that change the program of a pipeline stage."""


@dataclass(frozen=True)
class Fault:
    """Something wrong with some ranks, in some steps (all when None)."""

    kind: FaultKind
    ranks: tuple[int, ...]
    size: float
    steps: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind in PROGRAM_KINDS and self.steps is not None:
            raise ValueError("a stage runs the same program in every step")

    @property
    def causes(self) -> tuple[str, ...]:
        """Return the causes that may be named for it, the best first."""
        return CAUSES[self.kind]

    def hits(self, rank: int, step: int) -> bool:
        return rank in self.ranks and (self.steps is None or step in self.steps)


@dataclass(frozen=True)
class Model:
    """What one step computes.  A layer is a transformer block of 8 forward and 12 backward kernels.

    `layers` are those of one pipeline stage (all virtual stages of a rank together).  `kernel_scale` stretches all
    kernels: below 0.3 the host is nearly too slow to keep the device busy.  `buckets_of` is how many layers share a
    bucket of gradients.  `chunks` are virtual stages a rank (interleaved schedule).  With `is_batched` a pipeline sends
    and receives by `batch_isend_irecv`, one kernel for both, as Megatron does.  `loader_ns` is what every rank
    waits for data in every step.  With `is_tensor_sync` tensor parallel sums are on the stream of compute itself, as
    torch has it since 2.8 for calls that wait.  `gloo_threads` work on the collectives of a CPU job in turn; torch's
    gloo has two.
    """

    layers: int = 4
    kernel_scale: float = 1.0
    layer_bytes: int = 25_000_000
    activation_bytes: int = 8_000_000
    buckets_of: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    is_batched: bool = False
    optimizer_kernels: int = 4
    loader_ns: int = 250_000
    is_tensor_sync: bool = False
    has_pageable_input: bool = False
    gloo_threads: int = 1
    ends_with_sync: bool = True


@dataclass(frozen=True)
class Links:
    """Bytes a second and latency of links: inside its host (NVLink), and to other hosts (its share of the NIC).

    With `is_shared` collectives of one group that are on the wire together get equal shares of it.  So many
    collectives and messages as `nic_shares`, of whatever groups, can leave a host at full speed at the same time, and
    as many can come to it; more get equal shares (None: each has a link of its own).
    """

    within: float = 200e9
    between: float = 25e9
    within_latency_ns: int = 12_000
    between_latency_ns: int = 30_000
    is_shared: bool = False
    nic_shares: int | None = None


@dataclass(frozen=True)
class Noise:
    """What differs from one occurrence to the next, as standard deviations, and what differs between equal ranks.

    `hiccup_ratio` of all rank-steps have one stop, of the host or of a kernel: of `hiccup_ns`, or of so much in the
    mean where they are exponential.  `scatter_ns` is the mean by which a rank leaves a collective later than the
    earliest could; `stamp_ns` the error of a time stamp.
    `lateness_ns` is the mean by which all ranks of a host leave later than those of others, always alike: from the
    ends of collectives it cannot be told from a clock that is behind.
    """

    kernel_ratio: float = 0.005
    host_ratio: float = 0.03
    wire_ratio: float = 0.01
    rank_ratio: float = 0.001
    hiccup_ratio: float = 0.0
    hiccup_ns: int = 3_000_000
    has_exponential_hiccups: bool = False
    scatter_ns: float = 2_000.0
    stamp_ns: float = 100.0
    lateness_ns: float = 0.0


QUIET = Noise()
LOUD = Noise(kernel_ratio=0.03, host_ratio=0.08, wire_ratio=0.03, rank_ratio=0.002, hiccup_ratio=0.03)


@dataclass(frozen=True)
class Clocks:
    """How far the hosts' clocks are apart: standard deviations of their offsets and of their drifts (1e-6 is 1 ppm)."""

    offset_ns: float = 50_000.0
    drift_ratio: float = 2e-6


@dataclass(frozen=True)
class Job:
    """A job whose every draw follows from `seed`.

    `steps` are recorded, after `steps_before` that run unrecorded, as a profiler's window begins in a running job.
    `contention_ratio` is by how much more a kernel takes while a communication kernel is resident on its device.
    `checkpoint_steps` are those after which every rank saves for `checkpoint_ns`: nobody's fault.  On a CPU job
    (`is_cpu`) operators are the work and gloo communicates.  `has_sync_rows` is torch's `enable_cuda_sync_events`.
    """

    layout: Layout
    model: Model = field(default_factory=Model)
    links: Links = field(default_factory=Links)
    noise: Noise = QUIET
    clocks: Clocks = field(default_factory=Clocks)
    faults: tuple[Fault, ...] = ()
    steps: int = 6
    steps_before: int = 1
    seed: int = 0
    contention_ratio: float = 0.0
    checkpoint_steps: tuple[int, ...] = ()
    checkpoint_ns: int = 0
    is_cpu: bool = False
    has_sync_rows: bool = False
    has_nccl_events: bool = True
    """Whether NCCL's own records and waits are in the trace; they order nothing that is."""
    has_host_names: bool = True
    """Whether traces name their hosts; torch.profiler itself does not."""
    has_host_rows: bool = True
    """Whether traces have rows of the host and marks of steps: without them they are of `activities=[CUDA]`."""
    is_balanced: bool = False
    """Whether IMBALANCE gives every microbatch the mean length of its step: the same work, evenly spread."""

    @property
    def all_steps(self) -> int:
        return self.steps_before + self.steps


def without(job: Job, *faults: Fault) -> Job:
    """Return the same job with the same draws without `faults`, or without any when none is given.

    Imbalance is removed by spreading the same work evenly: shorter sequences would be another job.
    """
    removed = faults or job.faults
    is_spread = any(fault.kind is FaultKind.IMBALANCE for fault in removed)
    left = tuple(fault for fault in job.faults if fault not in removed or fault.kind is FaultKind.IMBALANCE)
    return replace(job, faults=left, is_balanced=job.is_balanced or is_spread)
