"""Writes the table of all rules in docs/doctor.md, from the rules themselves.

`python -m pacecar.commands.doctor docs/doctor.md` writes it anew between its two marks; a test compares.
"""

from __future__ import annotations

from pathlib import Path

from .findings import Severity
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


def table() -> str:
    """Return all rules as Markdown: a heading a group, a row a rule."""
    lines = [
        f"{len(RULES)} rules: {', '.join(f'{_count(severity)} {severity}' for severity in reversed(Severity))}.",
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
                "| Finding | Severity | What it says | Needs | Source |",
                "|---|---|---|---|---|",
            ]
        said = f"**{rule.title}.** {rule.why[0].upper()}{rule.why[1:]}."
        lines.append(
            f"| `{rule.id}` | {rule.severity} | {_cell(said)} | {_needs(rule.needs)} | {_cell(str(rule.source))} |"
        )
    return "\n".join(lines).replace("\n\n\n", "\n\n")


def _count(severity: Severity) -> int:
    return sum(rule.severity is severity for rule in RULES)


def _needs(needs: str) -> str:
    return "" if needs == "machine" else f"`{needs}`"


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
