"""Runs a training script and notes at every step how pacecar's cost compares with its bound.

    watch_overhead.py FOLDER SCRIPT ARGUMENT...

Writes FOLDER/bound<rank>.json every WRITE_STEPS steps and when python ends: the highest ratio of cost to bound, where
it was, and the last figures.  Candidates of which the model expects too little are tried as well, because it is the
cost of trials that is looked at.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

from pacecar.controller.consensus.knob_switch import KnobSwitcher
from pacecar.controller.policy.candidate_selection import CandidateSelection
from pacecar.profiler.timing.overhead_budget import CREDIT_NS, OverheadBudget

WRITE_STEPS = 16
FOLDER = sys.argv[1]

torch.set_num_threads(1)
seen: dict[str, Any] = {"worst": 0.0, "steps": 0, "switches": 0}


def look(budget: OverheadBudget) -> None:
    bound_ns = budget.ratio_max * budget.wall_ns + budget.start_ns + CREDIT_NS
    seen["steps"] += 1
    if budget.cost_ns / bound_ns > seen["worst"]:
        seen.update(worst=budget.cost_ns / bound_ns, at_seconds=budget.wall_ns / 1e9, cost_ms=budget.cost_ns / 1e6)
    seen.update(
        seconds=budget.wall_ns / 1e9,
        ratio=budget.ratio,
        attach_ms=budget.start_ns / 1e6,
        windows=budget.windows,
        total_ms=budget.cost_ns / 1e6,
    )
    if seen["steps"] % WRITE_STEPS == 0:
        write()


def write() -> None:
    Path(FOLDER, f"bound{os.environ['RANK']}.json").write_text(json.dumps(seen))


def looked_at(name: str) -> None:
    method = getattr(OverheadBudget, name)

    def watched(self: OverheadBudget, *arguments: Any, **options: Any) -> Any:
        result = method(self, *arguments, **options)
        look(self)
        return result

    setattr(OverheadBudget, name, watched)


carry_out = KnobSwitcher.carry_out


def counted(self: KnobSwitcher, proposal: Any) -> Any:
    seen["switches"] += 1
    return carry_out(self, proposal)


def main() -> None:
    script, *arguments = sys.argv[2:]
    looked_at("step")
    looked_at("passed")
    KnobSwitcher.carry_out = counted  # type: ignore[method-assign]
    CandidateSelection._is_worth = lambda *_: True  # type: ignore[method-assign]
    atexit.register(write)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
