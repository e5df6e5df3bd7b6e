"""Draws the parts of the screen: each function turns its part of the document into lines of a given width.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from rich.console import Console
from rich.text import Text

from pacecar.clock import NS_PER_SECOND
from pacecar.formatting.dates import second_text
from pacecar.formatting.ledger_bar import ledger_bar, ledger_legend
from pacecar.formatting.ledger_headings import CAUSE_WORDS, SCENARIO_WORDS, UNCALIBRATED_WORDS
from pacecar.formatting.plain_text import clean
from pacecar.formatting.quantities import DASH, plural, short_count, short_duration, short_percent, short_size
from pacecar.knobs import setting
from pacecar.records import KnobValue
from pacecar.records.status_document import (
    GpuStatus,
    Host,
    JobStatus,
    Ladder,
    LinkStatus,
    MigInstance,
    Move,
    Rank,
    RecorderStatus,
    StatusDocument,
)

from .table import PaneColumn, cut, gauge, rows

__all__ = [
    "alarm_lines", "bar", "calibration_lines", "gpu_alarm_lines", "gpu_lines", "host_lines", "instance_lines",
    "job_facts", "job_line", "ladder_lines", "legend_lines", "link_lines", "move_lines", "rank_lines",
    "recorder_lines",
]  # fmt: skip

BAD, WARN = "bold red", "yellow"


def _spoken(name: str | None) -> str:
    """Return a name in the document as words."""
    return DASH if name is None else name.replace("_", " ")


def _setting(knob: str, value: KnobValue | None) -> str:
    """Return a knob's value in few cells; bytes look like the other sizes on the screen."""
    if value is None:
        return DASH
    return short_size(value) if isinstance(value, int) and knob.endswith("_bytes") else setting(knob, value)


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def host_lines(host: Host, width: int) -> list[Text]:
    """Return one line: processors, memory and, if there is any, swap."""
    memory = f"{short_size(host.memory_used_bytes)}/{short_size(host.memory_size_bytes)}"
    busy = host.cpu_utilization_ratio
    parts = [
        ("CPU", busy, f"{short_percent(busy)} of {short_count(host.cpus_online)}"),
        ("Mem", _ratio(host.memory_used_bytes, host.memory_size_bytes), memory),
    ]
    if host.swap_size_bytes:
        swap = f"{short_size(host.swap_used_bytes)}/{short_size(host.swap_size_bytes)}"
        parts.append(("Swp", _ratio(host.swap_used_bytes, host.swap_size_bytes), swap))
    size = max(8, (width - 5 * len(parts)) // len(parts))
    line = Text(no_wrap=True)
    for name, ratio, label in parts:
        line.append(f"{name} ", style="cyan").append_text(gauge(ratio, min(size, 60), label)).append(" ")
    return [cut(line, width)]


def _gpu_state(gpu: GpuStatus) -> Text:
    """Return the health verdict with its reasons, throttling, Xids, MIG and MPS."""
    if gpu.up == 0 and not gpu.health_reasons:
        return Text("not read yet" if gpu.down_reason is None else f"down: {_spoken(gpu.down_reason)}", style=BAD)
    wrong = [f"{gpu.health}: {', '.join(reason.words for reason in gpu.health_reasons)}"] if gpu.health_reasons else []
    wrong += [f"slowed: {_spoken(reason)}" for reason in gpu.throttled_by or ()]
    style = "green" if not wrong else WARN if gpu.health == "degraded" else BAD
    state = Text(", ".join(wrong) or "ok", style=style)
    if gpu.xid_errors_total:
        state.append(f", {gpu.xid_errors_total} Xid")
    if gpu.mig_enabled:
        state.append(f", MIG: {plural(len(gpu.instances), 'instance')}" if gpu.instances else ", MIG")
    if gpu.mps_processes:
        state.append(f", MPS: {plural(gpu.mps_processes, 'client')}")
    return state


GPU_COLUMNS: tuple[PaneColumn[GpuStatus], ...] = (
    PaneColumn("GPU", 3, lambda g: g.gpu),
    PaneColumn("Name", 12, lambda g: g.name or "", rank=6, is_text=True),
    PaneColumn("Util", 16, lambda g: gauge(g.utilization_ratio, 16, short_percent(g.utilization_ratio)), is_text=True),
    PaneColumn("Memory", 20, lambda g: gauge(_ratio(g.memory_used_bytes, g.memory_size_bytes), 20,
           f"{short_size(g.memory_used_bytes)}/{short_size(g.memory_size_bytes)}"), rank=1, is_text=True),
    PaneColumn("Power", 9, lambda g: f"{short_count(g.power_watts)}/{short_count(g.power_limit_watts)}W", rank=2),
    PaneColumn("Temp", 5, lambda g: "-" if g.temperature_celsius is None else f"{g.temperature_celsius:.0f}C", rank=3),
    PaneColumn("Clock", 7, lambda g: short_count(g.sm_clock_hertz, "Hz"), rank=7),
    PaneColumn("SM", 4, lambda g: short_percent(g.sm_active_ratio), rank=4),
    PaneColumn("Tensor", 6, lambda g: short_percent(g.tensor_active_ratio), rank=8),
    PaneColumn("DRAM", 5, lambda g: short_percent(g.dram_bandwidth_ratio), rank=9),
    PaneColumn("NVLink in/out", 15, lambda g: f"{short_count(g.nvlink_receive_bytes_per_second)}/"
           f"{short_count(g.nvlink_transmit_bytes_per_second)}", rank=10),
    PaneColumn("PCIe in/out", 15, lambda g: f"{short_count(g.pcie_receive_bytes_per_second)}/"
           f"{short_count(g.pcie_transmit_bytes_per_second)}", rank=11),
    PaneColumn("State", 10, _gpu_state, is_text=True, grows=True),
)  # fmt: skip


def gpu_lines(gpus: Sequence[GpuStatus], width: int) -> list[Text]:
    """Return a head and a line per GPU."""
    return rows(GPU_COLUMNS, gpus, width)


def gpu_alarm_lines(document: StatusDocument, width: int) -> list[Text]:
    """Return faults of GPUs with their remedy; GPUs with the same fault share a paragraph."""
    same: dict[tuple[str, str, str], list[GpuStatus]] = {}
    for gpu in document.gpus:
        for reason in gpu.health_reasons:
            same.setdefault((reason.verdict, reason.words, reason.remedy), []).append(gpu)
    lines: list[Text] = []
    for (verdict, words, remedy), gpus in sorted(same.items(), key=lambda item: item[0][0] != "failed"):
        who = f"GPU {', '.join(gpu.gpu for gpu in gpus)}"
        if len(gpus) == 1 and gpus[0].identity:
            who += f" ({gpus[0].identity})"
        text = f"! {who} {verdict}: {words}. To do: {remedy}."
        lines += _paragraph(text, width, BAD if verdict == "failed" else WARN)
    for gone in document.gpus_missing:
        text = (
            f"! A GPU is missing: {gone.name}, {gone.pci_bus_id}, {gone.uuid}, last read as GPU {gone.gpu} at"
            f" {second_text(int(gone.seen_time_seconds * NS_PER_SECOND))}."
        )
        lines += _paragraph(text, width, BAD)
    return lines


def _paragraph(text: str, width: int, style: str) -> list[Text]:
    lines = wrap(clean(text), max(width, 20), subsequent_indent="    ")  # narrower is unreadable
    return [cut(Text(line, style=style), width) for line in lines]


INSTANCE_COLUMNS: tuple[PaneColumn[tuple[GpuStatus, MigInstance]], ...] = (
    PaneColumn("MIG", 6, lambda both: f"{both[0].gpu}:{both[1].gpu_instance}/{both[1].compute_instance}",
                is_text=True),
    PaneColumn("Memory", 20, lambda both: gauge(_ratio(both[1].memory_used_bytes, both[1].memory_size_bytes), 20,
           f"{short_size(both[1].memory_used_bytes)}/{short_size(both[1].memory_size_bytes)}"), is_text=True),
    PaneColumn("Processes", 9, lambda both: short_count(both[1].processes)),
    PaneColumn("Instance", 14, lambda both: " ".join(filter(None, (both[1].name, both[1].uuid))), is_text=True,
                grows=True),
)  # fmt: skip


def instance_lines(gpus: Sequence[GpuStatus], width: int) -> list[Text]:
    """Return a head and a line per MIG instance; empty if there are none."""
    instances = [(gpu, instance) for gpu in gpus for instance in gpu.instances]
    return rows(INSTANCE_COLUMNS, instances, width) if instances else []


def _link_state(link: LinkStatus) -> Text:
    return Text("-") if link.up is None else Text("up") if link.up else Text("down", style=BAD)


def _in_use(ratio: float | None) -> Text:
    return gauge(ratio, 14, short_percent(ratio))


LINK_COLUMNS: tuple[PaneColumn[LinkStatus], ...] = (
    PaneColumn("Link", 16, lambda link: link.name, is_text=True),
    PaneColumn("State", 5, _link_state),
    PaneColumn("Speed", 9, lambda link: short_count(link.link_bytes_per_second, "B/s"), rank=2),
    PaneColumn("Received", 9, lambda link: short_count(link.receive_bytes_per_second, "B/s")),
    PaneColumn("In use", 14, lambda link: _in_use(link.receive_utilization_ratio), rank=3),
    PaneColumn("Sent", 9, lambda link: short_count(link.transmit_bytes_per_second, "B/s")),
    PaneColumn("In use", 14, lambda link: _in_use(link.transmit_utilization_ratio), rank=3),
    PaneColumn("Errors", 7, lambda link: short_count(link.errors_total), rank=1),
)


def link_lines(links: Sequence[LinkStatus], width: int) -> list[Text]:
    """Return a head and a line per link."""
    return rows(LINK_COLUMNS, links, width)


def _job_state(job: JobStatus) -> Text:
    if job.hang_verdict is not None:
        return Text("hangs", style=BAD)
    if job.hangs:
        return Text("hang?", style=BAD)
    if job.finished:
        return Text("finished", style="dim")
    if job.stragglers:
        return Text("straggler", style="yellow")
    return Text("-" if job.tuner is None else f"tuner {job.tuner.state}", style="" if job.tuner is None else "green")


JOB_COLUMNS: tuple[PaneColumn[JobStatus], ...] = (
    PaneColumn("Job", 22, lambda job: job.called, is_text=True),
    PaneColumn(
        "Step", 7, lambda job: short_count(job.step) if job.step is None or job.step > 9_999_999 else str(job.step)
    ),
    PaneColumn("Pace", 7, lambda job: short_duration(job.pace_seconds)),
    PaneColumn(
        "Samples",
        8,
        lambda job: ("~" if job.samples_guessed else "") + short_count(job.samples_per_second, "/s"),
        rank=3,
    ),
    PaneColumn("Tokens", 8, lambda job: short_count(job.tokens_per_second, "/s"), rank=2),
    PaneColumn("MFU", 5, lambda job: short_percent(job.mfu_ratio), rank=1),
    PaneColumn("Ranks", 7, lambda job: f"{len(job.ranks) + job.ranks_left_out}/{short_count(job.world_size)}", rank=4),
    PaneColumn("Heard", 7, lambda job: short_duration(job.last_record_age_seconds), rank=5),
    PaneColumn("State", 14, _job_state, is_text=True, grows=True),
)


def job_line(jobs: Sequence[JobStatus], width: int, chosen: int | None) -> list[Text]:
    """Return a head and a line per job; line `chosen` is reversed."""
    return rows(JOB_COLUMNS, jobs, width, chosen=chosen)


def bar(ledger: dict[str, float] | None, width: int, console: Console) -> Text:
    """Return a full bar with the share of each heading; dots if no step was reported."""
    if ledger is None or sum(ledger.values()) <= 0:
        return Text("." * width, style="dim")
    return ledger_bar(ledger, width, console)


def legend_lines(ledger: dict[str, float] | None, width: int, console: Console) -> list[Text]:
    """Return the legend of the bar, with shares, in lines of at most `width` cells."""
    return [cut(line, width) for line in ledger_legend(ledger or {}, width, console, is_narrow=True) if len(line)]


def calibration_lines(job: JobStatus, width: int) -> list[Text]:
    """Return a line for each reason why ledgers of the job are not based on an exact window."""
    found: dict[str, int] = {}
    for rank in job.ranks:
        if rank.ledger_uncalibrated is not None:
            found[rank.ledger_uncalibrated] = found.get(rank.ledger_uncalibrated, 0) + 1
    lines = []
    for reason, ranks in found.items():
        words = UNCALIBRATED_WORDS.get(reason, reason)
        who = "" if ranks == len(job.ranks) else f" on {ranks} of {len(job.ranks)} ranks"
        lines.append(cut(Text(clean(f"not calibrated{who}: {words}"), style="dim"), width))
    return lines


def alarm_lines(jobs: Sequence[JobStatus], width: int) -> list[Text]:
    """Return a line per straggler and suspicion, and why a job hangs in as many as that takes."""
    lines = []
    for job in jobs:
        if job.hang_verdict is not None:
            lines += [Text(part, style=BAD) for part in wrap(clean(f"! {job.called} hangs: {job.hang_verdict}"), width)]
        for hang in job.hangs:
            what = "is silent while others wait" if hang.silent else "finishes no step: it may hang"
            lines.append(cut(Text(clean(f"! {job.called}: rank {hang.rank} {what}"), style=BAD), width))
        for late in job.stragglers:
            who = "the ranks are held up" if late.rank is None else f"rank {late.rank} is late"
            cost = f"{short_duration(late.excess_seconds)} a step ({CAUSE_WORDS.get(late.cause, late.cause)})"
            text = f"! {job.called}: {who} by {cost}: {late.evidence}"
            lines.append(cut(Text(clean(text), style="yellow"), width))
    return lines


def _outcome(move: Move) -> Text:
    word = move.outcome or ("advice" if move.kind == "advise" else "on trial")
    return Text(_spoken(word), style={"kept": "green", "rolled_back": "yellow", "barred": "red"}.get(word, "cyan"))


MOVE_COLUMNS: tuple[PaneColumn[tuple[JobStatus, Move]], ...] = (
    PaneColumn("Job", 12, lambda both: both[0].called, rank=3, is_text=True),
    PaneColumn("Step", 6, lambda both: str(both[1].step)),
    PaneColumn("Knob", 14, lambda both: _spoken(both[1].knob), is_text=True),
    PaneColumn("Change", 13, lambda both: f"{_setting(both[1].knob, both[1].from_value)}>"
           f"{_setting(both[1].knob, both[1].to_value)}", is_text=True),
    PaneColumn("Exp.", 6, lambda both: short_percent(both[1].expected_gain_ratio, digits=1, signed=True), rank=2),
    PaneColumn("Meas.", 6, lambda both: short_percent(both[1].measured_gain_ratio, digits=1, signed=True)),
    PaneColumn("Outcome", 11, lambda both: _outcome(both[1]), is_text=True),
    PaneColumn("Why", 10, lambda both: both[1].outcome_reason or both[1].reason, is_text=True, grows=True),
)  # fmt: skip


def move_lines(moves: Sequence[tuple[JobStatus, Move]], width: int) -> list[Text]:
    """Return a head and a line per decision."""
    return rows(MOVE_COLUMNS, moves, width)


def where_words(rank: Rank) -> str:
    """Return the node and device of a rank, and its pod or Slurm job."""
    pod = None if rank.pod_name is None else f"pod {rank.pod_namespace}/{rank.pod_name}"
    slurm = None if rank.slurm_job is None else f"Slurm {rank.slurm_job}"
    return "  ".join(filter(None, (f"{rank.host} {rank.device}", pod, slurm)))


def rank_lines(ranks: Sequence[Rank], width: int, console: Console, chosen: int | None) -> list[Text]:
    """Return a head and a line per rank, with the bar of its last step."""
    size = max(10, min(60, width - 52))
    columns: tuple[PaneColumn[Rank], ...] = (
        PaneColumn("Rank", 5, lambda rank: str(rank.rank)),
        PaneColumn("Step", 7, lambda rank: "-" if rank.step is None else str(rank.step), rank=3),
        PaneColumn("Last", 7, lambda rank: short_duration(rank.step_duration_seconds)),
        PaneColumn("Ledger of the last step", size, lambda rank: bar(rank.ledger_seconds, size, console), is_text=True),
        PaneColumn("MFU", 5, lambda rank: short_percent(rank.mfu_ratio), rank=1),
        PaneColumn("Mem", 6, lambda rank: short_size(rank.memory_allocated_bytes), rank=2),
        PaneColumn("Where", 14, where_words, is_text=True, grows=True),
    )
    return rows(columns, ranks, width, chosen=chosen)


def ladder_lines(ladder: Ladder | None, width: int) -> list[Text]:
    """Return a line per what-if bound."""
    if ladder is None:
        return [Text("what-if ladder: not known yet", style="dim")]
    lines = [Text(f"What if, of {short_duration(ladder.pace_seconds)} a step ({ladder.source})", style="bold")]
    for rung in ladder.rungs:
        words = SCENARIO_WORDS.get(rung.scenario, _spoken(rung.scenario))
        step, gain = short_duration(rung.step_seconds), short_percent(rung.gain_ratio, digits=1)
        lines.append(Text(f"  {words:32} at least {step:>7}, saves at most {gain}"))
    return [cut(line, width) for line in lines]


def _said_samples(job: JobStatus) -> str:
    return f"{short_count(job.samples_per_second)} samples/s" + (" (a guess)" if job.samples_guessed else "")


def job_facts(job: JobStatus, width: int) -> list[Text]:
    """Return the facts about one job in a line or two."""
    facts = [
        f"step {job.step if job.step is not None else '-'}", f"pace {short_duration(job.pace_seconds)}",
        f"median rank {short_duration(job.median_pace_seconds)}", _said_samples(job),
        f"{short_count(job.tokens_per_second)} tokens/s", f"MFU {short_percent(job.mfu_ratio, digits=1)}",
        f"ranks here {len(job.ranks) + job.ranks_left_out} of {short_count(job.world_size)}",
    ]  # fmt: skip
    if job.tuner is not None:
        facts.append(f"tuner {job.tuner.state}")
    lines = [Text(no_wrap=True)]
    for fact in facts:
        if len(lines[-1]) and len(lines[-1]) + 2 + len(fact) > width:
            lines.append(Text(no_wrap=True))
        lines[-1].append(("  " if len(lines[-1]) else "") + fact)
    if job.tuner is not None and job.tuner.detail:
        lines.append(cut(Text(f"now: {clean(job.tuner.detail)}", style="cyan"), width))
    return lines


def recorder_lines(recorder: RecorderStatus | None, width: int) -> list[Text]:
    """Return one line about the flight recorder: its span, and what it wrote and why; empty if it is off."""
    if recorder is None:
        return []
    line = Text(no_wrap=True).append("Rec ", style="cyan")
    line.append(f"last {short_duration(recorder.span_seconds)} in {short_size(recorder.memory_bytes)}")
    line.append(f"  {plural(recorder.files_total, 'recording')} written")
    line.append(f", {short_size(recorder.files_bytes)} on disk" if recorder.files_bytes else "")
    reasons = [f"{_spoken(name)} {count}" for name, count in recorder.triggers_total.items() if count]
    line.append(f"  for {', '.join(reasons)}" if reasons else "", style="yellow")
    if recorder.lost_total or recorder.write_failures_total:
        bad = f"  {recorder.write_failures_total} writes failed, {recorder.lost_total} lost"
        line.append(bad, style=BAD)
    return [cut(line, width)]


def daemon_words(document: StatusDocument) -> str:
    """Return the title's words about the daemon and its recorder."""
    own, recorder = document.daemon, document.daemon.recorder
    words = f"daemon {short_percent(own.cpu_utilization_ratio, digits=1)} of {short_percent(own.cpu_budget_ratio)} CPU"
    if recorder is None:
        return words
    wrote = f", {recorder.files_total} written" if recorder.files_total else ""
    return f"rec {short_duration(recorder.span_seconds)}{wrote}  {words}"
