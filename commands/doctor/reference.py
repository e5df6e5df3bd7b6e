"""Writes the table of all rules in docs/doctor.md, from the rules themselves.

`python -m pacecar.commands.doctor docs/doctor.md` writes it anew between its two marks; a test compares.
"""

from __future__ import annotations

from pathlib import Path

from .findings import FindingSource, Severity
from .rules.registry import RULES

__all__ = ["BEGIN", "END", "renew", "table"]

BEGIN = "<!-- the rules: written by python -m pacecar.commands.doctor -->"
END = "<!-- end of the rules -->"

_HEADINGS = {
    "gpu": "GPUs",
    "nic": "PCIe and RDMA",
    "pci": "PCIe and RDMA",
    "rdma": "PCIe and RDMA",
    "nccl": "NCCL",
    "log": "NCCL's log",
    "ras": "The running NCCL job",
    "inspector": "The running NCCL job",
    "net": "TCP",
    "cpu": "Host",
    "numa": "Host",
    "shm": "Host",
    "files": "Host",
    "memlock": "Host",
    "memory": "Host",
    "io": "Host",
    "job": "The job's records",
    "env": "Variables and script",
    "script": "Variables and script",
}
"""Beginning of a rule's id -> the heading that it stands under."""

_SHORT = {
    "NVIDIA, NVML API Reference Guide": "NVML",
    "NVIDIA, NCCL User Guide, Environment Variables": "NCCL",
    "NVIDIA, NCCL User Guide, Troubleshooting": "NCCL Troubleshooting",
    "PyTorch documentation": "PyTorch",
}
"""Document that many rules rest on -> what the table calls it."""


def table() -> str:
    """Return all rules as Markdown: a heading a group, a row a rule."""
    counts = ", ".join(f"{_count(severity)} {severity}" for severity in reversed(Severity))
    names = "; ".join(f"{short} is {document}" for document, short in _SHORT.items())
    lines = [
        f"{len(RULES)} rules: {counts}. In brackets: the option that a rule needs.",
        "",
        f"Sources: {names}.",
        "",
    ]
    heading = ""
    for rule in RULES:
        group = _HEADINGS[rule.id.partition("-")[0]]
        if group != heading:
            heading = group
            lines += [
                "",
                f"### {heading}",
                "",
                "| Rule | Severity | Finding | Source |",
                "|---|---|---|---|",
            ]
        said = _cell(f"{rule.title}{_needs(rule.needs)}")
        lines.append(f"| `{rule.id}` | {rule.severity} | {said} | {_cell(_source(rule.source))} |")
    return "\n".join(lines).replace("\n\n\n", "\n\n")


def _count(severity: Severity) -> int:
    return sum(rule.severity is severity for rule in RULES)


def _needs(needs: str) -> str:
    return "" if needs == "machine" else f" (`{needs}`)"


def _source(source: FindingSource) -> str:
    return f"{_SHORT.get(source.document, source.document)}: {source.section}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def renew(path: Path) -> None:
    """Write the table between its marks in `path`; raises ValueError where they are not there."""
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path}: no marks {BEGIN!r} and {END!r}")
    path.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}", encoding="utf-8")
