"""Simulates distributed training jobs of which the truth is known: who is slow, in what, and what it costs.

In: a `Job` (layout, model, links, noise, clocks, faults, seed).  Out: a `Run` with true times and the traces that
pacecar's reader would give of torch's files, in the clocks of their hosts; and a `Truth`: culprits with what their
removal saves.

    job = Job(Layout(data=8), faults=(Fault(FaultKind.SLOW_COMPUTE, (3,), 0.1),), seed=1)
    truth = truth_of(job)            runs the job, and once more without each fault
    truth.run.traces()               what an analysis gets
    truth.culprits                   what it should find

It is no short cut of the analysis.  Hosts execute programs instruction by instruction and run ahead of their devices,
streams run what was launched in order, collectives and messages meet, on one true clock (`engine`).  What a fault costs
is not computed: the job is run again without it, with the same draws.

    layout, job                          what is simulated: values
    kernels, schedules, instructions     what a program is made of
    step_builder, messages, programs     the program of one training step
    cpu_programs                         the same of a DDP job with gloo
    durations, links                     how long things take, drawn by seed and place
    lanes, engine, run                   the simulation and its result
    clocks, collectives, waits, traces   what a trace shows of it
    timers                               what the running job's timers would see of it
    kineto                               the file that torch would have written of a trace
    truth, dependencies                  what faults cost, and what work had to wait for
    identifiability                      whom the traces can show to have a slow link
    acceptance                           the jobs that an analysis is judged by
    damage                               traces as users may have them: older, cut, with a clock that jumped

Deliberately simple: two collectives at a time share a link only where `Links.is_shared` says so and both are of one
group; the queue of launches has no end; python threads do not take the interpreter from each other; a communication
kernel slows others but is not slowed.
"""

from .clocks import HostClock
from .job import LOUD, QUIET, Clocks, Fault, FaultKind, Job, Links, Model, Noise, without
from .layout import Group, Layout
from .run import Run, simulate
from .truth import Culprit, Truth, truth_of

__all__ = [
    "LOUD",
    "QUIET",
    "Clocks",
    "Culprit",
    "Fault",
    "FaultKind",
    "Group",
    "HostClock",
    "Job",
    "Layout",
    "Links",
    "Model",
    "Noise",
    "Run",
    "Truth",
    "simulate",
    "truth_of",
    "without",
]
