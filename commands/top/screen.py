"""Lays out the screen of `pacecar top`: which panes are shown, how high, and what is selected.

A terminal may have 24 lines or 60.  Each pane first gets the lines that it must have (a few GPUs, one job, the alarms);
the rest is distributed in the order in which readers look.  Pure.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from pacecar.formatting.plain_text import clean
from pacecar.records.job_identity import JobKey
from pacecar.records.status_document import GpuStatus, JobStatus, StatusDocument

from . import panes
from .table import cut

__all__ = ["GPU_SORTS", "JOB_SORTS", "ScreenView", "compose", "everything", "on_key", "shown_jobs"]

FILTER_MAX = 64

GPU_SORTS = ("number", "utilization", "memory", "power", "temperature")
JOB_SORTS = ("name", "pace", "heard")

HELP = """
  Up, Down, k, j      choose a job, or a rank in a job      Enter, Right   open the job
  PgUp, PgDn          a page                                Esc, Left      back
  Home, g  End, G     first, last                           Tab            to the next job
  /  F3  F4           filter jobs by name                   F5, Space      hold the picture, go on
  s  F6               sort GPUs by the next column          o              sort jobs by the next column
  N P M W T           GPUs by number, utilization, memory, power (W), temperature
  h  ?  F1            this help                             q  F10  Ctrl-C quit

  A bar is a job's ledger: where the recent time of its ranks here, or of a rank's last step, went. A straggler holds up
  the others; the what-if ladder shows how long a step would take at least without one cost. - means unknown.
""".strip("\n")

FOOTER = (
    ("F1", "Help"),
    ("/", "Filter"),
    ("F5", "Hold"),
    ("F6", "Sort"),
    ("o", "Order"),
    ("Enter", "Job"),
    ("q", "Quit"),
)


@dataclass
class ScreenView:
    """The user's choices: page, job and rank, order, filter."""

    page: str = "overview"
    job: JobKey | None = None
    rank: int = 0
    gpu_sort: str = "number"
    job_sort: str = "name"
    filter: str = ""
    is_typing: bool = False
    is_held: bool = False


class Pane(NamedTuple):
    """Lines of one part: at least `least` are shown at any height; `step` lines belong together."""

    lines: list[Text]
    least: int
    step: int = 1


def shown_jobs(document: StatusDocument, view: ScreenView) -> list[JobStatus]:
    """Return the jobs that pass the filter, in order."""
    jobs = [job for job in document.jobs if view.filter.lower() in str(job.key).lower()]
    if view.job_sort == "pace":
        return sorted(jobs, key=lambda job: -(job.pace_seconds or 0.0))
    if view.job_sort == "heard":
        return sorted(jobs, key=lambda job: (job.last_record_age_seconds is None, job.last_record_age_seconds or 0.0))
    return jobs


def _sorted_gpus(document: StatusDocument, by: str) -> list[GpuStatus]:
    field = {"utilization": "utilization_ratio", "memory": "memory_used_bytes", "power": "power_watts"}.get(by)
    field = field or ("temperature_celsius" if by == "temperature" else None)
    if field is None:
        return list(document.gpus)
    return sorted(document.gpus, key=lambda gpu: (getattr(gpu, field) is None, -(getattr(gpu, field) or 0)))


def _jobs(jobs: list[JobStatus], view: ScreenView, width: int, console: Console) -> list[Text]:
    chosen = next((number for number, job in enumerate(jobs) if job.key == view.job), None)
    head, *lines = panes.job_line(jobs, width, chosen)
    result = [head]
    for job, line in zip(jobs, lines, strict=True):
        result += [line, Text("  ").append_text(panes.bar(job.ledger_seconds, width - 2, console))]
    return result


def _panes(document: StatusDocument, view: ScreenView, width: int, console: Console) -> list[Pane]:
    """Return the panes, from top to bottom."""
    jobs = shown_jobs(document, view)
    moves = sorted(((job, move) for job in jobs for move in job.moves), key=lambda both: -both[1].time_seconds)
    job_lines = _jobs(jobs, view, width, console)
    if not jobs:
        job_lines = [
            job_lines[0],
            Text("no job" + (" matches the filter" if view.filter else " reports"), style="dim"),
        ]
    gpu_lines = panes.gpu_lines(_sorted_gpus(document, view.gpu_sort), width)
    chosen = next((job for job in jobs if job.key == view.job), None) or _troubled(jobs)
    legend = [] if chosen is None else panes.legend_lines(chosen.ledger_seconds, width, console)
    ranks: list[Text] = []
    if chosen is not None:
        head = cut(Text(f"Ranks of {clean(chosen.called)}", style="bold"), width)
        ranks = [head, *panes.rank_lines(chosen.ranks, width, console, None)]
    ladder = [] if chosen is None or chosen.what_if is None else panes.ladder_lines(chosen.what_if, width)
    return [
        Pane(panes.host_lines(document.host, width), 1),
        Pane(gpu_lines if document.gpus else [], 5),
        Pane(panes.gpu_alarm_lines(document, width), 2),
        Pane(panes.instance_lines(document.gpus, width), 0),
        Pane(panes.link_lines(document.links, width) if document.links else [], 2),
        Pane(job_lines, 3, step=2),
        Pane(legend, 1 if len(legend) == 1 else 0),
        Pane(panes.alarm_lines(jobs, width), 2),
        Pane(panes.move_lines(moves, width) if moves else [], 2),
        Pane(panes.recorder_lines(document.daemon.recorder, width), 0),
        Pane(ladder, 0, step=len(ladder) or 1),
        Pane(ranks, 0),
    ]


def _troubled(jobs: list[JobStatus]) -> JobStatus | None:
    """Return the first job with a hang or straggler, else the first job."""
    return next((job for job in jobs if job.hang_verdict or job.hangs or job.stragglers), jobs[0] if jobs else None)


def _heights(parts: list[Pane], height: int) -> list[int]:
    """Distribute `height` lines: first each pane's minimum, most important first, then the rest."""
    given = [0] * len(parts)
    # Host, jobs, GPUs, their faults, alarms, moves, links, instances, legend, recorder, ladder, ranks.
    order = (0, 5, 1, 2, 7, 8, 4, 3, 6, 9, 10, 11)
    for number in order:
        given[number] = min(len(parts[number].lines), parts[number].least, height - sum(given))
    for number in order:
        part, room = parts[number], height - sum(given)
        more = min(len(part.lines) - given[number], room)
        given[number] += more - more % part.step
    return given


def compose(
    document: StatusDocument, view: ScreenView, width: int, height: int, console: Console, note: str | None = None
) -> list[Text]:
    """Return the screen, exactly `height` lines of at most `width` cells; `note` is an error for the title."""
    inside = height - 2
    if view.page == "help":
        body = [cut(Text(line), width) for line in HELP.splitlines()]
    elif view.page == "job":
        body = _job_page(document, view, width, inside, console)
    else:
        parts = _panes(document, view, width, console)
        windows = [
            _window(part, size, view, document) for part, size in zip(parts, _heights(parts, inside), strict=True)
        ]
        body = _stacked([window for window in windows if window], inside)
    body = body[:inside] + [Text()] * (inside - len(body))
    return [_title(document, view, width, note), *body, _footer(view, width)][: max(1, height)]


def _stacked(windows: list[list[Text]], height: int) -> list[Text]:
    """Stack the panes, with empty lines between them if all of those fit."""
    is_roomy = sum(map(len, windows)) + len(windows) - 1 <= height
    lines: list[Text] = []
    for window in windows:
        lines += ([Text()] if lines and is_roomy else []) + window
    return lines


def _window(part: Pane, size: int, view: ScreenView, document: StatusDocument) -> list[Text]:
    """Return `size` lines of a pane: its head and the part with the selection."""
    if len(part.lines) <= size:
        return part.lines
    start = 1
    if part.step > 1 and size > part.step:
        names = [job.key for job in shown_jobs(document, view)]
        place = names.index(view.job) if view.job in names else 0
        start = 1 + part.step * max(0, place - (size - 1) // part.step + 1)
    return [part.lines[0], *part.lines[start : start + size - 1]][:size]


def _title(document: StatusDocument, view: ScreenView, width: int, note: str | None) -> Text:
    title = Text(f"pacecar top  {clean(document.node)}  ", style="bold white on dark_blue")
    clock = time.strftime("%H:%M:%S", time.localtime(document.time_seconds))
    right = f"{clock}  {panes.daemon_words(document)}"
    if view.is_held:
        right = f"held  {right}"
    if note is not None:
        title.append(f"! {clean(note)} ", style="bold white on red")
        right = clock
    title = cut(title, max(0, width - len(right) - 1))
    return cut(title.append(" " * max(1, width - title.cell_len - len(right))).append(right), width)


def _footer(view: ScreenView, width: int) -> Text:
    if view.is_typing:
        return cut(Text(f"filter jobs: {view.filter}_   Enter keeps it, Esc clears it", style="reverse"), width)
    line = Text(no_wrap=True)
    for key, word in FOOTER:
        line.append(key, style="bold").append(f" {word} ", style="black on cyan").append(" ")
    line.append(f" GPUs by {view.gpu_sort}, jobs by {view.job_sort}", style="dim")
    if view.filter:
        line.append(f", only *{view.filter}*", style="dim")
    return cut(line, width)


def _job_page(document: StatusDocument, view: ScreenView, width: int, height: int, console: Console) -> list[Text]:
    job = next((job for job in document.jobs if job.key == view.job), None)
    if job is None:
        return [cut(Text("this job is gone; Esc goes back", style="dim"), width)]
    lines = [Text(clean(job.called), style="bold"), *panes.job_facts(job, width)]
    lines += panes.alarm_lines([job], width)
    lines += [
        panes.bar(job.ledger_seconds, width, console),
        *panes.legend_lines(job.ledger_seconds, width, console),
    ]
    lines += panes.calibration_lines(job, width)
    ladder = panes.ladder_lines(job.what_if, width)
    moves = panes.move_lines([(job, move) for move in job.moves], width) if job.moves else []
    tail = ladder + moves[:4] if height < 40 else ladder + moves
    room = max(3, height - len(lines) - (len(tail) if height - len(lines) - len(tail) >= 4 else 0))
    place = max(0, min(view.rank, len(job.ranks) - 1))
    start = max(0, min(place - (room - 1) // 2, len(job.ranks) - (room - 1)))
    lines += panes.rank_lines(job.ranks[start : start + room - 1], width, console, place - start)
    return lines + tail


def everything(document: StatusDocument, width: int, console: Console) -> list[Text]:
    """Return everything, at any length, for `--once`."""
    view = ScreenView()
    own = f"pacecar top  {clean(document.node)}  {panes.daemon_words(document)}"
    lines = [cut(Text(own, style="bold"), width)]
    for part in _panes(document, view, width, console)[:-2]:  # of one job; all follow
        lines += [Text(), *part.lines] if part.lines else []
    for job in document.jobs:
        lines += [Text(), cut(Text(clean(job.called), style="bold"), width), *panes.job_facts(job, width)]
        lines += panes.rank_lines(job.ranks, width, console, None)
        lines += panes.ladder_lines(job.what_if, width)
    return lines


def on_key(key: str, view: ScreenView, document: StatusDocument | None) -> bool:
    """Apply `key` to the view; return False to quit."""
    if key in ("interrupt", "f10") or (key == "q" and not view.is_typing):
        return False
    if view.is_typing:
        _type(key, view)
        return True
    if key in ("h", "?", "f1"):
        view.page = "overview" if view.page == "help" else "help"
    elif key in ("escape", "left"):
        view.page = "overview"
    elif key in ("/", "f3", "f4"):
        view.page, view.is_typing = "overview", True
    elif key in ("f5", " "):
        view.is_held = not view.is_held
    elif key in ("s", "f6"):
        view.gpu_sort = _next(GPU_SORTS, view.gpu_sort)
    elif key == "o":
        view.job_sort = _next(JOB_SORTS, view.job_sort)
    elif key in "NPMWT":
        view.gpu_sort = GPU_SORTS["NPMWT".index(key)]
    elif document is not None:
        _move(key, view, document)
    return True


def _type(key: str, view: ScreenView) -> None:
    if key == "enter":
        view.is_typing = False
    elif key == "escape":
        view.is_typing, view.filter = False, ""
    elif key == "backspace":
        view.filter = view.filter[:-1]
    elif len(key) == 1:
        view.filter = (view.filter + key)[:FILTER_MAX]


def _next(names: tuple[str, ...], now: str) -> str:
    return names[(names.index(now) + 1) % len(names)]


_STRIDES = {"up": -1, "k": -1, "down": 1, "j": 1, "tab": 1, "shift_tab": -1, "page_up": -10, "page_down": 10,
            "home": -10**6, "g": -10**6, "end": 10**6, "G": 10**6}  # fmt: skip


def _move(key: str, view: ScreenView, document: StatusDocument) -> None:
    jobs = [job.key for job in shown_jobs(document, view)]
    if not jobs:
        return
    stride = _STRIDES.get(key)
    if stride is not None and view.page == "job" and key not in ("tab", "shift_tab"):
        ranks = next((len(job.ranks) for job in document.jobs if job.key == view.job), 1)
        view.rank = max(0, min(ranks - 1, view.rank + stride))
    elif stride is not None:
        place = jobs.index(view.job) + stride if view.job in jobs else (0 if stride > 0 else len(jobs) - 1)
        view.job, view.rank = jobs[max(0, min(len(jobs) - 1, place))], 0
    elif key in ("enter", "right"):
        view.page, view.rank = "job", 0
        view.job = view.job if view.job in jobs else jobs[0]
