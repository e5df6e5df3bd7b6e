"""Says which part of what training holds in a rank's memory a restart could free, or put to use.

Sharding and the allocator's mode are fixed when a script starts.  So what data parallelism repeats, what FSDP shards
more finely than the memory asks for, and what lies in unusable pieces is stated with the line that would change it.

Pure.  `training_memory` reads the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from pacecar.formatting.quantities import percent, plural, size_text
from pacecar.records import DeviceMemory

__all__ = ["SPLIT_RATIO_MIN", "TrainingMemory", "allocator_remedy", "memory_advice"]

REPLICATED_RATIO_MIN = 0.5
"""Share of the device's memory from which what every rank holds alike is most of it."""

FREE_RATIO_MIN = 0.2
"""Share of the device's memory that must stay free with less sharding: activations differ from batch to batch."""

SPLIT_RATIO_MIN = 0.25
"""Share of reserved memory in unused pieces of split blocks, too small for a large tensor."""

_SEGMENTS = "expandable_segments:True"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """What one rank holds for training, in bytes; a sharded tensor counts as this rank's shard.

    `replicas` ranks hold the same (DDP), or each holds one of `shards` (FSDP2); 1 if not.  `device_bytes` and
    `allocator` are None without CUDA.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    optimizer: str
    replicas: int = 1
    shards: int = 1
    node_ranks: int = 1
    device_bytes: int | None = None
    allocator: DeviceMemory | None = None
    allocator_setting: str = ""

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer state."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def memory_advice(memory: TrainingMemory, exposed_ratio: float | None) -> list[str]:
    """Return sentences; `exposed_ratio` is exposed communication over the step where that is worth a restart."""
    found = [_less_replication(memory), _less_sharding(memory, exposed_ratio), _fragmentation(memory)]
    return [sentence for sentence in found if sentence is not None]


def allocator_remedy(setting: str) -> str | None:
    """Return the line that makes segments expandable, keeping what is set; None if it is set already."""
    if _SEGMENTS in setting.replace(" ", ""):
        return None
    return f"export PYTORCH_CUDA_ALLOC_CONF={','.join(filter(None, (setting, _SEGMENTS)))}"


def _less_replication(memory: TrainingMemory) -> str | None:
    state, total, ranks = memory.state_bytes, memory.device_bytes, memory.replicas
    if ranks < 2 or not total or state < REPLICATED_RATIO_MIN * total:
        return None
    freed, optimizer_freed = (size - size // ranks for size in (state, memory.optimizer_bytes))
    ways = [f"fully_shard (FSDP2) on each block and the model in place of DDP frees {size_text(freed)} of them a rank"]
    if "ZeroRedundancyOptimizer" not in memory.optimizer and optimizer_freed:
        ways.append(
            f"ZeroRedundancyOptimizer(model.parameters(), optimizer_class={memory.optimizer}, lr=...) frees"
            f" {size_text(optimizer_freed)}"
        )
    what = f"parameters ({size_text(memory.parameter_bytes)}), gradients and optimizer state"
    held = f"{size_text(state)}, {state / total:.0%} of the device, the same on {ranks} ranks"
    return f"{what} take {held}: {'; '.join(ways)} (needs a restart)"


def _less_sharding(memory: TrainingMemory, exposed_ratio: float | None) -> str | None:
    total, peak = memory.device_bytes, None if memory.allocator is None else memory.allocator.allocated_peak_bytes
    if memory.shards < 2 or exposed_ratio is None or not total or peak is None:
        return None
    for ways in (1, memory.node_ranks):
        if ways >= memory.shards or memory.shards % ways:
            continue
        more = memory.state_bytes * (memory.shards // ways - 1)
        if peak + more > (1 - FREE_RATIO_MIN) * total:
            continue
        mesh = f'init_device_mesh("cuda", ({memory.shards // ways}, {ways}), mesh_dim_names=("replicate", "shard"))'
        line = "DistributedDataParallel in place of fully_shard" if ways == 1 else f"fully_shard(..., mesh={mesh})"
        return (
            f"exposed communication is {percent(exposed_ratio, digits=0)} of the step, and memory has room to shard"
            f" over {plural(ways, 'rank')}, not {memory.shards}: {line} takes {size_text(more)} more a rank,"
            f" beside a peak of {size_text(peak)} of {size_text(total)} (needs a restart)"
        )
    return None


def _fragmentation(memory: TrainingMemory) -> str | None:
    allocator, remedy = memory.allocator, allocator_remedy(memory.allocator_setting)
    if allocator is None or remedy is None:
        return None
    split, retries = allocator.inactive_split_bytes or 0, allocator.total_allocation_retries or 0
    if not retries and split < max(1, SPLIT_RATIO_MIN * allocator.reserved_bytes):
        return None
    flushed = f"flushed its cache {retries} times and " if retries else ""
    held = f"holds {size_text(split)} of its {size_text(allocator.reserved_bytes)} in unused pieces"
    return f"the allocator {flushed}{held}: {remedy} (needs a restart)"
