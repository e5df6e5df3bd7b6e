"""Defines `pacecar job`: orders to all ranks of a running job, on all its nodes, from a node that has any of them.

The daemon of this node hands the order to one rank, which passes it on to the others (`pacecar.profiler.orders`).  The
daemon authorizes the user of the job and root, by the uid from the kernel.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pacecar.formatting.plain_text import clean
from pacecar.formatting.quantities import plural

from .shared_options import (
    complain,
    config_option,
    fail,
    load,
    need_analysis,
    place_of_files,
    print_json,
    trace_directory_option,
)

if TYPE_CHECKING:
    from pacecar.records import Answer
    from pacecar.records.job_orders import JobAnswer

__all__ = ["job"]

F = TypeVar("F", bound=Callable[..., Any])

TUNE_ORDERS = ("status", "freeze", "resume", "set", "rollback")


class _JobGroup(click.Group):
    """A group whose argument, the job, may be left out before a command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        is_command = [word in self.commands for word in args[:2]]
        if is_command in ([True], [True, False]):  # a later word may be an option's value
            args.insert(0, "")
        return super().parse_args(ctx, args)


@click.group(cls=_JobGroup)
@click.argument("job", default="", metavar="[JOB]")
@click.pass_context
def job(context: click.Context, job: str) -> None:
    """Ask or order all ranks of the running JOB, on all its nodes.  Without JOB: your only one on this node."""
    context.obj = job


def _options(command: F) -> F:
    options: tuple[Callable[[Any], Any], ...] = (
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option("--socket", help="The daemon's socket.  [default: as configured]"),
        config_option,
        click.pass_obj,
    )
    for option in options:
        command = option(command)
    return command


@job.command()
@_options
def show(name: str, **options: Any) -> None:  # noqa: ANN401  click's values
    """Show all nodes of the job: steps, ledger, late and silent ranks, hangs, knobs."""
    answers, final = _ask(name, "show", {}, options)
    from .job_text import job_document, json_of, lines

    document = job_document(final, answers)
    if options["as_json"]:
        print_json(json_of(document))
    else:
        for line in lines(document, width=shutil.get_terminal_size().columns):
            click.echo(line)
    sys.exit(0 if final.state == "done" and document.is_whole else 1)


@job.command()
@_options
def hang(name: str, **options: Any) -> None:  # noqa: ANN401
    """Say what all ranks are doing, and which one holds the others up if the job hangs."""
    answers, final = _ask(name, "hang", {}, options)
    from .job_text import hang_lines, job_document, json_of

    document = job_document(final, answers)
    if options["as_json"]:
        print_json(json_of(document))
    else:
        for line in hang_lines(document, final.detail):
            click.echo(line)
    sys.exit(0 if final.state == "done" else 1)


@job.command()
@click.option("--directory", metavar="FOLDER", callback=place_of_files, help="Where.  [default: the job's run folder]")
@_options
def dump(name: str, directory: str | None, **options: Any) -> None:  # noqa: ANN401
    """Write what all ranks are doing into a folder, for `pacecar analyze --hang`, and print its path."""
    if directory is not None and "://" in directory:
        raise click.BadParameter("dumps are written into a folder, not to a URL", param_hint="--directory")
    given: dict[str, int | str] = {} if directory is None else {"directory": directory}
    answers, final = _ask(name, "dump", given, options)
    from .job_text import absent_lines, job_document

    document = job_document(final, answers)
    for line in absent_lines(document):
        click.echo(line, err=True)
    if options["as_json"]:
        print_json({"state": final.state, "detail": final.detail})
    else:
        click.echo(clean(final.detail), err=final.state != "done")
    sys.exit(0 if final.state == "done" and document.is_whole else 1)


@job.command()
@click.option("--steps", type=click.IntRange(1, 100), default=5, show_default=True, help="Number of steps to trace.")
@click.option("--stacks", is_flag=True, help="Also record Python stacks; the steps become much slower.")
@trace_directory_option
@click.option("--analyze", "is_analyzed", is_flag=True, help="Then show what `pacecar analyze` says of the traces.")
@_options
def trace(
    name: str,
    steps: int,
    stacks: bool,
    directory: str | None,
    is_analyzed: bool,
    **options: Any,  # noqa: ANN401
) -> None:
    """Trace the same next steps on all ranks; print where each rank's host, or the store, has its file."""
    given: dict[str, int | str] = {"steps": steps, "stacks": int(stacks)}
    if is_analyzed:
        need_analysis(as_json=options["as_json"])
    if directory is not None:
        given["directory"] = directory
    answers, final = _ask(name, "trace", given, options)
    from .job_text import absent_lines, job_document

    document = job_document(final, answers)
    for line in absent_lines(document):
        click.echo(line, err=True)
    click.echo(clean(final.detail), err=True)
    files = [(reply.rank, reply.host, reply.detail) for reply in document.replies if reply.state == "done"]
    if is_analyzed:
        code = _analyze([(host, file) for _, host, file in files], as_json=options["as_json"])
        sys.exit(code if document.is_whole else 1)
    if options["as_json"]:
        print_json([{"rank": rank, "host": host, "file": file} for rank, host, file in files])
    else:
        for _, host, file in files:
            click.echo(clean(file if "://" in file else f"{host}:{file}"))
    sys.exit(0 if document.is_whole else 1)


def _analyze(files: list[tuple[str, str]], *, as_json: bool) -> int:
    """Analyze the files (host and path) that are here or in a store, and return the exit code."""
    from pacecar.analysis.trace.decoding.remote_file import place_of

    from .analyze import AnalyzeOptions, run_analyze

    elsewhere = [(host, file) for host, file in files if "://" not in file and not Path(file).exists()]
    here = [file for host, file in files if (host, file) not in elsewhere]
    if elsewhere:
        complain(
            f"{len(elsewhere)} of {plural(len(files), 'trace')} are on other hosts"
            f" ({clean(':'.join(elsewhere[0]))}): --directory names a folder that all hosts share, or a URL"
        )
    if not here:
        return 1
    code = run_analyze(AnalyzeOptions(paths=tuple(map(place_of, here)), as_json=as_json))
    return 1 if elsewhere else code


@job.command()
@click.argument("order", type=click.Choice(TUNE_ORDERS))
@click.argument("setting", nargs=-1, metavar="[KNOB VALUE]")
@_options
def tune(name: str, order: str, setting: tuple[str, ...], **options: Any) -> None:  # noqa: ANN401
    """Do what `pacecar tune` does, wherever rank 0 is."""
    arguments: dict[str, int | str] = {"order": order}
    if len(setting) != 2 * (order == "set"):
        raise click.UsageError("set takes a knob and a value, the others nothing")
    if order == "set":
        from pacecar.knobs import read_setting

        try:
            read_setting(*setting)
        except ValueError as error:
            fail(str(error), code=2)
        arguments |= {"knob": setting[0], "value": setting[1]}
    _, final = _ask(name, "tune", arguments, options)
    if final.report is not None and not options["as_json"]:
        from .tune_text import lines

        for line in lines(final.job, final.report, width=shutil.get_terminal_size().columns):
            click.echo(line)
    elif options["as_json"]:
        print_json({"state": final.state, "detail": final.detail} if final.report is None else final.report)
    else:
        click.echo(clean(f"{final.state}: {final.detail}"), err=final.state != "done")
    sys.exit(0 if final.state == "done" else 1)


def _ask(
    name: str, order: str, arguments: dict[str, int | str], options: dict[str, Any]
) -> tuple[list[JobAnswer], Answer]:
    """Return the ranks' replies and the final answer; exits if there is none."""
    config = load(options["config_file"], {"socket": options["socket"]})
    from pacecar.records import Answer

    from .daemon_client import AskError, ask_job

    answers: list[JobAnswer] = []
    try:
        for said in ask_job(config.daemon.socket, name, order, arguments):
            if not isinstance(said, Answer):
                answers.append(said)
            elif said.state != "accepted":
                return answers, said
            elif said.detail and not options["as_json"]:
                click.echo(clean(said.detail), err=True)
    except AskError as error:
        fail(str(error))
    raise AssertionError("ask_job ends with a final answer, or raises")
