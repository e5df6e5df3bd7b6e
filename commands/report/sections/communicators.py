"""Reads what NCCL's Inspector wrote of the run: into its folder, or where NCCL_INSPECTOR_DUMP_DIR says.

That folder may have files of other jobs, so only those of the run's own processes are taken from it.  A .prom file does
not name its process, and is gone when the job has ended: node_exporter's textfile collector keeps its figures.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from pacecar.nccl_inspector import CommunicatorBandwidth, find_inspector_files, inspector_folder, read_inspector
from pacecar.records import JobHello

from ..reading.inputs import Inputs

__all__ = ["communicators_of"]


def communicators_of(
    inputs: Inputs, hellos: Iterable[JobHello], environ: Mapping[str, str] = os.environ
) -> tuple[CommunicatorBandwidth, ...]:
    """Return the bandwidths of the run's communicators; files that cannot be read become notices."""
    if inputs.recording is not None:
        return ()
    elsewhere = inspector_folder(environ, Path())
    names = {f"{hello.host}-pid{hello.pid}.log" for hello in hellos}
    others = find_inspector_files([elsewhere] if elsewhere is not None else [])
    paths = [*find_inspector_files([inputs.folder]), *(path for path in others if path.name in names)]
    figures = read_inspector({path.resolve(): None for path in paths})
    for note in figures.notes:
        inputs.notices.add("NCCL's Inspector", note, note, is_damage=False)
    return figures.rows
