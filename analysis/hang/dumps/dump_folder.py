"""Reads a folder of flight recorder dumps, one file for each rank, or the run folder of a job that hung.

The rank is a number in the file's name, as torch and its users write it: `nccl_trace_rank_3` (torch's default),
`_dump_3` (NVIDIA's resiliency extension), `fr_rank3.json`.  A running job's own evidence, `hang-step387.json`, holds
the accounts of all ranks.  NCCL's logs may lie beside the dumps.  A file that cannot be used is named in `problems`;
the rest is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pacecar.formatting.plain_text import clean
from pacecar.nccl_debug_log import is_debug_log
from pacecar.records.hangs import HangEvidence, RankAccount

from .flight_recorder import DumpError, read_dump

__all__ = ["DumpFolder", "rank_of", "read_folder"]

FILE_BYTES_MAX = 256 * 1024 * 1024
"""A dump of torch's 2000 entries has one to three megabytes, with stacks."""

HEAD_BYTES = 4096
"""By which a log of NCCL is recognized."""

FILES_MAX = 65_536
"""More ranks than any job has."""

APART_SECONDS_MAX = 3600
"""Dumps of one hang are written within the timeout of the watchdog, ten minutes; older ones are left over."""

_RANKS = (
    re.compile(r"(?<!local)(?<!local[-_.])rank[-_.]?(\d{1,9})(?!\d)", re.IGNORECASE),
    re.compile(r"(?<!\d)(\d{1,9})(?:\.(?:json|pickle|pkl))?$"),
)
"""After the word, or else at the end."""


_EVIDENCE = re.compile(r"hang(-step\d+)?\.json")
_OF_RUNS = re.compile(r"rank\d+\.(jsonl|log)|.+-pid\d+\.log|.+\.prom")
"""What else pacecar and NCCL's Inspector write into a run folder."""


class DumpFolder(msgspec.Struct, frozen=True):
    """The accounts of a folder, by rank.

    `problems` are lines for people; `files` counts the dumps that were read; `logs` are NCCL's.
    """

    accounts: tuple[RankAccount, ...]
    world_size: int
    files: int
    problems: tuple[str, ...]
    logs: tuple[Path, ...]


def read_folder(folder: Path) -> DumpFolder:
    """Read every dump in `folder`, not in folders below it; raises OSError if it cannot be listed."""
    found: dict[int, tuple[float, Path, RankAccount]] = {}
    problems: list[str] = []
    logs: list[Path] = []
    files = 0
    for path in _files(folder, problems):
        try:
            if _is_log(path):
                logs.append(path)
                continue
            modified, accounts = _read(path, problems)
        except (DumpError, OSError) as error:
            reason = error.strerror or "cannot be read" if isinstance(error, OSError) else str(error)
            problems.append(f"{clean(path.name)}: {reason.lower() if isinstance(error, OSError) else reason}")
            continue
        files += 1
        for account in accounts:
            if account.world_size > FILES_MAX:
                problems.append(f"{clean(path.name)}: left out: no job has {account.world_size} ranks")
                continue
            other = found.get(account.rank)
            if other is not None:
                older = path if modified < other[0] else other[1]
                problems.append(f"{clean(older.name)}: another dump of rank {account.rank} is newer, and used instead")
            if other is None or modified >= other[0]:
                found[account.rank] = modified, path, account
    newest = max((modified for modified, _, _ in found.values()), default=0.0)
    for rank, (modified, path, _) in sorted(found.items()):
        if newest - modified > APART_SECONDS_MAX:
            problems.append(f"{clean(path.name)}: left out: it is over an hour older than the newest dump")
            del found[rank]
    size = max((account.world_size for _, _, account in found.values()), default=0)
    if found and not any(group.ranks for _, _, account in found.values() for group in account.groups):
        problems.append(f"no dump says how many ranks the job has: {size} are assumed")
    accounts = tuple(msgspec.structs.replace(found[rank][2], world_size=size) for rank in sorted(found))
    return DumpFolder(accounts, size, files, tuple(problems), tuple(logs))


def rank_of(name: str) -> int | None:
    """Return the rank in a file's name; None if it has none."""
    found = next((found for pattern in _RANKS if (found := pattern.findall(name))), None)
    return int(found[-1]) if found else None


def _files(folder: Path, problems: list[str]) -> Iterator[Path]:
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    if len(paths) > FILES_MAX:
        problems.append(f"{len(paths)} files, more than {FILES_MAX}: the rest is left out")
    is_run = any(_EVIDENCE.fullmatch(path.name) for path in paths)
    for path in paths[:FILES_MAX]:
        # Only files: opening a pipe would wait for a writer.
        if path.is_file() and not (is_run and _OF_RUNS.fullmatch(path.name)):
            yield path


def _is_log(path: Path) -> bool:
    with path.open("rb") as file:
        return is_debug_log(file.read(HEAD_BYTES))


def _read(path: Path, problems: list[str]) -> tuple[float, tuple[RankAccount, ...]]:
    """Return when a file was written, and what it says; add what it says with reservations to `problems`."""
    status = path.stat()
    if status.st_size > FILE_BYTES_MAX:
        raise DumpError(f"{status.st_size} bytes: dumps above {FILE_BYTES_MAX} are not read")
    with path.open("rb") as file:
        data = file.read(FILE_BYTES_MAX)
    if _EVIDENCE.fullmatch(path.name):
        return status.st_mtime, _evidence(path, data, problems)
    rank = rank_of(path.name)
    account = read_dump(data, rank or 0)
    if rank is None:
        raise DumpError("no rank in its name")
    problems += [f"{clean(path.name)}: {one}" for one in account.problems]
    return status.st_mtime, (account,)


def _evidence(path: Path, data: bytes, problems: list[str]) -> tuple[RankAccount, ...]:
    try:
        evidence = msgspec.json.decode(data, type=HangEvidence)
    except msgspec.DecodeError as error:
        raise DumpError(f"truncated, or not pacecar's evidence of a hang: {clean(error, 100)}") from None
    if evidence.left_out:
        problems.append(f"{clean(path.name)}: the accounts of {len(evidence.left_out)} ranks did not fit into it")
    return evidence.accounts
