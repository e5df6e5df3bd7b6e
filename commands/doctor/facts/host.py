"""Reads the processors, memory and limits of this host and of a given process.

Source: the kernel's Documentation/admin-guide/{pm/cpufreq,pm/intel_pstate,sysctl/kernel,cgroup-v2}.rst and
accounting/psi.rst; proc(5) and tmpfs(5).  psutil cannot read a recorded system.  Left out: cgroups v1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from pacecar.kernel_files.cgroups import levels_of, parse_cpu_max, parse_flat_line, v2_group
from pacecar.kernel_files.memory import rows_bytes
from pacecar.kernel_files.processors import CPUS_MAX, numa_nodes, parse_cpu_list, parse_pressure_average
from pacecar.kernel_files.reader import lines_of, row

from ..host_access import FactReader
from .model import AccountedTime, Cpus, HostPressureFacts, ProcessFacts, ProcessLimits, Seen

__all__ = ["cpus", "limits", "process"]

_CAP_IPC_LOCK = 14  # include/uapi/linux/capability.h

_TMPFS_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def cpus(reader: FactReader) -> Cpus:
    """Read the processors and the memory."""
    proc, system = reader.access.proc, reader.access.sys / "devices/system"
    model, sockets, count, is_virtual = _cpuinfo(reader, proc / "cpuinfo")
    governors: dict[str, list[int]] = {}
    where = str(system / "cpu/cpu*/cpufreq/scaling_governor")
    for name in reader.names(system / "cpu")[:CPUS_MAX]:
        if re.fullmatch(r"cpu\d+", name):
            governor = reader.word(system / "cpu" / name / "cpufreq/scaling_governor")
            if governor is not None:
                governors.setdefault(governor.value, []).append(int(name[3:]))
    nodes: dict[int, frozenset[int]] = {}
    for name in numa_nodes(reader.names(system / "node")):
        listed = reader.parsed(system / "node" / name / "cpulist", parse_cpu_list)
        if listed is not None and listed.value:  # a node of memory only has no CPUs
            nodes[int(name[4:])] = listed.value
    return Cpus(
        model=model,
        sockets=sockets,
        count=count,
        nodes=nodes,
        governors={governor: tuple(sorted(found)) for governor, found in governors.items()},
        governor_where=where,
        scaling_driver=reader.word(system / "cpu/cpu0/cpufreq/scaling_driver"),
        boost=reader.number(system / "cpu/cpufreq/boost"),
        no_turbo=reader.number(system / "cpu/intel_pstate/no_turbo"),
        numa_balancing=reader.number(proc / "sys/kernel/numa_balancing"),
        memory_bytes=_memory(reader, proc / "meminfo"),
        kernel=reader.word(proc / "sys/kernel/osrelease"),
        is_virtual=is_virtual,
        throttling=_throttling(reader),
        quota=_quota(reader),
        load=reader.parsed(proc / "loadavg", _load),
        pressure=_pressure(reader, proc / "pressure"),
    )


def _load(text: str) -> float:
    return float(text.split()[1])


def _pressure(reader: FactReader, folder: Path) -> HostPressureFacts:
    def share(kind: str) -> Callable[[str], float]:
        return lambda text: parse_pressure_average(text, kind)

    return HostPressureFacts(
        cpu=reader.parsed(folder / "cpu", share("some")),
        memory=reader.parsed(folder / "memory", share("full")),
        io=reader.parsed(folder / "io", share("full")),
    )


def _cpuinfo(reader: FactReader, path: Path) -> tuple[Seen[str] | None, int | None, int | None, bool | None]:
    text = reader.text(path)
    if text is None:
        return None, None, None, None
    values: dict[str, list[str]] = {}
    for line in lines_of(text):
        key, colon, value = line.partition(":")
        if colon:
            values.setdefault(key.strip(), []).append(value.strip())
    models, flags = values.get("model name"), values.get("flags")
    return (
        Seen(models[0], str(path)) if models else None,
        len(set(values["physical id"])) if "physical id" in values else None,
        len(values["processor"]) if "processor" in values else None,
        None if flags is None else "hypervisor" in flags[0].split(),
    )


def _memory(reader: FactReader, path: Path) -> Seen[int] | None:
    def total(text: str) -> int:
        found = rows_bytes(text, "MemTotal")
        if found is None:
            raise ValueError("no line `MemTotal: ... kB`")
        return found

    return reader.parsed(path, total)


def _groups(reader: FactReader) -> Sequence[Path]:
    """Return the folders of the process's control group (v2) and of its parents."""
    access = reader.access
    text = reader.text(access.proc / _proc_entry(reader) / "cgroup")
    group = None if text is None else v2_group(text)
    return () if group is None else levels_of(access.sys / "fs/cgroup", "/", group)


def _quota(reader: FactReader) -> int | None:
    """Return the CPUs that the tightest `cpu.max` from the group up allows, at least 1; None if unlimited."""
    found = [reader.parsed(folder / "cpu.max", parse_cpu_max) for folder in _groups(reader)]
    limits = [seen.value for seen in found if seen is not None and seen.value is not None]
    return max(int(min(limits)), 1) if limits else None


def _throttling(reader: FactReader) -> Seen[AccountedTime] | None:
    """Return the worst throttling between the process's control group and the root."""
    worst: Seen[AccountedTime] | None = None
    for folder in _groups(reader):
        stat = reader.parsed(folder / "cpu.stat", _cpu_stat)
        if (
            stat is not None
            and stat.value is not None
            and (worst is None or stat.value.throttled > worst.value.throttled)
        ):
            worst = Seen(stat.value, stat.where)
    return worst


def _cpu_stat(text: str) -> AccountedTime | None:
    values = dict(map(parse_flat_line, lines_of(text)))
    if "nr_periods" not in values:
        return None  # a group without the cpu controller has usage only
    return AccountedTime(values["nr_throttled"], values["nr_periods"])


def _proc_entry(reader: FactReader) -> str:
    return "self" if reader.access.pid is None else str(reader.access.pid)


def limits(reader: FactReader) -> ProcessLimits:
    """Read the limits of the process (--pid, or this one) and the size of its /dev/shm."""
    folder = reader.access.proc / _proc_entry(reader)
    path = folder / "limits"
    text = reader.text(path) or ""
    shm, missing = _shared_memory(reader, folder / "mounts")
    return ProcessLimits(
        files=_limit(reader, path, text, "Max open files"),
        locked_bytes=_limit(reader, path, text, "Max locked memory"),
        may_lock_all=_may_lock(reader, folder / "status"),
        shared_memory_bytes=shm,
        shared_memory_missing=missing,
    )


def _limit(reader: FactReader, path: Path, text: str, name: str) -> Seen[int | None] | None:
    for number, line in enumerate(lines_of(text), start=1):
        if line.startswith(name):
            soft = line.removeprefix(name).split()[:1]
            if soft == ["unlimited"]:
                return Seen(None, f"{path}:{number}")
            if soft and soft[0].isdigit():
                return Seen(int(soft[0]), f"{path}:{number}")
            reader.note(f"{path}:{number}: no limit in {line[:80]!r}")
    return None


def _may_lock(reader: FactReader, path: Path) -> bool | None:
    found = re.search(r"^CapEff:\s*([0-9a-f]{1,16})$", reader.text(path) or "", re.MULTILINE)
    return None if found is None else bool(int(found[1], 16) >> _CAP_IPC_LOCK & 1)


def _shared_memory(reader: FactReader, path: Path) -> tuple[Seen[int] | None, Seen[str] | None]:
    """Return the size of /dev/shm, or the file that shows that it is missing; both None if unknown."""
    text = reader.text(path)
    if text is None:
        return None, None
    found: Seen[int] | None = None
    lines = [line.split() for line in lines_of(text)]
    if not any(len(fields) >= 4 for fields in lines):
        reader.note(f"{path}: no mount in it")
        return None, None
    for number, fields in enumerate(lines, start=1):
        if len(fields) < 4 or fields[1] != "/dev/shm":
            continue
        if fields[2] != "tmpfs":
            return None, None  # a disk's folder, as large as the disk
        size = re.search(r"(?:^|,)size=(\d+)([kmgt]?)(?:,|$)", fields[3])
        if size is not None:  # the last mount hides earlier ones
            found = Seen(int(size[1]) * _TMPFS_UNITS[size[2]], f"{path}:{number}")
        else:  # half of the memory, tmpfs(5)
            memory = _memory(reader, reader.access.proc / "meminfo")
            found = (
                None if memory is None else Seen(memory.value // 2, f"{path}:{number} (no size: half of the memory)")
            )
            if found is None:
                return None, None
    return (found, None) if found is not None else (None, Seen("no mount of /dev/shm", str(path)))


def process(reader: FactReader) -> ProcessFacts | None:
    """Read where the given process may run; None if no process was given."""
    pid = reader.access.pid
    if pid is None:
        return None

    def allowed(text: str) -> frozenset[int]:
        found = row(text, "Cpus_allowed_list:")
        if not found:
            raise ValueError("no line Cpus_allowed_list")
        return parse_cpu_list(found[0])

    return ProcessFacts(pid, cpus=reader.parsed(reader.access.proc / str(pid) / "status", allowed))
