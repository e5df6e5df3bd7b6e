"""Cases in which each alert fires, with its labels and number, and in which it must not.

Times and values are as promtool writes them: a value a minute, `0x10 1x5` is eleven zeros and six ones.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FIRING", "SILENT", "Case"]

NODE = 'instance="n1:9850"'
GPU = f'{NODE}, gpu="3"'
LAUNCH, OTHER_LAUNCH = "3f2a9c01d4e5b678", "3f2a9c01d4e5b679"
JOB = f'training_job="llama", launch="{LAUNCH}"'
NAMESAKE = f'training_job="llama", launch="{OTHER_LAUNCH}"'
"""Another job of the same name, which only the launch distinguishes."""

RANK0, RANK1 = f'{NODE}, {JOB}, rank="0"', f'{NODE}, {JOB}, rank="1"'
PORT = f'{NODE}, device="mlx5_0", port="1"'
CARD = f'{NODE}, interface="eth0"'
ELSEWHERE = f'instance="n2:9850", {JOB}, rank="0"'
OTHERS0 = f'instance="n2:9850", {NAMESAKE}, rank="0"'

MOUNT = f'{NODE}, mountpoint="/data"'
RANK2 = f'{NODE}, {JOB}, rank="2"'
PLACE = 'pod_name="train-0", pod_namespace="ml", slurm_job="12"'
HOLDS = {
    f'pacecar_gpu_process_memory_bytes{{{GPU}, pid="77"}}': "1x60",
    f'pacecar_process_info{{{NODE}, pid="77", {JOB}, rank="1", {PLACE}}}': "1x60",
    f"pacecar_gpu_processes{{{GPU}}}": "1x60",
}
"""A rank in a pod holds memory of the GPU."""

HUNG = {
    f"pacecar_job_last_record_age_seconds{{{RANK0}}}": "1x4 60+60x10",
    f"pacecar_job_last_record_age_seconds{{{RANK1}}}": "1x4 61+60x10",
    f"pacecar_job_last_record_age_seconds{{{RANK2}}}": "1x4 62+60x10",
    f"pacecar_job_hang_suspected{{{RANK0}}}": "_x4 1x10",
}
"""Three ranks end no step, and rank 0 reports it."""


def _disk(available: str, *, files_free: str = "900x200", read_only: str = "0x200") -> dict[str, str]:
    """A file system of 1000 bytes and 1000 files."""
    return {
        f"pacecar_host_filesystem_size_bytes{{{MOUNT}}}": "1000x200",
        f"pacecar_host_filesystem_available_bytes{{{MOUNT}}}": available,
        f"pacecar_host_filesystem_files{{{MOUNT}}}": "1000x200",
        f"pacecar_host_filesystem_files_free{{{MOUNT}}}": files_free,
        f"pacecar_host_filesystem_read_only{{{MOUNT}}}": read_only,
    }


def _paced(pace: str, samples: str) -> dict[str, str]:
    """A job with one rank that ends steps; `samples` is the counter."""
    return {
        f"pacecar_job_pace_seconds{{{NODE}, {JOB}}}": pace,
        f"pacecar_job_samples_total{{{RANK0}}}": samples,
        f"pacecar_job_last_record_age_seconds{{{RANK0}}}": "1x200",
        f"pacecar_rank_info{{{RANK0}}}": "1x200",
    }


ENDED = {f"pacecar_job_last_record_age_seconds{{{RANK0}}}": "1x3 60+60x30"}
"""Rank 0 ends after three minutes, and its job stays on the daemon's board for a while."""

SPEAKS = {f"pacecar_job_last_record_age_seconds{{{RANK0}}}": "1x40"}

ON_GPU = {"instance": "n1:9850", "gpu": "3"}
OF_JOB = {"training_job": "llama", "launch": LAUNCH}
ON_NODE = {"instance": "n1:9850"}


@dataclass(frozen=True)
class Case:
    """Series (name and labels -> values) and the alert at a time, with the number that its texts show.

    A silent case has no labels.
    """

    alert: str
    title: str
    at: str
    series: dict[str, str]
    labels: dict[str, str] | None = None
    shown: str = ""


def _reason(reason: str, values: str) -> dict[str, str]:
    return {f'pacecar_gpu_health_reason{{{GPU}, reason="{reason}"}}': values}


def _missing(values: str) -> dict[str, str]:
    return {f'pacecar_gpu_missing{{{NODE}, uuid="GPU-8", name="NVIDIA H100", pci_bus_id="0000:5d:00.0"}}': values}


def _down(reason: str, values: str) -> dict[str, str]:
    return {f'pacecar_gpu_down{{{GPU}, reason="{reason}"}}': values}


FIRING = [
    Case("PacecarGpuXid", "a code that is counted from zero on", "15m",
        {f'pacecar_gpu_xid_errors_total{{{GPU}, xid="79", cluster="east"}}': "0x10 1x10"},
        ON_GPU | {"xid": "79", "cluster": "east"}, "1"),
    Case("PacecarGpuXid", "a code that was never seen before", "16m",
        {f'pacecar_gpu_xid_errors_total{{{GPU}, xid="120"}}': "_x15 2x15", f"pacecar_build_info{{{NODE}}}": "1x40"},
        ON_GPU | {"xid": "120"}, "2"),
    Case("PacecarGpuXidOfProgram", "an illegal address", "15m",
        {f'pacecar_gpu_xid_errors_total{{{GPU}, xid="31"}}': "0x10 3x10"}, ON_GPU | {"xid": "31"}, "3"),
    Case("PacecarGpuXidOfRepair", "a row that will be remapped", "15m",
        {f'pacecar_gpu_xid_errors_total{{{GPU}, xid="63"}}': "0x10 1x10"}, ON_GPU | {"xid": "63"}, "1"),
    Case("PacecarGpuDown", "hung", "8m", _down("hung", "0x5 1x10"), ON_GPU | {"reason": "hung"}),
    Case("PacecarGpuDown", "lost", "8m", _down("lost", "0x5 1x10"), ON_GPU | {"reason": "lost"}),
    Case("PacecarGpuThrottled", "heat for half of the time", "20m",
        {f'pacecar_gpu_clock_event_seconds_total{{{GPU}, reason="hw_thermal_slowdown", source="driver"}}': "0+30x30"},
        ON_GPU | {"reason": "hw_thermal_slowdown"}, "50%"),
    Case("PacecarGpuEccUncorrected", "one error", "15m",
        {f'pacecar_gpu_ecc_errors_total{{{GPU}, severity="uncorrected", lifetime="volatile"}}': "0x12 1x10"},
        ON_GPU, "1"),
    Case("PacecarGpuMemoryRepairPending", "a row", "12m", {f"pacecar_gpu_row_remap_pending{{{GPU}}}": "0x5 1x10"},
        ON_GPU),
    Case("PacecarGpuMemoryRepairPending", "a page of an older GPU", "12m",
        {f"pacecar_gpu_retired_pages_pending{{{GPU}}}": "0x5 1x10"}, ON_GPU),
    Case("PacecarGpuMemoryRepairFailed", "no spare rows", "6m", {f"pacecar_gpu_row_remap_failed{{{GPU}}}": "0x5 1x10"},
        ON_GPU),
    Case("PacecarGpuIdle", "a rank that hangs has its memory", "40m",
        {f"pacecar_gpu_utilization_ratio{{{GPU}}}": "0.9x5 0x60", **HOLDS},
        ON_GPU | OF_JOB | {"pod_name": "train-0", "pod_namespace": "ml", "slurm_job": "12"}),
    Case("PacecarGpuIdle", "a process of which nobody knows whose it is", "40m",
        {f"pacecar_gpu_utilization_ratio{{{GPU}}}": "0x60", f"pacecar_gpu_processes{{{GPU}}}": "1x60"}, ON_GPU),
    Case("PacecarGpuMissing", "after a boot", "8m", _missing("_x1 1x10"),
        ON_NODE | {"uuid": "GPU-8", "name": "NVIDIA H100", "pci_bus_id": "0000:5d:00.0"}),
    Case("PacecarGpuPcieWidth", "four lanes of sixteen", "20m",
        {**_reason("pcie_width", "0x5 1x30"), f"pacecar_gpu_pcie_width{{{GPU}}}": "16x5 4x30"}, ON_GPU, "4"),
    Case("PacecarNvlinkDown", "a link that was up", "8m", {
            f'pacecar_gpu_nvlink_link_state{{{GPU}, link="7"}}': "1x5 0x10", **_reason("nvlink_down", "0x5 1x10"),
        }, ON_GPU | {"link": "7"}),
    Case("PacecarNvlinkDown", "a daemon was started anew and does not know that the link was up", "25m", {
            f'pacecar_gpu_nvlink_link_state{{{GPU}, link="7"}}': "1x5 0x4 _x3 0x20",
            **_reason("nvlink_down", "0x5 1x4 _x3 0x20"),
        }, ON_GPU | {"link": "7"}),
    *(
        Case("PacecarGpuFabric", reason, "8m", _reason(reason, "0x5 1x10"), ON_GPU | {"reason": reason})
        for reason in ("fabric_failed", "fabric_not_joined", "fabric_misconfigured")
    ),
    Case("PacecarGpuFabricDegraded", "half of the bandwidth", "12m", _reason("fabric_degraded", "0x5 1x10"),
        ON_GPU | {"reason": "fabric_degraded"}),
    Case("PacecarNvlinkErrors", "replays at a rate", "25m",
        {f'pacecar_gpu_nvlink_link_errors_total{{{GPU}, link="7", kind="replay"}}': "0+2x30"},
        ON_GPU | {"link": "7", "kind": "replay"}, "30"),
    Case("PacecarRdmaErrors", "the link went down", "15m",
        {f'pacecar_rdma_errors_total{{{PORT}, error="link_downed"}}': "0x12 1x10"},
        ON_NODE | {"device": "mlx5_0", "port": "1", "error": "link_downed"}, "1"),
    Case("PacecarRdmaPortDown", "a port that was active this morning", "100m",
        {f"pacecar_rdma_port_active{{{PORT}}}": "1x5 0x120"}, ON_NODE | {"device": "mlx5_0", "port": "1"}),
    Case("PacecarRdmaPortDown", "and the daemon was away for a while", "40m",
        {f"pacecar_rdma_port_active{{{PORT}}}": "1x5 0x3 stale _x10 0x40"},
        ON_NODE | {"device": "mlx5_0", "port": "1"}),
    Case("PacecarNetworkErrors", "what is received", "25m",
        {f"pacecar_host_network_receive_errors_total{{{CARD}}}": "0+4x30",
         f"pacecar_host_network_transmit_errors_total{{{CARD}}}": "0x30"}, ON_NODE | {"interface": "eth0"}, "60"),
    Case("PacecarNetworkErrors", "what is sent", "25m",
        {f"pacecar_host_network_receive_errors_total{{{CARD}}}": "0x30",
         f"pacecar_host_network_transmit_errors_total{{{CARD}}}": "0+2x30"}, ON_NODE | {"interface": "eth0"}, "30"),
    Case("PacecarNetworkFlaps", "up and down twice", "15m",
        {f"pacecar_host_network_carrier_changes_total{{{CARD}}}": "2x8 4x2 6x10"},
        ON_NODE | {"interface": "eth0"}, "4"),
    Case("PacecarTcpRetransmissions", "one in fifty", "20m",
        {f"pacecar_host_tcp_segments_sent_total{{{NODE}}}": "0+60000x30",
         f"pacecar_host_tcp_segments_retransmitted_total{{{NODE}}}": "0+1200x30"}, ON_NODE, "2%"),
    Case("PacecarDiskFull", "no space", "15m", _disk("500x5 10x200"), ON_NODE | {"mountpoint": "/data"}, "1%"),
    Case("PacecarDiskFull", "no more files", "15m", _disk("500x200", files_free="5x200"),
        ON_NODE | {"mountpoint": "/data"}, "0.5%"),
    Case("PacecarDiskFilling", "checkpoints that nobody deletes", "90m", _disk("330-2x200"),
        ON_NODE | {"mountpoint": "/data"}, "15%"),
    Case("PacecarDiskReadOnly", "after an error, and for hours", "150m", _disk("500x200", read_only="0x5 1x200"),
        ON_NODE | {"mountpoint": "/data"}),
    Case("PacecarOomKill", "a process of the node", "15m", {f"pacecar_host_oom_kills_total{{{NODE}}}": "0x10 1x10"},
        ON_NODE, "1"),
    Case("PacecarOomKill", "a loader's worker in a job's container", "15m",
        {f"pacecar_host_oom_kills_total{{{NODE}}}": "0x10 2x10",
         f'pacecar_cgroup_oom_kills_total{{{NODE}, cgroup="/pod7"}}': "0x10 2x10",
         f'pacecar_cgroup_member_info{{{RANK0}, cgroup="/pod7", member="rank"}}': "1x30",
         f'pacecar_cgroup_member_info{{{RANK1}, cgroup="/pod7", member="rank"}}': "1x30"}, ON_NODE | OF_JOB, "2"),
    Case("PacecarStraggler", "a quarter of the pace", "5m",
        {f"pacecar_job_pace_seconds{{{NODE}, {JOB}}}": "0.4x10",
         f'pacecar_job_straggler_excess_seconds{{{RANK1}, cause="throttled"}}': "0.1x10"},
        OF_JOB | {"rank": "1", "cause": "throttled"}, "25%"),
    Case("PacecarJobSlower", "half as long again, and fewer samples", "120m",
        _paced("1x60 1.5x100", "0+60x60 3640+40x100"), OF_JOB, "50%"),
    Case("PacecarJobHangs", "all ranks wait, and none is behind", "8m",
        {f"pacecar_job_hang_suspected{{{RANK0}}}": "0x5 1x10", f"pacecar_job_hang_suspected{{{RANK1}}}": "0x5 1x10",
         f"pacecar_job_hang_collectives{{{RANK0}}}": "_x5 9x10",
         f"pacecar_job_hang_collectives{{{RANK1}}}": "_x5 9x10"}, OF_JOB),
    Case("PacecarJobHangs", "a rank that was stopped says nothing", "8m",
        {**HUNG, f"pacecar_job_hang_suspected{{{RANK1}}}": "_x4 1x10"}, OF_JOB | {"rank": "2"}),
    Case("PacecarJobHangs", "the rank that was stopped is alone on its node", "8m",
        {f"pacecar_job_last_record_age_seconds{{{RANK1}}}": "1x4 60+60x10",
         f"pacecar_job_hang_suspected{{{RANK1}}}": "_x4 1x10",
         f"pacecar_job_last_record_age_seconds{{{ELSEWHERE}}}": "1x4 60+60x10"}, OF_JOB | {"rank": "0"}),
    Case("PacecarJobHangs", "the ranks themselves have found out", "8m",
         {**HUNG, f"pacecar_job_hang_suspected{{{RANK1}}}": "_x4 1x10",
          f'pacecar_job_hang_verdict{{{RANK1}, kind="not_joined"}}': "_x4 1x10"},
         OF_JOB | {"rank": "1", "kind": "not_joined"}),
    Case("PacecarJobHangs", "one of three is two collectives behind", "8m",
        {**HUNG, f"pacecar_job_hang_suspected{{{RANK1}}}": "_x4 1x10",
         f"pacecar_job_hang_suspected{{{RANK2}}}": "_x4 1x10",
         **{f"pacecar_job_hang_collectives{{{rank}}}": f"_x4 {begun}x10"
            for rank, begun in ((RANK0, 41), (RANK1, 39), (RANK2, 41))}}, OF_JOB | {"rank": "1"}),
    Case("PacecarJobHangs", "one is ahead of two, so none is named", "8m",
        {**HUNG, f"pacecar_job_hang_suspected{{{RANK1}}}": "_x4 1x10",
         f"pacecar_job_hang_suspected{{{RANK2}}}": "_x4 1x10",
         **{f"pacecar_job_hang_collectives{{{rank}}}": f"_x4 {begun}x10"
            for rank, begun in ((RANK0, 41), (RANK1, 39), (RANK2, 39))}}, OF_JOB),
    Case("PacecarJobStalled", "all ranks", "10m",
        {f"pacecar_job_last_record_age_seconds{{{RANK0}}}": "1x4 60+60x10",
         f"pacecar_job_last_record_age_seconds{{{RANK1}}}": "1x4 62+60x10",
         f"pacecar_job_step_duration_seconds{{{RANK0}}}": "2x20",
         f'pacecar_process_info{{{RANK0}, pid="7"}}': "1x20", f'pacecar_process_info{{{RANK1}, pid="8"}}': "1x20"},
        OF_JOB, "6m 0s"),
    Case("PacecarJobTrainsAgain", "resumed 900 steps behind, 40 a minute", "30m",
        {f"pacecar_job_global_step{{{RANK0}}}": "0+100x10 _x60",
         f"pacecar_job_global_step{{{OTHERS0}}}": "_x12 100+40x40",
         f"pacecar_job_last_record_age_seconds{{{OTHERS0}}}": "_x12 1x40",
         f"pacecar_job_attempt{{instance=\"n2:9850\", {NAMESAKE}}}": "_x12 1x40"}, {"training_job": "llama"}, "180"),
    Case("PacecarJobOutOfMemory", "caught and gone on", "15m",
        {f"pacecar_job_memory_out_of_memory_total{{{RANK0}}}": "0x10 1x10"}, OF_JOB, "1"),
    Case("PacecarTuningFrozen", "for a quarter of an hour", "20m",
        {f'pacecar_tuner_state{{{NODE}, {JOB}, state="frozen"}}': "0x5 1x20", **SPEAKS}, OF_JOB),
    Case("PacecarKnobsApart", "one rank behind", "12m",
        {f"pacecar_knob_epoch{{{RANK0}}}": "1x5 2x10", f"pacecar_knob_epoch{{{RANK1}}}": "1x15", **SPEAKS,
         f"pacecar_job_last_record_age_seconds{{{RANK1}}}": "1x40"}, OF_JOB, "1"),
    Case("PacecarKnobsApart", "one job on two nodes", "12m",
        {f"pacecar_knob_epoch{{{RANK0}}}": "3x15", f"pacecar_knob_epoch{{{ELSEWHERE}}}": "1x15", **SPEAKS,
         f"pacecar_job_last_record_age_seconds{{{ELSEWHERE}}}": "1x40"}, OF_JOB, "2"),
    Case("PacecarOverheadOverBudget", "twice the budget", "25m",
        {f"pacecar_job_overhead_seconds_total{{{RANK0}}}": "0+1.2x30",
         f"pacecar_job_step_wall_seconds_total{{{RANK0}}}": "0+60x30"}, OF_JOB, "2%"),
    Case("PacecarHookOff", "one rank", "12m",
        {f"pacecar_job_hook_measuring{{{RANK0}}}": "1x5 0x10", **SPEAKS}, OF_JOB, "1"),
    Case("PacecarRecordsDropped", "a daemon that is slow", "25m",
        {f"pacecar_job_records_dropped_total{{{RANK0}}}": "0+5x30"}, OF_JOB, "50"),
    Case("PacecarFramesRefused", "a hook of another version", "25m",
        {f'pacecar_inbox_frames_refused_total{{{NODE}, refusal="version"}}': "0+1x30"},
        ON_NODE | {"refusal": "version"}, "15"),
    Case("PacecarRanksLeftOut", "more ranks than there is room for", "15m",
        {f'pacecar_inbox_left_out_total{{{NODE}, kind="rank"}}': "0x12 8x10"}, ON_NODE | {"kind": "rank"}, "8"),
    Case("PacecarCollectorFailed", "a disk that cannot be asked", "25m", {
            f'pacecar_collector_outcome{{{NODE}, collector="disk", outcome="failed"}}': "0x5 1x30",
            f'pacecar_gpu_down{{{GPU}, reason="lost"}}': "1x40",
        }, ON_NODE | {"collector": "disk", "outcome": "failed"}),
    Case("PacecarCollectorFailed", "GPUs, though none is down", "25m", {
            f'pacecar_collector_outcome{{{NODE}, collector="gpu", outcome="failed"}}': "0x5 1x30",
            f'pacecar_gpu_down{{{GPU}, reason="lost"}}': "0x40",
        }, ON_NODE | {"collector": "gpu", "outcome": "failed"}),
    Case("PacecarDaemonOverBudget", "one and a half times", "30m",
        {f"pacecar_daemon_cpu_seconds_total{{{NODE}}}": "0+4.5x40",
         f"pacecar_daemon_cpu_budget_ratio{{{NODE}}}": "0.05x40"}, ON_NODE, "150%"),
    Case("PacecarDaemonGone", "scraped a while ago and not now", "22m",
        {f'pacecar_build_info{{{NODE}, version="1", python="3"}}': "1x10"}, ON_NODE | {"version": "1", "python": "3"}),
    *(
        Case("PacecarDaemonNotAnswering", title, at, series, ON_NODE | {"job": job})
        for title, at, job, series in (
            ("its tick has stopped and it answers 503", "12m", "gpus", {
                f'up{{{NODE}, job="gpus"}}': "1x10 0x10",
                f'pacecar_build_info{{{NODE}, job="gpus", version="1", python="3"}}': "1x10 stale"}),
            ("for an hour", "70m", "gpus", {
                f'up{{{NODE}, job="gpus"}}': "1x10 0x70",
                f'pacecar_build_info{{{NODE}, job="gpus", version="1", python="3"}}': "1x10 stale"}),
            ("a target that never answered", "5m", "monitoring/pacecar",
                {f'up{{{NODE}, job="monitoring/pacecar"}}': "0x10"}),
        )
    ),
    Case("PacecarDaemonRestarting", "a tick that stalls each few minutes", "20m",
        {f"pacecar_daemon_start_time_seconds{{{NODE}}}": "100x5 500x5 900x5 1300x10"}, ON_NODE, "3"),
    Case("PacecarDaemonFault", "a job whose samples cannot be made", "15m",
        {f'pacecar_daemon_faults_total{{{NODE}, part="job"}}': "0x10 3x10"}, ON_NODE | {"part": "job"}),
    Case("PacecarDaemonFault", "a thread that was started anew", "15m",
        {f'pacecar_daemon_thread_restarts_total{{{NODE}, thread="inbox"}}': "0x10 1x10"},
        ON_NODE | {"thread": "inbox"}),
    Case("PacecarDaemonFault", "a thread that ended", "12m",
        {f'pacecar_daemon_thread_up{{{NODE}, thread="recorder"}}': "1x10 0x10"}, ON_NODE | {"thread": "recorder"}),
    Case("PacecarSettingsNotLoaded", "a typing error", "12m",
        {f"pacecar_daemon_config_last_reload_successful{{{NODE}}}": "1x5 0x10"}, ON_NODE),
    Case("PacecarRecordingLost", "a full disk", "20m", {f"pacecar_recorder_lost_total{{{NODE}}}": "0x12 1x10"},
        ON_NODE, "1"),
]  # fmt: skip
"""At least one for each alert."""

SILENT = [
    Case("PacecarGpuXid", "memory is marked for repair", "15m",
        {f'pacecar_gpu_xid_errors_total{{{GPU}, xid="63"}}': "0x10 1x10"}),
    Case("PacecarGpuXidOfRepair", "memory that could not be repaired", "15m",
        {f'pacecar_gpu_xid_errors_total{{{GPU}, xid="64"}}': "0x10 1x10"}),
    Case("PacecarGpuXid", "an error of this morning", "25m",
        {f'pacecar_gpu_xid_errors_total{{{GPU}, xid="79"}}': "1x40", f"pacecar_build_info{{{NODE}}}": "1x40"}),
    Case("PacecarGpuXid", "Prometheus was away, and the error is old", "16m",
        {f'pacecar_gpu_xid_errors_total{{{GPU}, xid="120"}}': "_x15 2x15",
         f"pacecar_build_info{{{NODE}}}": "_x15 1x15"}),
    Case("PacecarGpuXid", "the daemon was started anew and counts from zero", "15m",
        {f'pacecar_gpu_xid_errors_total{{{GPU}, xid="79"}}': "2x10 0x10", f"pacecar_build_info{{{NODE}}}": "1x40"}),
    Case("PacecarGpuXid", "a program's own fault", "15m",
        {f'pacecar_gpu_xid_errors_total{{{GPU}, xid="13"}}': "0x10 1x10", f"pacecar_build_info{{{NODE}}}": "1x40"}),
    Case("PacecarGpuXidOfProgram", "none", "15m", {f'pacecar_gpu_xid_errors_total{{{GPU}, xid="31"}}': "0x30"}),
    Case("PacecarGpuDown", "a driver that is loaded anew is back within the minute", "8m",
        _down("driver", "0x5 1x1 0x10")),
    Case("PacecarGpuDown", "up", "8m", _down("lost", "0x15")),
    Case("PacecarGpuThrottled", "at the power limit, which is normal under load", "20m",
        {f'pacecar_gpu_clock_event_seconds_total{{{GPU}, reason="sw_power_cap", source="driver"}}': "0+55x30"}),
    Case("PacecarGpuThrottled", "hot for a moment", "20m",
        {f'pacecar_gpu_clock_event_seconds_total{{{GPU}, reason="hw_thermal_slowdown", source="driver"}}': "0+6x30"}),
    Case("PacecarGpuEccUncorrected", "corrected ones cost nothing", "15m",
        {f'pacecar_gpu_ecc_errors_total{{{GPU}, severity="corrected", lifetime="volatile"}}': "0+9x30"}),
    Case("PacecarGpuEccUncorrected", "errors of the board's life", "15m",
        {f'pacecar_gpu_ecc_errors_total{{{GPU}, severity="uncorrected", lifetime="volatile"}}': "4x30"}),
    Case("PacecarGpuMemoryRepairPending", "nothing pending", "12m",
        {f"pacecar_gpu_row_remap_pending{{{GPU}}}": "0x20"}),
    Case("PacecarGpuMemoryRepairFailed", "nothing failed", "12m", {f"pacecar_gpu_row_remap_failed{{{GPU}}}": "0x20"}),
    Case("PacecarGpuIdle", "nobody holds it", "50m",
        {f"pacecar_gpu_utilization_ratio{{{GPU}}}": "0x60", f"pacecar_gpu_processes{{{GPU}}}": "0x60"}),
    Case("PacecarGpuIdle", "a job that validates on the host for twenty minutes", "50m",
        {f"pacecar_gpu_utilization_ratio{{{GPU}}}": "0.9x5 0x20 0.9x2 0x20 0.9x9", **HOLDS}),
    Case("PacecarGpuMissing", "all there", "20m", _missing("0x30")),
    Case("PacecarGpuMissing", "a driver that is loaded some minutes after the daemon", "20m", _missing("1x3 0x30")),
    Case("PacecarGpuPcieWidth", "all lanes", "30m",
        {**_reason("pcie_width", "0x40"), f"pacecar_gpu_pcie_width{{{GPU}}}": "16x40"}),
    Case("PacecarGpuPcieWidth", "while the link retrains", "30m",
        {**_reason("pcie_width", "0x5 1x3 0x40"), f"pacecar_gpu_pcie_width{{{GPU}}}": "16x5 8x3 16x40"}),
    Case("PacecarNvlinkDown", "a link that leads nowhere on this board", "8m",
        {f'pacecar_gpu_nvlink_link_state{{{GPU}, link="7"}}': "0x20", **_reason("nvlink_down", "0x20")}),
    Case("PacecarNvlinkDown", "a link that sleeps while another is down", "8m",
        {f'pacecar_gpu_nvlink_link_state{{{GPU}, link="7"}}': "2x20", **_reason("nvlink_down", "1x20")}),
    Case("PacecarNvlinkDown", "a link that came up again", "25m",
        {f'pacecar_gpu_nvlink_link_state{{{GPU}, link="7"}}': "1x5 0x5 1x20",
         **_reason("nvlink_down", "0x5 1x5 0x20")}),
    Case("PacecarGpuFabric", "joined, and slower than it could be", "12m",
        {**_reason("fabric_failed", "0x20"), **_reason("fabric_degraded", "1x20")}),
    Case("PacecarGpuFabricDegraded", "a route that was recovered at once", "12m",
        _reason("fabric_degraded", "0x5 1x2 0x20")),
    Case("PacecarNvlinkErrors", "one replay", "25m",
        {f'pacecar_gpu_nvlink_link_errors_total{{{GPU}, link="7", kind="replay"}}': "0x20 1x10"}),
    Case("PacecarNvlinkErrors", "symbols that were mended", "25m",
        {f'pacecar_gpu_nvlink_link_errors_total{{{GPU}, link="7", kind="symbol"}}': "0+1000x30"}),
    Case("PacecarRdmaErrors", "queues that were flushed when a job ended", "15m",
        {f'pacecar_rdma_errors_total{{{PORT}, error="req_cqe_flush_error"}}': "0x12 512x10"}),
    Case("PacecarRdmaErrors", "the same as all completions with an error are counted", "15m",
        {f'pacecar_rdma_errors_total{{{PORT}, error="resp_cqe_error"}}': "0x12 512x10"}),
    Case("PacecarRdmaErrors", "none", "15m", {f'pacecar_rdma_errors_total{{{PORT}, error="link_downed"}}': "3x30"}),
    Case("PacecarRdmaPortDown", "a port that was never in use", "60m",
        {f"pacecar_rdma_port_active{{{PORT}}}": "0x120"}),
    Case("PacecarRdmaPortDown", "up again", "60m", {f"pacecar_rdma_port_active{{{PORT}}}": "1x5 0x9 1x120"}),
    Case("PacecarRdmaPortDown", "a card that was taken out", "60m",
        {f"pacecar_rdma_port_active{{{PORT}}}": "1x5 0x9 stale"}),
    Case("PacecarNetworkErrors", "a few since boot", "25m",
        {f"pacecar_host_network_receive_errors_total{{{CARD}}}": "7x30",
         f"pacecar_host_network_transmit_errors_total{{{CARD}}}": "0x30"}),
    Case("PacecarNetworkFlaps", "up once", "15m",
        {f"pacecar_host_network_carrier_changes_total{{{CARD}}}": "2x10 3x10"}),
    Case("PacecarNetworkFlaps", "a bridge whose containers come and go", "15m",
        {f'pacecar_host_network_carrier_changes_total{{{NODE}, interface="docker0"}}': "2x8 4x2 8x10"}),
    Case("PacecarTcpRetransmissions", "one in a thousand", "20m",
        {f"pacecar_host_tcp_segments_sent_total{{{NODE}}}": "0+60000x30",
         f"pacecar_host_tcp_segments_retransmitted_total{{{NODE}}}": "0+60x30"}),
    Case("PacecarTcpRetransmissions", "a node that hardly sends", "20m",
        {f"pacecar_host_tcp_segments_sent_total{{{NODE}}}": "0+60x30",
         f"pacecar_host_tcp_segments_retransmitted_total{{{NODE}}}": "0+30x30"}),
    Case("PacecarDiskFull", "half full", "15m", _disk("500x200")),
    Case("PacecarDiskFull", "an image that is mounted read-only has never any room", "15m",
        _disk("0x200", read_only="1x200")),
    Case("PacecarDiskFilling", "a data set that is unpacked onto a large disk", "90m", _disk("900-4x200")),
    Case("PacecarDiskFilling", "little left, and for months", "90m", _disk("150x200")),
    Case("PacecarDiskReadOnly", "an image that was always so", "90m", _disk("0x200", read_only="1x200")),
    Case("PacecarDiskReadOnly", "mounted anew", "90m", _disk("500x200", read_only="0x5 1x20 0x200")),
    Case("PacecarOomKill", "one of this morning", "15m", {f"pacecar_host_oom_kills_total{{{NODE}}}": "7x30"}),
    Case("PacecarStraggler", "a twentieth of the pace", "5m",
        {f"pacecar_job_pace_seconds{{{NODE}, {JOB}}}": "0.4x10",
         f'pacecar_job_straggler_excess_seconds{{{RANK1}, cause="throttled"}}': "0.02x10"}),
    Case("PacecarStraggler", "late for a minute", "8m",
        {f"pacecar_job_pace_seconds{{{NODE}, {JOB}}}": "0.4x10",
         f'pacecar_job_straggler_excess_seconds{{{RANK1}, cause="host_bound"}}': "_x3 0.1x1 stale"}),
    Case("PacecarJobSlower", "twice the step with twice the samples", "120m", _paced("1x60 2x100", "0+60x200")),
    Case("PacecarJobSlower", "a tenth", "120m", _paced("1x60 1.1x100", "0+60x60 3654+54x100")),
    Case("PacecarJobSlower", "slow at its start, while it compiles", "50m", _paced("9x20 1x100", "0+6x20 120+60x100")),
    Case("PacecarJobSlower", "ended on a long step", "120m",
        {**_paced("1x60 1.5x100", "0+60x60 3640x100"), **ENDED}),
    Case("PacecarJobHangs", "over", "8m", {f"pacecar_job_hang_suspected{{{RANK0}}}": "0x3 1x1 0x10"}),
    Case("PacecarJobTrainsAgain", "a new job of that name, which nobody restarted", "30m",
        {f"pacecar_job_global_step{{{RANK0}}}": "0+100x10 _x60",
         f"pacecar_job_global_step{{{OTHERS0}}}": "_x12 100+40x40",
         f"pacecar_job_last_record_age_seconds{{{OTHERS0}}}": "_x12 1x40",
         f"pacecar_job_attempt{{instance=\"n2:9850\", {NAMESAKE}}}": "_x12 0x40"}),
    Case("PacecarJobTrainsAgain", "resumed where it was", "30m",
        {f"pacecar_job_global_step{{{RANK0}}}": "0+100x10 _x60",
         f"pacecar_job_global_step{{{OTHERS0}}}": "_x12 1001+40x40",
         f"pacecar_job_last_record_age_seconds{{{OTHERS0}}}": "_x12 1x40",
         f"pacecar_job_attempt{{instance=\"n2:9850\", {NAMESAKE}}}": "_x12 1x40"}),
    Case("PacecarJobStalled", "a job that has ended and is still on the board", "10m",
        {f"pacecar_job_last_record_age_seconds{{{RANK0}}}": "1x3 60+60x10",
         f'pacecar_process_info{{{RANK0}, pid="7"}}': "1x4"}),
    Case("PacecarJobStalled", "started anew on another node, before its first step", "10m",
        {**ENDED, f'pacecar_process_info{{{RANK0}, pid="7"}}': "1x4",
         f"pacecar_job_step_duration_seconds{{{RANK0}}}": "2x20",
         f'pacecar_process_info{{{ELSEWHERE}, pid="9"}}': "_x5 1x20"}),
    Case("PacecarJobStalled", "a job whose steps take seven minutes", "9m",
        {f"pacecar_job_last_record_age_seconds{{{RANK0}}}": "1 1 1+60x7",
         f"pacecar_job_step_duration_seconds{{{RANK0}}}": "420x20",
         f'pacecar_process_info{{{RANK0}, pid="7"}}': "1x20"}),
    Case("PacecarJobStalled", "one of two ranks is silent, the other is not", "10m",
        {f"pacecar_job_last_record_age_seconds{{{RANK0}}}": "1x3 60+60x10",
         f"pacecar_job_last_record_age_seconds{{{RANK1}}}": "1x20",
         f'pacecar_process_info{{{RANK0}, pid="7"}}': "1x20", f'pacecar_process_info{{{RANK1}, pid="8"}}': "1x20"}),
    Case("PacecarJobOutOfMemory", "an error of this morning", "15m",
        {f"pacecar_job_memory_out_of_memory_total{{{RANK0}}}": "1x30"}),
    Case("PacecarTuningFrozen", "for a moment", "12m",
        {f'pacecar_tuner_state{{{NODE}, {JOB}, state="frozen"}}': "0x5 1x3 0x20"}),
    Case("PacecarTuningFrozen", "watching", "20m",
        {f'pacecar_tuner_state{{{NODE}, {JOB}, state="frozen"}}': "0x30",
         f'pacecar_tuner_state{{{NODE}, {JOB}, state="watching"}}': "1x30"}),
    Case("PacecarTuningFrozen", "a job that ended frozen", "15m",
        {f'pacecar_tuner_state{{{NODE}, {JOB}, state="frozen"}}': "0x2 1x30", **ENDED}),
    Case("PacecarKnobsApart", "killed in the middle of a switch", "10m",
        {f"pacecar_knob_epoch{{{RANK0}}}": "1x3 2x20", f"pacecar_knob_epoch{{{RANK1}}}": "1x20", **ENDED,
         f"pacecar_job_last_record_age_seconds{{{RANK1}}}": "1x3 60+60x30"}),
    Case("PacecarKnobsApart", "started anew on another node", "12m",
        {f"pacecar_knob_epoch{{{RANK0}}}": "3x20", **ENDED, f"pacecar_knob_epoch{{{ELSEWHERE}}}": "_x4 0x20",
         f"pacecar_job_last_record_age_seconds{{{ELSEWHERE}}}": "_x4 1x20"}),
    Case("PacecarKnobsApart", "two jobs of one name on two nodes", "20m",
        {f"pacecar_knob_epoch{{{RANK0}}}": "3x30", f"pacecar_knob_epoch{{{OTHERS0}}}": "0x30", **SPEAKS,
         f"pacecar_job_last_record_age_seconds{{{OTHERS0}}}": "1x40"}),
    Case("PacecarJobStalled", "a job of the same name has long steps and goes on", "20m",
        {f"pacecar_job_last_record_age_seconds{{{RANK0}}}": "1x40", f"pacecar_process_info{{{RANK0}}}": "1x40",
         f"pacecar_job_step_duration_seconds{{{RANK0}}}": "1x40",
         f"pacecar_job_last_record_age_seconds{{{OTHERS0}}}": "500x40", f"pacecar_process_info{{{OTHERS0}}}": "1x40",
         f"pacecar_job_step_duration_seconds{{{OTHERS0}}}": "60x40"}),
    Case("PacecarKnobsApart", "while the records of a switch come in", "7m",
        {f"pacecar_knob_epoch{{{RANK0}}}": "1x5 2x10", f"pacecar_knob_epoch{{{RANK1}}}": "1x6 2x10"}),
    Case("PacecarOverheadOverBudget", "within the budget", "25m",
        {f"pacecar_job_overhead_seconds_total{{{RANK0}}}": "0+0.3x30",
         f"pacecar_job_step_wall_seconds_total{{{RANK0}}}": "0+60x30"}),
    Case("PacecarHookOff", "measuring", "12m", {f"pacecar_job_hook_measuring{{{RANK0}}}": "1x20"}),
    Case("PacecarHookOff", "a job that ended so", "13m", {f"pacecar_job_hook_measuring{{{RANK0}}}": "0x20", **ENDED}),
    Case("PacecarRecordsDropped", "a few while a daemon was started anew", "20m",
        {f"pacecar_job_records_dropped_total{{{RANK0}}}": "0x3 5x30"}),
    Case("PacecarFramesRefused", "none", "25m",
        {f'pacecar_inbox_frames_refused_total{{{NODE}, refusal="version"}}': "0x40"}),
    Case("PacecarRanksLeftOut", "room for all", "15m",
        {f'pacecar_inbox_left_out_total{{{NODE}, kind="rank"}}': "0x30"}),
    Case("PacecarCollectorFailed", "now and then", "40m",
        {f'pacecar_collector_outcome{{{NODE}, collector="disk", outcome="failed"}}': "1x10 0x1 1x10 0x1 1x10 0x20"}),
    Case("PacecarCollectorFailed", "a GPU is down, which has an alert of its own", "30m",
        {f'pacecar_collector_outcome{{{NODE}, collector="gpu", outcome="failed"}}': "1x40",
         f'pacecar_gpu_down{{{GPU}, reason="lost"}}': "1x40"}),
    Case("PacecarDaemonOverBudget", "at its budget", "30m",
        {f"pacecar_daemon_cpu_seconds_total{{{NODE}}}": "0+3x40",
         f"pacecar_daemon_cpu_budget_ratio{{{NODE}}}": "0.05x40"}),
    Case("PacecarDaemonGone", "another version of the same node", "22m",
        {f'pacecar_build_info{{{NODE}, version="1", python="3"}}': "1x10",
         f'pacecar_build_info{{{NODE}, version="2", python="3"}}': "_x11 1x30"}),
    Case("PacecarDaemonGone", "a sidecar that ended with its job", "22m",
        {'pacecar_build_info{instance="n1/train-0", version="1", python="3"}': "1x10"}),
    Case("PacecarDaemonGone", "a target that does not answer has an alert of its own", "22m",
        {f'pacecar_build_info{{{NODE}, job="pacecar", version="1", python="3"}}': "1x10",
         f'up{{{NODE}, job="pacecar"}}': "1x10 0x20"}),
    Case("PacecarDaemonNotAnswering", "a node that was taken out of Prometheus' targets", "30m",
        {f'pacecar_build_info{{{NODE}, job="pacecar", version="1", python="3"}}': "1x10 stale",
         f'up{{{NODE}, job="pacecar"}}': "1x10 0x5 stale"}),
    Case("PacecarDaemonNotAnswering", "a sidecar that ended with its job", "30m",
        {'up{instance="n1/train-0", job="pacecar"}': "1x10 0x30",
         'pacecar_build_info{instance="n1/train-0", job="pacecar", version="1"}': "1x10 stale"}),
    Case("PacecarDaemonNotAnswering", "one scrape that was lost", "12m",
        {f'up{{{NODE}, job="pacecar"}}': "1x10 0x0 1x10",
         f'pacecar_build_info{{{NODE}, version="1", python="3"}}': "1x20"}),
    Case("PacecarDaemonNotAnswering", "another exporter of the node is down", "12m",
        {'up{instance="n1:9100", job="node"}': "1x10 0x10", f'up{{{NODE}, job="pacecar"}}': "1x20",
         f'pacecar_build_info{{{NODE}, version="1", python="3"}}': "1x20"}),
    Case("PacecarDaemonRestarting", "an upgrade", "20m",
        {f"pacecar_daemon_start_time_seconds{{{NODE}}}": "100x10 700x20"}),
    Case("PacecarDaemonFault", "a bug of this morning", "25m",
        {f'pacecar_daemon_faults_total{{{NODE}, part="job"}}': "3x40",
         f'pacecar_daemon_thread_up{{{NODE}, thread="tick"}}': "1x40"}),
    Case("PacecarSettingsNotLoaded", "loaded", "12m",
        {f"pacecar_daemon_config_last_reload_successful{{{NODE}}}": "1x20"}),
    Case("PacecarRecordingLost", "none", "20m", {f"pacecar_recorder_lost_total{{{NODE}}}": "0x30"}),
]  # fmt: skip
"""At least one per alert: similar situations in which it must not fire."""
