"""Draw docs/images/doctor.svg: `PYTHONPATH=. python tests/commands/doctor/showcase.py docs/images/doctor.svg`.

The recorded 8-GPU node with four faults, its folder's name taken out of the paths.
"""

from __future__ import annotations

import dataclasses
import io
import re
import sys
import tempfile
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from pacecar.commands.doctor.rules.registry import judge
from pacecar.commands.doctor.terminal_report import picture
from tests.commands.doctor.faults import FAULTS
from tests.commands.doctor.machine import h100_node

OFFLINE = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "Fira Code", "DejaVu Sans Mono"
)
"""rich's own form would have a reader's browser fetch a font from another host."""

SHOWN = ("nccl-ib-disabled", "gpu-power-cap", "job-exposed-communication", "script-bucket-view")


def draw(path: Path) -> None:
    machine = h100_node()
    machine.log = None
    for rule in SHOWN:
        next(fault for fault in FAULTS if fault.rule == rule).plant(machine)
    with tempfile.TemporaryDirectory() as folder:
        facts = machine.collect_facts(Path(folder))
        judgement = judge(facts)
    findings = tuple(
        dataclasses.replace(
            finding,
            evidence=tuple(dataclasses.replace(e, where=_shown(e.where, folder)) for e in finding.evidence),
        )
        for finding in judgement.findings
    )
    facts = dataclasses.replace(facts, torch_version="2.9.0")
    console = Console(record=True, width=110, file=io.StringIO(), force_terminal=True)
    console.print(picture(facts, dataclasses.replace(judgement, findings=findings)), highlight=False)
    path.write_text(console.export_svg(title="pacecar doctor", code_format=OFFLINE), encoding="utf-8")


def _shown(where: str, folder: str) -> str:
    for written, shown in (("/run", "runs/latest"), ("/train.py", "train.py"), ("", "")):
        where = where.replace(f"{folder}{written}", shown)
    return where


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
