"""Chooses NCCL's algorithm, protocol and CTAs by measured times, and writes them for NCCL's example tuner plugin.

Format: plugins/tuner/example in NVIDIA/nccl, which reads up to ten fields and compares sizes as this bench counts them
(`ncclFuncMaxSendRecvCount`: the whole array).  A row stands only where a setting won for certain: its upper quartile is
below the lower one of NCCL's own choice, measured before and after all settings.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from .document import OPERATIONS, AlgorithmsBench, NetBench, Row, SettingBench, Winner

__all__ = ["DEFAULT", "NcclSetting", "SettingError", "find_winners", "parse_setting", "tuner_csv"]

DEFAULT = "default"
"""The setting under which NCCL chooses."""

_ALL_PROTOCOLS = ("ll", "ll128", "simple")
_SIMPLE = ("simple",)

ALGORITHMS = {
    "ring": ("Ring", _ALL_PROTOCOLS, OPERATIONS),
    "tree": ("Tree", _ALL_PROTOCOLS, ("all_reduce",)),
    "collnet_direct": ("CollNetDirect", _SIMPLE, OPERATIONS),
    "collnet_chain": ("CollNetChain", _SIMPLE, ("all_reduce",)),
    "nvls": ("NVLS", _SIMPLE, OPERATIONS),
    "nvls_tree": ("NVLSTree", _SIMPLE, ("all_reduce",)),
    "pat": ("PAT", _SIMPLE, ("all_gather", "reduce_scatter")),
}
"""The plugin's name -> the value of NCCL_ALGO, protocols and operations (src/init.cc and src/graph/tuning.cc)."""

_PROTOCOLS = {"ll": "LL", "ll128": "LL128", "simple": "Simple"}

CTAS_MAX = 64
"""MAXCHANNELS of NCCL (src/include/device.h)."""

_PLUGIN_OPERATIONS = {"all_reduce": "allreduce", "all_gather": "allgather", "reduce_scatter": "reducescatter"}


class SettingError(ValueError):
    """The text is not a setting; the message says what is possible."""


@dataclass(frozen=True, slots=True)
class NcclSetting:
    """What NCCL is made to use; `ctas` is None where it chooses their number."""

    algorithm: str
    protocol: str
    ctas: int | None = None

    def __str__(self) -> str:
        return f"{self.algorithm}/{self.protocol}" + ("" if self.ctas is None else f"/{self.ctas}")

    @property
    def operations(self) -> tuple[str, ...]:
        """The operations that NCCL has this algorithm for."""
        return ALGORITHMS[self.algorithm][2]

    def environment(self) -> dict[str, str]:
        """Return the variables that NCCL reads when a communicator is made."""
        made = {"NCCL_ALGO": ALGORITHMS[self.algorithm][0], "NCCL_PROTO": _PROTOCOLS[self.protocol]}
        return made if self.ctas is None else {**made, "NCCL_MIN_CTAS": str(self.ctas), "NCCL_MAX_CTAS": str(self.ctas)}


def parse_setting(text: str) -> NcclSetting:
    """Return the setting ALGORITHM/PROTOCOL or ALGORITHM/PROTOCOL/CTAS; raises SettingError."""
    algorithm, _, rest = text.strip().lower().partition("/")
    protocol, _, ctas = rest.partition("/")
    if algorithm not in ALGORITHMS:
        raise SettingError(f"{text!r}: choose the algorithm from {', '.join(ALGORITHMS)}")
    if protocol not in ALGORITHMS[algorithm][1]:
        raise SettingError(f"{text!r}: {algorithm} has the protocols {', '.join(ALGORITHMS[algorithm][1])}")
    if ctas and not (ctas.isdecimal() and 1 <= int(ctas) <= CTAS_MAX):
        raise SettingError(f"{text!r}: CTAs are a number from 1 to {CTAS_MAX}")
    return NcclSetting(algorithm, protocol, int(ctas) if ctas else None)


def find_winners(settings: Sequence[SettingBench]) -> tuple[Winner, ...]:
    """Return for each operation and size the fastest setting that beats every run of NCCL's own choice for certain."""
    own = [one.bench for one in settings if one.setting == DEFAULT and one.bench is not None]
    found = []
    for operation in OPERATIONS:
        defaults = [_rows(bench, operation) for bench in own]
        for size in sorted(set.intersection(*(set(rows) for rows in defaults)) if defaults else ()):
            base_low = min(rows[size].low_ns for rows in defaults)
            base = min(rows[size].time_ns for rows in defaults)
            base_high = max(rows[size].high_ns for rows in defaults)
            rows = {one.setting: _rows(one.bench, operation).get(size) for one in settings if one.bench is not None}
            tried = {name: row for name, row in rows.items() if row is not None and name != DEFAULT and not row.wrong}
            if not tried:
                continue
            name, best = min(tried.items(), key=lambda item: item[1].time_ns)
            if best.high_ns < base_low:
                found.append(
                    Winner(
                        operation=operation, bytes=size, setting=name, time_ns=best.time_ns, default_ns=base,
                        gain_ratio=1 - best.time_ns / base, gain_low=1 - best.high_ns / base_low,
                        gain_high=1 - best.low_ns / base_high,
                    )
                )  # fmt: skip
    return tuple(found)


def tuner_csv(result: AlgorithmsBench) -> str:
    """Return the file for NCCL_TUNER_CONFIG_FILE; comments only, if nothing won."""
    bench = next(one.bench for one in result.settings if one.bench is not None)
    nodes = len({place.host for place in bench.places})
    lines = [
        "# By pacecar bench net --algorithms, for plugins/tuner/example in NVIDIA/nccl. Its plugin.c sets",
        "# *nChannels = 1 where no row says more: make that 0, NCCL's own choice, before you build it. Then:",
        "# NCCL_TUNER_PLUGIN=/path/to/libnccl-tuner-example.so NCCL_TUNER_CONFIG_FILE=/path/to/this file",
        "# colltype,minbytes,maxbytes,algorithm,protocol,channels,nNodes,nRanks",
    ]
    for first, last, (low, high) in _ranges(result, bench):
        setting = parse_setting(first.setting)
        gains = f"{first.gain_ratio:.0%}" + ("" if last is first else f" to {last.gain_ratio:.0%}")
        lines.append(f"# {gains} less time, measured at {first.bytes} to {last.bytes} bytes")
        lines.append(
            f"{_PLUGIN_OPERATIONS[first.operation]},{low},{high},{setting.algorithm},{setting.protocol},"
            f"{-1 if setting.ctas is None else setting.ctas},{nodes},{bench.ranks}"
        )
    return "\n".join(lines) + "\n"


def _ranges(result: AlgorithmsBench, bench: NetBench) -> Iterator[tuple[Winner, Winner, tuple[int, int]]]:
    """Yield first and last winner of each run of one setting, and the bytes that it stands for.

    Between two measured sizes the border is their geometric mean; nothing is said beyond the measured ones.
    """
    for operation in OPERATIONS:
        sizes = sorted(_rows(bench, operation))
        won = {winner.bytes: winner for winner in result.winners if winner.operation == operation}
        ends = [*(math.isqrt(a * b) for a, b in pairwise(sizes)), *sizes[-1:]]
        starts = [*sizes[:1], *(end + 1 for end in ends)]
        settings = [won[size].setting if size in won else None for size in sizes]
        for setting, run in groupby(range(len(sizes)), key=settings.__getitem__):
            if setting is not None:
                indices = list(run)
                first, last = indices[0], indices[-1]
                yield won[sizes[first]], won[sizes[last]], (starts[first], ends[last])


def _rows(bench: NetBench | None, operation: str) -> dict[int, Row]:
    """Return the rows of an operation by size."""
    found = () if bench is None else bench.operations
    return {row.bytes: row for one in found if one.operation == operation for row in one.rows}
