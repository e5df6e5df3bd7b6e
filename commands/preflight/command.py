"""Defines `pacecar preflight`: compares the nodes and links of a job with their peers before the job begins.

0  nothing is slow or broken, of what could be told
1  something is (on ranks other than 0: this rank's node is), or the ranks did not meet
2  wrong usage
"""

from __future__ import annotations

import math
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from ..joining_ranks import JoinError, require_rank_variables
from ..shared_options import fail

__all__ = ["preflight"]

HOW = """a single process has no peer.  Start it on all ranks of the job, for example
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node-a:29400 -m pacecar preflight
or check this machine alone: pacecar preflight --local"""


@click.command()
@click.option("--local", "is_local", is_flag=True, help="Check this machine only, its GPUs against each other.")
@click.option("--backend", type=click.Choice(["gloo", "nccl"]), help="[default: nccl with GPUs, else gloo]")
@click.option(
    "--seconds",
    type=click.FloatRange(5.0, 3600.0),
    default=60.0,
    show_default=True,
    help="Judge after this long by what there is.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0.01, 0.9),
    default=0.25,
    show_default=True,
    help="Slow is what is this share below its peers' median.",
)
@click.option(
    "--disk",
    "folder",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="A folder on the disk to check.",
)
@click.option(
    "--reference",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    metavar="FILE",
    help="JSON of an earlier run, whose nodes count as peers.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def preflight(is_local: bool, reference: Path | None, **given: Any) -> None:  # noqa: ANN401  click's values
    """Find slow or broken nodes and links before a job begins.

    Run it on every rank, as the job runs.  Each rank measures its device, memory and disk, then links to a few others.
    """
    if find_spec("torch") is None:
        fail("arithmetic and links are measured by torch, which is not installed: pip install 'pacecar[torch]'")
    if math.isnan(given["seconds"]) or math.isnan(given["tolerance"]):  # click's ranges accept it
        fail("nan is not a number", code=2)
    if not is_local:
        require_rank_variables(HOW)
    from .run_preflight import PreflightOptions, run_alone, run_preflight

    options = PreflightOptions(**given, reference=() if reference is None else _checks(reference))
    if is_local:
        code = run_alone(options)
        sys.stdout.flush()
        os._exit(code)  # a device or disk that does not answer may hold the process up
    try:
        run_preflight(options)
    except JoinError as error:
        fail(f"preflight: {error}")


def _checks(file: Path) -> tuple[Any, ...]:
    import msgspec

    from .document import PreflightResult

    try:
        return msgspec.json.decode(file.read_bytes(), type=PreflightResult).nodes
    except (OSError, msgspec.DecodeError) as error:
        fail(f"--reference {file}: {error}", code=2)
