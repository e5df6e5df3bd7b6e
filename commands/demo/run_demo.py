"""Runs one demo: makes the run folder, starts daemon and job, shows their progress, and prints the run's report.

However it ends (Ctrl-C, a job that dies, a terminal that closes), the processes are stopped, and what was measured
until then is reported.
"""

from __future__ import annotations

import signal
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import FrameType
from typing import Literal

import msgspec
from rich.console import Console
from rich.live import Live

from pacecar.clock import SystemClock
from pacecar.config import ConfigError, load_config
from pacecar.safe_files import replacing

from ..report.build import BuildOptions, build_report
from ..report.document import Report
from ..report.reading.inputs import find_inputs
from ..report.reading.notices import ReportError
from ..shared_options import complain
from .closing_tables import closing, within_budget_after_seconds
from .processes import Children, DemoOptions, LaunchError
from .progress import DemoSetup, Progress, RestDetector, event_line, plain_line, screen
from .runfolder import RecordTail, make_run_folder, point_latest

__all__ = ["run_demo"]

REFRESH_SECONDS = 0.5
"""Time between two drawings of the screen."""

PLAIN_LINE_SECONDS = 10.0
"""Without a terminal, a line is printed this often while nothing happens."""

OVERTIME_SECONDS_MAX = 120.0
"""Time for start-up and shutdown beyond the training time; a job that takes longer hangs and is killed."""

SECONDS_MAX = 150.0
"""Default limit of training: on a quiet machine the tuner has nothing left to try after half of it."""

Ending = Literal["finished", "failed", "interrupted"]


def run_demo(options: DemoOptions, console: Console | None = None) -> int:
    """Run the demo; return 0, 1 if it failed, or 128 + the signal that interrupted it."""
    console = console or Console(soft_wrap=False)
    try:
        budget = load_config().hook.overhead_budget
    except ConfigError as error:
        complain(str(error))
        return 1
    rest = None
    if options.steps is None and options.seconds is None:
        options, rest = replace(options, seconds=SECONDS_MAX), RestDetector(budget)
    started = time.monotonic()
    try:
        folder = make_run_folder(options.run_dir, SystemClock())
    except OSError as error:
        complain(f"{options.run_dir}: cannot make a run folder here: {error.strerror}")
        return 1
    code = 0
    message: str | None = None
    ending: Ending = "failed"
    progress = Progress()
    with _signals() as caught, Children(folder, options) as children:
        try:
            children.start_daemon()
            if children.port != options.port and options.port != 0:
                console.print(f"port {options.port} is in use (another daemon?): serving on {children.port} instead")
            children.start_job()
            point_latest(folder)
            ending, message = _follow(children, progress, console, started, caught, budget=budget, rest=rest)
        except KeyboardInterrupt:
            ending = "interrupted"
            code = 128 + (caught[0] if caught else signal.SIGINT)
            console.print("\nstopping the job ...")
        except LaunchError as error:
            complain(str(error))
            return 1
        finally:
            # The rest is short and bounded; another Ctrl-C would only leave processes or files behind.
            _ignore_signals()
        children.stop_job()
        _keep_last_metrics(children)
        children.keep_recording()
        _conclude(children, progress, console, ending, time.monotonic() - started, budget)
    if message is None:
        return code
    complain(message)
    return 1


def _follow(
    children: Children,
    progress: Progress,
    console: Console,
    started: float,
    caught: Sequence[int],
    *,
    budget: float,
    rest: RestDetector | None,
) -> tuple[Ending, str | None]:
    """Show the job until it ends; return how it ended, and an error message if it failed.

    `rest` decides when the job may end early.  Raises KeyboardInterrupt for a signal in `caught` that arrived where
    Python ignores exceptions, as in a callback of the garbage collector.
    """
    options = children.options
    limit = f"{options.steps} steps" if options.steps is not None else f"{options.seconds:.0f} s of training"
    limit = limit if rest is None else f"at most {limit}: it ends when the tuner rests"
    setup = DemoSetup(children.job, children.metrics_url, str(children.folder), limit, budget)
    console.print(
        f"pacecar demo {children.job}: {children.world_size} ranks, tune {options.tune},\n{limit}", highlight=False
    )
    console.print(f"metrics {children.metrics_url}", soft_wrap=True)
    console.print(f"folder {children.folder}", soft_wrap=True)
    tails = [RecordTail(children.folder / f"rank{rank}.jsonl") for rank in range(children.world_size or 0)]
    is_daemon_gone = False
    deadline = None if options.seconds is None else started + options.seconds + OVERTIME_SECONDS_MAX
    for elapsed in _display(progress, setup, console, started):
        if caught:
            raise KeyboardInterrupt
        for tail in tails:
            progress.add(tail.read())
        if rest is not None and rest.is_over(progress, elapsed):
            children.finish_job()
        daemon_code = children.daemon_exit_code()
        if daemon_code is not None and not is_daemon_gone:
            is_daemon_gone = True
            console.print(
                f"the daemon ended with exit code {daemon_code}: no metrics until another one is started on its"
                " socket; training and tuning continue",
                highlight=False,
            )
        code = children.job_exit_code()
        if code == 0:
            return "finished", None
        reason = None if code is None else f"the job ended with exit code {code}"
        if code is None and deadline is not None and started + elapsed > deadline:
            reason = "the job did not end in time"
        if reason is not None:
            return "failed", f"{reason}; its log {children.folder}/job.log ends:\n{children.log_tail('job.log')}"
    raise AssertionError("the display ends with the job")


def _display(progress: Progress, setup: DemoSetup, console: Console, started: float) -> Iterator[float]:
    """Yield the elapsed seconds every REFRESH_SECONDS; show `progress` and the time of training in between."""
    began = started
    next_line = started + PLAIN_LINE_SECONDS
    live = Live(console=console, transient=True, auto_refresh=False) if console.is_terminal else None
    with live if live is not None else nullcontext():
        while True:
            yield time.monotonic() - started
            now = time.monotonic()
            if progress.last is None:
                began = now
            shown = now - (began if progress.last is not None else started)
            if live is not None:
                live.update(screen(progress, setup, shown, console), refresh=True)
            else:
                lines = [event_line(progress.events.popleft(), shown) for _ in range(len(progress.events))]
                if lines or now >= next_line:
                    next_line = now + PLAIN_LINE_SECONDS
                    lines = lines or [plain_line(progress, shown)]
                for line in lines:
                    console.print(line, soft_wrap=True, highlight=False, markup=False)
            time.sleep(REFRESH_SECONDS)


def _conclude(
    children: Children, progress: Progress, console: Console, ending: Ending, seconds: float, budget: float
) -> None:
    """Write the report of the run folder to report.json, and print its tables."""
    folder = children.folder
    try:
        report = build_report(find_inputs(folder), BuildOptions(budget_ratio=budget)).report
    except ReportError:
        console.print(f"no step was completed; the logs are in {folder}", soft_wrap=True, highlight=False)
    else:
        settled_ratio = progress.settled_overhead_ratio()
        _write_report(folder, report, ending, seconds, within_budget_after_seconds(report, settled_ratio))
        places = {
            "report": f"{folder}/report.json   pacecar report {folder} makes a page of it",
            "records": f"{folder}/rank*.jsonl   job.log   daemon.log",
            "metrics": f"{folder}/metrics.txt, the last answer of {children.metrics_url}",
        }
        if _keep_dashboard(folder):
            places["dashboard"] = f"{folder}/dashboard.json, to import into Grafana"
        console.print(closing(report, settled_ratio, places, console), crop=False)
    console.print(f"{ending} after {seconds:.0f} s", highlight=False)


def _write_report(folder: Path, report: Report, ending: Ending, seconds: float, within_budget: float | None) -> None:
    """Write what `pacecar report --json` prints, plus what only the demo knows."""
    demo = {"status": ending, "duration_seconds": round(seconds, 3), "within_budget_after_seconds": within_budget}
    document = {**msgspec.to_builtins(report), "demo": demo}
    with replacing(folder / "report.json") as stream:
        stream.write(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")


def _keep_last_metrics(children: Children) -> None:
    """Save the daemon's last metrics page: the daemon ends with the demo, and the report reads it."""
    # A daemon that was killed must not cost the report.
    with suppress(OSError), urllib.request.urlopen(children.metrics_url, timeout=2.0) as answer:
        text = answer.read()
        with replacing(children.folder / "metrics.txt") as stream:
            stream.write(text)


def _keep_dashboard(folder: Path) -> bool:
    dashboard = resources.files("pacecar.dashboards") / "generated" / "job.json"
    if not dashboard.is_file():
        return False
    with replacing(folder / "dashboard.json") as stream:
        stream.write(dashboard.read_bytes())
    return True


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into KeyboardInterrupt; yield the list of signals received.

    Only the first: an impatient user's second Ctrl-C would interrupt the handling of the first and lose the report.
    """
    caught: list[int] = []

    def interrupt(number: int, _: FrameType | None) -> None:
        caught.append(number)
        if len(caught) == 1:
            raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
