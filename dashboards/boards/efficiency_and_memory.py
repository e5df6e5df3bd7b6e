"""Builds the job dashboard's rows "Efficiency" and "Memory": MFU, FLOP/s, energy, device memory and checkpoints.

MFU is first, because it is the one figure of a GPU that cannot be high without useful work.  It is absent if the peak
of the device is unknown; the FLOP/s are shown anyway.
"""

from __future__ import annotations

from ..panels import Query, Section, columns, look, table, time_series
from ..queries import NODE, ONE_JOB, RANK

__all__ = ["efficiency_section", "memory_section"]

NO_FLOPS = "FLOPs are not known: counting was not possible and none were given"
NO_PEAK = "FLOPs or the peak of the device are not known"
NO_ALLOCATOR = "No rank trains on a device with a caching allocator"
NO_CHECKPOINT = "No checkpoint inside pacer.checkpoint() yet"
NO_ENERGY = "No energy counter of a GPU that is the job's alone"

select, rate, increase = ONE_JOB.select, ONE_JOB.rate, ONE_JOB.increase

_NODE = f"{{{{{NODE}}}}}"
_RANK = f"rank {{{{{RANK}}}}}"


def efficiency_section() -> Section:
    """Return the row about FLOPs and energy."""
    return Section("Efficiency", [
        (6, 7, time_series("MFU", "Model FLOPs utilization: the share of the device's arithmetic that was spent on the "
            "model, waits and all.", [Query(select("pacecar_job_mfu_ratio"), _RANK)],
            unit="percentunit", limit=1.0, empty=NO_PEAK)),
        (6, 7, time_series("FLOP/s", "Model FLOPs per second by rank, and the peak of its device.", [
                Query(select("pacecar_job_model_flops_per_second"), _RANK),
                Query(select("pacecar_job_device_peak_flops_per_second"), f"{_RANK} peak"),
            ], unit="flops", empty=NO_FLOPS)),
        (6, 7, time_series("Power of the job", "What the job's GPUs take on each node, those left out that it shares "
            "with another job.", [Query(rate("pacecar_job_energy_joules_total"), _NODE)],
            unit="watt", empty=NO_ENERGY)),
        (6, 7, time_series("Energy of a sample and a token", "Of the GPUs of each node, by what its ranks did; of a "
            "token on the right.", [
                Query(select("pacecar_job_energy_per_sample_joules"), f"{_NODE} sample"),
                Query(select("pacecar_job_energy_per_token_joules"), f"{_NODE} token"),
            ], unit="joule", empty=NO_ENERGY,
            overrides=[look(".* token", regex=True, custom__axisPlacement="right")])),
    ])  # fmt: skip


def memory_section() -> Section:
    """Return the row about device memory, checkpoints, and the basis of the efficiency figures."""
    return Section("Memory, checkpoints, and FLOPs and energy of a step", [
        (8, 7, time_series("Device memory", "In tensors at the end of a step, at most, and held by the allocator.", [
                Query(select("pacecar_job_memory_allocated_bytes"), f"{_RANK} allocated"),
                Query(select("pacecar_job_memory_allocated_peak_bytes"), f"{_RANK} peak"),
                Query(select("pacecar_job_memory_reserved_bytes"), f"{_RANK} reserved"),
            ], unit="bytes", empty=NO_ALLOCATOR)),
        (8, 7, time_series("Fragmentation", "Share of the reserved memory that no tensor uses at the end of a step. "
            "Rising over hours, with retries, it is fragmentation.",
            [Query(select("pacecar_job_memory_fragmentation_ratio"), _RANK)],
            unit="percentunit", limit=1.0, empty=NO_ALLOCATOR)),
        (8, 7, time_series("Unusable parts", "Free parts in the middle of blocks that are in use.",
            [Query(select("pacecar_job_memory_inactive_split_bytes"), _RANK)], unit="bytes", empty=NO_ALLOCATOR)),
        (8, 7, time_series("Retries", "Requests for which the allocator freed its cache, and those that failed.", [
                Query(increase("pacecar_job_memory_allocation_retries_total"), f"{_RANK} retries"),
                Query(increase("pacecar_job_memory_out_of_memory_total"), f"{_RANK} out of memory"),
            ], unit="none", empty=NO_ALLOCATOR)),
        (8, 7, time_series("Checkpoints", "Share of time that the loop spends saving checkpoints.", [
                Query(rate("pacecar_job_checkpoint_seconds_total"), _RANK),
            ], unit="percentunit", empty=NO_CHECKPOINT)),
        (8, 7, time_series("Checkpoints saved", "Checkpoints in the window.",
            [Query(increase("pacecar_job_checkpoints_total"), _RANK)], unit="none", empty=NO_CHECKPOINT)),
        (8, 7, time_series("FLOPs of a step", "Model FLOPs of the last step. It changes with the batch and with the "
            "length of the sequences.", [Query(select("pacecar_job_step_flops"), _RANK)], unit="none",
            empty=NO_FLOPS)),
        (8, 7, time_series("Energy of a step", "Of the GPUs of each node; the sum is the job's.",
            [Query(select("pacecar_job_energy_per_step_joules"), _NODE)], unit="joule", empty=NO_ENERGY)),
        (8, 7, table("How FLOPs are known", "Counted by the hook or given by the user, and the arithmetic that the "
            "peak is of.", [
                Query(select("pacecar_job_flops_info"), "", instant=True),
            ], empty=NO_FLOPS, transformations=columns(RANK, "source", "arithmetic"))),
    ], collapsed=True)  # fmt: skip
