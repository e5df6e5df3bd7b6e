"""Writes the page of an analysis: who holds the job up, where its time went, and the tables behind it.

The terminal shows only the largest rows, and `--json` is for programs.  The page has every rank, a step of all ranks
with the critical path, and tables that can be sorted.  It names missing parts.

Pure but for `write_page`, which writes the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from markupsafe import Markup

from pacecar.analysis.document.report import TraceDocument, TraceJob, TraceReport
from pacecar.analysis.reading.parallel_reading import Analysis
from pacecar.analysis.trace.columns import TraceWarning
from pacecar.formatting.ledger_headings import HEADING_WORDS
from pacecar.formatting.page.document import (
    Section,
    Tile,
    box,
    definitions,
    figure,
    folded,
    legend,
    paragraph,
    subheading,
    table_html,
    tiles,
    unbroken,
    whole_page,
)  # fmt: skip
from pacecar.formatting.plain_text import clean
from pacecar.formatting.quantities import duration, percent, plural
from pacecar.formatting.tables import whole_number
from pacecar.records import LEDGER_HEADINGS
from pacecar.safe_files import output

from ..tables import job_tables, trace_tables, work_tables
from ..words import (
    cause_words,
    no_late_rank_words,
    pace_of,
    path_sums,
    path_words,
    saved_words,
    shown_rank,
    shown_ranks,
    untold_words,
    who_words,
)
from . import charts
from .rank_timeline import RankTimeline, draw_ranks

__all__ = ["analysis_page", "write_page"]

TRACES_MAX = 16
"""The most traces with sections of their own, if they are not ranks of one job."""

GPUS_MAX = 3

SHARE_MIN = 0.0005
"""The least share in the first line: less would read 0.0 %."""

JOB_BAR_NOTE = (
    "In the job's bar communication is the time on the wire only: while a rank waits for another, the path is on that"
    " other rank."
)

WINDOW_WORDS = {"trace": "first to last work", "steps": "the marked steps", "hta": "HTA's"}

ROWS_MAX = 200
"""The most rows of a table, the largest; `--json` has all."""

KINDS_MAX = 60
"""The most kernels, operators and annotations: the longest, with nearly all of the time."""

WARNINGS_MAX = 40
"""The most lines of warnings; the rest is counted."""


def write_page(analysis: Analysis, path: Path, step: int | None = None) -> None:
    """Write the page; `step` is the one to draw.  Raises OSError; LookupError if the step does not exist."""
    page = analysis_page(analysis, step)
    with output(path) as stream:
        stream.write(page.encode())


def analysis_page(analysis: Analysis, step: int | None = None) -> str:
    """Return the page as HTML."""
    document = analysis.document
    drawn = draw_ranks(analysis, step)
    job = document.job
    if job is not None:
        sections = list(_job_sections(document, job, drawn))
        title, lead = _job_title(document, job), _job_lead(job)
        cards = _job_tiles(job)
    else:
        sections = [section for report in document.traces[:TRACES_MAX] for section in _trace_sections(document, report)]
        if drawn is not None:
            sections.insert(1, ("timeline", "Timeline", _timeline(drawn)))
        title, lead = _trace_title(document), _trace_lead(document.traces[0])
        cards = _trace_tiles(document.traces[0])
    top = [
        paragraph(_what(document), "soft"),
        paragraph(unbroken(lead), "lead"),
        _warnings(document),
        tiles(cards),
        definitions("facts", _facts(document)),
    ]
    return whole_page(title, top, [section for section in sections if any(section[2])], is_sortable=True)


def _job_title(document: TraceDocument, job: TraceJob) -> str:
    of = f" of {job.world_size}" if job.world_size is not None and len(job.ranks) < job.world_size else ""
    return f"Trace analysis: {len(job.ranks) or len(document.traces)}{of} ranks"


def _trace_title(document: TraceDocument) -> str:
    names = [clean(Path(report.file).name, 80) for report in document.traces]
    return f"Trace analysis: {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _what(document: TraceDocument) -> str:
    events = sum(report.events for report in document.traces)
    return f"pacecar analyze: {plural(len(document.traces), 'trace')}, {whole_number(events)} events"


def _facts(document: TraceDocument) -> list[tuple[str, str]]:
    reports = document.traces
    facts = []
    if backends := list(dict.fromkeys(clean(report.backend) for report in reports if report.backend)):
        facts.append(("backend", ", ".join(backends)))
    if gpus := list(dict.fromkeys(clean(gpu) for report in reports for gpu in report.gpus if gpu)):
        facts.append(("devices", ", ".join(gpus[:GPUS_MAX]) + (", ..." if len(gpus) > GPUS_MAX else "")))
    facts.append(("window", WINDOW_WORDS.get(reports[0].window, clean(reports[0].window))))
    if cut := sum(report.is_truncated for report in reports):
        facts.append(("cut off", plural(cut, "trace")))
    return facts


def _job_lead(job: TraceJob) -> str:
    """Return the verdict: the late ranks, their causes, and what fixing them would save."""
    if job.wall_ns is None or len(job.ranks) < 2:
        return "The traces hold too little to say who holds the job up."
    if not job.stragglers:
        why = untold_words(job)
        return f"{no_late_rank_words(job)}{'' if why is None else f': {why}'}."
    said = []
    for one in job.stragglers:
        who = who_words(one)
        holds = "hold" if who.startswith("ranks") else "holds"
        if one.kind == "imbalance":
            said.append(f"Uneven work holds the job up: evenly spread it would save {saved_words(one, job)}.")
        else:
            what = f"{who[0].upper()}{who[1:]} {holds} the job up, in {cause_words(one.cause)}"
            said.append(f"{what}: mending it would save {saved_words(one, job)}.")
    return " ".join(said)


def _job_tiles(job: TraceJob) -> list[Tile]:
    found: list[Tile] = []
    pace = pace_of(job)
    if job.wall_ns is not None:
        found.append(("wall time", duration(job.wall_ns), "from the first rank's beginning to the last one's end"))
    if pace and job.wall_ns and round(pace) != job.wall_ns:
        found.append(("a step", duration(pace), f"{round(job.wall_ns / pace)} steps"))
    sums = charts.cause_sums(job.critical_path)
    if sums and job.wall_ns:
        cause, most = next(iter(sums.items()))
        found.append(("most of the critical path", path_words(cause), f"{percent(most / job.wall_ns)} of it"))
    waited = sum(share.wait_ns for share in job.shares)
    in_collectives = waited + sum(share.wire_ns for share in job.shares)  # two at a time count twice, in both
    if in_collectives:
        found.append(("waiting", percent(waited / in_collectives), "of the time in collectives"))
    if job.replay_error_ratio is not None:
        error = percent(job.replay_error_ratio, digits=2, signed=True)
        found.append(("replay's own error", error, "against the run as it was"))
    if job.unexplained_ratio is not None:
        found.append(("unexplained", percent(job.unexplained_ratio), "of a rank's time, at most"))
    return found


def _job_sections(document: TraceDocument, job: TraceJob, drawn: RankTimeline | None) -> Iterator[Section]:
    reports = sorted(document.traces, key=lambda report: (report.rank is None, report.rank or 0, report.file))
    verdict = table_html(job_tables.stragglers_table(job))
    yield "verdict", "Who holds the job up", [verdict or paragraph(_job_lead(job))]
    yield "ledger", "Where the time went", _job_ledger(reports, job)
    if drawn is not None:
        yield "timeline", "A step of all ranks", _timeline(drawn)
    path = table_html(job_tables.critical_table(job, ROWS_MAX))
    yield "path", "Critical path", [_or_missing(path, "No critical path is known.")]
    yield "whatif", "What if", _what_if(job)
    collectives = table_html(trace_tables.collectives_table(job.collectives, ROWS_MAX))
    yield (
        "collectives",
        "Collectives",
        [
            _or_missing(collectives, "No collective was found in the traces of two ranks."),
            folded("One by one", job_tables.instances_table(job, ROWS_MAX)),
        ],
    )
    yield "alltoall", "All-to-alls", [table_html(work_tables.all_to_all_table(job.all_to_all))]
    report, why = shown_rank(reports, job)
    whose = f"rank {report.rank}" if report.rank is not None else clean(Path(report.file).name, 60)
    yield "work", f"Work of {whose}", _work(report, f"Of {len(reports)} ranks this is {whose}, {why}.")
    yield (
        "incidents",
        "Incidents",
        [_or_missing(table_html(job_tables.incidents_table(job, ROWS_MAX)), "No single step of a rank stands out.")],
    )
    yield (
        "clocks",
        "Clocks",
        [table_html(job_tables.clocks_table(job, ROWS_MAX)), table_html(job_tables.clock_pairs_table(job, ROWS_MAX))],
    )


def _job_ledger(reports: Sequence[TraceReport], job: TraceJob) -> list[Markup]:
    used = [name for name in LEDGER_HEADINGS if any(report.ledger.parts().get(name) for report in reports)]
    causes = [charts.CAUSE_CLASSES.get(cause, cause) for cause in charts.cause_sums(job.critical_path)]
    bar = charts.job_bar(job.critical_path, job.wall_ns or 0)
    shown = shown_ranks(reports, job, path_sums(job), ROWS_MAX)
    words = [(name, HEADING_WORDS[name]) for name in LEDGER_HEADINGS if name in {*used, *causes}]
    words += [(name, cause_words(name)) for name in causes if name not in HEADING_WORDS]
    return [
        figure("The job: its wall time by what the critical path was spent in", bar),
        figure("Each rank: its ledger", charts.rank_bars(reports)),
        legend(words),
        *([paragraph(JOB_BAR_NOTE, "note")] if bar else []),
        table_html(job_tables.ranks_table(shown, len(reports), job)),
    ]


def _work(report: TraceReport, said: str = "") -> list[Markup]:
    """Return the tables of a trace's work, the first open and the others folded, below the note `said`."""
    by_name = work_tables.tables_by_name(report.tables, KINDS_MAX) if report.tables is not None else {}
    found = [table for tables in by_name.values() for table in tables]
    if not found:
        return []
    above = [paragraph(said, "note")] if said else []
    return [*above, subheading(found[0].name), table_html(found[0]), *(folded(one.name, one) for one in found[1:])]


def _timeline(drawn: RankTimeline) -> list[Markup]:
    return [figure(drawn.caption, drawn.svg), legend(drawn.legend), paragraph(drawn.note, "note")]


def _what_if(job: TraceJob) -> list[Markup]:
    drawn = figure("How long it would be", charts.what_if_bars(job.what_if))
    untold = [paragraph(f"{said[:1].upper()}{said[1:]}.", "note") for said in job.what_if_untold]
    return [drawn, table_html(trace_tables.what_if_table(job.what_if)), *untold]


def _or_missing(found: Markup, words: str) -> Markup:
    return found or paragraph(words)


def _trace_lead(report: TraceReport) -> str:
    """Return where most of the time went."""
    wall = report.ledger.wall_ns
    if wall <= 0:
        return "The trace holds no work."
    most = sorted(report.ledger.parts().items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{HEADING_WORDS[name]} {percent(ns / wall)}" for name, ns in most if ns >= SHARE_MIN * wall)
    window = WINDOW_WORDS.get(report.window, clean(report.window))
    return f"{duration(wall)}, {window}: {parts}."


def _trace_tiles(report: TraceReport) -> list[Tile]:
    wall = report.ledger.wall_ns
    if wall <= 0:
        return []
    steps = plural(len(report.steps), "step") if report.steps else "no steps marked"
    found: list[Tile] = [("span", duration(wall), steps)]
    found.append(("device idle", percent(report.idle_ns / wall), duration(report.idle_ns)))
    if report.communication_ns:
        exposed = percent(report.exposed_communication_ns / wall)
        found.append(("exposed communication", exposed, f"{percent(report.overlap_ratio)} of all is hidden"))
    best = max(report.what_if, key=lambda one: one.saved_ns, default=None)
    if best is not None and best.saved_ns > 0:
        share = percent(best.saved_ns / (best.step_ns + best.saved_ns))
        found.append(("at most to be saved", share, "by all of what-if"))
    found.append(("unknown", percent(report.unknown_ns / wall), "of the span cannot be told"))
    return found


def _trace_sections(document: TraceDocument, report: TraceReport) -> Iterator[Section]:
    place = next(number for number, each in enumerate(document.traces) if each is report)
    mark, name = "", ""
    if len(document.traces) > 1:
        mark, name = str(place), f"{clean(Path(report.file).name, 60)}: "
    bar = charts.rank_bars([report]).replace("ledgerofeachrank", f"ledger{mark}rank")
    used = [(part, HEADING_WORDS[part]) for part, ns in report.ledger.parts().items() if ns]
    yield (
        f"ledger{mark}",
        f"{name}Where the time went",
        [figure(f"{name}Ledger", bar), legend(used), table_html(trace_tables.ledger_table(report))],
    )
    steps = charts.step_bars(report.steps).replace("ledgerofeachstep", f"ledger{mark}step")
    yield (
        f"steps{mark}",
        f"{name}Steps",
        [figure(f"{name}Each step", steps), table_html(trace_tables.steps_table(report.steps, ROWS_MAX))],
    )
    yield f"gaps{mark}", f"{name}Idle", [table_html(trace_tables.gaps_table(report.gaps, report.span_ns))]
    collectives = table_html(trace_tables.collectives_table(report.collectives, ROWS_MAX))
    yield f"collectives{mark}", f"{name}Collectives", [_or_missing(collectives, "No collective is in the trace.")]
    yield f"work{mark}", f"{name}Work", _work(report)
    yield (
        f"families{mark}",
        f"{name}Kernel families",
        [table_html(trace_tables.families_table(report.families, ROWS_MAX))],
    )
    bars = charts.what_if_bars(report.what_if).replace("howlongastepwouldbe", f"bars{mark}")
    yield (
        f"whatif{mark}",
        f"{name}What if",
        [figure(f"{name}How long it would be", bars), table_html(trace_tables.what_if_table(report.what_if))],
    )


def _warnings(document: TraceDocument) -> Markup:
    """Return each distinct warning once, with the number of its files."""
    merged: dict[tuple[str, str], int] = {}
    counts: Counter[tuple[str, str]] = Counter()
    job: Sequence[TraceWarning] = document.job.warnings if document.job is not None else ()
    for warning in (*document.warnings, *job, *(one for report in document.traces for one in report.warnings)):
        key = (clean(warning.code), clean(warning.message))
        merged[key] = merged.get(key, 0) + 1
        counts[key] += warning.count
    lines = []
    for (code, message), files in list(merged.items())[:WARNINGS_MAX]:
        count = counts[code, message]
        line = TraceWarning(code, message, 1 if count == files else count).line
        lines.append(f"{line} ({code}{f', {files} files' if files > 1 else ''})")
    if len(merged) > WARNINGS_MAX:
        lines.append(f"and {len(merged) - WARNINGS_MAX} more: --json has them all")
    return box("info", "Warnings", lines)
