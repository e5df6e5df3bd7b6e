"""Asks NCCL about a hang, its RAS while it is looked into and its log after the verdict, and words the answers.

They are evidence and never change a verdict: both count what was launched, so of a job that hangs with equal counts
they say that nothing is wrong.  Each is asked on a thread of its own, since RAS takes many seconds where a process does
not answer, and the file system of the log may be what the job waits for; a verdict does not wait for them.

Ranks of a communicator are numbered within it.  A rank whose process is known is named as a rank of the job.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from pacecar.nccl_debug_log import debug_files, launch_words, read_launches
from pacecar.nccl_ras import RasError, RasFinding, ask_ras_twice, ras_address, some_of

__all__ = ["LogWitness", "NcclWitness", "RasWitness", "has_nccl_log", "may_have_ras", "ras_words"]

LOG_BYTES_MAX = 64 << 20
"""Of all logs: two seconds of a processor, in a job that hangs."""

_log = logging.getLogger("pacecar")


class NcclWitness:
    """Asks once, from its making on; `speak` yields sentences."""

    def __init__(self, name: str, speak: Callable[[], Iterable[str]]) -> None:
        self._speak = speak
        self._words: tuple[str, ...] = ()
        self._thread = threading.Thread(target=self._run, name=f"pacecar-hang-{name}", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether it has answered, or will not."""
        return not self._thread.is_alive()

    def take(self) -> tuple[str, ...]:
        """Return what was said since the last call; nothing as long as it was not, and where there is nobody to ask."""
        words, self._words = self._words, ()
        return words

    def _run(self) -> None:
        try:
            self._words = tuple(self._speak())
        except Exception:  # noqa: BLE001  a thread's own outer boundary; the verdict stands without it
            _log.debug("NCCL could not be asked", exc_info=True)


class RasWitness(NcclWitness):
    """Asks RAS; `ranks` is (address, pid) -> rank of the job."""

    def __init__(
        self,
        ranks: Mapping[tuple[str, int], int],
        ask: Callable[[], Sequence[RasFinding] | None] = lambda: ask_ras_twice(ras_address()),
    ) -> None:
        super().__init__("ras", lambda: _ras_said(ask, ranks))


class LogWitness(NcclWitness):
    """Reads the logs of NCCL that this rank can see, at NCCL_DEBUG_FILE; `pids` has the pid of each rank of the job."""

    def __init__(self, pids: Sequence[int], environ: Mapping[str, str] = os.environ) -> None:
        super().__init__("log", lambda: _log_said(pids, environ.get("NCCL_DEBUG_FILE", "")))


def _ras_said(ask: Callable[[], Sequence[RasFinding] | None], ranks: Mapping[tuple[str, int], int]) -> Iterator[str]:
    try:
        found = ask()
    except RasError as error:
        yield f"NCCL's RAS cannot be read: {error}"
    else:
        yield from () if found is None else ras_words(found, ranks)


def _log_said(pids: Sequence[int], pattern: str) -> Iterator[str]:
    communicators, notes = read_launches(debug_files(pattern, frozenset(pids)), LOG_BYTES_MAX)
    once = {pid for pid, count in Counter(pids).items() if count == 1}  # hosts may share numbers
    yield from launch_words(communicators, lambda one: pids.index(one.pid) if one.pid in once else None)
    yield from notes if communicators else ()


def may_have_ras(backend: str | None, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a job with this backend may have RAS, which NCCL_RAS_ENABLE=0 turns off."""
    return "nccl" in (backend or "") and environ.get("NCCL_RAS_ENABLE", "1") != "0"


def has_nccl_log(backend: str | None, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a job with this backend may log its calls to files."""
    return "nccl" in (backend or "") and bool(environ.get("NCCL_DEBUG_FILE"))


def ras_words(findings: Sequence[RasFinding], ranks: Mapping[tuple[str, int], int]) -> Iterator[str]:
    """Yield sentences of what RAS says; `ranks` is (address, pid) -> rank of the job."""
    for one in findings:
        if one.missing:
            names = [_name(one, missing.rank, ranks) for missing in one.missing]
            yield f"NCCL's RAS, asked twice: {some_of(names)} of {one} did not answer"
        if one.behind:
            names = [f"{_name(one, rank, ranks)} only {count}" for rank, count in one.behind.items()]
            yield f"NCCL's RAS, asked twice: on {one} others launched {one.most} collectives, {some_of(names)}"
    if not findings:
        yield "NCCL's RAS sees nothing wrong, but it cannot see a hang in which all ranks launched the same collectives"


def _name(one: RasFinding, rank: int, ranks: Mapping[tuple[str, int], int]) -> str:
    of_job = ranks.get(one.pids[rank])
    return one.rank_words(rank) + ("" if of_job is None else f", which is rank {of_job} of the job,")
