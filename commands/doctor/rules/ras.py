"""Rules for the NCCL job that runs on this machine, by NCCL's own RAS service (`pacecar.nccl_ras`).

RAS numbers ranks within a communicator, so a finding names the host and the process.
"""

from __future__ import annotations

from pacecar.nccl_ras import RasFinding, some_of

from ..facts.evidence import FindingEvidence
from ..facts.model import NodeFacts
from ..findings import Hit, Rule, Severity
from ..sources import NCCL_RAS

__all__ = ["RULES"]

WHERE = "NCCL's RAS, asked twice"


def _missing(facts: NodeFacts) -> Hit | None:
    found = [one for one in facts.ras or () if one.missing]
    if not found:
        return None
    evidence = [
        FindingEvidence(
            str(one),
            some_of(
                [f"{one.rank_words(rank.rank)} ({'given up' if rank.is_dead else 'silent'})" for rank in one.missing]
            ),
            WHERE,
        )
        for one in found
    ]
    return Hit(evidence, _stack(found[0], found[0].missing[0].rank))


def _behind(facts: NodeFacts) -> Hit | None:
    found = [one for one in facts.ras or () if one.behind]
    if not found:
        return None
    evidence = [
        FindingEvidence(
            str(one),
            some_of(
                [f"{one.rank_words(rank)} launched {count:,} of {one.most:,}" for rank, count in one.behind.items()]
            ),
            WHERE,
        )
        for one in found
    ]
    return Hit(evidence, _stack(found[0], min(found[0].behind, key=lambda rank: found[0].behind[rank])))


def _stack(one: RasFinding, rank: int) -> str:
    host, pid = one.pids[rank]
    if pid <= 0:
        return "ncclras -v    # all that NCCL knows of the job's processes"
    return f"py-spy dump --pid {pid}    # on {host}: where it is"


RULES = (
    Rule("ras-missing", Severity.CRITICAL, "Ranks of the running NCCL job do not answer",
         "a process that ended, is stopped, or lost its network leaves the others waiting", "machine",
         NCCL_RAS.at("Understanding RAS output"), _missing),
    Rule("ras-behind", Severity.WARNING, "Ranks of the running NCCL job launched fewer collectives and stand still",
         "others may wait for them; a rank that loads data or saves a checkpoint looks the same for a while", "machine",
         NCCL_RAS.at("Understanding RAS output"), _behind),
)  # fmt: skip
