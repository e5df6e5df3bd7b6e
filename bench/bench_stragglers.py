"""Compares the verdict of `pacecar analyze` with the known stragglers of three real jobs.

The jobs are those of ByteDance's StragglerAnalysis: AR has one slowed worker, ST a last pipeline stage with more work,
SE sequences of different lengths and a slightly longer last stage.  Their tables are not part of pacecar:

    git clone https://github.com/ByteDance-Seed/StragglerAnalysis
    pip install pyarrow
    python bench/bench_stragglers.py StragglerAnalysis/data

Each table becomes one trace per worker (`straggler_traces`), which the command analyzes.  Beside it is the answer of
their simulator (`mw-*.json` next to the tables): a replayed step, and one with every operation at the mean of its kind,
which removes all causes at once.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, it finds its own folder only
from bench.straggler_traces import Operation, Rows, documents

JOBS = {
    "AR": "one worker is slow",
    "ST": "the last stage has more work",
    "SE": "sequences differ in length; the last stage has more work",
}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, help="the folder with trace-AR.parquet and the others")
    parser.add_argument("--steps", type=int, default=8, help="of each job, from its first on")
    parser.add_argument("--rows", choices=[*Rows], default=Rows.ALL, help="that the traces have; device: no launches")
    parser.add_argument("--jobs", nargs="+", choices=[*JOBS], default=[*JOBS])
    args = parser.parse_args(words)
    for job in args.jobs:
        path = args.data / f"trace-{job}.parquet"
        if not path.is_file():
            parser.error(f"{path} is not there: clone github.com/ByteDance-Seed/StragglerAnalysis and name its data/")
        with tempfile.TemporaryDirectory() as folder:
            stages = _write(Path(folder), _operations(path, args.steps, parser), Rows(args.rows))
            found = _analyzed(Path(folder))
        sys.stdout.write("\n".join(_lines(job, found, stages, args.data)) + "\n\n")
        sys.stdout.flush()


def _operations(path: Path, steps: int, parser: argparse.ArgumentParser) -> list[Operation]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        parser.error("reading the tables needs pyarrow: pip install pyarrow")
    columns = ["dp_rank", "stage", "step", "optype", "start_ts", "duration"]
    table = parquet.read_table(path, columns=columns).to_pydict()
    chosen = set(sorted(set(table["step"]))[:steps])
    rows = zip(*(table[column] for column in columns), strict=True)
    return [
        Operation(replica, stage, step, kind, round(1e9 * start), round(1e9 * duration))
        for replica, stage, step, kind, start, duration in rows
        if step in chosen
    ]


def _write(folder: Path, operations: list[Operation], rows: Rows) -> int:
    """Write the traces, and return how many stages there are."""
    for rank, document in documents(operations, rows):
        (folder / f"rank{rank}.pt.trace.json.gz").write_bytes(gzip.compress(document.encode(), 1))
    return 1 + max(one.stage for one in operations)


def _analyzed(folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "pacecar", "analyze", str(folder), "--json"]
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=root)
    job: dict[str, Any] = json.loads(done.stdout)["job"]
    return job


def _lines(job: str, found: dict[str, Any], stages: int, data: Path) -> list[str]:
    what_if = found["what_if"]
    step_ns = what_if[0]["step_ns"] + what_if[0]["saved_ns"] if what_if else found["wall_ns"]
    lines = [
        f"{job}: {JOBS[job]}",
        f"  {len(found['ranks'])} workers, {stages} stages, a step of {step_ns / 1e9:.3f} s",
    ]
    for one in found["stragglers"]:
        ranks = one.get("ranks") or [one["rank"]]
        places = sorted({f"stage {rank % stages}" for rank in ranks})
        who = f"data-parallel rank {ranks[0] // stages}, {places[0]}" if len(ranks) == 1 else ", ".join(places)
        saved, error = one["saved_ns"], one["error_ns"]
        share = saved / step_ns
        lines.append(
            f"  named: {who}: {one['cause']}, saves {saved / 1e9:.3f} s a step ({share:.1%}), error {error / 1e9:.3f}"
        )
    if not found["stragglers"]:
        lines.append("  no rank is named")
    lines += [f"  {one['code']}: {one['message']}" for one in found["warnings"]]
    every = next((one for one in found["what_if"] if one["name"] == "straggler_median"), None)
    if every is not None:
        lines.append(f"  without all of it a step takes {every['step_ns'] / 1e9:.3f} s")
    lines.append(f"  replay is {found['replay_error_ratio']:+.2%} off")
    theirs = data / f"mw-{job}.json"
    if theirs.is_file():
        known = json.loads(theirs.read_text(encoding="utf-8"))
        lines.append(
            f"  their simulator: {known['tori']:.3f} s a step, every operation at its mean {known['tideal']:.3f} s"
        )
    return lines


if __name__ == "__main__":
    main()
