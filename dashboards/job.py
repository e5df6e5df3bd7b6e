"""Is this job as fast as it can be, and what is being done about it?  The dashboard "pacecar / Job".

It reads from top to bottom in the order in which one asks: how fast (pace), where does the time go (ledger), what did
the tuner do and was it right (tuner), what does the watching cost (pacecar itself), and what is the machine doing
meanwhile (`pacecar.dashboards.node`).  Utilization stands last on purpose: a GPU at 98 % says nothing about speed.

Left out: alert rules, and comparing jobs; each gets a dashboard of its own.
"""

from __future__ import annotations

from grafanalib import core

from pacecar.catalog import CATALOG, WINDOW_NAMES
from pacecar.config import HookConfig
from pacecar.dashboards.node import gpu_section, host_section
from pacecar.dashboards.palette import BAD, GOOD, HEADING_COLOURS, WARN
from pacecar.dashboards.panels import (
    DATASOURCE,
    Query,
    Section,
    bar_chart,
    colour,
    columns,
    look,
    place,
    stat,
    state_timeline,
    table,
    time_series,
)
from pacecar.dashboards.queries import INTERVAL, JOB, NODE, RANK, combine, divide, increase, mean_of, rate, select
from pacecar.dashboards.vitals import vitals_section
from pacecar.dashboards.whatif import what_if_panels

__all__ = ["NOT_DRAWN", "UID", "job_dashboard"]

UID = "pacecar-job"
SCHEMA_VERSION = 39
"""Of Grafana 10; grafanalib's own default (12) would run ten years of migrations over each panel."""

NO_JOB = "No job has reported here yet"
NO_TOKENS = "The job does not say how many tokens it trains on"
NO_TUNER = "No tuner is at work in this job"

_BUDGET = HookConfig().overhead_budget

_FOR_THE_NODE = """
    host_interrupts_total host_forks_total host_tasks_runnable host_tasks_blocked host_cpu_frequency_min_hertz
    host_cpu_frequency_mean_hertz host_cpu_frequency_limit_hertz host_numa_cpu_seconds_total
    host_numa_cpu_utilization_ratio host_numa_memory_size_bytes host_numa_memory_free_bytes
    host_numa_pages_total host_memory_shared_bytes host_memory_dirty_bytes host_memory_unevictable_bytes
    host_memory_transparent_huge_bytes host_hugepages_size_bytes host_hugepages_free_bytes
    host_major_page_faults_total host_oom_kills_total host_swap_in_bytes_total host_swap_out_bytes_total
    host_disk_read_seconds_total host_disk_write_seconds_total host_disk_queue_seconds_total
    host_disk_requests_in_flight host_filesystem_files host_filesystem_files_free host_filesystem_read_only
    host_network_receive_utilization_ratio host_network_transmit_utilization_ratio host_network_up
    host_network_mtu_bytes host_network_carrier_changes_total host_tcp_segments_received_total
    host_tcp_segments_sent_total host_tcp_segments_retransmitted_total host_tcp_retransmissions_total
    host_tcp_timeouts_total host_tcp_receive_errors_total host_tcp_resets_sent_total host_tcp_drops_total
    host_tcp_connections host_udp_receive_errors_total host_udp_buffer_errors_total host_softnet_drops_total
    host_softnet_squeezes_total rdma_port_info rdma_port_active rdma_port_link_up
    rdma_port_link_bytes_per_second rdma_receive_bytes_total rdma_transmit_bytes_total
    rdma_receive_packets_total rdma_transmit_packets_total rdma_receive_utilization_ratio
    rdma_transmit_utilization_ratio rdma_transmit_waits_total rdma_errors_total rdma_congestion_events_total
    cgroup_member_info cgroup_cpu_limit_cpus cgroup_cpu_seconds_total cgroup_cpu_periods_total
    cgroup_cpu_throttled_periods_total cgroup_cpu_throttled_seconds_total cgroup_memory_limit_bytes
    cgroup_memory_used_bytes cgroup_memory_limit_hits_total cgroup_oom_kills_total daemon_threads
    daemon_open_files daemon_cpu_utilization_ratio daemon_cpu_budget_ratio daemon_glance_frequency_hertz
    daemon_glance_changes_total daemon_scrapes_total daemon_scrape_seconds_total collector_glances_total
    collector_glance_failures_total daemon_viewers daemon_viewers_refused_total daemon_viewers_dropped_total
    daemon_viewer_frames_total daemon_history_series_left_out
"""

_FOR_THE_GPU = """
    gpu_up gpu_down gpu_last_success_time_seconds gpu_consecutive_failures gpu_failures_total
    gpu_read_failures_total gpu_driver_calls_total gpu_driver_openings_total gpu_encoder_utilization_ratio
    gpu_decoder_utilization_ratio gpu_memory_reserved_bytes gpu_bar1_size_bytes gpu_bar1_used_bytes
    gpu_power_mean_watts gpu_memory_temperature_celsius gpu_temperature_threshold_celsius
    gpu_clock_event_seconds_total gpu_performance_state gpu_ecc_errors_total gpu_retired_pages
    gpu_retired_pages_pending gpu_remapped_rows gpu_row_remap_pending gpu_row_remap_failed
    gpu_pcie_generation gpu_pcie_generation_max gpu_pcie_width gpu_pcie_width_max gpu_pcie_replays_total
    gpu_pcie_receive_bytes_per_second gpu_pcie_transmit_bytes_per_second gpu_nvlink_receive_bytes_per_second
    gpu_nvlink_transmit_bytes_per_second gpu_nvlink_info gpu_nvlink_link_state
    gpu_nvlink_link_bytes_per_second gpu_nvlink_link_receive_bytes_total
    gpu_nvlink_link_transmit_bytes_total gpu_nvlink_link_receive_packets_total
    gpu_nvlink_link_transmit_packets_total gpu_nvlink_link_errors_total gpu_sm_active_ratio
    gpu_sm_occupancy_ratio gpu_tensor_active_ratio gpu_pipe_active_ratio gpu_dram_bandwidth_ratio
    gpu_xid_errors_total gpu_fabric_state gpu_fabric_status gpu_fabric_condition gpu_processes
    gpu_process_memory_bytes gpu_process_sm_ratio gpu_mig_enabled gpu_instance_info
    gpu_instance_memory_size_bytes gpu_instance_memory_used_bytes gpu_instance_memory_free_bytes
    gpu_instance_memory_reserved_bytes gpu_instance_processes gpu_instance_active_ratio
"""

_FOR_ALERTS = "pacecar_processes_left_out pacecar_inbox_left_out_total"

NOT_DRAWN = {
    "pacecar_build_info": "a constant to join on; `pacecar version` shows it",
    "pacecar_web_connections": "clients come for a millisecond; who is not served is drawn",
    "pacecar_daemon_config_last_reload_success_timestamp_seconds": "for alerts; whether it succeeded is drawn",
    "pacecar_daemon_config_reloads_total": "for alerts; whether the last one succeeded is drawn",
    "pacecar_gpu_memory_free_bytes": "size minus used, and both are drawn",
    **{
        f"pacecar_daemon_otlp_{name}": "of daemons that push, which a store that does not scrape draws itself"
        for name in ("exports_total", "export_duration_seconds", "success_age_seconds")
    },
    "pacecar_process_info": "to join on: which job, pod or container a pid is",
    **dict.fromkeys(_FOR_ALERTS.split(), "for alerts: zero on a healthy node"),
    **{m.name: "of the flight recorder: for alerts, and `pacecar dump`" for m in CATALOG if "_recorder_" in m.name},
    **{f"pacecar_{name}": "for the node dashboard: of the machine, not of a job" for name in _FOR_THE_NODE.split()},
    **{f"pacecar_{name}": "for the node dashboard: of one GPU, not of a job" for name in _FOR_THE_GPU.split()},
    **{name: "for the node dashboard: extremes of a window" for names in WINDOW_NAMES.values() for name in names},
}
"""Metrics that are on no panel, and why."""


def _pace() -> Section:
    slowest = combine("max", mean_of("pacecar_job_step_wall_seconds_total", "pacecar_job_steps_total", all_ranks=True))
    samples = combine("sum", rate("pacecar_job_samples_total", all_ranks=True))
    tokens = combine("sum", rate("pacecar_job_tokens_total", all_ranks=True))
    last = select("pacecar_job_step_duration_seconds", all_ranks=True)
    return Section("Pace", [
        (3, 4, stat("Ranks", "Ranks that report. Fewer than the world size: some are not heard.",
            [Query(combine("count", select("pacecar_rank_info", all_ranks=True)), "ranks")],
            unit="none", empty=NO_JOB)),
        (3, 4, stat("Step", "The last step that any rank reported.",
            [Query(combine("max", select("pacecar_job_step", all_ranks=True)), "step")], unit="none", empty=NO_JOB)),
        (3, 4, stat("Step time", "Mean step time of the slowest rank: the pace of the job.",
            [Query(slowest, "slowest rank")], unit="s", empty=NO_JOB)),
        (3, 4, stat("Samples a second", "Samples that all ranks together train on.",
            [Query(samples, "samples/s")], unit="short", empty="The hook cannot count samples")),
        (3, 4, stat("Tokens a second", "Tokens that all ranks together train on.",
            [Query(tokens, "tokens/s")], unit="short", empty=NO_TOKENS)),
        (3, 4, stat("Exposed communication", "Share of the step in which communication ran and no compute did.",
            [Query(_share("exposed_communication"), "exposed")], unit="percentunit", empty=NO_JOB,
            thresholds=[(0.0, GOOD), (0.05, WARN), (0.15, BAD)], decimals=1)),
        (3, 4, stat("Overhead", "Share of step time that pacecar itself takes; coloured from half the default budget.",
            [Query(divide(combine("sum", rate("pacecar_job_overhead_seconds_total", all_ranks=True)),
                          combine("sum", rate("pacecar_job_step_wall_seconds_total", all_ranks=True))), "overhead")],
            unit="percentunit", empty=NO_JOB, decimals=2,
            thresholds=[(0.0, GOOD), (_BUDGET / 2, WARN), (_BUDGET, BAD)])),
        (3, 4, stat("Last record", "How long ago the most silent rank was heard.",
            [Query(combine("max", select("pacecar_job_last_record_age_seconds", all_ranks=True)), "age")],
            unit="s", empty=NO_JOB, thresholds=[(0.0, GOOD), (30.0, WARN), (120.0, BAD)])),
        (12, 8, time_series("Step time by rank", "Mean step time over the window, of every step in it.",
            [Query(mean_of("pacecar_job_step_wall_seconds_total", "pacecar_job_steps_total"), f"rank {{{{{RANK}}}}}")],
            unit="s", empty=NO_JOB)),
        (12, 8, time_series("Spread of the last step", "The slowest rank sets the pace; the distance to the median "
            "is what a straggler costs.", [
                Query(combine("max", last), "slowest"),
                Query(combine("quantile(0.5)", last), "median"),
                Query(combine("min", last), "fastest"),
            ], unit="s", empty=NO_JOB)),
        (8, 7, time_series("Samples", "Samples a second of all ranks together.", [Query(samples, "samples/s")],
            unit="short", empty="The hook cannot count samples")),
        (8, 7, time_series("Tokens", "Tokens a second of all ranks together.", [Query(tokens, "tokens/s")],
            unit="short", empty=NO_TOKENS)),
        (8, 7, time_series("Phases of the step", "Host time of the last step's phases, mean of the ranks. On a GPU the "
            "host runs ahead: read the ledger for where device time went.",
            [Query(combine("avg", select("pacecar_job_step_phase_duration_seconds"), "phase"), "{{phase}}")],
            unit="s", empty=NO_JOB)),
    ])  # fmt: skip


def _share(heading: str, *, all_ranks: bool = True) -> str:
    return divide(
        combine("sum", rate("pacecar_job_ledger_seconds_total", {"heading": heading}, all_ranks=all_ranks)),
        combine("sum", rate("pacecar_job_step_wall_seconds_total", all_ranks=all_ranks)),
    )


def _ledger_stack(title: str, text: str, *, repeat: str | None = None) -> core.TimeSeries:
    """One query a heading: Prometheus returns series in no promised order, and a stack needs one."""
    return time_series(
        title, text, [Query(_share(heading, all_ranks=False), heading) for heading in HEADING_COLOURS],
        unit="percentunit", empty=NO_JOB, stacked=True, limit=1.0, repeat=repeat,
        overrides=[colour(heading, shade) for heading, shade in HEADING_COLOURS.items()],
    )  # fmt: skip


def _ledger_by_rank() -> core.BarChart:
    grown = increase("pacecar_job_ledger_seconds_total", window="$__range")
    wall = increase("pacecar_job_step_wall_seconds_total", window="$__range")
    share = divide(
        combine("sum", grown, RANK, "heading"), combine("sum", wall, RANK), matching=f"on ({RANK}) group_left ()"
    )
    order = {f"{RANK}\\heading": 0, **{heading: index for index, heading in enumerate(HEADING_COLOURS, start=1)}}
    return bar_chart(
        "Ledger by rank", "Where each rank's time went over the range shown. A rank that waits for another shows "
        "exposed communication; the one that is waited for shows less of it.",
        [Query(share, "", instant=True)], unit="percentunit", empty=NO_JOB, limit=1.0, x_field=f"{RANK}\\heading",
        transformations=[
            {"id": "groupingToMatrix",
             "options": {"columnField": "heading", "rowField": RANK, "valueField": "Value"}},
            {"id": "organize", "options": {"indexByName": order, "excludeByName": {}, "renameByName": {}}},
        ],
        overrides=[colour(heading, shade) for heading, shade in HEADING_COLOURS.items()],
    )  # fmt: skip


def _ledger() -> Section:
    def of_step(name: str) -> str:
        return divide(combine("sum", rate(name)), combine("sum", rate("pacecar_job_step_wall_seconds_total")))

    overlap = divide(
        combine("sum", rate("pacecar_job_overlapped_communication_seconds_total"), RANK),
        combine("sum", rate("pacecar_job_communication_seconds_total"), RANK),
    )
    return Section("Ledger: where the step went", [
        (14, 10, _ledger_stack("Ledger", "Share of step time by heading, of the ranks chosen; the headings sum to one. "
            "Only compute, and the optimizer's own work, is what the job is for.")),
        (10, 10, _ledger_by_rank()),
        (8, 7, time_series("Overlap ratio", "Communication that ran under compute, over all communication. "
            "Absent while nothing was communicated.", [Query(overlap, f"rank {{{{{RANK}}}}}")],
            unit="percentunit", limit=1.0, empty="No communication was measured")),
        (8, 7, time_series("Communication", "Communication per second of step: all of it, and the part that was hidden "
            "under compute. The gap between the lines is what the job waits for.", [
                Query(of_step("pacecar_job_communication_seconds_total"), "all"),
                Query(of_step("pacecar_job_overlapped_communication_seconds_total"), "overlapped"),
            ], unit="percentunit", empty=NO_JOB)),
        (8, 7, time_series("Age of the calibration", "Steps since the exact window that the estimate rests on. "
            "Absent before the first window, when most of the ledger is unknown.",
            [Query(combine("max", select("pacecar_job_ledger_calibration_age_steps"), RANK), f"rank {{{{{RANK}}}}}")],
            unit="none", empty="No exact window was taken yet")),
        *what_if_panels(),
        (12, 7, time_series("Collectives of a step", "Time of the collectives of one operation in the step of the last "
            "exact window, mean of the ranks chosen; waiting for a late rank is inside.", [
                Query(combine("avg", select("pacecar_job_collective_duration_seconds"), "op"), "{{op}}"),
                Query(combine("avg", select("pacecar_job_collectives"), "op"), "{{op}}: count"),
            ], unit="s", empty="No collective was seen in an exact window", overrides=[
                look(".*: count", regex=True, unit="none", custom__axisPlacement="right")])),
        (12, 7, time_series("Bus bandwidth", "Bus bandwidth of those collectives, to compare with the links' speed, "
            "and their size. Absent on gloo, which does not say sizes.", [
                Query(combine("avg", select("pacecar_job_collective_bus_bandwidth_bytes_per_second"), "op"), "{{op}}"),
                Query(combine("avg", select("pacecar_job_collective_bytes"), "op"), "{{op}}: size"),
            ], unit="Bps", empty="The backend does not say how large its collectives are", overrides=[
                look(".*: size", regex=True, unit="bytes", custom__axisPlacement="right")])),
        (12, 7, time_series("Error of the estimate", "Share of the step that the estimate would have put under a wrong "
            "heading, asked at each exact window before it is learned from; and the bound of what the profiler's own "
            "slow-down can have moved. The estimate is meant to stay under 5 %.", [
                Query(combine("max", select("pacecar_job_estimate_error_ratio"), RANK), f"rank {{{{{RANK}}}}}"),
                Query(combine("max", select("pacecar_job_estimate_bias_limit_ratio")), "bound of the profiler's bias"),
            ], unit="percentunit", empty="Fewer than two exact windows were taken", thresholds=[(0.05, BAD)])),
        (12, 7, time_series("Error by heading", "Estimate minus exact over the step, mean of the ranks chosen: above "
            "zero the estimate says too much.",
            [Query(combine("avg", select("pacecar_job_estimate_heading_error_ratio", {"heading": heading})), heading)
             for heading in HEADING_COLOURS],
            unit="percentunit", empty="Fewer than two exact windows were taken",
            overrides=[colour(heading, shade) for heading, shade in HEADING_COLOURS.items()])),
    ])  # fmt: skip


def _ledger_of_each_rank() -> Section:
    panel = _ledger_stack("Rank $rank", "Share of step time by heading, of one rank.", repeat="rank")
    return Section("Ledger of each rank over time", [(6, 7, panel)], collapsed=True)


def _tuner() -> Section:
    newest = combine("max", select("pacecar_knob_epoch", all_ranks=True))
    oldest = combine("min", select("pacecar_knob_epoch", all_ranks=True))
    return Section("Tuner", [
        (12, 8, state_timeline("State of the tuner", "One bar for each state while the tuner is in it. "
            "Frozen means that it stopped for the rest of the run; its log line says why.",
            [Query(select("pacecar_tuner_state") + " == 1", "{{state}}")], empty=NO_TUNER, shade=GOOD)),
        (12, 8, time_series("Knobs", "Numeric knobs in force. Bytes on the right axis.",
            [Query(combine("max", select("pacecar_knob_value", all_ranks=True), "knob"), "{{knob}}")],
            unit="none", empty="No knob was reported", stepped=True,
            overrides=[look(".*_bytes", regex=True, unit="bytes", custom__axisPlacement="right")])),
        (12, 8, time_series("Expected and measured gain", "Share of step time that the last decision expected to save, "
            "and that the last verdict measured. Negative: it cost time, and was taken back. Off by: how far the last "
            "forecast that was put to the test was from its measurement.", [
                Query(combine("max", select("pacecar_tuner_expected_gain_ratio"), "knob"), "{{knob}} expected"),
                Query(combine("max", select("pacecar_tuner_measured_gain_ratio"), "knob"), "{{knob}} measured"),
                Query(combine("max", select("pacecar_tuner_forecast_error_ratio"), "knob"), "{{knob}} off by"),
            ], unit="percentunit", empty="No trial was decided yet", stepped=True,
            overrides=[look(".* expected", regex=True, custom__lineStyle={"fill": "dash", "dash": [8, 8]})])),
        (6, 8, stat("Decisions", "Trials begun and advice given.",
            [Query(combine("sum", select("pacecar_tuner_decisions_total"), "knob", "kind"), "{{knob}} {{kind}}")],
            unit="none", empty="No decision was taken", names=True)),
        (6, 8, stat("Verdicts", "What became of the changes: kept, rolled back, barred or abandoned.",
            [Query(combine("sum", select("pacecar_tuner_verdicts_total"), "knob", "outcome"), "{{knob}} {{outcome}}")],
            unit="none", empty="No verdict yet", names=True)),
        (8, 7, time_series("Exploration", "Time lost to trials so far, against the setting in force before each; "
            "negative when the trials themselves gained.",
            [Query(combine("max", select("pacecar_tuner_exploration_seconds")), "lost")], unit="s", empty=NO_TUNER)),
        (8, 7, time_series("Switches", "What turning the knobs itself took, and how often each rank did it.", [
                Query(combine("max", select("pacecar_knob_switch_duration_seconds")), "last switch, slowest rank"),
                Query(combine("max", increase("pacecar_knob_switches_total")), "switches in the window"),
            ], unit="s", empty="No knob was turned", overrides=[
                look("switches in the window", unit="none", custom__axisPlacement="right")])),
        (4, 7, stat("Epochs apart", "Difference between the newest and the oldest knob epoch. Above zero for longer "
            "than a step means that ranks run different settings.", [Query(f"{newest} - {oldest}", "apart")],
            unit="none", empty=NO_TUNER, thresholds=[(0.0, GOOD), (1.0, BAD)])),
        (4, 7, stat("Micro-batches", "Micro-batches in the last step of a rank.",
            [Query(combine("max", select("pacecar_job_micro_batches")), "micro-batches")], unit="none", empty=NO_JOB)),
    ])  # fmt: skip


def _crew() -> Section:
    late = select("pacecar_job_straggler_excess_seconds", all_ranks=True)
    waits = divide(
        combine("sum", rate("pacecar_job_phase_seconds_total", all_ranks=True), "phase"),
        combine("sum", rate("pacecar_job_phase_seconds_total", all_ranks=True)),
        matching="on () group_left ()",
    )
    return Section("Ranks side by side", [
        (12, 8, time_series("Stragglers", "By how much the step of a late rank exceeds the other ranks' median, while "
            "it is late: what the job would gain. Without a rank: all ranks wait for a link that cannot be told.",
            [Query(late, f"rank {{{{{RANK}}}}}: {{{{cause}}}}")], unit="s", empty="No rank is late")),
        (12, 8, time_series("Pace of the slowest and the median rank", "Mean step over the last steps compared.", [
                Query(combine("max", select("pacecar_job_pace_seconds", all_ranks=True)), "slowest"),
                Query(combine("max", select("pacecar_job_median_pace_seconds", all_ranks=True)), "median"),
            ], unit="s", empty="The ranks are not compared: see the log of rank 0")),
        (12, 7, time_series("Host time of all ranks", "Share of the time of all ranks together by phase of the step. "
            "The tail is the wait for the last all-reduces.", [Query(waits, "{{phase}}")],
            unit="percentunit", empty="The ranks are not compared: see the log of rank 0", stacked=True, limit=1.0)),
        (6, 7, time_series("Found late", "Times that a rank was found late, by cause.",
            [Query(combine("sum", increase("pacecar_job_stragglers_total", all_ranks=True), "cause"), "{{cause}}")],
            unit="none", empty="No rank was late")),
        (6, 7, time_series("Hangs", "Ranks that end no step for suspiciously long, and how often that began.", [
                Query(combine("sum", select("pacecar_job_hang_suspected", all_ranks=True)), "now"),
                Query(combine("max", select("pacecar_job_hang_silent", all_ranks=True), "rank") + " > 0",
                      "rank {{rank}} says nothing"),
                Query(combine("sum", increase("pacecar_job_hangs_total", all_ranks=True)), "begun in the window"),
            ], unit="none", empty="No hang was suspected")),
    ])  # fmt: skip


def _itself() -> Section:
    overhead = divide(
        combine("sum", rate("pacecar_job_overhead_seconds_total"), RANK),
        combine("sum", rate("pacecar_job_step_wall_seconds_total"), RANK),
    )
    late = select("pacecar_daemon_tick_lateness_seconds")
    return Section("pacecar itself", [
        (8, 7, time_series("Overhead in the job", "Share of step time that the hook and the tuner take, windows "
            "included. The line is the default budget.", [Query(overhead, f"rank {{{{{RANK}}}}}")],
            unit="percentunit", empty=NO_JOB, thresholds=[(_BUDGET, BAD)])),
        (8, 7, time_series("Windows and drops", "Exact windows taken, and records that the hook dropped: drops "
            "lose detail, never totals. Where steps are too short for the budget only one in k is measured.", [
                Query(combine("sum", increase("pacecar_job_windows_total")), "windows"),
                Query(combine("sum", increase("pacecar_job_records_dropped_total")), "dropped records"),
                Query(combine("max", select("pacecar_job_measured_every_steps")), "one step in so many is measured"),
                Query(combine("min", select("pacecar_job_hook_measuring")), "measuring (0: a hook is off)"),
            ], unit="none", empty=NO_JOB)),
        (8, 7, time_series("Inbox", "Frames taken in and refused by the daemons, and clients of the endpoint that were "
            "not served, by reason.", [
                Query(combine("sum", rate("pacecar_inbox_frames_total")), "taken"),
                Query(combine("sum", rate("pacecar_inbox_frames_refused_total"), "refusal"), "refused: {{refusal}}"),
                Query(combine("sum", rate("pacecar_web_refused_total"), "refusal"), "client: {{refusal}}"),
            ], unit="cps", empty="No daemon is scraped")),
        (6, 7, time_series("Daemon", "CPU time per second of the daemon on each node.",
            [Query(rate("pacecar_daemon_cpu_seconds_total"), f"{{{{{NODE}}}}}")],
            unit="percentunit", empty="No daemon is scraped")),
        (6, 7, time_series("Daemon's memory", "Resident memory of the daemon on each node.",
            [Query(select("pacecar_daemon_resident_memory_bytes"), f"{{{{{NODE}}}}}")],
            unit="bytes", empty="No daemon is scraped")),
        (6, 7, time_series("Beat", "How late the slowest daemon's tick began, how old the numbers served are, and how "
            "many ticks were left out.", [
                Query(combine("max", late), "lateness"),
                Query(combine("max", select("pacecar_daemon_snapshot_age_seconds")), "age of the numbers"),
                Query(combine("sum", increase("pacecar_daemon_ticks_missed_total")), "ticks missed"),
            ], unit="s", empty="No daemon is scraped", overrides=[
                look("ticks missed", unit="none", custom__axisPlacement="right")])),
        (6, 7, time_series("Collectors", "What each collector takes in a tick, on the node where it takes longest.",
            [Query(combine("max", select("pacecar_collector_duration_seconds"), "collector"), "{{collector}}")],
            unit="s", empty="No daemon is scraped")),
        (8, 6, table("Collectors that do not read", "Collectors whose last outcome was failed or absent. Absent is "
            "healthy: there is nothing of that kind on the node.",
            [Query(select("pacecar_collector_outcome", {"outcome": "!=ok"}) + " == 1", "", instant=True)],
            empty="Every collector reads its source", transformations=columns(NODE, "collector", "outcome"))),
        (8, 6, time_series("Failures of collectors", "Ticks in which a collector failed.",
            [Query(combine("sum", increase("pacecar_collector_failures_total"), "collector"), "{{collector}}")],
            unit="none", empty="No collector has failed")),
        (8, 6, stat("Running since", "When the daemon on each node was started: a recent time is a restart.",
            [Query(select("pacecar_daemon_start_time_seconds") + " * 1000", f"{{{{{NODE}}}}}")],
            unit="dateTimeAsIso", empty="No daemon is scraped", names=True)),
        (8, 6, stat("Connected", "Hooks connected to the daemons, jobs on their boards, ticks per second, "
            "and 0 where a daemon could not use its newest settings.", [
                Query(combine("sum", select("pacecar_inbox_connections")), "hooks"),
                Query(combine("max", select("pacecar_inbox_jobs")), "jobs"),
                Query(combine("min", select("pacecar_daemon_config_last_reload_successful")), "settings in force"),
                Query(combine("min", rate("pacecar_daemon_ticks_total")), "ticks/s, slowest daemon"),
            ], unit="none", empty="No daemon is scraped", names=True, decimals=1)),
    ], collapsed=True)  # fmt: skip


def _ranks() -> Section:
    shown = (RANK, NODE, "host", "local_rank", "device", "backend", "framework", "pid")
    return Section("Ranks", [
        (24, 8, table("Who is who", "One line a rank: where it runs and on what.",
            [Query(select("pacecar_rank_info"), "", instant=True)], empty=NO_JOB,
            transformations=columns(*shown))),
    ], collapsed=True)  # fmt: skip


def _variables() -> core.Templating:
    def query(name: str, label: str, text: str, *, many: bool, all_value: str | None = None) -> core.Template:
        return core.Template(
            name=name, label=label, query=text, dataSource=DATASOURCE, type="query", includeAll=many, multi=many,
            allValue=all_value, refresh=2, sort=3, default=None,
        )  # fmt: skip

    return core.Templating(list=[
        core.Template(name="datasource", label="Data source", query="prometheus", type="datasource", refresh=1),
        query("job", "Job", f"label_values(pacecar_rank_info, {JOB})", many=False),
        query("rank", "Rank", f'label_values(pacecar_rank_info{{{JOB}="$job"}}, {RANK})', many=True, all_value=".+"),
        query("node", "Node", f'label_values(pacecar_rank_info{{{JOB}="$job"}}, {NODE})', many=True),
    ])  # fmt: skip


def _annotations() -> core.Annotations:
    def marks(name: str, metric: str, labels: str, title: str, shade: str) -> dict[str, object]:
        counter = select(metric)
        # A counter that is born at 1 has no increase: what was not there a moment ago counts too.
        fresh = f"({counter} unless {counter} offset {INTERVAL})"
        return {
            "name": name, "datasource": DATASOURCE, "enable": True, "hide": False, "iconColor": shade,
            "expr": f"({increase(metric)} > 0) or {fresh}", "titleFormat": title, "tagKeys": labels,
        }  # fmt: skip

    return core.Annotations(list=[
        marks("Decisions", "pacecar_tuner_decisions_total", "knob,kind", "{{kind}}: {{knob}}", GOOD),
        marks("Verdicts", "pacecar_tuner_verdicts_total", "knob,outcome", "{{outcome}}: {{knob}}", WARN),
        marks("Orders", "pacecar_tuner_orders_total", "action,outcome", "by hand: {{action}}, {{outcome}}", WARN),
    ])  # fmt: skip


def job_dashboard() -> core.Dashboard:
    """Return the dashboard of one training job, ready to be tidied and written."""
    sections = [
        _pace(), _ledger(), _ledger_of_each_rank(), _crew(), _tuner(), vitals_section(), host_section(), gpu_section(),
        _itself(), _ranks(),
    ]  # fmt: skip
    return core.Dashboard(
        title="pacecar / Job",
        uid=UID,
        description="One training job: its pace, where its steps went, what the tuner did about it, and its machines.",
        tags=["pacecar", "training"],
        schemaVersion=SCHEMA_VERSION,
        graphTooltip=1,
        refresh="10s",
        time=core.Time("now-1h", "now"),
        timezone="browser",
        editable=True,
        templating=_variables(),
        annotations=_annotations(),
        panels=place(sections),
    )
