"""Makes the table of other authors' training scripts in docs/compatibility.md, of what their runs left (`public/`).

A row is one script, run bare and under `pacecar run`, once and by hand: the scripts and their data stay where they were
run, so `make compatibility` does not run them again.  Nothing in a row is typed: exit codes, losses, steps and lines
are what the runs wrote.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["section"]

FOLDER = Path(__file__).with_name("public")

WATCHED = ("run", "tuned")

HEAD = """
## Public training scripts, untouched

Scripts of other authors, run once and by hand, on CPUs with gloo and torch {torch}, at tiny sizes: *bare*, under
`pacecar run` (*run*) and, where there are ranks, under `pacecar run --tune exact` (*tuned*), there with an exploration
budget of 1, no dead band and no windows, so that a knob turns within seconds. No line of a script was changed; *beside
it* is what its environment was given: a seed, small data made for this, names of CUDA that mean the CPU. Pythons were
forked from one that had torch loaded, or *started anew* (by torchrun where there are ranks), on two cores that others
used. *Losses* are the values that every `backward` of every rank began with, but for those by which pacecar prices its
own hooks; *equal*: to the bit those of the bare run. *Steps* are those that pacecar measured on rank 0. *Turned* are
the knobs that turned while the script trained, *live* those in force then (-: none turned, in so few steps or for the
reason that the line has). What pacecar said is of the tuned run, where there is one.

| Script | What it is | Beside it | Ranks | Exit codes | Losses | Steps | Live | Turned | What pacecar said | Run on |
|---|---|---|---|---|---|---|---|---|---|---|
"""

OMITTED = """
Not in the table, because it does not run here without pacecar either: {reasons}.
"""

REASONS = (
    "torchtitan after v0.2.2 (pytorch/torchtitan@b5bcd76c: `fully_shard` of torch 2.13 refuses its parameters, which"
    " are no DTensors of the mesh that it passes)",
    "litgpt on two ranks (Lightning Fabric has its FSDP strategy for GPUs only)",
    "nanochat on two ranks (its optimizer asks for futures of collectives, which gloo does not give)",
)


def rows(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """Return all rows, by script."""
    return sorted((json.loads(path.read_text()) for path in folder.glob("*.json")), key=lambda row: str(row["script"]))


def section(folder: Path = FOLDER) -> str:
    """Return the part of the page; empty where no script was ever run."""
    found = rows(folder)
    if not found:
        return ""
    torch = ", ".join(sorted({row["torch"] for row in found}))
    return HEAD.format(torch=torch) + "".join(_line(row) for row in found) + OMITTED.format(reasons="; ".join(REASONS))


def _line(row: dict[str, Any]) -> str:
    ran = row["ran"]
    watched = [mode for mode in WATCHED if mode in ran]
    steps = ", ".join(f"{mode} {'-' if ran[mode]['steps'] is None else ran[mode]['steps']}" for mode in watched)
    said = "<br>".join(ran[watched[-1]]["said"])
    cells = [
        f"{row['script']} ({row['source']})",
        row["kind"],
        row["beside"],
        str(row["ranks"]),
        ", ".join(f"{mode} {ran[mode]['code']}" for mode in ("bare", *watched)),
        f"{ran['bare']['losses']}; " + ", ".join(f"{mode} {ran[mode]['bits']}" for mode in watched),
        steps,
        _knobs(ran, "live"),
        _knobs(ran, "turned"),
        said or "nothing",
        f"{row['date']}, pacecar {row['pacecar']}",
    ]
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |\n"


def _knobs(ran: dict[str, Any], which: str) -> str:
    """Return the knobs of the tuned run; "-" where there was none, or none turned."""
    return ", ".join(f"`{knob}`" for knob in ran.get("tuned", {which: []})[which]) or "-"
