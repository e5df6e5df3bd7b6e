"""Reads the variables that affect training, from this shell or the job's process, and from NCCL's files.

The doctor rarely runs in the shell that started the job; `--pid` reads the job's own environment.  NCCL also reads
files: a variable overrides them, and the user's file overrides the administrator's.

Only names that a rule uses are kept, so that no password ends up in a report.

Source: NVIDIA, NCCL user guide, "Environment Variables" (the introduction names the files); proc(5) for environ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ..host_access import FactReader
from .model import Seen, SettingFacts

__all__ = ["read_settings"]

_NAMES = frozenset({
    "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "SLURM_JOBID",
    "TORCH_DISTRIBUTED_DEBUG", "TORCH_NCCL_BLOCKING_WAIT",
})  # fmt: skip


def read_settings(reader: FactReader) -> SettingFacts:
    """Read the variables; if the process's environment may not be read, only those of the files."""
    access = reader.access
    values: dict[str, Seen[str]] = {}
    environ, where = _environment(reader)
    for name, value in environ.items():
        if name.startswith("NCCL_") or name in _NAMES:
            values[name] = Seen(value, where)
    files = [access.etc / "nccl.conf"]
    own = environ.get("NCCL_CONF_FILE", "").removeprefix("~/")
    if own and access.home is not None:
        files.insert(0, access.home / own)
    elif access.home is not None:
        files.insert(0, access.home / ".nccl.conf")
    for path in files:
        for name, seen in _of_file(reader, path):
            values.setdefault(name, seen)
    return SettingFacts(values)


def _environment(reader: FactReader) -> tuple[Mapping[str, str], str]:
    pid = reader.access.pid
    if pid is None:
        return reader.access.environ, "the environment"
    path = reader.access.proc / str(pid) / "environ"
    text = reader.text(path) or ""
    pairs = (entry.partition("=") for entry in text.split("\0") if "=" in entry)
    return {name: value for name, _, value in pairs}, str(path)


def _of_file(reader: FactReader, path: Path) -> Iterator[tuple[str, Seen[str]]]:
    text = reader.text(path)
    for number, line in enumerate((text or "").splitlines(), start=1):
        name, equals, value = line.partition("=")
        if equals and name.strip().startswith("NCCL_"):
            yield name.strip(), Seen(value.strip(), f"{path}:{number}")
