"""Asks NCCL's RAS while a hang is looked into, and words its answer as evidence; it never changes a verdict.

RAS counts what was launched, so of a job that hangs with equal counts it says that nothing is wrong.  It is asked on a
thread of its own, since it takes many seconds where a process does not answer; a verdict does not wait for it.

Ranks of a communicator are numbered within it.  A rank whose address and pid are known is named as a rank of the job.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from pacecar.nccl_ras import RasError, RasFinding, ask_ras_twice, ras_address, some_of

__all__ = ["RasWitness", "may_have_ras", "ras_words"]

_log = logging.getLogger("pacecar")


class RasWitness:
    """Asks once, from its making on; `ranks` is (address, pid) -> rank of the job."""

    def __init__(
        self,
        ranks: Mapping[tuple[str, int], int],
        ask: Callable[[], Sequence[RasFinding] | None] = lambda: ask_ras_twice(ras_address()),
    ) -> None:
        self._ranks = ranks
        self._ask = ask
        self._words: tuple[str, ...] = ()
        self._thread = threading.Thread(target=self._run, name="pacecar-hang-ras", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether it has answered, or will not."""
        return not self._thread.is_alive()

    def take(self) -> tuple[str, ...]:
        """Return what RAS has said since the last call; nothing as long as it has not, and where there is no RAS."""
        words, self._words = self._words, ()
        return words

    def _run(self) -> None:
        try:
            found = self._ask()
        except RasError as error:
            self._words = (f"NCCL's RAS cannot be read: {error}",)
        except Exception:  # noqa: BLE001  a thread's own outer boundary; the verdict stands without it
            _log.debug("NCCL's RAS could not be asked", exc_info=True)
        else:
            self._words = () if found is None else tuple(ras_words(found, self._ranks))


def may_have_ras(backend: str | None, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a job with this backend may have RAS, which NCCL_RAS_ENABLE=0 turns off."""
    return "nccl" in (backend or "") and environ.get("NCCL_RAS_ENABLE", "1") != "0"


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
