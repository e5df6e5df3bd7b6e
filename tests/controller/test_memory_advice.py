"""Memory that a restart could free or use is named with bytes and the line to write, and only where it is there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pacecar.controller.memory_advice import TrainingMemory, allocator_remedy, memory_advice
from pacecar.controller.restart_advice import advise
from pacecar.controller.training_memory import read_training_memory
from pacecar.records import DeviceMemory, Ledger

GIB = 2**30
ALLOCATOR = DeviceMemory(
    allocated_bytes=20 * GIB, reserved_bytes=30 * GIB, allocated_peak_bytes=25 * GIB, inactive_split_bytes=0,
    total_allocation_retries=0,
)  # fmt: skip


def memory(**parts: Any) -> TrainingMemory:
    given: dict[str, Any] = {
        "parameter_bytes": 12 * GIB, "gradient_bytes": 12 * GIB, "optimizer_bytes": 24 * GIB,
        "optimizer": "torch.optim.AdamW", "device_bytes": 80 * GIB, "allocator": ALLOCATOR,
    }  # fmt: skip
    return TrainingMemory(**{**given, **parts})


def test_what_ddp_repeats_is_named_where_it_takes_most_of_the_device() -> None:
    (said,) = memory_advice(memory(replicas=8), None)
    assert "48 GiB, 60% of the device, the same on 8 ranks" in said
    assert "fully_shard (FSDP2)" in said
    assert "frees 42 GiB" in said
    assert "ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=...) frees 21 GiB" in said
    assert "ZeroRedundancyOptimizer(" not in memory_advice(
        memory(replicas=8, optimizer="torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer"), None
    )[0]  # fmt: skip


@pytest.mark.parametrize(
    "parts",
    [{"replicas": 1}, {"replicas": 8, "optimizer_bytes": 0}, {"replicas": 8, "device_bytes": None}],
    ids=["one rank", "half of the device is more", "no device"],
)
def test_a_state_that_is_not_repeated_or_small_is_left_alone(parts: dict[str, Any]) -> None:
    assert memory_advice(memory(**parts), 0.5) == []


def test_fsdp_is_told_to_shard_less_where_gathers_are_exposed_and_memory_is_free() -> None:
    small = {"parameter_bytes": GIB, "gradient_bytes": GIB, "optimizer_bytes": 2 * GIB, "shards": 16, "node_ranks": 8}
    (said,) = memory_advice(memory(**small), 0.2)
    assert "exposed communication is 20 % of the step" in said
    assert 'fully_shard(..., mesh=init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard")))' in said
    assert "takes 4 GiB more a rank, beside a peak of 25 GiB of 80 GiB" in said
    (tiny,) = memory_advice(memory(**{**small, "shards": 8, "parameter_bytes": 0, "optimizer_bytes": 0}), 0.2)
    assert "DistributedDataParallel in place of fully_shard takes 7 GiB more" in tiny
    assert memory_advice(memory(**small), None) == [], "little is exposed"
    full = DeviceMemory(allocated_bytes=1, reserved_bytes=1, allocated_peak_bytes=61 * GIB)
    assert memory_advice(memory(**small, allocator=full), 0.2) == [], "a fifth must stay free"
    assert memory_advice(memory(**small, allocator=None), 0.2) == []


@pytest.mark.parametrize(
    ("split", "retries", "setting", "says"),
    [
        (0, 2, "", "the allocator flushed its cache 2 times and holds 0 B of its 40 GiB in unused pieces: export"),
        (12, 0, "", "the allocator holds 12 GiB of its 40 GiB in unused pieces: export"),
        (12, 0, "max_split_size_mb:64", "CONF=max_split_size_mb:64,expandable_segments:True (needs a restart)"),
        (9, 0, "", None),
        (12, 3, "expandable_segments:True", None),
        (None, None, "", None),
    ],
)
def test_fragments_that_cost_memory_or_retries_are_named(split: Any, retries: Any, setting: str, says: Any) -> None:
    allocator = DeviceMemory(
        allocated_bytes=GIB, reserved_bytes=40 * GIB, total_allocation_retries=retries,
        inactive_split_bytes=None if split is None else split * GIB,
    )  # fmt: skip
    said = memory_advice(memory(allocator=allocator, allocator_setting=setting), None)
    assert [says in sentence for sentence in said] == ([] if says is None else [True])
    assert allocator_remedy("expandable_segments:False") is not None


def test_an_empty_allocator_is_not_fragmented() -> None:
    empty = DeviceMemory(allocated_bytes=0, reserved_bytes=0, inactive_split_bytes=0, total_allocation_retries=0)
    assert memory_advice(memory(allocator=empty), None) == []


def test_the_advice_of_a_job_has_it_with_the_exposed_share_of_its_ledger() -> None:
    ledger = Ledger(wall_ns=100, compute_ns=80, exposed_communication_ns=20, communication_ns=20)
    job = {"mode": "lossy", "decisions": (), "refused": {}, "backend": "nccl", "device": "cuda:0", "is_crowded": False}
    small = memory(parameter_bytes=GIB, gradient_bytes=0, optimizer_bytes=0, shards=4, node_ranks=4)
    assert any("to shard over 1 rank, not 4" in said for said in advise(ledger=ledger, memory=small, **job))
    quiet = Ledger(wall_ns=100, compute_ns=95, exposed_communication_ns=5, communication_ns=5)
    assert advise(ledger=quiet, memory=small, **job) == ()


def test_bytes_are_those_of_parameters_gradients_and_optimizer_state() -> None:
    model = nn.Linear(10, 10)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([model.weight])
    held = read_training_memory(model, optimizer, torch.device("cpu"), {"PYTORCH_ALLOC_CONF": "backend:native"})
    assert (held.parameter_bytes, held.gradient_bytes, held.optimizer_bytes) == (440, 400, 0)
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    held = read_training_memory(model, optimizer, torch.device("cpu"), {})
    assert held.optimizer_bytes == 2 * 400 + 4, "two moments and a step"
    assert (held.replicas, held.shards, held.optimizer, held.device_bytes) == (1, 1, "torch.optim.AdamW", None)
