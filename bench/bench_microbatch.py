"""What is tuning the micro-batch worth where its default is poor?  A small GPT, one sample of 32 at a time, two ranks.

Real compute and real DDP over gloo on this machine.  Arms, interleaved in rounds: the job as the script has it, and the
same under `pacecar.attach(tune="exact")` with default budgets.  Printed are, of the slower rank: the pace at the end
(median of the last fifth), the total time with exploration included, the size it ended at, trials, and how far the
losses of the arms differ.  `--json FILE` keeps it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

JOB = Path(__file__).resolve().parents[1] / "tests" / "controller" / "job_microbatch.py"
JOB_SECONDS_MAX = 1800
RANKS = 2
ARMS: dict[str, dict[str, Any]] = {"off": {"tune": "off"}, "exact": {"tune": "exact"}}


def run(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Run one job; return what each rank said."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(RANKS), "STORE": f"{folder}/store"}
        ranks = [
            subprocess.Popen(
                [sys.executable, str(JOB), json.dumps([options])],
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        said = [process.communicate(timeout=JOB_SECONDS_MAX) for process in ranks]
    for process, (_, errors) in zip(ranks, said, strict=True):
        if process.returncode:
            raise SystemExit(f"the job failed ({process.returncode}): {errors[-2000:]}")
    return [json.loads(output.strip().splitlines()[-1])[0] for output, _ in said]


def figures(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return an arm's figures: of the slower rank where ranks differ."""
    steps = [max(pair) for pair in zip(*(rank["step_ns"] for rank in ranks), strict=True)]
    return {
        "final_ms": median(steps[-(len(steps) // 5) :]) / 1e6,
        "total_seconds": sum(steps) / 1e9,
        "micro_batch": ranks[0]["knobs"].get("micro_batch"),
        "verdicts": [f"{reason} ({outcome})" for _, outcome, reason in ranks[0]["verdicts"]],
        "losses": ranks[0]["losses"],
        "models_agree": all(rank["models_agree"] for rank in ranks),
    }


def say(*lines: str) -> None:
    """Print, further lines indented."""
    sys.stdout.write("\n    ".join(lines) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run the arms and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    shape = {"steps": asked.steps, "layers": asked.layers, "batch": asked.batch, "micro_batch": asked.micro_batch}
    rounds: list[dict[str, dict[str, Any]]] = []
    for turn in range(asked.rounds):
        order = list(ARMS) if turn % 2 == 0 else list(reversed(ARMS))
        done = {arm: figures(run(shape | ARMS[arm])) for arm in order}
        rounds.append(done)
        off, exact = done["off"], done["exact"]
        apart = max(abs(a - b) / abs(a) for a, b in zip(off["losses"], exact["losses"], strict=True))
        say(
            f"round {turn + 1}: final step {off['final_ms']:.1f} -> {exact['final_ms']:.1f} ms"
            f" ({off['final_ms'] / exact['final_ms']:.2f} x), total {off['total_seconds']:.1f} ->"
            f" {exact['total_seconds']:.1f} s ({off['total_seconds'] / exact['total_seconds']:.2f} x),"
            f" micro_batch {asked.micro_batch} -> {exact['micro_batch']}, losses apart {apart:.1e},"
            f" ranks' models equal: {off['models_agree'] and exact['models_agree']}",
            *exact["verdicts"],
        )
    ratios = sorted(r["off"]["final_ms"] / r["exact"]["final_ms"] for r in rounds)
    say(f"final throughput: {median(ratios):.2f} x [{ratios[0]:.2f} .. {ratios[-1]:.2f}] at the same global batch")
    if asked.json is not None:
        asked.json.write_text(json.dumps({"shape": shape, "rounds": rounds}, indent=1))


if __name__ == "__main__":
    main()
