"""Defines the record of how well a rank uses its device: FLOPs, memory and checkpoints.

Measured integers are fields; ratios are properties, computed from them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pacecar.records.ranges import Bytes, Count, Flops, Label, Nanoseconds, PositiveFlops, Rank, Text

__all__ = ["ARITHMETICS", "DeviceMemory", "Vitals"]

ARITHMETICS = frozenset({
    "tf32", "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "complex32", "complex64", "complex128", "int64", "int32",
    "int16", "int8", "uint8", "bool", "other",
})  # fmt: skip
"""Every value of the label `arithmetic`: TF32, torch's dtypes by name, and "other" for newer ones."""


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The memory of one device by torch's caching allocator; None for what this allocator does not count.

    `allocated_bytes` are in tensors, `reserved_bytes` taken from the driver.  `allocated_peak_bytes` is the peak since
    the script last reset it, `interval_peak_bytes` since the last reading; None if the peak is older.
    """

    allocated_bytes: Bytes
    reserved_bytes: Bytes
    allocated_peak_bytes: Bytes | None = None
    interval_peak_bytes: Bytes | None = None
    inactive_split_bytes: Bytes | None = None
    total_allocation_retries: Count | None = None
    total_out_of_memory: Count | None = None

    @property
    def fragmentation_ratio(self) -> float | None:
        """Reserved memory that no tensor uses, over all reserved (0..1); None if nothing is reserved."""
        if self.reserved_bytes == 0:
            return None
        return (self.reserved_bytes - self.allocated_bytes) / self.reserved_bytes


class Vitals(msgspec.Struct, frozen=True, kw_only=True, tag="vitals"):
    """How well one rank used its device in the last `steps` steps, which ended with `step` and took `wall_ns`.

    FLOPs are model FLOPs (forward and backward, without recomputation): `step_flops` of the last step, `flops` of those
    `flops_steps` steps whose FLOPs are known and which took `flops_wall_ns`.  `flops_source` says whether they were
    counted or given by the user, `flops_reason` why there are none.  `arithmetic` is the dtype, or tf32, of most of
    them, `peak_flops_per_second` the device's peak in it; if that is None, there is no MFU.  Checkpoints are counted
    since attach, also outside of steps.
    """

    job: Label
    rank: Rank
    step: Count
    ended_wall_ns: Nanoseconds
    steps: Count
    wall_ns: Nanoseconds
    samples: Count | None
    tokens: Count | None
    flops_source: Literal["counted", "given"] | None = None
    flops_reason: Text | None = None
    step_flops: Flops | None = None
    flops: Flops | None = None
    flops_steps: Count = 0
    flops_wall_ns: Nanoseconds = 0
    arithmetic: Label | None = None
    peak_flops_per_second: PositiveFlops | None = None
    memory: DeviceMemory | None = None
    total_checkpoints: Count = 0
    total_checkpoint_ns: Nanoseconds = 0

    @property
    def flops_per_second(self) -> float | None:
        """Model FLOPs per second of wall time; None if no step's FLOPs are known."""
        if self.flops is None or self.flops_wall_ns == 0:
            return None
        return self.flops * 1_000_000_000 / self.flops_wall_ns

    @property
    def mfu_ratio(self) -> float | None:
        """Model FLOPs utilization (PaLM, Chowdhery et al. 2022, appendix B); None if FLOPs or peak are unknown."""
        rate = self.flops_per_second
        if rate is None or self.peak_flops_per_second is None:
            return None
        return rate / self.peak_flops_per_second
