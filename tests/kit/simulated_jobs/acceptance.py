"""Draws the jobs that an analysis is judged by: with planted faults that cost something, and healthy ones.

    for _, truth in planted_faults(seed=1, count=100): ...   whoever is named must be in truth.culprits, with its cause
    for job in healthy_jobs(seed=1, count=500): ...          nobody may be named

Kinds of jobs, their sizes and speeds, the ranks and kinds of faults are drawn.  How large a fault must be to cost
`COST_RATIO_MIN` of the wall time is not known beforehand: a slow host may hide behind its device.  So it is made larger
until it does, and given up where it never does.

Left out: judging an analysis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from .identifiability import ranks_told
from .job import LOUD, PROGRAM_KINDS, QUIET, Clocks, Fault, FaultKind, Job, Model, without
from .layout import Layout
from .run import Run, simulate
from .truth import Truth, truth_of

__all__ = [
    *("COST_RATIO_MIN", "FORMS", "KINDS", "LARGE_KINDS", "SPANNING_KINDS", "Form", "draw_job", "healthy_jobs"),
    "planted_faults",
]

COST_RATIO_MIN = 0.03
"""What a planted fault costs at least, as a share of the wall time."""

COST_RATIO_MAX = 0.4
"""Beyond it a fault is too easy to find to tell analyses apart."""

TRIES_MAX = 8
"""How often a fault is made larger before it is given up."""

TWO_FAULTS_RATIO = 0.2
"""The share of jobs with two faults."""

KINDS: dict[str, tuple[Layout, ...]] = {
    "ddp": (Layout(data=8), Layout(data=16), Layout(data=32), Layout(data=64)),
    "fsdp": tuple(Layout(data=n, is_sharded=True) for n in (8, 16, 32)),
    "tensor": (Layout(tensor=8),),
    "tensor x ddp": (Layout(tensor=4, data=4), Layout(tensor=2, data=8), Layout(tensor=8, data=4)),
    "tensor x fsdp": (Layout(tensor=4, data=4, is_sharded=True), Layout(tensor=8, data=4, is_sharded=True)),
    "1f1b": (Layout(pipeline=8, ranks_per_host=4),),
    "1f1b x ddp": (Layout(pipeline=4, data=2, ranks_per_host=4), Layout(pipeline=4, data=8)),
    "1f1b x tensor x ddp": (Layout(pipeline=2, tensor=4, data=2), Layout(pipeline=4, tensor=4, data=2)),
    "gpipe x ddp": (Layout(pipeline=4, data=2, ranks_per_host=4),),
    "interleaved x ddp": (Layout(pipeline=4, data=2, ranks_per_host=4),),
    "cpu": (Layout(data=8, ranks_per_host=4), Layout(data=16, ranks_per_host=4)),
}
"""Layouts by kind of job, from 8 to 64 ranks."""

SPANNING_KINDS: dict[str, tuple[Layout, ...]] = {
    "tensor over hosts x ddp": (
        Layout(tensor=8, data=2, ranks_per_host=4),
        Layout(tensor=4, data=4, ranks_per_host=2),
        Layout(tensor=16, data=2),
    ),
    "tensor over hosts x fsdp": (Layout(tensor=8, data=4, ranks_per_host=4, is_sharded=True),),
    "1f1b over hosts": (
        Layout(pipeline=4, ranks_per_host=2),
        Layout(pipeline=8, ranks_per_host=4),
        Layout(pipeline=4, data=2, ranks_per_host=4),
        Layout(pipeline=4, data=4),
    ),
    "gpipe over hosts": (
        Layout(pipeline=4, ranks_per_host=2),
        Layout(pipeline=8, ranks_per_host=4),
        Layout(pipeline=4, data=2, ranks_per_host=4),
    ),
}
"""Layouts whose groups lie across hosts in different ways."""

LARGE_KINDS: dict[str, tuple[Layout, ...]] = {
    "large ddp": (Layout(data=256),),
    "large fsdp": (Layout(data=256, is_sharded=True),),
    "large tensor x ddp": (Layout(tensor=8, data=128), Layout(tensor=8, data=32)),
    "large 1f1b x tensor x ddp": (Layout(pipeline=4, tensor=8, data=8), Layout(pipeline=8, tensor=8, data=8)),
}
"""Layouts of 256 to 1024 ranks, which take minutes to simulate."""

SMALL_KERNELS = 0.3
"""By how much kernels are shorter in jobs whose hosts have to hurry; a slow host hides behind any longer ones."""

_IN_NS = (
    *(FaultKind.DATA_WAIT, FaultKind.OPTIMIZER_HOST, FaultKind.COPY),
    *(FaultKind.STALL, FaultKind.CHECKPOINT, FaultKind.GC),
)
_OF_HOSTS = (FaultKind.SLOW_HOST, FaultKind.SLOW_LAUNCH)
_LINKS = (FaultKind.SLOW_LINK, FaultKind.SLOW_DEVICE_LINK)
_FIRST_SIZE = {
    FaultKind.SLOW_COMPUTE: 0.05,
    FaultKind.SLOW_BACKWARD: 0.07,
    FaultKind.SLOW_HOST: 0.3,
    FaultKind.SLOW_LAUNCH: 4_000,
    FaultKind.SLOW_LINK: 0.4,
    FaultKind.SLOW_DEVICE_LINK: 0.4,
    FaultKind.IMBALANCE: 0.08,
    FaultKind.EXTRA_WORK: 0.08,
}
"""What is tried first of faults that are ratios, or nanoseconds a launch."""


class Form(NamedTuple):
    """What all jobs of a run have in common beside their kind.

    `faults` are the kinds that are planted, all that the job can have where there are none.  Where `is_together`, two
    faults are there in all steps, and always two; they may be of one rank.
    """

    faults: tuple[FaultKind, ...] = ()
    has_host_names: bool = True
    has_host_rows: bool = True
    nic_shares: int | None = None
    is_together: bool = False

    def of(self, job: Job) -> Job:
        """Return the job in this form."""
        links = replace(job.links, nic_shares=self.nic_shares)
        return replace(job, links=links, has_host_names=self.has_host_names, has_host_rows=self.has_host_rows)


_DEVICE_FAULTS = (FaultKind.SLOW_COMPUTE, FaultKind.SLOW_BACKWARD, FaultKind.EXTRA_LAYERS, FaultKind.IMBALANCE)

FORMS: dict[str, Form] = {
    "usual": Form(),
    "nameless hosts": Form(has_host_names=False),
    "shared links": Form(faults=(FaultKind.SLOW_LINK,), nic_shares=2),
    "shared links, nameless hosts": Form(faults=(FaultKind.SLOW_LINK,), nic_shares=1, has_host_names=False),
    "extra kernels": Form(faults=(FaultKind.EXTRA_KERNEL, FaultKind.EXTRA_WORK)),
    "uneven lengths": Form(faults=(FaultKind.IMBALANCE,)),
    "two faults": Form(is_together=True),
    "device rows": Form(faults=_DEVICE_FAULTS, has_host_rows=False),
    "device rows, nameless hosts": Form(faults=_DEVICE_FAULTS, has_host_rows=False, has_host_names=False),
}
"""Forms of jobs and of their traces, by name."""


def draw_job(drawn: np.random.Generator, kind: str, *, loud: bool = False, form: Form = FORMS["usual"]) -> Job:
    """Return a healthy job of this kind and form: sizes, speeds and clocks are drawn."""
    layouts = (KINDS | SPANNING_KINDS | LARGE_KINDS)[kind]
    layout = layouts[int(drawn.integers(len(layouts)))]
    is_cpu = kind == "cpu"
    pipelined = layout.pipeline > 1
    scale = float(drawn.choice([0.8, 1.5, 2.5]))
    speed = 25e9 if layout.hosts > 1 else 200e9
    talk = float(drawn.uniform(0.1, 0.7))  # what an all-reduce of a layer takes, as a share of its backward
    size = int(talk * 1.9e-3 * scale * speed / 2)
    model = Model(
        layers=2 if pipelined else int(drawn.integers(3, 6)),
        kernel_scale=scale * layout.tensor * (0.5 if pipelined else 1),
        layer_bytes=size * layout.tensor // 64 * 64,
        activation_bytes=int(drawn.uniform(2e6, 6e6) * scale) // 64 * 64,
        buckets_of=int(drawn.integers(1, 3)),
        microbatches=2 * layout.pipeline if pipelined else 1,
        schedule=next((word for word in ("gpipe", "interleaved") if kind.startswith(word)), "1f1b"),
        chunks=2 if kind == "interleaved x ddp" else 1,
        is_batched=pipelined and kind != "interleaved x ddp" and bool(drawn.random() < 0.5),
        loader_ns=int(drawn.choice([100_000, 400_000, 1_500_000])),
        has_pageable_input=bool(drawn.random() < 0.3),
        is_tensor_sync=bool(drawn.random() < 0.5),
        ends_with_sync=bool(drawn.random() < 0.8),
    )
    job = Job(
        layout,
        model,
        noise=LOUD if loud else QUIET,
        clocks=Clocks(offset_ns=float(drawn.choice([0, 20_000, 200_000, 5_000_000]))),
        seed=int(drawn.integers(1 << 30)),
        contention_ratio=0.0 if is_cpu else float(drawn.choice([0.0, 0.0, 0.15])),
        is_cpu=is_cpu,
        has_sync_rows=bool(not is_cpu and drawn.random() < 0.2),
    )
    return form.of(job)


def healthy_jobs(
    seed: int,
    count: int,
    *,
    loud: bool = False,
    kinds: Sequence[str] = tuple(KINDS),
    first: int = 0,
    form: Form = FORMS["usual"],
) -> Iterator[Job]:
    """Yield jobs in which nobody is to blame, some of which are slow as a whole; the draws from `first` on.

    All ranks may wait for data, or save a checkpoint; a host may be hardly ahead of its device.
    """
    for number in range(first, first + count):
        drawn = np.random.default_rng([seed, 1, number])
        job = draw_job(drawn, str(drawn.choice(list(kinds))), loud=loud, form=form)
        match int(drawn.integers(4)):
            case 0:
                job = replace(job, model=replace(job.model, loader_ns=int(drawn.uniform(2e6, 8e6))))
            case 1:
                saved = (int(drawn.integers(1, job.all_steps)),)
                job = replace(job, checkpoint_steps=saved, checkpoint_ns=int(drawn.uniform(5e6, 50e6)))
            case 2 if not job.is_cpu:
                job = _with_small_kernels(job)
            case _:
                pass
        yield job


def planted_faults(
    seed: int,
    count: int,
    *,
    loud: bool = False,
    kinds: Sequence[str] = tuple(KINDS),
    first: int = 0,
    form: Form = FORMS["usual"],
) -> Iterator[tuple[int, Truth]]:
    """Yield jobs with one or two faults, each of which costs from `COST_RATIO_MIN` to `COST_RATIO_MAX`.

    With each comes the number of its draw, of which those that cost too little or too much are left out.  A draw
    follows from seed and number alone, so `first` of a miss and a count of 1 give that job again.
    """
    number, found = first, 0
    while found < count:
        drawn = np.random.default_rng([seed, 2, number])
        truth = _plant(drawn, str(drawn.choice(list(kinds))), loud=loud, form=form)
        if truth is not None:
            found += 1
            yield number, truth
        number += 1


def _with_small_kernels(job: Job) -> Job:
    """Return the job with kernels so small that the host is only a little ahead of the device."""
    return replace(job, model=replace(job.model, kernel_scale=job.model.kernel_scale * SMALL_KERNELS))


def _plant(drawn: np.random.Generator, kind: str, *, loud: bool, form: Form) -> Truth | None:
    job = draw_job(drawn, kind, loud=loud, form=form)
    fault = _draw_fault(drawn, job, form)
    if fault is None:
        return None
    if fault.kind in _OF_HOSTS:
        job = _with_small_kernels(job)
    healthy = simulate(job)
    fault = _sized(drawn, fault, healthy)
    if drawn.random() >= TWO_FAULTS_RATIO and not form.is_together:
        return _grown(replace(job, faults=(fault,)), healthy)
    other = _draw_fault(drawn, job, form)
    if other is None:
        return None
    other = _sized(drawn, other, healthy)
    kinds = {fault.kind, other.kind}
    is_shared = bool(set(other.ranks) & set(fault.ranks)) and not form.is_together
    if len(kinds) == 1 or is_shared or kinds & {FaultKind.IMBALANCE, *PROGRAM_KINDS}:
        return None
    if not kinds & set(_LINKS) and not form.is_together:  # at the same time one would hide behind the other
        half = job.steps_before + job.steps // 2
        fault = _only_in(fault, range(half), job)
        other = _only_in(other, range(half, job.all_steps), job)
    return _grown(replace(job, faults=(fault, other)), healthy)


def _only_in(fault: Fault, steps: range, job: Job) -> Fault:
    """Return the fault in those steps; one of a single step moves there."""
    had = range(job.all_steps) if fault.steps is None else fault.steps
    return replace(fault, steps=tuple(step for step in had if step in steps) or (steps[-1],))


def _draw_fault(drawn: np.random.Generator, job: Job, form: Form) -> Fault | None:
    """Return a fault that such a job can have and its traces can tell, of no size yet; None where the form has none."""
    layout = job.layout
    kinds = [*_IN_NS, FaultKind.SLOW_COMPUTE, FaultKind.SLOW_BACKWARD]
    if job.is_cpu:
        kinds.remove(FaultKind.COPY)
    else:
        kinds += [*_OF_HOSTS, FaultKind.SLOW_DEVICE_LINK] + [FaultKind.SLOW_LINK] * (layout.hosts > 1)
    kinds += [FaultKind.EXTRA_LAYERS, FaultKind.SLOW_COMPUTE] * (layout.pipeline > 1)
    kinds += [FaultKind.IMBALANCE] * (layout.data > 1)
    if form.faults:
        also = [FaultKind.EXTRA_KERNEL, FaultKind.EXTRA_WORK] * (layout.pipeline > 1)
        kinds = [kind for kind in [*kinds, *also] if kind in form.faults]
        if not kinds:
            return None
    kind = kinds[int(drawn.integers(len(kinds)))]
    fault = Fault(kind, _draw_ranks(drawn, kind, layout), 0, _draw_steps(drawn, kind, job))
    told = ranks_told(job, fault)
    if told is None or len(told) > max(2, len(fault.ranks)):
        return None if form.faults else _draw_fault(drawn, job, form)
    return fault


def _draw_ranks(drawn: np.random.Generator, kind: FaultKind, layout: Layout) -> tuple[int, ...]:
    """Return one rank, and at times a stage or a host of them where that can be."""
    chance = drawn.random()
    if kind is FaultKind.IMBALANCE:
        return ()
    if kind is FaultKind.COPY:
        return (int(drawn.choice(layout.ranks_of_stage(0))),)
    is_compute = kind is FaultKind.SLOW_COMPUTE
    if kind in PROGRAM_KINDS or (is_compute and layout.pipeline > 1 and chance < 0.5):
        return layout.ranks_of_stage(int(drawn.integers(layout.pipeline)))
    if kind is FaultKind.SLOW_LINK or (is_compute and layout.hosts > 2 and chance > 0.8):
        return layout.ranks_of_host(int(drawn.integers(layout.hosts)))
    return (int(drawn.integers(layout.ranks)),)


def _draw_steps(drawn: np.random.Generator, kind: FaultKind, job: Job) -> tuple[int, ...] | None:
    """Return one step for what happens once; else all, or at times all from a certain one on."""
    first = int(drawn.integers(job.steps_before, job.all_steps))
    if kind in (FaultKind.STALL, FaultKind.CHECKPOINT):
        return (first,)
    if kind in PROGRAM_KINDS or drawn.random() < 0.75:
        return None
    return tuple(range(min(first, job.all_steps - 2), job.all_steps))


def _sized(drawn: np.random.Generator, fault: Fault, healthy: Run) -> Fault:
    """Return the fault as large as would do if nothing hid it."""
    if fault.kind is FaultKind.EXTRA_LAYERS:
        return replace(fault, size=1)
    steps = healthy.job.all_steps
    times = steps / len(fault.steps or range(steps))  # a fault of few steps has to be larger
    if fault.kind is FaultKind.EXTRA_KERNEL:
        return replace(fault, size=float(drawn.uniform(0.04, 0.15)) * healthy.step_ns / healthy.job.model.microbatches)
    if fault.kind in _IN_NS:
        return replace(fault, size=float(drawn.uniform(0.04, 0.15)) * healthy.step_ns * times)
    return replace(fault, size=_FIRST_SIZE[fault.kind] * float(drawn.uniform(1, 2)) * times)


def _grown(job: Job, healthy: Run) -> Truth | None:
    """Return the truth of the job with its faults made larger until each costs enough; None where one never does."""
    for _ in range(TRIES_MAX):
        truth = truth_of(job, healthy if without(job) == replace(job, faults=()) else None)
        costs = {one.fault: one.saved_ratio for one in truth.culprits}
        if max(costs.values()) > COST_RATIO_MAX:
            return None
        if min(costs.values()) >= COST_RATIO_MIN:
            return truth
        job = replace(job, faults=tuple(_larger(fault, costs[fault]) for fault in job.faults))
    return None


def _larger(fault: Fault, cost: float) -> Fault:
    if cost >= COST_RATIO_MIN:
        return fault
    if fault.kind is FaultKind.EXTRA_LAYERS:
        return replace(fault, size=fault.size + 1)
    return replace(fault, size=fault.size * 1.7)
