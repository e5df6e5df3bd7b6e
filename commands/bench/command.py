"""Defines `pacecar bench`: `net` times the collectives of the job's own backend between its ranks.

Every rank of a job runs this command, so only rank 0 reports errors in its usage.
"""

from __future__ import annotations

import math
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import click

from ..joining_ranks import JoinError, require_rank_variables
from ..shared_options import fail

__all__ = ["bench"]

HOW = """a single process has no peer.  Start one rank for each GPU (or several processes), for example
    torchrun --nproc-per-node 8 -m pacecar bench net
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node-a:29400 -m pacecar bench net
    srun --ntasks-per-node 1 torchrun --nnodes 2 ... (as above)
in the environment of the job"""


@click.group()
def bench() -> None:
    """Measure this machine and its links."""


@bench.command()
@click.option(
    "--op",
    "operations",
    multiple=True,
    metavar="OPERATION",
    help="all_reduce, all_gather or reduce_scatter; may be repeated.  [default: all]",
)
@click.option("-b", "--min-bytes", default="1K", show_default=True, metavar="SIZE", help="Smallest size.")
@click.option("-e", "--max-bytes", default="64M", show_default=True, metavar="SIZE", help="Largest size.")
@click.option("-f", "--factor", type=float, default=4.0, show_default=True, help="Factor between two sizes.")
@click.option(
    "-n",
    "--iterations",
    type=click.IntRange(3, 10_000),
    default=20,
    show_default=True,
    help="Timed iterations of each size.",
)
@click.option(
    "-w",
    "--warmup",
    type=click.IntRange(0, 1000),
    default=5,
    show_default=True,
    help="Untimed iterations of each size.",
)
@click.option(
    "--seconds-per-size",
    type=click.FloatRange(0.1, 3600),
    default=5.0,
    show_default=True,
    help="Time for one size; a slow link gets fewer iterations, but at least 3.",
)
@click.option("--backend", type=click.Choice(["gloo", "nccl"]), help="[default: nccl with GPUs, else gloo]")
@click.option(
    "--timeout-seconds",
    type=click.FloatRange(1.0, 86_400.0),
    default=60.0,
    show_default=True,
    help="Limit for ranks to meet, and for one collective.",
)
@click.option(
    "--rated-gigabits",
    type=click.FloatRange(0.001, 1e6),
    help="Rated speed of the link in Gbit/s, if the link does not report it.",
)
@click.option(
    "--algorithms",
    metavar="SETTINGS",
    help="Compare these with NCCL's own choice, such as ring/simple,tree/ll128,nvls/simple/16:"
    " algorithm/protocol[/CTAs], each measured by new processes.",
)
@click.option(
    "--tuner-csv",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write what won into this file, for NCCL's example tuner plugin; with --algorithms.",
)
@click.option("--store-prefix", default="", hidden=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
def net(**options: Any) -> None:  # noqa: ANN401  click's values
    """Time collectives between the ranks of a job, through its own backend.

    Run it on every rank: torchrun --nproc-per-node 8 -m pacecar bench net.  The columns are those of nccl-tests; below
    each table is a fitted line, time = alpha + bytes x beta.
    """
    if find_spec("torch") is None:
        _fail(
            "the collectives are torch.distributed's, and torch is not installed: pip install 'pacecar[torch]'", code=1
        )
    from .document import OPERATIONS
    from .sizes import SizeError, parse_size, steps

    try:
        sizes = steps(parse_size(options["min_bytes"]), parse_size(options["max_bytes"]), options["factor"])
    except SizeError as error:
        _fail(str(error))
    unknown = [name for name in options["operations"] if name not in OPERATIONS]
    if unknown:
        _fail(f"--op {unknown[0]}: choose from {', '.join(OPERATIONS)}")
    for name in ("seconds_per_size", "timeout_seconds", "rated_gigabits"):
        if options[name] is not None and math.isnan(options[name]):  # click's ranges accept it
            _fail(f"--{name.replace('_', '-')} nan: give a number")
    require_rank_variables(HOW)
    if options["algorithms"] is None:
        if options["tuner_csv"] is not None:
            _fail("--tuner-csv needs --algorithms: without several settings there is nothing to choose from")
        _run(sizes, options)
    else:
        _compare(options)


def _compare(options: dict[str, Any]) -> NoReturn:
    from .algorithms import run_algorithms
    from .document import OPERATIONS
    from .tuner_csv import SettingError, parse_setting

    try:
        settings = list(dict.fromkeys(parse_setting(text) for text in options["algorithms"].split(",")))
    except SettingError as error:
        _fail(f"--algorithms: {error}")
    passed_on = ("min_bytes", "max_bytes", "factor", "iterations", "warmup", "seconds_per_size", "timeout_seconds")
    arguments = [word for name in passed_on for word in (f"--{name.replace('_', '-')}", str(options[name]))]
    try:
        code = run_algorithms(
            settings,
            tuple(dict.fromkeys(options["operations"])) or OPERATIONS,
            arguments,
            backend=options["backend"],
            timeout_seconds=options["timeout_seconds"],
            csv=options["tuner_csv"],
            as_json=options["as_json"],
        )
    except JoinError as error:
        _fail(f"bench net: {error}")
    except OSError as error:
        _fail(f"--tuner-csv: {error}", code=1)
    sys.exit(code)


def _run(sizes: list[int], options: dict[str, Any]) -> None:
    from .document import OPERATIONS
    from .measure import MeasurementPlan
    from .net import NetOptions, run_net

    gigabits = options["rated_gigabits"]
    try:
        code = run_net(
            NetOptions(
                operations=tuple(dict.fromkeys(options["operations"])) or OPERATIONS,
                sizes=tuple(sizes),
                backend=options["backend"],
                plan=MeasurementPlan(options["warmup"], options["iterations"], options["seconds_per_size"]),
                timeout_seconds=options["timeout_seconds"],
                rated_bytes_per_second=None if gigabits is None else round(gigabits * 1e9 / 8),
                as_json=options["as_json"],
                store_prefix=options["store_prefix"],
            )
        )
    except JoinError as error:
        fail(f"bench net: rank {os.environ['RANK']}: {error}")
    sys.exit(code)


def _fail(message: str, *, code: int = 2) -> NoReturn:
    """Exit; print `message` on rank 0, or without ranks."""
    if os.environ.get("RANK", "0") == "0":
        fail(message, code=code)
    sys.exit(code)
