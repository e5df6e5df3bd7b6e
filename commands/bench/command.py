"""Defines `pacecar bench`: `net` times the collectives of the job's own backend between its ranks.

Every rank of a job runs this command, so only rank 0 reports errors in its usage.
"""

from __future__ import annotations

import math
import os
import sys
from importlib.util import find_spec
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
    _run(sizes, options)


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
