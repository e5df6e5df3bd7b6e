"""Defines the command `pacecar` and its subcommands.

Each subcommand imports its room only when it runs: the daemon must never load torch, and `pacecar --help` must not load
the daemon.  Errors that a user can cause (a wrong key, a port in use, a missing package) end in one line on stderr and
an exit code, never in a traceback:

    0 success    1 failure    2 wrong usage or configuration    130 interrupted
"""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from pacecar import __version__
from pacecar.formatting.plain_text import PlainFormatter, clean
from pacecar.safe_files import is_stdout

from .bench.command import bench
from .dashboards import dashboards
from .deploy import deploy
from .doctor.command import doctor
from .dump import dump
from .health import health
from .help_text import restore_help
from .job import job
from .knobs import knobs
from .preflight.command import preflight
from .report.command import report
from .run import run
from .shared_options import config_option, need, need_analysis, print_json, trace_directory_option
from .shared_options import fail as _fail
from .shared_options import load as _load
from .top.command import top
from .tune import tune

if TYPE_CHECKING:
    from pacecar.analysis.trace.decoding.remote_file import TracePlace
    from pacecar.records import Answer

    from .daemon_client import Reply

__all__ = ["cli", "main"]

TRACE_ATTEMPTS = 3
"""Attempts to request a trace if all ranks had passed its steps before they received the request."""

OPTIONS_OF_TRACES = (
    "cache", "csv", "dask_address", "html", "jobs", "parquet", "perfetto", "picture", "ranks", "step", "steps",
    "tables", "window",
)  # fmt: skip
"""Options of `pacecar analyze` that mean nothing for flight recorder dumps."""

RANKS_MAX = 1 << 20
"""The most ranks that `--ranks` may name; a larger range is a mistake."""

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Measure distributed PyTorch training, and tune it while it runs."""


@cli.command()
@config_option
@click.option("--host", help="Address of the metrics endpoint.  [default: 127.0.0.1]")
@click.option("--port", type=int, help="Port of the metrics endpoint; 0 picks a free one.  [default: 9850]")
@click.option("--socket", help="Unix socket to which hooks in training jobs report.")
@click.option("--period-seconds", type=float, help="Time between two ticks.  [default: 1.0]")
@click.option("--disable", multiple=True, metavar="COLLECTOR", help="Leave a collector out; may be repeated.")
@click.option("--web-config-file", help="TLS and passwords of the endpoint, in Prometheus' web configuration form.")
@click.option("--log-level", help="debug, info, warning or error.  [default: info]")
def daemon(config_file: Path | None, **flags: Any) -> None:  # noqa: ANN401  click's values, checked by the config
    """Sample this machine and serve its metrics until SIGTERM."""
    config = _load(config_file, flags)
    from pacecar.config import config_path, load_config
    from pacecar.monitor.daemon import DaemonError
    from pacecar.monitor.service import run

    _log_to_stderr(config.daemon.log_level)
    given = {key: value for key, value in flags.items() if value not in (None, ())}
    try:
        code = run(
            config.daemon,
            otlp=config.otlp,
            load=lambda: load_config(config_file, flags={"daemon": given}).daemon,
            file=config_path(config_file),
        )
    except DaemonError as error:
        _fail(str(error))
    sys.exit(code)


@cli.command()
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print the snapshot as one JSON object.")
@click.option("--disable", multiple=True, metavar="COLLECTOR", help="Leave a collector out; may be repeated.")
def sample(config_file: Path | None, as_json: bool, **flags: Any) -> None:  # noqa: ANN401  click's values
    """Sample this machine once and print the values.  Needs no daemon."""
    config = _load(config_file, flags)
    from pacecar.monitor.sampling.collector_registry import DaemonError, sample_once

    from .sample_text import document, lines

    _log_to_stderr("warning")
    try:
        snapshot = sample_once(config.daemon)
    except DaemonError as error:
        _fail(str(error))
    if as_json:
        print_json(document(snapshot))
        return
    for line in lines(snapshot):
        click.echo(clean(line))


@cli.command()
@click.option(
    "--seconds",
    type=click.FloatRange(min=1.0),
    help="Training time.  [default: until the tuner rests, at most 150]",
)
@click.option("--steps", type=click.IntRange(min=1), help="Train this many steps instead.")
@click.option("--world-size", type=click.IntRange(min=1, max=64), help="Ranks.  [default: the number of GPUs, or 2]")
@click.option("--tune", type=click.Choice(["off", "advise", "exact"]), default="exact", show_default=True)
@click.option("--batch", type=click.IntRange(min=1), help="Sequences in a step, on each rank.")
@click.option("--micro-batch", type=click.IntRange(min=1), help="Sequences in a forward and backward, on each rank.")
@click.option("--port", type=click.IntRange(0, 65535), default=9850, show_default=True, help="Metrics endpoint.")
@click.option(
    "--run-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Parent of run folders."
)
@click.option("--seed", type=int, default=1, show_default=True)
def demo(**options: Any) -> None:  # noqa: ANN401  click's values
    """Train a small language model here, with daemon, hook and tuner, and report what tuning brought."""
    if options["steps"] is not None and options["seconds"] is not None:
        raise click.UsageError("give --steps or --seconds, not both")
    need("torch", "the demo trains a model with PyTorch", "torch")
    need("rich", "the demo shows its progress with rich", "demo")
    from .demo.processes import DemoOptions
    from .demo.run_demo import run_demo

    sys.exit(run_demo(DemoOptions(**options)))


class _Place(click.Path):
    """A path, or a URL, which a `Path` would lose a slash of."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        if isinstance(value, str) and "://" in value:
            from pacecar.analysis.trace.decoding.remote_file import Url

            return Url(value)
        return super().convert(value, param, ctx)


class _Here(click.Path):
    """A path to write to: a URL would become a folder "s3:" here."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        if isinstance(value, str) and "://" in value:
            self.fail("a URL, but only traces are read from URLs: give a path on this machine", param, ctx)
        return super().convert(value, param, ctx)


@cli.command()
@click.argument("traces", nargs=-1, type=_Place(path_type=Path), metavar="TRACE...")
@click.option("--json", "as_json", is_flag=True, help="Print the whole analysis as one JSON object.")
@click.option("--steps", metavar="A:B", help="Only the steps A to B, inclusive; A: and :B leave one end open.")
@click.option("--ranks", metavar="LIST", help="Only these ranks, such as 0-63,512.")
@click.option(
    "--window",
    type=click.Choice(["trace", "steps", "hta"]),
    help="From first to last work, the marked steps, or HolisticTraceAnalysis's window.  [default: trace]",
)
@click.option(
    "--compare", nargs=2, type=_Place(path_type=Path), metavar="A B", help="Compare two traces, or two folders."
)
@click.option(
    "--hang", type=click.Path(path_type=Path), metavar="FOLDER", help="Say why a job hangs, from flight recorder dumps."
)
@click.option(
    "--tables",
    metavar="NAMES",
    help="Print tables instead of the ledger: all, or some of kernels,operators,roofline,launches,memory,annotations,"
    "all_to_all.",
)
@click.option(
    "--by",
    type=click.Choice(["total", "exposed", "critical"]),
    default="total",
    show_default=True,
    help="The time by which kernels and operators are sorted.",
)
@click.option("--csv", type=_Here(path_type=Path), metavar="FOLDER", help="Write all tables as CSV files.")
@click.option(
    "--parquet",
    type=_Here(path_type=Path),
    metavar="FOLDER",
    help="Write all tables, and the rows of the traces, as Parquet.",
)
@click.option("--perfetto", type=_Here(path_type=Path), metavar="OUT", help="Write the ledger as a trace.")
@click.option("--picture", type=_Here(path_type=Path), metavar="OUT.svg", help="Draw one step of one or more ranks.")
@click.option("--html", type=_Here(path_type=Path), metavar="OUT.html", help="Write a self-contained page.")
@click.option("--step", type=int, metavar="N", help="The step to draw.  [default: a typical one]")
@click.option("--engine", type=click.Choice(["local", "dask"]), default="local", show_default=True)
@click.option("--dask-address", metavar="ADDR", help="The dask scheduler, for example tcp://10.0.0.1:8786.")
@click.option("--cache", type=_Here(path_type=Path), metavar="FOLDER", help="Keep what was read, for the next run.")
@click.option("--jobs", type=click.IntRange(min=1), help="Files read in parallel.  [default: one per core]")
@click.option("-q", "--quiet", "is_quiet", is_flag=True, help="No progress bar.")
def analyze(traces: tuple[TracePlace, ...], **options: Any) -> None:  # noqa: ANN401  click's values
    """Show where the time of profiled steps went, from traces of torch.profiler: files, folders or URLs."""
    if sum((bool(traces), options["compare"] is not None, options["hang"] is not None)) != 1:
        raise click.UsageError("give traces, or --compare A B, or --hang FOLDER")
    if options["hang"] is not None and any(options[name] for name in OPTIONS_OF_TRACES):
        raise click.UsageError("--hang reads no traces: it goes only with --json")
    outputs = [options[name] for name in ("picture", "perfetto", "html")]
    for name in ("csv", "parquet"):
        if is_stdout(options[name]):
            raise click.UsageError(f"--{name} writes a folder of files: - is not one")
    if sum(map(is_stdout, outputs)) + options["as_json"] > 1 and any(map(is_stdout, outputs)):
        raise click.UsageError("standard output takes one of --json, --perfetto -, --picture - and --html -")
    if options["compare"] is not None and any(options[name] for name in ("picture", "perfetto", "html", "parquet")):
        raise click.UsageError(
            "--compare does not draw or write: leave out --picture, --html, --perfetto and --parquet"
        )
    if options["step"] is not None and not (options["picture"] or options["html"]):
        raise click.UsageError("--step is the step to draw: it needs --picture or --html (--steps selects steps)")
    if (options["engine"] == "dask") != (options["dask_address"] is not None):
        raise click.UsageError("--engine dask and --dask-address go together")
    if options["steps"] is not None and options["window"] in {"trace", "hta"}:
        raise click.UsageError("--steps selects steps: it needs --window steps")
    options["steps"] = _steps(options["steps"])
    options["ranks"] = _ranks(options["ranks"])
    options["tables"] = _tables(options["tables"])
    if options["by"] != "total" and not options["tables"]:
        raise click.UsageError("--by sorts the rows of tables: it needs --tables")
    if options["tables"] and options["compare"] is not None:
        raise click.UsageError("--compare has its own tables, down to kernels and operators: leave out --tables")
    # Importing numpy starts OpenBLAS threads, which spin; nothing here multiplies matrices.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    need_analysis(as_json=options["as_json"])
    if options["parquet"] is not None:
        need("pyarrow", "Parquet is written with pyarrow", "parquet")
    from .analyze import AnalyzeOptions, run_analyze

    sys.exit(run_analyze(AnalyzeOptions(paths=traces, **options)))


def _tables(text: str | None) -> tuple[str, ...]:
    """Return the names of the tables in "kernels,roofline", all of "all"."""
    if text is None:
        return ()
    from pacecar.analysis.document.report_tables import TABLE_NAMES

    names = tuple(name.strip() for name in text.split(","))
    if wrong := [name for name in names if name not in (*TABLE_NAMES, "all")]:
        raise click.UsageError(f"--tables {clean(', '.join(wrong))}: give all, or some of {','.join(TABLE_NAMES)}")
    return TABLE_NAMES if "all" in names else names


def _ranks(text: str | None) -> frozenset[int] | None:
    """Return "0-2,7" as the numbers 0, 1, 2 and 7."""
    if text is None:
        return None
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,8})(?:-([0-9]{1,8}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last - first >= RANKS_MAX:
            raise click.UsageError(f"--ranks {clean(text)}: give ranks and ranges, such as 0-63,512")
        found.update(range(first, last + 1))
    return frozenset(found)


def _steps(text: str | None) -> tuple[int, int] | None:
    """Return "3:7" as (3, 7); an open end is 0 or sys.maxsize."""
    if text is None:
        return None
    first, colon, last = text.partition(":")
    try:
        low = int(first) if first else 0
        high = (int(last) if last else sys.maxsize) if colon else low
    except ValueError:
        low, high = 1, 0
    if low > high or not (first or last):
        raise click.UsageError(f"--steps {text}: write A:B, A: or :B with A not above B")
    return low, high


@cli.command()
@config_option
@click.argument("job")
@click.option("--steps", type=click.IntRange(1, 100), default=5, show_default=True, help="Number of steps to trace.")
@click.option("--stacks", is_flag=True, help="Also record Python stacks; the steps become much slower.")
@trace_directory_option
@click.option("--socket", help="The daemon's socket.  [default: as configured]")
@click.option(
    "--at-step",
    type=click.IntRange(min=1),
    metavar="N",
    help="Begin at step N, to trace the same steps on several nodes.",
)
@click.option(
    "--timeout-seconds", type=click.FloatRange(min=1.0), help="Give up after this time.  [default: from the job's pace]"
)
@click.option("--no-analysis", is_flag=True, help="Only print the paths of the traces.")
def trace(
    config_file: Path | None,
    job: str,
    steps: int,
    stacks: bool,
    directory: str | None,
    socket: str | None,
    at_step: int | None,
    timeout_seconds: float | None,
    no_analysis: bool,
) -> None:
    """Trace the next steps of the running JOB, the same on all its ranks of this node, and analyze them."""
    config = _load(config_file, {"socket": socket})
    from pacecar.records.commands import TOO_LATE

    from .daemon_client import AskError, Reply, ask

    arguments: dict[str, int | str] = {"steps": steps, "stacks": int(stacks)}
    if directory is not None:
        arguments["directory"] = directory
    if at_step is not None:
        arguments["at_step"] = at_step
    replies: list[Reply] = []
    for attempts_left in reversed(range(TRACE_ATTEMPTS)):
        replies.clear()
        try:
            for said in ask(config.daemon.socket, job, "trace", arguments, timeout_seconds=timeout_seconds):
                if isinstance(said, Reply):
                    replies.append(said)
                click.echo(_spoken(said), err=True)
        except AskError as error:
            _fail(str(error))
        is_late = all(reply.state == "refused" and reply.detail.startswith(TOO_LATE) for reply in replies)
        if at_step is not None or not replies or not is_late or not attempts_left:
            break
        click.echo("the job passed these steps before the request arrived: asking again", err=True)
    files = [reply.detail for reply in sorted(replies, key=lambda reply: reply.rank) if reply.state == "done"]
    if not files:
        _fail(f"no rank of {job} wrote a trace")
    if no_analysis:
        click.echo("\n".join(files))
    else:
        click.echo(err=True)
        _analyze(files)
    sys.exit(0 if len(files) == len(replies) else 1)


def _spoken(said: Answer | Reply) -> str:
    who = "the daemon" if said.rank is None else f"rank {said.rank}"
    return f"{who}: {said.state}: {said.detail}"


@cli.command()
def version() -> None:
    """Print the version."""
    click.echo(f"pacecar {__version__}")


cli.add_command(bench)
cli.add_command(dashboards)
cli.add_command(deploy)
cli.add_command(doctor)
cli.add_command(dump)
cli.add_command(health)
cli.add_command(job)
cli.add_command(knobs)
cli.add_command(preflight)
cli.add_command(report)
cli.add_command(run)
cli.add_command(top)
cli.add_command(tune)
if sys.flags.optimize >= 2:  # python -OO drops docstrings
    restore_help(cli)


def main() -> NoReturn:
    """Run the command and exit.  If the reader of a pipe is gone, click exits with code 1 and no message."""
    try:
        code = cli(standalone_mode=False)
    except click.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        context = error.ctx if isinstance(error, click.NoSuchOption) else None
        if context is not None and any(isinstance(one, click.Argument) for one in context.command.params):
            click.echo(f"Put a name that begins with a dash behind --: {context.command_path} -- -NAME", err=True)
        sys.exit(error.exit_code)
    # In this mode click returns the code of --help and ctx.exit() instead of raising it.
    sys.exit(code if isinstance(code, int) else 0)


def _analyze(files: list[str]) -> None:
    need_analysis(as_json=False, otherwise=" (--no-analysis works without)")
    from pacecar.analysis.trace.decoding.remote_file import place_of

    from .analyze import AnalyzeOptions, run_analyze

    code = run_analyze(AnalyzeOptions(paths=tuple(map(place_of, files))))
    if code:
        sys.exit(code)


def _log_to_stderr(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter(LOG_FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
