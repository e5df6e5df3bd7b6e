"""Reads the processors, the memory and the limits of this host, and of the process that was asked about.

Source: of the kernel Documentation/admin-guide/{pm/cpufreq,pm/intel_pstate,sysctl/kernel,cgroup-v2}.rst and
accounting/psi.rst; proc(5) and tmpfs(5).  psutil only knows the running system; a recorded one must give the same
answers.  Left out: control groups of version 1.
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
from .model import AccountedTime, Cpus, HostPressure, ProcessFacts, ProcessLimits, Seen

__all__ = ["cpus", "limits", "process"]

_CAP_IPC_LOCK = 14  # include/uapi/linux/capability.h

_TMPFS_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def cpus(looker: FactReader) -> Cpus:
    """Read what there is to know about processors and memory."""
    proc, system = looker.places.proc, looker.places.sys / "devices/system"
    model, sockets, count, is_virtual = _cpuinfo(looker, proc / "cpuinfo")
    governors: dict[str, list[int]] = {}
    where = str(system / "cpu/cpu*/cpufreq/scaling_governor")
    for name in looker.names(system / "cpu")[:CPUS_MAX]:
        if re.fullmatch(r"cpu\d+", name):
            governor = looker.word(system / "cpu" / name / "cpufreq/scaling_governor")
            if governor is not None:
                governors.setdefault(governor.value, []).append(int(name[3:]))
    nodes: dict[int, frozenset[int]] = {}
    for name in numa_nodes(looker.names(system / "node")):
        listed = looker.parsed(system / "node" / name / "cpulist", parse_cpu_list)
        if listed is not None and listed.value:  # a node of memory only has no CPUs
            nodes[int(name[4:])] = listed.value
    return Cpus(
        model=model,
        sockets=sockets,
        count=count,
        nodes=nodes,
        governors={governor: tuple(sorted(found)) for governor, found in governors.items()},
        governor_where=where,
        scaling_driver=looker.word(system / "cpu/cpu0/cpufreq/scaling_driver"),
        boost=looker.number(system / "cpu/cpufreq/boost"),
        no_turbo=looker.number(system / "cpu/intel_pstate/no_turbo"),
        numa_balancing=looker.number(proc / "sys/kernel/numa_balancing"),
        memory_bytes=_memory(looker, proc / "meminfo"),
        kernel=looker.word(proc / "sys/kernel/osrelease"),
        is_virtual=is_virtual,
        throttling=_throttling(looker),
        quota=_quota(looker),
        load=looker.parsed(proc / "loadavg", _load),
        pressure=_pressure(looker, proc / "pressure"),
    )


def _load(text: str) -> float:
    return float(text.split()[1])


def _pressure(looker: FactReader, folder: Path) -> HostPressure:
    def share(kind: str) -> Callable[[str], float]:
        return lambda text: parse_pressure_average(text, kind)

    return HostPressure(
        cpu=looker.parsed(folder / "cpu", share("some")),
        memory=looker.parsed(folder / "memory", share("full")),
        io=looker.parsed(folder / "io", share("full")),
    )


def _cpuinfo(looker: FactReader, path: Path) -> tuple[Seen[str] | None, int | None, int | None, bool | None]:
    text = looker.text(path)
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


def _memory(looker: FactReader, path: Path) -> Seen[int] | None:
    def total(text: str) -> int:
        found = rows_bytes(text, "MemTotal")
        if found is None:
            raise ValueError("no line `MemTotal: ... kB`")
        return found

    return looker.parsed(path, total)


def _groups(looker: FactReader) -> Sequence[Path]:
    """Return the folders of the process' control group (version 2) and of those above it."""
    places = looker.places
    text = looker.text(places.proc / _who(looker) / "cgroup")
    group = None if text is None else v2_group(text)
    return () if group is None else levels_of(places.sys / "fs/cgroup", "/", group)


def _quota(looker: FactReader) -> int | None:
    """Return the CPUs of the tightest `cpu.max` on the way up, at least one; None where none limits."""
    found = [looker.parsed(folder / "cpu.max", parse_cpu_max) for folder in _groups(looker)]
    limits = [seen.value for seen in found if seen is not None and seen.value is not None]
    return max(int(min(limits)), 1) if limits else None


def _throttling(looker: FactReader) -> Seen[AccountedTime] | None:
    """Return the worst throttling between the process' control group and the root."""
    worst: Seen[AccountedTime] | None = None
    for folder in _groups(looker):
        stat = looker.parsed(folder / "cpu.stat", _cpu_stat)
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


def _who(looker: FactReader) -> str:
    return "self" if looker.places.pid is None else str(looker.places.pid)


def limits(looker: FactReader) -> ProcessLimits:
    """Read the limits of the process (--pid, or this one) and the size of /dev/shm as it sees it."""
    folder = looker.places.proc / _who(looker)
    path = folder / "limits"
    text = looker.text(path) or ""
    shm, missing = _shared_memory(looker, folder / "mounts")
    return ProcessLimits(
        files=_limit(looker, path, text, "Max open files"),
        locked_bytes=_limit(looker, path, text, "Max locked memory"),
        may_lock_all=_may_lock(looker, folder / "status"),
        shared_memory_bytes=shm,
        shared_memory_missing=missing,
    )


def _limit(looker: FactReader, path: Path, text: str, name: str) -> Seen[int | None] | None:
    for number, line in enumerate(lines_of(text), start=1):
        if line.startswith(name):
            soft = line.removeprefix(name).split()[:1]
            if soft == ["unlimited"]:
                return Seen(None, f"{path}:{number}")
            if soft and soft[0].isdigit():
                return Seen(int(soft[0]), f"{path}:{number}")
            looker.note(f"{path}:{number}: no limit in {line[:80]!r}")
    return None


def _may_lock(looker: FactReader, path: Path) -> bool | None:
    found = re.search(r"^CapEff:\s*([0-9a-f]{1,16})$", looker.text(path) or "", re.MULTILINE)
    return None if found is None else bool(int(found[1], 16) >> _CAP_IPC_LOCK & 1)


def _shared_memory(looker: FactReader, path: Path) -> tuple[Seen[int] | None, Seen[str] | None]:
    """Return the size of /dev/shm, or where it is missing; both None where the mounts cannot be read."""
    text = looker.text(path)
    if text is None:
        return None, None
    found: Seen[int] | None = None
    lines = [line.split() for line in lines_of(text)]
    if not any(len(fields) >= 4 for fields in lines):
        looker.note(f"{path}: no mount in it")
        return None, None
    for number, fields in enumerate(lines, start=1):
        if len(fields) < 4 or fields[1] != "/dev/shm":
            continue
        if fields[2] != "tmpfs":
            return None, None  # a disk's folder, as large as the disk
        size = re.search(r"(?:^|,)size=(\d+)([kmgt]?)(?:,|$)", fields[3])
        if size is not None:  # the last mount on a point hides the others
            found = Seen(int(size[1]) * _TMPFS_UNITS[size[2]], f"{path}:{number}")
        else:  # half of the memory, tmpfs(5)
            memory = _memory(looker, looker.places.proc / "meminfo")
            found = (
                None if memory is None else Seen(memory.value // 2, f"{path}:{number} (no size: half of the memory)")
            )
            if found is None:
                return None, None
    return (found, None) if found is not None else (None, Seen("no mount of /dev/shm", str(path)))


def process(looker: FactReader) -> ProcessFacts | None:
    """Read where the process that was asked about may run; None where nobody asked."""
    pid = looker.places.pid
    if pid is None:
        return None

    def allowed(text: str) -> frozenset[int]:
        found = row(text, "Cpus_allowed_list:")
        if not found:
            raise ValueError("no line Cpus_allowed_list")
        return parse_cpu_list(found[0])

    return ProcessFacts(pid, cpus=looker.parsed(looker.places.proc / str(pid) / "status", allowed))
