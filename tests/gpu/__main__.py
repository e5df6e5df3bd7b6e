"""Runs the parts of `make gpu` on this machine, and writes the pages that say what they found.

    python -m tests.gpu                            all parts, on a GPU, and the pages
    python -m tests.gpu --parts windows ledger     these
    python -m tests.gpu --stand-in                 all parts without a GPU, to try the tests themselves
    python -m tests.gpu --page findings.jsonl      the pages alone, from what was found elsewhere

What may run beside other tests runs first, all parts together; then each part has the machine for itself, at most
PART_SECONDS long, and all of them end within SECONDS.  A finding is written as soon as it is there, so that a part that
is killed loses only what it had not found yet.  Exit code 0 when every claim that was tried held.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# Nothing that a bare machine lacks: `missing` says what that is.
from tests.gpu.page import FINDINGS, write_pages

PARTS = ("windows", "ledger", "training", "overhead", "nvml", "nccl", "stragglers", "hangs", "commands", "knobs")
"""In the order of what is most dearly bought: a machine may be taken away before the end."""

PART_SECONDS = 175
SECONDS = 480
TORCH_MIN = (2, 9)
PYTHON_MIN = (3, 11)
MODULES = (
    "click", "hypothesis", "jinja2", "msgspec", "numpy", "prometheus_client", "psutil", "pynvml", "pytest", "rich",
    "xdist",
)  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "gpu"


def missing() -> str | None:
    """Return in one line what this machine lacks to run the parts on its GPU."""
    lacks = [name for name in (*MODULES, "pacecar", "torch") if importlib.util.find_spec(name) is None]
    if sys.version_info < PYTHON_MIN:
        return f"Python {sys.version.split()[0]}: {'.'.join(map(str, PYTHON_MIN))} or newer is needed"
    if lacks:
        return f"modules that cannot be imported: {', '.join(lacks)} (`make gpu-carry` gathers wheels)"
    import torch

    if not torch.cuda.is_available():
        reason = "no driver" if shutil.which("nvidia-smi") is None else "torch sees none"
        return f"no NVIDIA GPU: {reason} (torch {torch.__version__})"
    if tuple(int(number) for number in torch.__version__.split(".")[:2]) < TORCH_MIN:
        return f"torch {torch.__version__}: {'.'.join(map(str, TORCH_MIN))} or newer is needed"
    return None


def machine(*, is_stand_in: bool) -> dict[str, str]:
    """Return what the findings were found on."""
    import torch

    said = {"Python": platform.python_version(), "torch": torch.__version__, "kernel": platform.release()}
    if not is_stand_in:
        said |= {"GPU": "NVIDIA GPU", "CUDA": str(torch.version.cuda)}
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):  # torch would begin to use the GPU
            told = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
            said["GPU"], said["driver"] = told.splitlines()[0].split(", ")
    return {**said, "date": time.strftime("%Y-%m-%d", time.gmtime())}


def run(words: list[str], seconds: float, out: Path, name: str, environ: dict[str, str]) -> str | None:
    """Run pytest; return why it did not come to its end, None: it did."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "-W", "default",
        "--import-mode=importlib", *words,
    ]  # fmt: skip
    with (out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, **environ}, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            end(process)
            return f"it took more than {seconds:.0f} s and was ended"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return None if code in (0, 1, 5) else f"pytest's exit code was {code}: see {name}.log"  # 5: no tests


def end(process: subprocess.Popen[bytes]) -> None:
    """End pytest and what it started: jobs have sessions of their own, and would keep the GPU from the next part."""
    import psutil

    started = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGKILL)
    for one in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def main() -> int:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.page is not None:
        write_pages(options.page)
        return 0
    lacks = missing()
    if lacks is not None and not options.stand_in:
        print(f"make gpu: {lacks}; it would run {', '.join(options.parts)} in at most {SECONDS // 60} minutes")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    findings = options.out / "findings.jsonl"
    findings.unlink(missing_ok=True)
    environ = {FINDINGS: str(findings), **({"CUDA_VISIBLE_DEVICES": ""} if options.stand_in else {})}
    begun = time.monotonic()

    def left() -> float:
        return begun + SECONDS - time.monotonic()

    def note(part: str, reason: str | None) -> None:
        if reason is None:
            return
        line = {"part": part, "test": part, "claim": "What was started comes to its end.", "outcome": "did not hold",
                "detail": reason, "seconds": 0.0, "figures": {}}  # fmt: skip
        with findings.open("a") as file:
            file.write(json.dumps(line) + "\n")

    with findings.open("a") as file:
        file.write(json.dumps({"machine": machine(is_stand_in=options.stand_in)}) + "\n")
    files = {part: f"tests/gpu/test_{part}_on_gpu.py" for part in options.parts}
    processes = str(min(8, len(os.sched_getaffinity(0))))
    together = ["-n", processes, "--dist", "loadgroup", "-m", "gpu and not exclusive", *files.values()]
    note("together", run(together, min(PART_SECONDS, left()), options.out, "together", environ))
    for part, file in files.items():
        seconds = min(PART_SECONDS, left())
        if seconds < 1:
            note(part, f"the {SECONDS} s for all parts were over")
            continue
        print(f"{time.monotonic() - begun:4.0f} s  {part}", flush=True)
        note(part, run(["-m", "gpu and exclusive", file], seconds, options.out, part, environ))
    if not options.stand_in:
        write_pages(findings)
    return tell(findings, time.monotonic() - begun)


def tell(findings: Path, seconds: float) -> int:
    """Print what did not hold, and how many claims there were; return the exit code."""
    found: list[dict[str, Any]] = []
    if findings.exists():
        found = [one for one in map(json.loads, findings.read_text().splitlines()) if "machine" not in one]
    for one in found:
        if one["outcome"] == "did not hold":
            print(f"{one['part']}, {one['test']}: {one['claim']}\n    {one['detail'][:300]}")
    counts = {
        outcome: sum(one["outcome"] == outcome for one in found) for outcome in ("held", "did not hold", "not run")
    }
    print(f"{', '.join(f'{count} {outcome}' for outcome, count in counts.items())}, in {seconds:.0f} s; {findings}")
    return 0 if found and not counts["did not hold"] else 1


if __name__ == "__main__":
    sys.exit(main())
