"""Writes the program of one training step of a DDP job on CPUs with gloo.

Operators are the work, and autograd's thread runs those of backward.  A collective is queued for a thread of gloo's,
of several for each in turn; nothing in a trace says when the loop began to wait for it.  Left out: other parallelism
than DDP.
"""

from __future__ import annotations

from pacecar.analysis.trace.columns import HostKind
from pacecar.ledger.attribution import Work

from .instructions import AUTOGRAD, MAIN, Code, Instruction, Phase, Program
from .job import Job
from .kernels import BACKWARD, FORWARD, Kernel
from .programs import CHECKPOINT_ROW, LOADER_ROW, STEP_ROW

__all__ = ["GLOO", "cpu_program"]

GLOO = 1
"""The "stream" of gloo's first thread; others follow."""

STRETCH = 8
"""By how much an operator on a CPU takes longer than the kernel on a device, which keeps a step at some 100 ms."""

PYTHON_NS = 12_000
CALL_NS = 40_000
_ON_CPU = {"aten::_flash_attention_forward": "aten::_scaled_dot_product_flash_attention_for_cpu"}


def cpu_program(job: Job) -> Program:
    """Return one step of every rank.  Raises ValueError for a layout that is not plain data parallel."""
    layout, model = job.layout, job.model
    if layout.ranks != layout.data or layout.is_sharded:
        raise ValueError("jobs on CPUs are DDP")
    found: list[Instruction] = [Instruction(Code.OPEN, STEP_ROW, kind=HostKind.ANNOTATION)]
    found.append(Instruction(Code.HOST, LOADER_ROW, HostKind.LOADER, 10_000, call_ns=model.loader_ns, phase=Phase.DATA))
    name = "Optimizer.zero_grad#SGD.zero_grad"
    found.append(Instruction(Code.HOST, name, HostKind.OPTIMIZER, 10_000, call_ns=30_000))
    found.append(Instruction(Code.OPEN, "DistributedDataParallel.forward", HostKind.ANNOTATION, 5_000))
    for _ in range(model.layers):
        found += [_operator(job, kernel, Phase.FORWARD) for half in FORWARD for kernel in half]
    found.append(Instruction(Code.CLOSE))
    events = []
    for layer in reversed(range(model.layers)):
        found += [_operator(job, kernel, Phase.BACKWARD) for half in BACKWARD for kernel in half]
        if layout.data > 1 and layer % model.buckets_of == 0:
            size = model.layer_bytes * min(model.buckets_of, model.layers - layer)
            found.append(_all_reduce(size, layer, GLOO + len(events) % model.gloo_threads))
            events.append(layer)
    found += [Instruction(Code.SYNC, before_ns=2_000, event=one, thread=AUTOGRAD) for one in events]
    found.append(Instruction(Code.OPEN, "Optimizer.step#SGD.step", HostKind.OPTIMIZER, 10_000, phase=Phase.OPTIMIZER))
    found.append(Instruction(Code.HOST, before_ns=80_000, phase=Phase.OPTIMIZER))
    update = Kernel("", "aten::_foreach_add_", 60_000, ())
    found += [_operator(job, update, Phase.OPTIMIZER) for _ in range(model.optimizer_kernels)]
    found.append(Instruction(Code.CLOSE))
    found.append(Instruction(Code.HOST, CHECKPOINT_ROW, HostKind.CHECKPOINT, phase=Phase.CHECKPOINT))
    found.append(Instruction(Code.HOST, before_ns=30_000))
    found.append(Instruction(Code.CLOSE))
    return Program(found)


def _operator(job: Job, kernel: Kernel, phase: Phase) -> Instruction:
    return Instruction(
        Code.HOST,
        _ON_CPU.get(kernel.operator, kernel.operator),
        before_ns=PYTHON_NS,
        call_ns=round(kernel.device_ns * job.model.kernel_scale * STRETCH),
        thread=AUTOGRAD if phase is Phase.BACKWARD else MAIN,
        phase=phase,
        power=kernel.power,
    )


def _all_reduce(size: int, event: int, thread: int) -> Instruction:
    return Instruction(
        Code.COLLECTIVE,
        "c10d::allreduce_",
        HostKind.COLLECTIVE_CALL,
        before_ns=8_000,
        call_ns=CALL_NS,
        thread=AUTOGRAD,
        phase=Phase.BACKWARD,
        stream=thread,
        on_stream=thread,
        event=event,
        work=Work.COMMUNICATION,
        power=0,
        role="data",
        operation="all_reduce",
        bytes=size,
    )
