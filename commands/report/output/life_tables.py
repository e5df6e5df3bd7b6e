"""Makes the tables of a job's life over its attempts: every second by heading, each attempt, and the intervals."""

from __future__ import annotations

from pacecar.formatting.dates import second_text
from pacecar.formatting.ledger_headings import heading_words
from pacecar.formatting.quantities import percent
from pacecar.formatting.tables import Table, table_of_rows
from pacecar.ledger.attempts import GOOGLE_NAMES, LIFE_HEADINGS, AttemptCharge, JobLife

from ..document import Report
from ..formatting import DASH, elapsed
from .tables import ROWS_MAX

__all__ = ["attempts_table", "google_table", "intervals_table", "life_table"]

MAIN_HEADINGS_MAX = 2
MAIN_SHARE_MIN = 0.01
"""Headings named for an interval, beside productive time, and the least share of one that is."""


def _life(report: Report) -> JobLife | None:
    """Return the life if it has several attempts; that of one is its run, which other tables show."""
    return report.life if report.life is not None and len(report.life.attempts) > 1 else None


def life_table(report: Report) -> Table | None:
    """Return where all time since the first start went."""
    life = _life(report)
    if life is None:
        return None
    rows = [
        (heading_words(heading), what, elapsed(life.headings_ns[heading]), _share(life.headings_ns[heading], life))
        for heading, what in LIFE_HEADINGS.items()
        if life.headings_ns[heading]
    ]
    rows.append(("all", "from the first process to the last record", elapsed(life.wall_ns), _share(life.wall_ns, life)))
    note = (
        f"productive_time_ratio {percent(life.productive_time_ratio)}: productive over all time."
        f" ETTR {percent(life.ettr)}: all but start-up, lost steps, hang, unrecorded and down, over"
        " all time (arXiv 2410.21680)."
    )
    head = ("", "what it is", "time", "share")
    return table_of_rows("Where the job's life went, over all its attempts", head, rows, texts=2, note=note, long=1)


def google_table(report: Report) -> Table | None:
    """Return the same time by the names of Google's library."""
    life = _life(report)
    if life is None:
        return None
    rows = [
        (
            name,
            ", ".join(map(heading_words, headings)),
            elapsed(life.google_ns[name]),
            _share(life.google_ns[name], life),
        )
        for name, headings in GOOGLE_NAMES.items()
    ]
    head = ("", "headings here", "time", "share")
    return table_of_rows("The same under the names of ml-goodput-measurement", head, rows, texts=2, long=1)


def attempts_table(report: Report) -> Table | None:
    """Return a row for each attempt."""
    life = _life(report)
    if life is None:
        return None
    head = ("attempt", "began", "end", "lasted", "down before", "start-up", "steps", "trained", "lost", "productive")
    last = len(life.attempts) - 1
    rows = [_attempt_row(place, one, may_run=place == last) for place, one in enumerate(life.attempts)][-ROWS_MAX:]
    lost = "unknown" if life.lost_steps is None else f"{life.lost_steps}{' or more' * life.lost_is_partial}"
    note = f"Lost steps: {lost}. Lost are steps that a later attempt trained again, or that no checkpoint holds."
    return table_of_rows("Attempts", head, rows, texts=3, note=note)


def _attempt_row(place: int, one: AttemptCharge, *, may_run: bool) -> tuple[str, ...]:
    headings, down_ns = one.headings_ns, one.headings_ns.get("down", 0)
    start_ns = sum(length for heading, length in headings.items() if heading.startswith("start_up"))
    lasted_ns = one.wall_ns - down_ns
    return (
        str(place if one.number is None else one.number),
        second_text(one.began_wall_ns),
        "closed" if not one.is_failed else "failed, killed or running" if may_run else "failed or killed",
        elapsed(lasted_ns),
        elapsed(down_ns) if place else DASH,
        elapsed(start_ns),
        DASH if one.first_step is None else f"{one.first_step} to {one.last_step}",
        str(one.steps),
        DASH if one.lost_steps is None else str(one.lost_steps),
        percent(headings.get("productive", 0) / lasted_ns if lasted_ns else None),
    )


def intervals_table(report: Report) -> Table | None:
    """Return the life in equal intervals, and what took most of the unproductive time in each."""
    life = _life(report)
    if life is None:
        return None
    rows = []
    for one in life.intervals:
        rest = sorted(((ns / one.wall_ns, name) for name, ns in one.headings_ns.items() if name != "productive"))
        shown = [(share, name) for share, name in rest[: -MAIN_HEADINGS_MAX - 1 : -1] if share >= MAIN_SHARE_MIN]
        most = (f"{heading_words(name)} {percent(share)}" for share, name in shown)
        rows.append((elapsed(one.at_ns), ", ".join(most), percent(one.productive_time_ratio)))
    return table_of_rows("The job's life by interval", ("after", "mostly else", "productive"), rows, texts=2)


def _share(length: int, life: JobLife) -> str:
    return percent(length / life.wall_ns if life.wall_ns else None)
