"""Reads the variables that change how the job trains: of this shell or of the job's process, and of NCCL's files.

The shell in which the doctor is typed is seldom the one that started the job: `--pid` reads the job's own environment.
NCCL also reads files; a variable wins over them, and the user's file over the administrator's.

Only names that a rule looks at are kept, so that no password of somebody's environment ends in a report.

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
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_NCCL_BLOCKING_WAIT",
})  # fmt: skip


def read_settings(looker: FactReader) -> SettingFacts:
    """Read the variables; where the process' environment may not be read, only the files are there."""
    places = looker.places
    values: dict[str, Seen[str]] = {}
    environ, where = _environment(looker)
    for name, value in environ.items():
        if name.startswith("NCCL_") or name in _NAMES:
            values[name] = Seen(value, where)
    files = [places.etc / "nccl.conf"]
    own = environ.get("NCCL_CONF_FILE", "").removeprefix("~/")
    if own and places.home is not None:
        files.insert(0, places.home / own)
    elif places.home is not None:
        files.insert(0, places.home / ".nccl.conf")
    for path in files:
        for name, seen in _of_file(looker, path):
            values.setdefault(name, seen)
    return SettingFacts(values)


def _environment(looker: FactReader) -> tuple[Mapping[str, str], str]:
    pid = looker.places.pid
    if pid is None:
        return looker.places.environ, "the environment"
    path = looker.places.proc / str(pid) / "environ"
    text = looker.text(path) or ""
    pairs = (entry.partition("=") for entry in text.split("\0") if "=" in entry)
    return {name: value for name, _, value in pairs}, str(path)


def _of_file(looker: FactReader, path: Path) -> Iterator[tuple[str, Seen[str]]]:
    text = looker.text(path)
    for number, line in enumerate((text or "").splitlines(), start=1):
        name, equals, value = line.partition("=")
        if equals and name.strip().startswith("NCCL_"):
            yield name.strip(), Seen(value.strip(), f"{path}:{number}")
