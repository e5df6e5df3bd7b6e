"""Runs one demo from the command to its exit code: folder, daemon, job, display, result, closing tables.

Whatever happens on the way (Ctrl-C, a job that dies, a terminal that closes), the processes are ended, and what was
measured until then is written and shown all the same.
"""

from __future__ import annotations

import os
import platform
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from importlib import metadata, resources
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from rich.console import Console
from rich.live import Live

from pacecar.clock import SystemClock
from pacecar.config import ConfigError, load_config
from pacecar.safe_files import replacing

from .closing_tables import closing
from .processes import Children, DemoOptions, LaunchError
from .progress import DemoSetup, Progress, event_line, plain_line, screen
from .rest_detector import RestDetector
from .result import as_document
from .runfolder import RecordTail, make_run_folder, point_latest, read_losses, write_json
from .summary import summarize

__all__ = ["run_demo"]

REFRESH_SECONDS = 0.5
"""How often the screen is drawn."""

PLAIN_LINE_SECONDS = 10.0
"""How often a log that is no terminal gets a line, when nothing happens."""

OVERTIME_SECONDS_MAX = 120.0
"""What a job may take beyond its training time, to start and to end; then it hangs and is ended."""

SECONDS_MAX = 150.0
"""Of training, by default: on a quiet machine the tuner has nothing left to try after half of it."""

Ending = Literal["finished", "failed", "interrupted"]


def run_demo(options: DemoOptions, console: Console | None = None) -> int:
    """Run the demo; return 0, 1 when it failed, or 128 + the signal that interrupted it."""
    console = console or Console(soft_wrap=False)
    try:
        budget = load_config().hook.overhead_budget
    except ConfigError as error:
        return _complain(str(error))
    rest = None
    if options.steps is None and options.seconds is None:
        options, rest = replace(options, seconds=SECONDS_MAX), RestDetector(budget)
    started = time.monotonic()
    try:
        folder = make_run_folder(options.run_dir, SystemClock())
    except OSError as error:
        return _complain(f"{options.run_dir}: a run folder cannot be made here: {error.strerror}")
    code = 0
    message: str | None = None
    ending: Ending = "failed"
    with _signals() as caught, Children(folder, options) as children:
        try:
            children.start_daemon()
            if children.port != options.port and options.port != 0:
                console.print(f"port {options.port} is taken (another daemon?): serving on {children.port} instead")
            children.start_job()
            point_latest(folder)
            ending, message = _follow(children, console, started, caught, budget=budget, rest=rest)
        except KeyboardInterrupt:
            ending = "interrupted"
            code = 128 + (caught[0] if caught else signal.SIGINT)
            console.print("\nstopping the job ...")
        except LaunchError as error:
            return _complain(str(error))
        finally:
            # What follows is short and bounded; another Ctrl-C would only leave processes or files behind.
            _ignore_signals()
        children.stop_job()
        _keep_last_metrics(children)
        children.keep_recording()
        _conclude(children, console, ending, time.monotonic() - started, budget)
    return code if message is None else _complain(message)


def _follow(
    children: Children,
    console: Console,
    started: float,
    caught: Sequence[int],
    *,
    budget: float,
    rest: RestDetector | None,
) -> tuple[Ending, str | None]:
    """Show the job until it ends; return how, and what to tell the user if it failed.  `rest` says when it may end.

    Raises KeyboardInterrupt when a signal is in `caught`: one that came where nothing can be raised (in a callback of
    the garbage collector) is seen here.
    """
    options = children.options
    limit = f"{options.steps} steps" if options.steps is not None else f"{options.seconds:.0f} s of training"
    limit = limit if rest is None else f"at most {limit}: it ends when the tuner rests"
    around = DemoSetup(children.job, children.metrics_url, str(children.folder), limit, budget)
    console.print(
        f"pacecar demo {children.job}: {children.world_size} ranks, tune {options.tune},\n{limit}", highlight=False
    )
    console.print(f"metrics {children.metrics_url}", soft_wrap=True)
    console.print(f"folder {children.folder}", soft_wrap=True)
    progress = Progress()
    tails = [RecordTail(children.folder / f"rank{rank}.jsonl") for rank in range(children.world_size or 0)]
    is_daemon_missed = False
    deadline = None if options.seconds is None else started + options.seconds + OVERTIME_SECONDS_MAX
    for elapsed in _display(progress, around, console, started):
        if caught:
            raise KeyboardInterrupt
        for tail in tails:
            progress.add(tail.read())
        if rest is not None and rest.is_over(progress, elapsed):
            children.finish_job()
        daemon_code = children.daemon_exit_code()
        if daemon_code is not None and not is_daemon_missed:
            is_daemon_missed = True
            console.print(
                f"the daemon ended with exit code {daemon_code}: nothing is served until one is started again at"
                " its socket; training and tuning go on without it",
                highlight=False,
            )
        code = children.job_exit_code()
        if code == 0:
            return "finished", None
        if code is not None:
            tail_text = children.log_tail("job.log")
            return (
                "failed",
                f"the job ended with exit code {code}; its log {children.folder}/job.log ends:\n{tail_text}",
            )
        if deadline is not None and started + elapsed > deadline:
            tail_text = children.log_tail("job.log")
            return "failed", f"the job did not end in time; its log {children.folder}/job.log ends:\n{tail_text}"
    raise AssertionError("the display ends with the job")


def _display(progress: Progress, around: DemoSetup, console: Console, started: float) -> Iterator[float]:
    """Yield the elapsed seconds, again and again, and show `progress` and the time of training in between."""
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
                live.update(screen(progress, around, shown, console), refresh=True)
            else:
                lines = [event_line(progress.events.popleft(), shown) for _ in range(len(progress.events))]
                if lines or now >= next_line:
                    next_line = now + PLAIN_LINE_SECONDS
                    lines = lines or [plain_line(progress, shown)]
                for line in lines:
                    console.print(line, soft_wrap=True, highlight=False, markup=False)
            time.sleep(REFRESH_SECONDS)


def _conclude(children: Children, console: Console, ending: Ending, seconds: float, budget: float) -> None:
    """Write result.json from the records on disk and print the report's tables."""
    folder = children.folder
    result = summarize(folder, read_losses(folder / "losses.jsonl"), overhead_budget=budget)
    document: dict[str, Any] = {
        "run": children.job,
        "status": ending,
        "duration_seconds": round(seconds, 3),
        "refused_lines": result.refused_lines,
        "tune": children.options.tune,
        "versions": {name: _version(name) for name in ("pacecar", "torch", "numpy", "msgspec")}
        | {"python": platform.python_version()},
        "cores": len(os.sched_getaffinity(0)),
        **as_document(result),
    }
    write_json(folder / "result.json", document)
    places = {
        "result": f"{folder}/result.json",
        "records": f"{folder}/rank*.jsonl   job.log   daemon.log",
        "metrics": f"{children.metrics_url} until now; its last answer is {folder}/metrics.txt",
    }
    if result.report is not None:
        places["report"] = f"pacecar report {folder}   makes a page of all this"
    if _keep_dashboard(folder):
        places["dashboard"] = f"{folder}/dashboard.json, to import into Grafana"
    if result.report is not None:
        console.print(closing(result, result.report, places, console), crop=False)
    else:
        console.print(f"no step was completed; the logs are in {folder}", soft_wrap=True, highlight=False)
    console.print(f"{ending} after {seconds:.0f} s", highlight=False)


def _keep_last_metrics(children: Children) -> None:
    """Keep the daemon's last answer: the daemon ends with the demo, and its page is worth a look afterwards."""
    # A daemon that was killed is no reason to lose the result.
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


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into KeyboardInterrupt; yield the list in which they are noted.

    Only the first: an impatient user's second one would come while the first is dealt with, and lose the result.
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


def _complain(message: str) -> int:
    sys.stderr.write(f"pacecar: {message}\n")
    return 1
