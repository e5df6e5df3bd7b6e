"""Defines `pacecar tune`: shows the tuner of a running job, freezes and resumes it, and sets its knobs by hand.

Each command asks rank 0 of the job through the socket of its node's daemon, and waits until all ranks have carried out
the order or the tuner says why not.  The daemon authorizes the user of the job and root, by the uid from the kernel.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pacecar.formatting.plain_text import clean

from .shared_options import config_option, fail, load, print_json

if TYPE_CHECKING:
    from .daemon_client import Reply

__all__ = ["tune"]

F = TypeVar("F", bound=Callable[..., Any])


@click.group()
def tune() -> None:
    """Inspect or pause the tuner of a running job, or set its knobs by hand."""


def _options(command: F) -> F:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option("--timeout-seconds", type=click.FloatRange(min=0.1), default=60.0, show_default=True),
        click.option("--socket", help="The daemon's socket.  [default: as configured]"),
        config_option,
    ):
        command = option(command)
    return command


@tune.command()
@click.argument("job")
@_options
def status(job: str, **options: Any) -> None:  # noqa: ANN401  click's values
    """Show what the tuner of JOB is doing, the knobs in force, and the gains so far."""
    reply = _ask(job, {"order": "status"}, options)
    if reply.state != "done" or reply.report is None:
        fail(reply.detail)
    if options["as_json"]:
        print_json(reply.report)
        return
    from .tune_text import lines

    for line in lines(job, reply.report, width=shutil.get_terminal_size().columns):
        click.echo(line)


@tune.command()
@click.argument("job")
@_options
def freeze(job: str, **options: Any) -> None:  # noqa: ANN401
    """Stop trials in JOB: kept changes stay, a trial in progress is undone."""
    _order(job, {"order": "freeze"}, options)


@tune.command()
@click.argument("job")
@_options
def resume(job: str, **options: Any) -> None:  # noqa: ANN401
    """Let the tuner of JOB continue, including knobs that were set by hand."""
    _order(job, {"order": "resume"}, options)


@tune.command("set")
@click.argument("knob")
@click.argument("value")
@click.argument("job")
@_options
def set_(knob: str, value: str, job: str, **options: Any) -> None:  # noqa: ANN401
    """Set KNOB to VALUE (4MiB, 8, fp16) on all ranks of JOB; the tuner leaves it alone until `resume`."""
    from pacecar.knobs import read_setting

    try:
        read_setting(knob, value)
    except ValueError as error:
        fail(str(error), code=2)
    _order(job, {"order": "set", "knob": knob, "value": value}, options)


@tune.command()
@click.argument("job")
@_options
def rollback(job: str, **options: Any) -> None:  # noqa: ANN401
    """Set all knobs of JOB back to their initial values, and freeze."""
    _order(job, {"order": "rollback"}, options)


def _order(job: str, arguments: dict[str, int | str], options: dict[str, Any]) -> None:
    reply = _ask(job, arguments, options)
    if options["as_json"]:
        print_json({"state": reply.state, "detail": reply.detail})
    else:
        click.echo(clean(f"{reply.state}: {reply.detail}"), err=reply.state != "done")
    sys.exit(0 if reply.state == "done" else 1)


def _ask(job: str, arguments: dict[str, int | str], options: dict[str, Any]) -> Reply:
    """Return the final answer of rank 0; exits if there is none."""
    config = load(options["config_file"], {"socket": options["socket"]})
    from .daemon_client import AskError, Reply, ask

    seconds = options["timeout_seconds"]
    replies: list[Reply] = []
    try:
        for said in ask(config.daemon.socket, job, "tune", arguments, timeout_seconds=seconds, ranks=(0,)):
            if isinstance(said, Reply):
                replies.append(said)
            elif said.rank is not None and not options["as_json"]:
                click.echo(clean(said.detail), err=True)
    except AskError as error:
        fail(str(error))
    if not replies:
        fail(f"no answer from {job}")
    if replies[0].state == "silent":
        fail(f"rank 0 of {job}: {replies[0].detail}; it answers between steps, so check that the job is still training")
    return replies[0]
