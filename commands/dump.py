"""Defines `pacecar dump`: asks the daemon to write a recording of its last minutes, or shows the content of one.

The request goes through the daemon's socket, and the daemon authorizes it (`pacecar.monitor.ingest.authorization`).
Showing needs no daemon.  `pacecar report` draws conclusions from a recording.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pacecar.clock import NS_PER_SECOND
from pacecar.formatting.dates import second_text
from pacecar.formatting.plain_text import clean

from .shared_options import complain, config_option, fail, load

if TYPE_CHECKING:
    from pacecar.records.recording import Recording

__all__ = ["dump"]

PATIENCE_SECONDS = 60.0
"""Writing takes a second, or longer on a disk that is busy with a checkpoint."""

EVENTS_SHOWN = 20


@click.command()
@config_option
@click.option("--socket", help="The daemon's socket.  [default: as configured]")
@click.option("--note", default="", help="A note to write into the recording.")
@click.option("--show", "shown", type=click.Path(path_type=Path), metavar="FILE", help="Show FILE instead.")
@click.option("--salvage", is_flag=True, help="With --show: read the intact part of a damaged file.")
@click.option("--json", "as_json", is_flag=True, help="With --show: print JSON.")
def dump(
    config_file: Path | None, socket: str | None, note: str, shown: Path | None, salvage: bool, as_json: bool
) -> None:
    """Have the daemon write its last minutes to a file, and print its path; or --show such a file."""
    if shown is not None:
        if note or socket:
            raise click.UsageError("--show reads a file: leave out --note and --socket")
        _show(shown, salvage=salvage, as_json=as_json)
        return
    if salvage or as_json:
        raise click.UsageError("--salvage and --json need --show FILE")
    click.echo(clean(_ask(load(config_file, {"socket": socket}).daemon.socket, note)))


def _ask(path: str, note: str) -> str:
    """Return the path of the recording; exits if there is none."""
    from pacecar.records import Answer, DumpRequest

    from .daemon_client import AskError, converse

    try:
        answer = converse(path, DumpRequest(serial=1, note=note), timeout_seconds=PATIENCE_SECONDS)
    except AskError as error:
        fail(str(error))
    assert isinstance(answer, Answer)
    if answer.state != "done":
        fail(answer.detail)
    return answer.detail


def _show(file: Path, *, salvage: bool, as_json: bool) -> None:
    from pacecar.formatting.tables import fact_lines
    from pacecar.records.recording import RecordingError, read_recording

    try:
        recording = read_recording(file, salvage=salvage)
        summary = _summary(recording)
    except RecordingError as error:
        fail(str(error))
    if recording.problem is not None:
        complain(f"{recording.problem}; the intact part is shown")
    if as_json:
        click.echo(json.dumps(summary, indent=2))  # escapes everything but ASCII, which is safe on a terminal
        return
    host, version, written = summary["host"], summary["pacecar_version"], _clock(summary["written_seconds"])
    click.echo(clean(f"{host}, pacecar {version}, written {written}"))
    for line in fact_lines(_facts(summary)):
        click.echo(line)


def _summary(recording: Recording) -> dict[str, Any]:
    """Return counts and facts of `recording` as plain values; raises RecordingError."""
    header = recording.header
    counts = {"ticks": 0, "glances": 0, "records": 0, "events": 0}
    series: set[tuple[str, tuple[str, ...]]] = set()
    first = last = None
    for chunk in recording.chunks():
        first = chunk.first_ns if first is None else min(first, chunk.first_ns)
        last = chunk.last_ns if last is None else max(last, chunk.last_ns)
        series.update(chunk.series)
        for kind in counts:
            counts[kind] += len(getattr(chunk, kind))
    jobs: dict[str, Counter[str]] = {}
    for _, record in recording.records():
        jobs.setdefault(record.job, Counter())[type(record).__name__] += 1
    return {
        "host": header.host,
        "pacecar_version": header.pacecar_version,
        "written_seconds": header.written_wall_ns / 1e9,
        "covered_seconds": None if first is None or last is None else (last - first) / 1e9,
        "triggers": [
            {"kind": t.kind, "subject": t.subject, "detail": t.detail, "wall_seconds": t.wall_ns / 1e9}
            for t in header.triggers
        ],
        "triggers_left_out": header.triggers_left_out,
        "dropped": header.dropped,
        "series": len(series),
        **counts,
        "ranks": [
            {
                "training_job": hello.job,
                "launch": hello.launch,
                "rank": hello.rank,
                "host": hello.host,
                "device": hello.device,
            }
            for hello in header.hellos
        ],
        "records_of_jobs": {job: dict(kinds) for job, kinds in jobs.items()},
        "latest_events": [
            {"wall_seconds": wall_ns / 1e9, "kind": event.kind, "text": event.text}
            for wall_ns, event in sorted(recording.events(), key=lambda one: one[0])[-EVENTS_SHOWN:]
        ],
    }


def _facts(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for trigger in summary["triggers"]:
        yield "trigger", f"{_clock(trigger['wall_seconds'])}  {trigger['kind']}: {trigger['detail']}"
    if summary["triggers_left_out"]:
        yield "trigger", f"and {summary['triggers_left_out']} more"
    covered = summary["covered_seconds"]
    yield (
        "covers",
        f"{'nothing' if covered is None else f'{covered:.1f} s'}: {summary['ticks']} ticks of"
        f" {summary['series']} series, {summary['glances']} glances, {summary['records']} records,"
        f" {summary['events']} events",
    )
    for reason, count in summary["dropped"].items():
        if count:
            yield "dropped", f"{count} entries since the daemon started ({reason})"
    for job, kinds in summary["records_of_jobs"].items():
        ranks = sum(rank["training_job"] == job for rank in summary["ranks"])
        said = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        yield "job", f"{job}: {ranks} ranks; {said}"
    for event in summary["latest_events"]:
        yield "event", f"{_clock(event['wall_seconds'])}  {event['kind']}: {event['text']}"


def _clock(seconds: float) -> str:
    return second_text(int(seconds * NS_PER_SECOND))
