"""Makes tables of what tests found: all of them in docs/measurements/gpu.md, a line for each part in docs/limits.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["FINDINGS", "write_pages"]

FINDINGS = "GPU_FINDINGS"
"""Environment variable: the file to which a line of JSON is added for each test, as soon as it is over.

None here may begin with PACECAR_: those are keys of pacecar's configuration.
"""

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "measurements" / "gpu.md"
LIMITS = ROOT / "docs" / "limits.md"
BEGIN, END = "<!-- findings: made by `make gpu` -->", "<!-- end of findings -->"
FIGURES_MAX = 6
CHARACTERS_MAX = 100
UNITS = {"_ms": " ms", "_us": " us", "_s": " s", "_mib": " MiB", "_bytes": " bytes", "_watts": " W"}


def write_pages(path: Path) -> None:
    """Replace the tables of both pages by those of the findings in `path`."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    machine: dict[str, str] = next((line["machine"] for line in lines if "machine" in line), {})
    findings = [line for line in lines if "machine" not in line]
    _replace(PAGE, [*_machine(machine), "", *_all(findings)])
    _replace(LIMITS, [*_machine(machine), "", *_parts(findings)])


def _replace(page: Path, lines: list[str]) -> None:
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert END in rest, f"{page} has no place for findings"
    page.write_text("\n".join((before + BEGIN, "", *lines, "", END)) + after)


def _machine(machine: dict[str, str]) -> list[str]:
    return [", ".join(f"{name} {value}" for name, value in machine.items() if name != "GPU").join(
        (f"{machine.get('GPU', 'Stand-ins for a GPU')}, ", ".")
    )]  # fmt: skip


def _parts(findings: list[dict[str, Any]]) -> Iterator[str]:
    yield "| Part of `make gpu` | Claims that held | that did not | not run |"
    yield "|---|---|---|---|"
    for part in dict.fromkeys(finding["part"] for finding in findings):
        own = [finding for finding in findings if finding["part"] == part]
        held = sum(finding["outcome"] == "held" for finding in own)
        yield f"| {part} | {held} | {_named(own, 'did not hold')} | {_named(own, 'not run')} |"


def _named(findings: list[dict[str, Any]], outcome: str) -> str:
    named = [finding["test"].removeprefix("test_") for finding in findings if finding["outcome"] == outcome]
    return ", ".join(f"`{name}`" for name in named) or "-"


def _all(findings: list[dict[str, Any]]) -> Iterator[str]:
    yield "| Part | Claim | Case | Outcome | Figures |"
    yield "|---|---|---|---|---|"
    above = ("", "")
    for finding in findings:
        case = finding["test"].removeprefix("test_")
        figures = _figures(finding["figures"]) or finding["detail"].split("\n")[0][:CHARACTERS_MAX]
        part, claim = finding["part"], finding["claim"]
        shown = ("" if part == above[0] else part, "" if (part, claim) == above else claim)
        above = (part, claim)
        cells = (*shown, f"`{case}`", finding["outcome"], figures)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _figures(figures: dict[str, Any]) -> str:
    shown = [f"{_name(name)} {_value(name, value)}" for name, value in figures.items() if _is_short(value)]
    return ", ".join(shown[:FIGURES_MAX])


def _is_short(value: object) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, str) and 0 < len(value) <= 24 and "\n" not in value)


def _name(name: str) -> str:
    unit = next((unit for unit in UNITS if name.endswith(unit)), "")
    return name.removesuffix(unit).replace("_", " ")


def _value(name: str, value: object) -> str:
    unit = next((text for suffix, text in UNITS.items() if name.endswith(suffix)), "")
    return f"{value:.4g}{unit}" if isinstance(value, float) else f"{value}{unit}"
