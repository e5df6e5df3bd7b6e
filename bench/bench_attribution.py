"""Compares `pacecar analyze` on a trace file with its peers: cost, and whether they compute the same.

The contestants are `pacecar analyze --json`, HolisticTraceAnalysis, TraceLens, and as a lower limit just decompressing
and decoding the file with a typed msgspec decoder.  Every run is its own process, contestants take turns (A B C A B C),
and a first turn is not counted.  CPU time and peak resident memory are the kernel's (wait4).  The cost of starting is
measured with a trace of two hundred events and shown separately.

    make bench-attribution
    make bench-attribution BENCH_FLAGS="--rounds 3 --files hta_nccl_data"
    python bench/bench_attribution.py --json > figures.json

getrusage(RUSAGE_CHILDREN) is wrong for memory: a child inherits its parent's peak, even over exec.  So this process
imports nothing large, and first checks that a known allocation is measured correctly.

Left out: several ranks, and traces with Python frames.  Without the real traces (`PACECAR_TRACES`, see
tests/analysis/trace/traces.py) an artificial one is used, with a message.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.attribution_figures import (  # noqa: E402  needs the root on the path
    DECODING,
    HTA,
    INSIDE,
    LIVE_AIM_US,
    OURS,
    SMALL,
    TRACELENS,
    Contestant,
    Figure,
    Run,
    Verdict,
    compared,
    costs,
    table,
    took_part,
    verdicts,
)

RUNS = Path(__file__).with_name("attribution_runs.py")
FILES = (
    "hta_df_index_resolver",
    "hta_trace_diff_test",
    "kineto_tb_nw0_1623143089861",
    "hta_nccl_data",
    "tl_b200_eager_trace",
)
JUDGED = ("hta_df_index_resolver", "artificial")
"""The trace of 216 000 events that the aims against HTA are set for, and the one that is made where it is absent."""
ARTIFICIAL_EVENTS = 200_000
SMALL_EVENTS = 200
RUN_SECONDS_MAX = 300
KNOWN = {
    (
        "hta_trace_diff_test",
        TRACELENS,
    ): "a memset is computation there and a copy here, so what runs under it is hidden",
    (
        "tl_b200_eager_trace",
        TRACELENS,
    ): "only kernels named nccl are communication there; most here are of other libraries",
    (
        "tl_b200_eager_trace",
        HTA,
    ): "only kernels named nccl are communication there, and an operator with a stream (73 us) is a kernel",
}
"""Why a peer's result is another one, where it is; pacecar.analysis.trace.steps says more."""
PROBE_BYTES = 64 << 20
PROBE_ERROR_BYTES_MAX = 4 << 20
PARENT_BYTES_MAX = 24 << 20
"""More than this and a child's peak would be this process's."""


def contestants() -> list[Contestant]:
    """Return the contestants; print which ones are missing."""
    here = sys.executable
    found = [
        Contestant(OURS, [here, "-m", "pacecar", "analyze", "--json"]),
        Contestant(INSIDE, [here, str(RUNS), "ours"]),
        Contestant(DECODING, [here, str(RUNS), "decoding"]),
    ]
    for name, folder, module, program in (
        (HTA, "hta", "hta", "hta"),
        (TRACELENS, "tracelens", "TraceLens", "tracelens"),
    ):
        python = ROOT / ".tools/attribution" / folder / "bin/python"
        # The name alone proves nothing: PyPI's `tracelens` is another project.
        probe = [str(python), "-c", f"import {module}"]
        if python.exists() and subprocess.run(probe, capture_output=True, check=False).returncode == 0:
            found.append(Contestant(name, [str(python), str(RUNS), program]))
        else:
            say(f"{name} is left out: {python.relative_to(ROOT)} has no {module}, see `make bench-attribution`")
    return found


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def run(command: Sequence[str], more: Mapping[str, str] | None = None) -> Run:
    """Run `command` to its end and return what it cost and, where it is JSON, what it said.

    `more` is added to the environment.

    Raises:
        RuntimeError: it failed or took too long.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        begun = time.monotonic()
        environ = {**os.environ, **(more or {})}
        process = subprocess.Popen(command, stdout=out, stderr=errors, stdin=subprocess.DEVNULL, cwd=ROOT, env=environ)
        killer = threading.Timer(RUN_SECONDS_MAX, process.kill)
        killer.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)
        finally:
            killer.cancel()
        wall = time.monotonic() - begun
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        errors.seek(0)
        if process.returncode:
            last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
            raise RuntimeError(f"{' '.join(command[1:4])} ended with {process.returncode}: {''.join(last)}")
        result: Run = {
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "wall_s": wall,
            "peak_bytes": usage.ru_maxrss * 1024,
        }
        return result | said(out.read())


def said(text: bytes) -> Run:
    """Return the fields of a line of JSON; of our document those of its only trace, under the bench's names."""
    document = json.loads(text or b"{}")
    if "traces" not in document:
        return dict(document)
    (trace,) = document["traces"]
    microseconds = {
        "span_us": "span_ns",
        "compute_us": "compute_ns",
        "communication_us": "communication_ns",
        "exposed_us": "exposed_communication_ns",
        "idle_us": "idle_ns",
    }
    return {name: trace[key] / 1000 for name, key in microseconds.items()} | {
        "events": trace["events"],
        "overlap_percent": None if trace["overlap_ratio"] is None else 100 * trace["overlap_ratio"],
    }


def prove_memory() -> None:
    """Exit with a message if a child's peak would not be its own."""
    # Not ru_maxrss, which may itself be inherited: what a child gets is the peak of this process's own memory.
    status = Path("/proc/self/status").read_text()
    own = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    if own > PARENT_BYTES_MAX:
        raise SystemExit(f"the bench itself has taken {own / 1e6:.0f} MB: peaks of children would not be theirs")
    # Both above this process's own, or the smaller would be measured as that.
    less, more = (run([sys.executable, "-c", f"b'1' * {n * PROBE_BYTES}"])["peak_bytes"] for n in (1, 3))
    if abs(more - less - 2 * PROBE_BYTES) > PROBE_ERROR_BYTES_MAX:
        raise SystemExit(f"{2 * PROBE_BYTES} bytes more were measured as {more - less}")


def files(wanted: Sequence[str], folder: Path) -> dict[str, Path]:
    """Return the traces by name; the artificial one, made in `folder`, where none of them is here."""
    # In a process of its own, because that module needs pytest, which would make this process large.
    ask = "from tests.analysis.trace.traces import folder; print(folder() or '')"
    here = subprocess.run(
        [sys.executable, "-c", ask], capture_output=True, text=True, cwd=ROOT, check=True
    ).stdout.strip()
    found = {}
    for name in wanted if here else ():
        place = Path(here, name)
        if place.is_dir():
            found[name] = min(place.iterdir())
        else:
            say(f"{name} is left out: it is not in the folder of real traces")
    if not found:
        say(f"no real trace is here: an artificial one of {ARTIFICIAL_EVENTS} events is made instead")
        found["artificial"] = make(folder / "artificial.json.gz", ARTIFICIAL_EVENTS)
    return found


def make(path: Path, events: int) -> Path:
    run([sys.executable, str(RUNS), "artificial", str(path), str(events)])
    return path


def measure(field_: list[Contestant], places: Mapping[str, Path], rounds: int) -> None:
    """Run all contestants in turns on every file, including the small one; skip a peer that fails on a file."""
    barred: set[tuple[str, str]] = set()
    for number in range(-1, rounds):
        for name, path in places.items():
            for contestant in field_:
                if (contestant.name, name) in barred:
                    continue
                try:
                    figures = run([*contestant.command, str(path)])
                except RuntimeError as reason:
                    if contestant.name in (OURS, INSIDE):
                        raise
                    barred.add((contestant.name, name))
                    say(f"{contestant.name} is left out on {name}: {reason}")
                    continue
                if number >= 0:
                    contestant.runs.setdefault(name, []).append(figures)
        say(f"round {number + 1} of {rounds}" if number >= 0 else "all are warm")


def agreement(field_: Mapping[str, Contestant], places: Mapping[str, Path]) -> dict[str, list[str]]:
    """Return by file whether the peers' results are ours; HTA's are compared with our `--window hta`."""
    found: dict[str, list[str]] = {}
    for name, path in places.items():
        mine = [*field_[OURS].command, str(path)]
        lines = found.setdefault(name, [])
        if HTA in field_ and took_part(field_[HTA], name):
            ours = run([*mine, "--window", "hta"])
            theirs = run([*field_[HTA].command, str(path)], {"HTA_DISABLE_NS_ROUNDING": "1"})
            lines += compared("HTA, its rounding to microseconds switched off", ours, theirs, KNOWN.get((name, HTA)))
        if TRACELENS in field_ and took_part(field_[TRACELENS], name):
            lines += compared(TRACELENS, run(mine), field_[TRACELENS].runs[name][0], KNOWN.get((name, TRACELENS)))
        elif (recorded := recorded_tracelens(path)) is not None:
            told = f"{TRACELENS}, as the traces' manifest has it"
            lines += compared(told, run(mine), recorded, KNOWN.get((name, TRACELENS)))
    return found


def recorded_tracelens(path: Path) -> Run | None:
    """Return what TraceLens said of a real trace when the manifest was made, under the bench's names."""
    manifest = path.parents[1] / "manifest.json"
    entries = json.loads(manifest.read_text()) if manifest.is_file() else []
    for entry in entries:
        said_then = entry.get("tracelens_us", {})
        if entry["file"] == f"{path.parent.name}/{path.name}" and said_then and said_then["err"] is None:
            return {
                "span_us": float(said_then["total_time"]),
                "communication_us": float(said_then["total_comm_time"]),
                "exposed_us": float(said_then["exposed_comm_time"]),
                "idle_us": float(said_then["idle_time"]),
            }
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description="attribution from trace files against its peers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--files", nargs="*", default=list(FILES), help="folders of the real traces")
    parser.add_argument("--artificial", action="store_true", help="take the artificial trace though real ones are here")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    prove_memory()
    with tempfile.TemporaryDirectory() as name:
        places = files([] if options.artificial else options.files, Path(name))
        field_ = {contestant.name: contestant for contestant in contestants()}
        measure(
            list(field_.values()), {SMALL: make(Path(name, "small.json.gz"), SMALL_EVENTS), **places}, options.rounds
        )
        agreed = agreement(field_, places)
    live = run([sys.executable, str(RUNS), "live"])
    ruled = {file: verdicts(field_, file, is_judged=file in JUDGED) for file in places}
    ruled["live"] = [
        Verdict(
            "CPU for an event of a live window: stop, read, attribute, us",
            Figure.of(live["us_per_event"]),
            LIVE_AIM_US,
            False,
        ),
        Verdict("wall for an event of a live window, us", Figure.of(live["wall_us_per_event"])),
    ]
    if options.json:
        write_json(field_, ruled, agreed, live)
    else:
        write_text(field_, ruled, agreed, live, options.rounds)


def write_text(
    field_: Mapping[str, Contestant],
    ruled: Mapping[str, Sequence[Verdict]],
    agreed: Mapping[str, Sequence[str]],
    live: Run,
    rounds: int,
) -> None:
    lines = [f"{rounds} rounds, {os.cpu_count()} processors, python {sys.version.split()[0]}"]
    lines += [f"{name}: {version}" for name, version in versions(field_).items()]
    for file in (*agreed, "live"):
        title = f"{live['events']} events, {live['version']}"
        if file != "live":
            run_ = field_[DECODING].runs[file][0]
            title = f"{run_['events']} events, {run_['bytes'] / 1e6:.1f} MB of JSON"
        lines += ["", f"{file}: {title}"]
        lines += table(list(field_.values()), file) if file != "live" else []
        lines += [verdict.text() for verdict in ruled[file]]
        lines += [f"  {line}" for line in agreed.get(file, ())]
    aims = [verdict for found in ruled.values() for verdict in found if verdict.aim is not None]
    lines += ["", f"{sum(verdict.is_met is True for verdict in aims)} of {len(aims)} aims are met"]
    sys.stdout.write("\n".join(lines) + "\n")


def write_json(
    field_: Mapping[str, Contestant],
    ruled: Mapping[str, Sequence[Verdict]],
    agreed: Mapping[str, Sequence[str]],
    live: Run,
) -> None:
    document = {
        "processors": os.cpu_count(),
        "versions": versions(field_),
        "costs": {
            file: {
                c.name: {k: asdict(v) for k, v in costs(c, file).items()} for c in field_.values() if took_part(c, file)
            }
            for file in agreed
        },
        "verdicts": {file: [asdict(v) | {"is_met": v.is_met} for v in found] for file, found in ruled.items()},
        "agreement": agreed,
        "live": live,
    }
    sys.stdout.write(json.dumps(document, indent=1) + "\n")


def versions(field_: Mapping[str, Contestant]) -> dict[str, str]:
    return {c.name: run["version"] for c in field_.values() for run in c.runs.get(SMALL, [])[:1] if "version" in run}


if __name__ == "__main__":
    main()
