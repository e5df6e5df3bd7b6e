"""Defines the options of `pacecar report`."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import click

from ..shared_options import config_option, load

__all__ = ["report"]

_RUN = click.Path(path_type=Path)


class _Price(click.FloatRange):
    """A finite number of at least 0; click's own range accepts `nan` and `inf`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        """Return the price as a float."""
        price = super().convert(value, param, ctx)
        if not math.isfinite(price):
            self.fail(f"{value} is not a price.", param, ctx)
        return price


@click.command()
@config_option
@click.argument("runs", nargs=-1, type=_RUN, metavar="RUN...")
@click.option("--compare", "is_comparison", is_flag=True, help="Compare two or more runs with the first of them.")
@click.option("--json", "as_json", is_flag=True, help="Print the document as JSON.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print tables as markdown.")
@click.option(
    "--output", type=_RUN, metavar="FILE", help="Output file, - for stdout.  [default: report.html in the run folder]"
)
@click.option("--job", metavar="NAME", help="The job to report, if the folder or recording holds several.")
@click.option("--recording", "recordings", multiple=True, type=_RUN, metavar="FILE",
              help="A daemon's recording of the run (GPUs, links, hosts, energy); may be repeated.")  # fmt: skip
@click.option(
    "--price-per-gpu-hour", type=_Price(min=0.0), metavar="PRICE", help="Price of a GPU hour, in any currency."
)
@click.option("--samples-per-epoch", type=click.IntRange(min=1), metavar="N", help="Samples in an epoch, to price it.")
@click.option("--tokens-per-epoch", type=click.IntRange(min=1), metavar="N", help="Tokens in an epoch, to price it.")
@click.option("--epochs", type=click.IntRange(min=1), default=1, show_default=True, help="Number of epochs to price.")
def report(config_file: Path | None, runs: tuple[Path, ...], **options: Any) -> None:  # noqa: ANN401  click's values
    """Report what a run did, what tuning changed and what it brought, on one self-contained page.

    RUN is the folder that attach(run_dir=...) or `pacecar demo` writes, a folder with one for each attempt of a
    restarted job, or a recording of the daemon.
    """
    if not runs:
        raise click.UsageError("give a run folder or a recording")
    if options["as_json"] and options["as_markdown"]:
        raise click.UsageError("give --json or --markdown, not both")
    if options["is_comparison"] and len(runs) < 2:
        raise click.UsageError("--compare needs two runs or more")
    if len(runs) > 1 and not options["is_comparison"]:
        raise click.UsageError("give one run, or --compare with several")
    if options["samples_per_epoch"] is not None and options["tokens_per_epoch"] is not None:
        raise click.UsageError("give --samples-per-epoch or --tokens-per-epoch, not both")
    if options["is_comparison"] and (options["recordings"] or options["job"]):
        raise click.UsageError("--job and --recording apply to one run: leave them out with --compare")
    epoch = options["samples_per_epoch"] or options["tokens_per_epoch"]
    if options["price_per_gpu_hour"] is None and (epoch is not None or options["epochs"] != 1):
        raise click.UsageError("to price an epoch, give --price-per-gpu-hour")
    from .build import BuildOptions
    from .run_report import ReportOptions, run_report
    from .sections.costs import Prices

    prices = Prices(
        per_gpu_hour=options["price_per_gpu_hour"],
        samples_per_epoch=options["samples_per_epoch"],
        tokens_per_epoch=options["tokens_per_epoch"],
        epochs=options["epochs"],
    )
    budget = _hook_budget(config_file)
    sys.exit(
        run_report(
            ReportOptions(
                runs=runs,
                build=BuildOptions(job=options["job"], prices=prices, budget_ratio=budget),
                is_comparison=options["is_comparison"],
                form="json" if options["as_json"] else "markdown" if options["as_markdown"] else "html",
                output=options["output"],
                recordings=options["recordings"],
            )
        )
    )


def _hook_budget(config_file: Path | None) -> float:
    """Return the hook's budget in the configuration here, for older records that do not hold the job's."""
    return load(config_file, {}).hook.overhead_budget
