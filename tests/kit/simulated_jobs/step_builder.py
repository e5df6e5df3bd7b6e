"""Builds the instructions of one step: kernels, copies, collectives, messages and the waits between them.

Host times are those of eager PyTorch on a fast CPU.  Left out: in which order a program says them (`programs`).
"""

from __future__ import annotations

from pacecar.analysis.trace.columns import HostKind
from pacecar.ledger.attribution import Work

from .instructions import MAIN, Code, Instruction, Phase, Stream
from .job import Model
from .kernels import NCCL, Kernel
from .layout import Layout

__all__ = ["BEFORE_NS", "MODULE_NS", "StepBuilder"]

BEFORE_NS, INSIDE_NS, CALL_NS, AFTER_NS = 6_000, 9_000, 5_000, 3_000
"""An operator of eager PyTorch: 23 us in all from one to the next."""

MODULE_NS = 20_000
"""What entering a layer's modules and hooks costs in python, before its first operator."""

COLLECTIVE_NS = (8_000, 70_000, 12_000, 40_000)
"""The same parts of the call of a collective: about 130 us, as measured in traces of DDP."""


class StepBuilder:
    """Collects the instructions of one step."""

    def __init__(self, layout: Layout, model: Model, stage: int) -> None:
        self.layout = layout
        self.model = model
        self.stage = stage
        self.found: list[Instruction] = []
        self.phase = Phase.OTHER
        self.thread = MAIN
        self.microbatch = 0
        self.is_extra = False
        self._events = 0

    def add(self, code: Code, row: str = "", **fields: object) -> Instruction:
        base = {"phase": self.phase, "thread": self.thread, "microbatch": self.microbatch, "is_extra": self.is_extra}
        self.found.append(Instruction(code, row, **(base | fields)))  # type: ignore[arg-type]
        return self.found[-1]

    def event(self) -> int:
        self._events += 1
        return self._events - 1

    def kernel(self, kernel: Kernel, before_ns: int = BEFORE_NS, device_ns: int | None = None) -> None:
        """Launch a kernel, which takes its own time, or `device_ns`."""
        share = self.layout.tensor if kernel.is_split else 1
        self.add(
            Code.LAUNCH,
            kernel.operator,
            before_ns=before_ns,
            inside_ns=INSIDE_NS,
            call="cudaLaunchKernel",
            call_ns=CALL_NS,
            after_ns=AFTER_NS,
            kernel=kernel.name,
            device_ns=round(kernel.device_ns * self.model.kernel_scale / share) if device_ns is None else device_ns,
            grid=kernel.grid,
            power=kernel.power,
        )

    def copy(self, row: str, name: str, device_ns: int, *, is_blocking: bool, stream: int = Stream.COMPUTE) -> None:
        self.add(
            Code.LAUNCH,
            row,
            before_ns=BEFORE_NS,
            inside_ns=INSIDE_NS,
            call="cudaMemcpyAsync",
            call_ns=CALL_NS,
            after_ns=AFTER_NS,
            kernel=name,
            work=Work.COPY,
            device_ns=device_ns,
            power=0,
            is_blocking=is_blocking,
            stream=stream,
        )

    def collective(
        self, operation: str, role: str, size: int, *, stream: int, on_stream: int = Stream.COMPUTE, peer: int = 0
    ) -> int:
        """Launch a collective, a send or a receive; return the event of its end."""
        code = {"send": Code.SEND, "recv": Code.RECV}.get(operation, Code.COLLECTIVE)
        before, inside, call, after = COLLECTIVE_NS
        event = self.event()
        self.add(
            code,
            _CALLS[operation],
            kind=HostKind.COLLECTIVE_CALL,
            before_ns=before,
            inside_ns=inside,
            call="cudaLaunchKernelExC",
            call_ns=call,
            after_ns=after,
            stream=stream,
            on_stream=on_stream,
            event=event,
            kernel=NCCL[operation][0],
            work=Work.COMMUNICATION,
            power=0,
            role=role,
            operation=operation,
            bytes=size,
            peer=peer,
        )
        return event

    def batch(self, *messages: tuple[str, int]) -> int:
        """Send and receive at once, (operation, stages away) each; return the event of the end of all."""
        for operation, peer in messages:
            self.add(
                Code.SEND if operation == "send" else Code.RECV,
                _CALLS[operation],
                kind=HostKind.COLLECTIVE_CALL,
                before_ns=8_000,
                inside_ns=40_000,
                after_ns=10_000,
                stream=Stream.PIPELINE,
                work=Work.COMMUNICATION,
                power=0,
                is_batched=True,
                role="pipeline",
                operation=operation,
                bytes=self.model.activation_bytes // self.layout.tensor,
                peer=peer,
            )
        event = self.event()
        before, inside, call, after = COLLECTIVE_NS
        self.add(
            Code.BATCH,
            before_ns=before,
            inside_ns=inside,
            call="cudaLaunchKernelExC",
            call_ns=call,
            after_ns=after,
            stream=Stream.PIPELINE,
            event=event,
            kernel=NCCL["send"][0],
            work=Work.COMMUNICATION,
            power=0,
        )
        return event

    def wait(self, event: int, stream: int = Stream.COMPUTE) -> None:
        self.add(Code.WAIT, call="cudaStreamWaitEvent", before_ns=4_000, call_ns=1_000, stream=stream, event=event)

    def record(self, stream: int = Stream.COMPUTE) -> int:
        event = self.event()
        self.add(Code.RECORD, call="cudaEventRecord", before_ns=4_000, call_ns=1_000, stream=stream, event=event)
        return event

    def open(self, row: str, kind: HostKind, before_ns: int = 2_000) -> None:
        self.add(Code.OPEN, row, kind=kind, before_ns=before_ns)

    def close(self) -> None:
        self.add(Code.CLOSE)

    def sum_over_tensor(self) -> None:
        """Sum activations over the tensor parallel ranks; the layer goes on when they are there."""
        if self.layout.tensor > 1:
            size = self.model.activation_bytes
            if self.model.is_tensor_sync:
                self.collective("all_reduce", "tensor", size, stream=Stream.COMPUTE)
            else:
                self.wait(self.collective("all_reduce", "tensor", size, stream=Stream.TENSOR))

    def gather(self, extra: bool) -> int:
        """Gather a layer's parameters, copied in on a stream of their own; return the event of the end."""
        self.wait(self.record(), Stream.COPY_IN)
        before = self.is_extra
        self.is_extra = before or extra
        self.copy(
            "fsdp::all_gather_copy_in",
            "Memcpy DtoD (Device -> Device)",
            8_000,
            is_blocking=False,
            stream=Stream.COPY_IN,
        )
        size = self.model.layer_bytes // self.layout.tensor
        event = self.collective("all_gather", "data", size, stream=Stream.DATA, on_stream=Stream.COPY_IN)
        self.is_extra = before
        return event


_CALLS = {
    "all_reduce": "c10d::allreduce_",
    "all_gather": "c10d::_allgather_base_",
    "reduce_scatter": "c10d::_reduce_scatter_base_",
    "send": "c10d::send",
    "recv": "c10d::recv_",
}
