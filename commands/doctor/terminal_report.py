"""Draws the findings for a terminal: the machine in a few lines, then each finding with evidence, remedy and source.

The worst finding is first, the summary last, near the prompt.  Evidence that repeats (eight GPUs, one fault) is shown
once; the JSON has all of it.  Control characters in text from logs, scripts and records are escaped.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import groupby, pairwise, zip_longest
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pacecar.formatting.plain_text import escaped
from pacecar.formatting.quantities import gibibytes, gigabits, plural

from .document import counts, inventory
from .facts.evidence import FindingEvidence
from .facts.model import NodeFacts
from .findings import Finding, Severity
from .rules.registry import Judgement

__all__ = ["EVIDENCE_MAX", "picture", "render"]

EVIDENCE_MAX = 10
"""Lines of evidence per finding: a node's eight GPUs and two more values."""

ALIKE_MAX = 3
"""A value that is the same on more cards than this is shown once."""

_STYLES = {Severity.CRITICAL: "bold red", Severity.WARNING: "bold yellow", Severity.INFO: "bold cyan"}


def picture(facts: NodeFacts, judgement: Judgement) -> Group:
    """Return the whole report."""
    parts: list[RenderableType] = [_machine(facts), Text()]
    for finding in judgement.findings:
        parts += [_finding(finding), Text()]
    parts += _notes(facts, judgement)
    parts.append(_sum(judgement))
    return Group(*parts)


def _machine(facts: NodeFacts) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _lines(facts):
        table.add_row(name, Text(escaped(text)))
    return table


def _lines(facts: NodeFacts) -> Iterator[tuple[str, str]]:
    machine = inventory(facts)
    cpu = machine["cpu"]
    parts = [cpu["model"] or "processor not named", _count(cpu["cpus"], "CPU")]
    parts += [_count(cpu["sockets"], "socket"), _count(cpu["numa_nodes"], "NUMA node")]
    memory = machine["memory_bytes"]
    parts.append("" if memory is None else gibibytes(memory))
    yield facts.host or "host", ", ".join(filter(None, parts))
    versions = [
        "" if machine["kernel"] is None else f"Linux {machine['kernel']}",
        "" if machine["driver"]["version"] is None else f"driver {machine['driver']['version']}",
        "" if machine["driver"]["cuda"] is None else f"CUDA {machine['driver']['cuda']}",
        "" if machine["torch"] is None else f"torch {machine['torch']}",
    ]
    yield "software", ", ".join(filter(None, versions)) or "unknown"
    yield "GPUs", _gpus(machine["gpus"]) or f"none ({machine['driver']['absent'] or 'the driver sees none'})"
    yield "RDMA", _ports(machine["rdma"]) or "none"
    yield "network", _cards(machine["interfaces"]) or "no physical interface"
    ways = _ways(machine["topology"])
    if ways:
        yield "ways", ways


def _count(number: int | None, what: str) -> str:
    return "" if number is None else plural(number, what)


def _gpus(gpus: list[dict[str, object]]) -> str:
    def kind(gpu: dict[str, object]) -> str:
        if gpu["lost"] is not None:
            return "not answering"
        memory, links = gpu["memory_bytes"], gpu["nvlinks_up"]
        parts = [str(gpu["name"])]
        parts += [gibibytes(memory)] if isinstance(memory, int) else []
        parts += [f"capability {gpu['compute_capability']}"] if gpu["compute_capability"] else []
        parts += [f"{links} NVLinks"] if links else []
        return ", ".join(parts)

    return "; ".join(f"{len([*same])} x {name}" for name, same in groupby(sorted(map(kind, gpus))))


def _ports(ports: list[dict[str, object]]) -> str:
    def kind(port: dict[str, object]) -> str:
        rate = port["bits_per_second"]
        speed = f" {gigabits(rate)}" if isinstance(rate, int) else ""
        return f"{port['link_layer'] or 'port'}{speed} {port['state'] or ''}".strip()

    return "; ".join(f"{len([*same])} x {name}" for name, same in groupby(sorted(map(kind, ports))))


def _cards(cards: list[dict[str, object]]) -> str:
    def kind(card: dict[str, object]) -> str:
        speed = card["bits_per_second"]
        return f"{card['state']}, {gigabits(speed) if isinstance(speed, int) else 'speed not told'}"

    alike: dict[str, list[str]] = {}
    for card in cards:
        alike.setdefault(kind(card), []).append(str(card["name"]))
    return "; ".join(f"{_span(names)} {what}" for what, names in alike.items())


def _span(names: list[str]) -> str:
    """Return a few names in full, a sequence as `ib0 to ib7 (8)`, and the first of others."""
    if len(names) <= ALIKE_MAX:
        return ", ".join(names)
    if all(_follows(one, other) for one, other in pairwise(names)):
        return f"{names[0]} to {names[-1]} ({len(names)})"
    return f"{', '.join(names[:ALIKE_MAX])} and {len(names) - ALIKE_MAX} more"


def _follows(one: str, other: str) -> bool:
    """Return whether the names differ in one number, by one: `mlx5_1 port 1` follows `mlx5_0 port 1`."""
    parts = list(zip_longest(re.split(r"(\d+)", one), re.split(r"(\d+)", other), fillvalue=""))
    unequal = [(mine, theirs) for mine, theirs in parts if mine != theirs]
    return (
        len(unequal) == 1
        and all(part.isdecimal() for part in unequal[0])
        and int(unequal[0][1]) - int(unequal[0][0]) == 1
    )


def _ways(topology: dict[str, Any]) -> str:
    """Return how GPUs can communicate and, if there is a log, how they do."""
    links, pairs, rdma = topology["nvlink"], topology["p2p"], topology["rdma"]
    parts = []
    if links["gpus"]:
        down = f", {plural(links['links_down'], 'link')} down" if links["links_down"] else ""
        parts.append(f"NVLink{' over switches' if links['has_switch'] else ''} between {links['gpus']} GPUs{down}")
    if pairs["pairs"]:
        parts.append(f"P2P on {pairs['possible']} of {plural(pairs['pairs'], 'pair')}")
    if rdma["active_ports"]:
        near = Counter(found["distance"] for found in rdma["nearest_port"].values() if found is not None)
        parts += [f"nearest RDMA port of {plural(number, 'GPU')}: {apart}" for apart, number in near.items()]
        parts.append(f"GPUDirect RDMA by {rdma['gpudirect'] or 'nothing'}")
    if topology["in_use"] is not None:
        used = ", ".join(f"{name} on {plural(count, 'channel')}" for name, count in topology["in_use"].items())
        parts.append(f"NCCL's log shows {used or 'no channel'}")
    return "; ".join(parts)


def _finding(finding: Finding) -> Group:
    head = Text.assemble(
        (f"{finding.severity.upper():<8} ", _STYLES[finding.severity]),
        (finding.title, "bold"),
        (f"  {finding.id}", "dim"),
    )
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("why", Text(finding.why))
    for number, evidence in enumerate(_shown(finding.evidence)):
        table.add_row("seen" if number == 0 else "", evidence)
    if finding.gain is not None:
        table.add_row("gain", Text(f"at most {finding.gain.at_most_ratio:.0%} of the step ({finding.gain.basis})"))
    table.add_row("do", Text(escaped(finding.remedy), style="green"))
    table.add_row("source", Text(str(finding.source), style="dim"))
    return Group(head, Padding(table, (0, 0, 0, 9)))


def _shown(evidence: tuple[FindingEvidence, ...]) -> Iterator[Text]:
    alike: dict[str, list[FindingEvidence]] = {}
    for item in evidence:
        alike.setdefault(item.value, []).append(item)
    rows = [row for same in alike.values() for row in ([same] if len(same) > ALIKE_MAX else [[item] for item in same])]
    for row in rows[:EVIDENCE_MAX]:
        more = "" if len(row) == 1 else " and so on"
        what = escaped(_span([item.what for item in row]))
        place = escaped(f"  [{row[0].where}{more}]")
        yield Text.assemble(f"{what}: ", (escaped(row[0].value), "bold"), (place, "dim"))
    if len(rows) > EVIDENCE_MAX:
        yield Text(f"and {len(rows) - EVIDENCE_MAX} more (--json has all)", style="dim")


def _notes(facts: NodeFacts, judgement: Judgement) -> list[RenderableType]:
    unreadable = (*facts.unreadable, *judgement.failed)
    parts: list[RenderableType] = []
    for name, notes, style in (
        ("could not read", unreadable, "yellow"),
        ("not shown to this user", facts.limited, "dim"),
    ):
        parts += [Text(escaped(f"{name}: {note}"), style=style) for note in notes]
    return [*parts, Text()] if parts else []


def _sum(judgement: Judgement) -> Text:
    tail = f"{judgement.applied} rules applied"
    if judgement.not_applied:
        asked = ", ".join(f"{number} more with {needs}" for needs, number in judgement.not_applied.items())
        tail = f"{tail}; {asked}"
    return Text.assemble((_words(judgement), "bold" if judgement.findings else "bold green"), (f"  ({tail})", "dim"))


def _words(judgement: Judgement) -> str:
    parts = [f"{number} {name}" for name, number in counts(judgement).items() if number]
    return ", ".join(parts) if parts else "Nothing found."


def render(facts: NodeFacts, judgement: Judgement, console: Console) -> None:
    """Print the report; piped text has no trailing blanks."""
    if console.is_terminal:
        console.print(picture(facts, judgement), highlight=False)
        return
    with console.capture() as capture:
        console.print(picture(facts, judgement), highlight=False)
    console.file.write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))
