"""Lists all rules, applies them to the facts, and sorts the findings, worst first.  Pure.

A rule that raises does not affect the others; it is reported as a bug in pacecar.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ..facts.model import NodeFacts
from ..findings import Finding, Needs, Rule
from . import contention, gpu, host, inspector, job, kernel_tcp, log, nccl, ras, script, topology

__all__ = ["RULES", "Judgement", "judge"]

RULES: tuple[Rule, ...] = (
    *gpu.RULES,
    *topology.RULES,
    *nccl.RULES,
    *log.RULES,
    *ras.RULES,
    *inspector.RULES,
    *kernel_tcp.RULES,
    *host.RULES,
    *contention.RULES,
    *job.RULES,
    *script.RULES,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Judgement:
    """All findings, worst first; the number of rules applied, and of those without input, by what they need."""

    findings: tuple[Finding, ...]
    applied: int
    not_applied: dict[Needs, int]
    failed: tuple[str, ...] = ()


def judge(facts: NodeFacts, rules: Sequence[Rule] = RULES) -> Judgement:
    """Apply `rules` to the facts."""
    given: dict[Needs, bool] = {
        "machine": True,
        "--pid": facts.process is not None,
        "--run": facts.run is not None,
        "--script": facts.script is not None,
        "--nccl-log": facts.log is not None,
    }
    findings: list[Finding] = []
    failed: list[str] = []
    not_applied: dict[Needs, int] = {}
    for rule in rules:
        if not given[rule.needs]:
            not_applied[rule.needs] = not_applied.get(rule.needs, 0) + 1
            continue
        try:
            hit = rule.check(facts)
        except Exception as error:  # noqa: BLE001  one faulty rule must not affect the others
            _log.debug("rule %s", rule.id, exc_info=True)
            failed.append(f"rule {rule.id}: {type(error).__name__}: {error} (a bug in pacecar; please report it)")
            continue
        if hit is not None:
            findings.append(
                Finding(
                    rule.id, rule.severity, rule.title, rule.why, tuple(hit.evidence), hit.remedy, hit.gain, rule.source
                )
            )
    findings.sort(key=lambda finding: (-finding.severity.rank, -(finding.gain.at_most_ratio if finding.gain else 0.0)))
    return Judgement(tuple(findings), len(rules) - sum(not_applied.values()), not_applied, tuple(failed))
