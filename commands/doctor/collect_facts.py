"""Reads a machine, its job and its files into one `NodeFacts`: calls all readers, one after the other.

Nothing is started, set or written.  A reader that meets what it cannot understand notes it and gives the rest.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from .facts.gpu import read_gpus
from .facts.host import cpus, limits, process
from .facts.job import Log, Run, Script
from .facts.log import LogError, read_log
from .facts.model import NodeFacts
from .facts.network import read_network
from .facts.pci import pci_devices
from .facts.run import RunError, read_run
from .facts.script import ScriptError, read_script
from .facts.setting import read_settings
from .host_access import FactReader, HostAccess

__all__ = ["examine"]


def examine(
    places: HostAccess,
    *,
    host: str,
    round_trip_ns: int | None = None,
    run: Path | None = None,
    script: Path | None = None,
    log: Path | None = None,
) -> NodeFacts:
    """Read all facts.  A run, script or log that was named and cannot be read is among the `unreadable`."""
    looker = FactReader(places)
    return NodeFacts(
        host=host,
        cpus=cpus(looker),
        pci=pci_devices(looker),
        gpus=read_gpus(looker),
        network=read_network(looker),
        limits=limits(looker),
        settings=read_settings(looker),
        torch_version=_torch_version(),
        round_trip_ns=round_trip_ns,
        process=process(looker),
        log=None if log is None else _log(looker, log),
        script=None if script is None else _script(looker, script),
        run=None if run is None else _run(looker, run),
        unreadable=looker.unreadable,
        limited=looker.limited,
    )


def _torch_version() -> str | None:
    """Return torch's version without importing it, which takes a second and all its libraries."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def _log(looker: FactReader, path: Path) -> Log | None:
    try:
        log, notes = read_log(path)
        for note in notes:
            looker.note(note)
        return log
    except OSError as error:
        looker.note(f"{path}: {error.strerror or error}")
    except LogError as error:
        looker.note(str(error))
    return None


def _script(looker: FactReader, path: Path) -> Script | None:
    try:
        return read_script(path)
    except OSError as error:
        looker.note(f"{path}: {error.strerror or error}")
    except ScriptError as error:
        looker.note(str(error))
    return None


def _run(looker: FactReader, folder: Path) -> Run | None:
    try:
        run, notes = read_run(folder)
    except RunError as error:
        looker.note(str(error))
        return None
    for note in notes:
        looker.note(note)
    return run
