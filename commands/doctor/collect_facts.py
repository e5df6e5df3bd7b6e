"""Reads a machine, its job and its files into one `NodeFacts`, by calling all readers.

Nothing is started, set or written.  A reader notes what it cannot understand and returns the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from pacecar.nccl_debug_log import debug_files
from pacecar.nccl_inspector import InspectorFigures, find_inspector_files, inspector_folder, read_inspector
from pacecar.nccl_ras import RasError, RasFinding

from .facts.evidence import FactError
from .facts.gpu import read_gpus
from .facts.host import cpus, limits, process
from .facts.job import Log
from .facts.log import read_log
from .facts.model import NodeFacts, SettingFacts
from .facts.network import read_network
from .facts.pci import pci_devices
from .facts.run import read_run
from .facts.script import read_script
from .facts.setting import read_settings
from .host_access import FactReader, HostAccess

__all__ = ["collect_facts"]


def collect_facts(
    access: HostAccess,
    *,
    host: str,
    round_trip_ns: int | None = None,
    run: Path | None = None,
    script: Path | None = None,
    log: Path | None = None,
) -> NodeFacts:
    """Read all facts.  A given run, script or log that cannot be read is listed in `unreadable`."""
    reader = FactReader(access)
    settings = read_settings(reader)
    return NodeFacts(
        host=host,
        cpus=cpus(reader),
        pci=pci_devices(reader),
        gpus=read_gpus(reader),
        network=read_network(reader),
        limits=limits(reader),
        settings=settings,
        torch_version=_torch_version(),
        round_trip_ns=round_trip_ns,
        process=process(reader),
        ras=_ras(reader),
        inspector=_inspector(reader, settings, run),
        log=_jobs_log(reader, settings, host) if log is None else _given(reader, log, read_log),
        script=_given(reader, script, read_script),
        run=_given(reader, run, read_run),
        unreadable=reader.unreadable,
        limited=reader.limited,
    )


def _ras(reader: FactReader) -> tuple[RasFinding, ...] | None:
    """Return what NCCL's RAS says is wrong; None if there is no RAS, or if its answer cannot be read."""
    try:
        return None if reader.access.ras is None else reader.access.ras()
    except RasError as error:
        reader.note(str(error))
        return None


def _inspector(reader: FactReader, settings: SettingFacts, run: Path | None) -> InspectorFigures | None:
    """Return what NCCL's Inspector wrote for the job, or into the run folder; None if it is not known where."""
    environ = {name: seen.value for name, seen in settings.values.items()}
    folders = (inspector_folder(environ, _job_folder(reader)), run)
    if not any(folders):
        return None
    figures = read_inspector(find_inspector_files(folder for folder in folders if folder is not None))
    for note in figures.notes:
        reader.note(note)
    return figures


def _jobs_log(reader: FactReader, settings: SettingFacts, host: str) -> Log | None:
    """Return the log that the process of --pid writes to, None if there is none."""
    pattern, pid = settings.get("NCCL_DEBUG_FILE"), reader.access.pid
    if pattern is None or pid is None:
        return None
    for path in debug_files(str(_job_folder(reader) / pattern.value), {pid}, host):
        try:
            return read_log(path)[0]
        except (OSError, FactError):  # nobody asked for it
            continue
    return None


def _job_folder(reader: FactReader) -> Path:
    """Return the folder in which the job runs: that of --pid, or this one."""
    pid = reader.access.pid
    return Path() if pid is None else reader.access.proc / str(pid) / "cwd"


def _torch_version() -> str | None:
    """Return torch's version without importing it, which would take a second."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


T = TypeVar("T")


def _given(reader: FactReader, path: Path | None, read: Callable[[Path], tuple[T, Sequence[str]]]) -> T | None:
    """Return what `read` makes of `path`, None without a path or if it cannot be read; note what is missing."""
    if path is None:
        return None
    try:
        found, notes = read(path)
    except OSError as error:
        reader.note(f"{path}: {error.strerror or error}")
    except FactError as error:
        reader.note(str(error))
    else:
        for note in notes:
            reader.note(note)
        return found
    return None
