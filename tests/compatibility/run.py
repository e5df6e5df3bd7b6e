"""Runs pacecar on other versions of torch and Python, one pair at a time, and keeps what was seen in `ran/`.

    python tests/compatibility/run.py                      the versions of MINORS, and the newest on the index
    python tests/compatibility/run.py --torch "2.15.0"     these
    python tests/compatibility/run.py --python "3.12"      on python3.12 of PATH; a path names one too

A pair gets an environment of its own in the folder for temporary files: pacecar, installed from a copy of the working
tree as a user installs it, and torch when the daemon was seen to run without.  Builds for CUDA take 5 GB and more, so
the environment is deleted before the next one is made, and none is made where less than DISK_BYTES_MIN are free.  pip's
own configuration is left out: it may cap the version of torch.  Another index is given by PIP_FLAGS.  Never part of
`make test`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE))

import table  # noqa: E402  it is beside this script

MINORS = ("2.4", "2.6", "2.9", "2.11", "2.13", "2.14", "2.15")
"""The oldest that pacecar supports, some between, and the latest."""

DISK_BYTES_MIN = 15 * 10**9
"""A build for CUDA, unpacked beside its wheels."""

INSTALL_SECONDS, JOB_SECONDS, DAEMON_SECONDS = 3600.0, 300.0, 60.0

STEPS = 60

LARGE = ("gc_interval", "checkpointed_blocks", "work_share")

TURNED = ("bucket_bytes", "first_bucket_bytes", "compression", "micro_batch", "loader_workers", "loader_prefetch")


def pip_environment() -> dict[str, str]:
    return {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def interpreter(name: str) -> tuple[str, str]:
    """Return path and version of the python that `name` means: a version, a program on PATH, or a path.

    Raises:
        SystemExit: it does not run.
    """
    program = f"python{name}" if name[0].isdigit() else name
    asked = "import sys; print(sys.executable); print('%d.%d.%d' % sys.version_info[:3])"
    try:
        ran = subprocess.run([program, "-c", asked], capture_output=True, text=True, timeout=60, check=True)
        path, version = ran.stdout.split("\n")[:2]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[0]
        raise SystemExit(f"{program} does not run: {said}; name a python on PATH (3.12), or give its path") from None
    return path, version


def on_the_index(python: str = "", seconds: float = 60.0) -> list[str]:
    """Return the released versions of torch that the index has for a python, this one or a version, oldest first.

    Raises:
        RuntimeError: the index cannot be asked.
    """
    flags = os.environ.get("PIP_FLAGS", "").split() + (["--python-version", python] if python else [])
    try:
        asked = subprocess.run(
            [sys.executable, "-m", "pip", "index", "versions", "torch", *flags],
            env=pip_environment(), capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"the index cannot be asked: {error}") from error
    found = re.search(r"Available versions: (.*)", asked.stdout)
    if asked.returncode or found is None:
        last = (asked.stderr.strip().splitlines() or ["no answer"])[-1]
        raise RuntimeError(f"the index cannot be asked: {last}")
    plain = {version.strip().partition("+")[0] for version in found[1].split(",")}
    return sorted((v for v in plain if re.fullmatch(r"\d+(\.\d+)+", v)), key=table.order)


def chosen(available: Sequence[str]) -> list[str]:
    """Return the newest patch of each of MINORS, and the newest of all."""
    wanted = {table.minor(minor) for minor in MINORS} | {table.minor(available[-1])}
    newest = {table.minor(version): version for version in available}
    return [newest[minor] for minor in sorted(wanted) if minor in newest]


# --- one version ---------------------------------------------------------------------------------------------------


def environment(folder: Path, path: str) -> Path:
    """Make an environment of the python at `path` with pacecar, and without torch; return its python.

    Raises:
        RuntimeError: pacecar cannot be installed; the message is pip's last line.
        subprocess.SubprocessError: this python makes no environments.
    """
    subprocess.run([path, "-m", "venv", str(folder / "venv")], check=True, capture_output=True)
    python = folder / "venv" / "bin" / "python"
    copy = folder / "pacecar"
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    install(python, str(copy))
    return python


def install(python: Path, *what: str) -> None:
    """Install into the environment of `python`.

    Raises:
        RuntimeError: it cannot be installed; the message is pip's last line.
    """
    flags = os.environ.get("PIP_FLAGS", "").split()
    ran = subprocess.run(
        [str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir", *flags, *what],
        env=pip_environment(), cwd=python.parent, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False,
    )  # fmt: skip
    if ran.returncode:
        lines = [line for line in ran.stderr.splitlines() if line.startswith("ERROR")] or ["no reason given"]
        raise RuntimeError(f"cannot be installed: {lines[-1].removeprefix('ERROR: ')}")


def bare() -> dict[str, str]:
    """Return the environment of a job: none of pacecar's variables, one thread a rank, and deprecations are told."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PACECAR_", "PYTHON"))}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default::DeprecationWarning"}


def deprecated(said: str) -> str | None:
    """Return the first warning that python gave of pacecar's own code, or None."""
    found = re.search(r"site-packages/(pacecar/\S+:\d+: (?:\w*Deprecation|Syntax)Warning: .*)", said)
    return None if found is None else found[1].replace("/", ".")


def without_torch(python: Path, folder: Path) -> str:
    """Return the cell of an environment without torch: the daemon is scraped, and `sample` and `doctor` answer."""
    command, log = str(python.with_name("pacecar")), folder / "daemon.log"
    with (
        log.open("w") as err,
        subprocess.Popen(
            [command, "daemon", "--port", "0", "--socket", f"{folder}/socket"], cwd=folder, env=bare(), stderr=err
        ) as daemon,
    ):
        try:
            scraped = scrape(daemon, log)
        finally:
            daemon.terminate()
    said = log.read_text()
    if "pacecar_host_cpus_online" not in scraped or daemon.returncode:
        return f"failed: exit code {daemon.returncode}: {tidy((said.splitlines() or ['nothing was said'])[-1])}"
    for words in (["sample", "--json"], ["doctor", "--json", "--fail-on", "never"]):
        ran = subprocess.run(
            [command, *words], cwd=folder, env=bare(), capture_output=True, text=True, timeout=JOB_SECONDS, check=False
        )
        said += ran.stderr
        if ran.returncode or not json.loads(ran.stdout):
            return f"failed: {words[0]}: {tidy((ran.stderr.splitlines() or ['nothing was said'])[-1])}"
    warned = deprecated(said)
    return "ok" if warned is None else f"failed: {tidy(warned)}"


def scrape(daemon: subprocess.Popen[bytes], log: Path) -> str:
    """Return the metrics once the daemon has read its machine, or the last that were had within DAEMON_SECONDS."""
    text, end = "", time.monotonic() + DAEMON_SECONDS
    while "pacecar_host_cpus_online" not in text and daemon.poll() is None and time.monotonic() < end:
        time.sleep(0.2)
        serving = re.search(r"serving (http://\S+/metrics)", log.read_text())
        if serving is not None:
            with urllib.request.urlopen(serving[1], timeout=DAEMON_SECONDS) as answer:
                text = answer.read().decode()
    return text


def ranks(python: Path, folder: Path, jobs: Sequence[tuple[str, dict[str, Any]]], *, world: int) -> dict[str, Any]:
    """Run `jobs` one after the other on `world` processes; return rank 0's last answer, or how it ended."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        started = [
            subprocess.Popen(
                [str(python), str(HERE / "job.py"), json.dumps(jobs)], cwd=place, text=True,
                env=bare() | {"RANK": str(rank), "WORLD_SIZE": str(world), "STORE": f"{place}/store", "TMPDIR": place},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for rank in range(world)
        ]  # fmt: skip
        outs = []
        try:
            for process in started:
                out, err = process.communicate(timeout=JOB_SECONDS)
                outs += [(out, err, process.returncode)]
        except subprocess.TimeoutExpired:
            return {"raised": f"it did not end within {JOB_SECONDS:.0f} s"}
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                    process.communicate()
    out, err, code = outs[0]
    answers = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    if len(answers) < len(jobs):
        return {"raised": f"exit code {code}: {(err.strip().splitlines() or ['nothing was said'])[-1]}"}
    warned = deprecated("\n".join(err for _, err, _ in outs))
    if warned is not None:
        return {"raised": warned}
    last: dict[str, Any] = answers[-1]
    if len(answers) > 1:
        last["others"] = answers[:-1]
    return last


def failed(answer: dict[str, Any]) -> str | None:
    """Return the cell of a job that did not come through, or None."""
    reason = answer.get("raised") or answer.get("inert")
    return None if reason is None else f"failed: {tidy(str(reason))}"


def tidy(text: str) -> str:
    """Return one line of bounded length that a table can hold, without paths of this machine."""
    return re.sub(r"(/[\w.+-]+){2,}", "...", " ".join(text.split())).replace("|", "/")[:200]


def knob_cell(answer: dict[str, Any], knob: str) -> str:
    """Return the cell of one knob."""
    ended = failed(answer)
    if ended is not None:
        return ended
    if knob in answer["turned"]:
        return "ok"
    if knob in answer["refused"]:
        return f"refused: {tidy(answer['refused'][knob])}"
    return f"failed: it was not turned ({tidy(str(answer.get('status')))})"


def measured(python: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the cells of one process."""
    jobs = [("plain", {"steps": STEPS, "pace": pace, "trace": pace}) for pace in (False, True)]
    answer = ranks(python, folder, jobs, world=1)
    ended = failed(answer)
    if ended is not None:
        yield from ((feature, ended) for feature in ("attach", "exact window", "FLOPs", "trace"))
        return
    same = answer["losses"] == answer["others"][0]["losses"]
    whole = answer["active"] and answer["phases"] == ["backward_ns", "forward_ns", "optimizer_ns"]
    yield "attach", "ok" if same and whole else f"failed: losses the same: {same}, phases {answer['phases']}"
    said = next((tidy(line) for line in answer["lines"] if "windows" in line or "estimates" in line), "none was taken")
    yield "exact window", "ok" if answer["windows"] else f"refused: {said}"
    said = next((tidy(line) for line in answer["lines"] if "FLOPs" in line), "none were counted")
    yield "FLOPs", "ok" if answer["flops"] else f"refused: {said}"
    yield "trace", "ok" if answer["trace"].startswith("done") else tidy(answer["trace"])


def turned(python: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the cells of the knobs and of what ranks say of each other."""
    crew = ranks(python, folder, [("ddp", {"steps": STEPS, "knobs": [], "mode": "off", "crew": True})], world=2)
    off = failed(crew) or (None if crew["crew"] is None else f"refused: {tidy(crew['crew'])}")
    yield "ranks compared", off or "ok"
    answer = ranks(python, folder, [("ddp", {"steps": STEPS, "knobs": TURNED, "mode": "lossy"})], world=2)
    yield from ((knob, knob_cell(answer, knob)) for knob in TURNED)
    answer = ranks(python, folder, [("ddp", {"steps": 3 * STEPS, "knobs": LARGE, "large": True})], world=2)
    yield from ((knob, knob_cell(answer, knob)) for knob in LARGE)
    answer = ranks(python, folder, [("tokens", {"steps": STEPS})], world=2)
    yield "micro_tokens", knob_cell(answer, "micro_tokens")
    sharded = [("fsdp2", {"steps": STEPS, "pace": pace}) for pace in (False, True)]
    answer = ranks(python, folder, sharded, world=2)
    without = answer.get("others", [{}])[0]
    for knob in ("fsdp_prefetch", "fsdp_reshard"):
        if "raised" in without:
            yield (
                knob,
                f"not run: FSDP2 of this torch does not train on CPUs, without pacecar: {tidy(without['raised'])}",
            )
        elif "losses" in answer and answer["losses"] != without["losses"]:
            yield knob, "failed: the losses are others than without pacecar"
        else:
            yield knob, knob_cell(answer, knob)
    adaptive = {"steps": 3 * STEPS, "knobs": ["batch_samples"], "mode": "adaptive", "batch_samples_max": 64}
    yield "batch_samples", knob_cell(ranks(python, folder, [("ddp", adaptive)], world=2), "batch_samples")


def scripts() -> dict[str, str]:
    """Return the README's training script, long enough to be tuned, and the same without pacecar."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    script = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[0].replace("range(100)", "range(600)")
    plain = script
    for ours, theirs in (
        ("import pacecar\n", ""), ("pacer.data(loader)", "loader"), ("pacer.microbatches(batch)", "[batch]"),
        ("pacer.backward(loss)", "loss.backward()"),
    ):  # fmt: skip
        assert ours in plain, f"the README's script has no {ours!r} any more"
        plain = plain.replace(ours, theirs)
    plain = re.sub(r"with pacecar\.attach\(.*\) as pacer:", "if True:", plain)
    assert "pace" not in plain, plain
    end = "dist.destroy_process_group()"
    # The barrier: gloo may abort a process that ends while it lets go of the last work (pytorch issue 190489).
    return {
        "README script": script.replace(end, f"assert pacer.inert_because is None\ndist.barrier()\n{end}"),
        "other script under pacecar run": plain.replace(end, f"dist.barrier()\n{end}"),
    }


def launched(python: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the cells of scripts that torchrun starts, by itself and under `pacecar run`."""
    script = scripts()
    torchrun = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    watched = [str(python), "-m", "pacecar", "run", "--tune", "exact", "--", *torchrun]
    for feature, text, command in (
        ("README script", script["README script"], torchrun),
        ("README script under pacecar run", script["README script"], watched),
        ("other script under pacecar run", script["other script under pacecar run"], watched),
    ):
        yield feature, launch(folder, text, command)


def launch(folder: Path, text: str, command: Sequence[str]) -> str:
    """Run a script; return its cell: both ranks were measured, and a bucket was switched."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        (Path(place) / "train.py").write_text(text, encoding="utf-8")
        tuning = {
            # This policy always tries the next size, where ours would say that so little is not worth it.
            "PACECAR_TUNE_POLICY": "throughput-doubling", "PACECAR_TUNE_KNOBS": "bucket_bytes",
            "PACECAR_TUNE_BUCKET_BYTES_MIN": "4096", "PACECAR_TUNE_WARMUP_STEPS": "2",
            "PACECAR_TUNE_EXPLORATION_BUDGET": "1.0", "PACECAR_TUNE_REMEMBER": "false",
            "PACECAR_HOOK_OVERHEAD_BUDGET": "1.0", "PACECAR_HOOK_SOCKET": f"{place}/nobody",
            "PACECAR_HOOK_RUN_DIR": f"{place}/run",
        }  # fmt: skip
        try:
            ran = subprocess.run(
                command,
                cwd=place,
                env=bare() | tuning,
                capture_output=True,
                text=True,
                timeout=JOB_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"failed: it did not end within {JOB_SECONDS:.0f} s"
        if ran.returncode:
            said = [line for line in ran.stderr.splitlines() if "Error" in line or line.startswith("pacecar")]
            return f"failed: exit code {ran.returncode}: {tidy((said or ['nothing was said'])[0])}"
        warned = deprecated(ran.stderr)
        if warned is not None:
            return f"failed: {tidy(warned)}"
        for rank in range(2):
            log = Path(place) / "run" / f"rank{rank}.jsonl"
            kinds = [json.loads(line)["type"] for line in log.read_text().splitlines()] if log.exists() else []
            if "step" not in kinds:
                said = [line for line in ran.stderr.splitlines() if line.startswith("pacecar")]
                return f"failed: rank {rank} was not measured: {tidy((said or ['nothing was said'])[0])}"
            if "switch" not in kinds:
                return f"failed: no bucket was switched on rank {rank}"
    return "ok"


def run_version(version: str, path: str, python_version: str) -> dict[str, Any]:
    """Return the row of one version of torch on the python at `path`."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    row: dict[str, Any] = {"version": version, "python": python_version, "date": date, "cells": {}, "missing": []}
    with tempfile.TemporaryDirectory(prefix="pacecar-torch-") as place:
        folder = Path(place)
        free = shutil.disk_usage(folder).free
        if free < DISK_BYTES_MIN:
            raise SystemExit(
                f"torch {version}: {free / 1e9:.1f} GB are free where temporary files go, and"
                f" {DISK_BYTES_MIN / 1e9:.0f} GB are needed; free some, or name another folder by TMPDIR"
            )
        try:
            python = environment(folder, path)
            row["cells"]["daemon without torch"] = without_torch(python, folder)
            install(python, f"torch=={version}", "numpy<2" if table.minor(version) <= (2, 4) else "numpy")
        except (RuntimeError, subprocess.SubprocessError) as error:
            row["cells"] = dict.fromkeys(table.FEATURES, f"not run: {tidy(str(error))}") | row["cells"]
            return row
        for part in (measured, turned, launched):
            for feature, cell in part(python, folder):
                print(f"torch {version}, Python {python_version}: {feature}: {cell}", flush=True)  # noqa: T201  for minutes
                row["cells"][feature] = cell
        told = ranks(python, folder, [("internals", {})], world=2)
        row["missing"] = told.get("missing", [])
    return row


def check_oldest() -> None:
    """Raise AssertionError unless the oldest of MINORS is the oldest that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={MINORS[0]}" in project["optional-dependencies"]["torch"], "MINORS begins with the oldest torch"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--torch", default="", help="versions, separated by blanks; default: those of MINORS and the newest"
    )
    parser.add_argument(
        "--python", default="", help="pythons, separated by blanks: versions, names on PATH or paths; default: this one"
    )
    options = parser.parse_args()
    check_oldest()
    table.FOLDER.mkdir(exist_ok=True)
    for path, python in [interpreter(name) for name in options.python.split() or [sys.executable]]:
        for version in options.torch.split() or chosen(on_the_index(python)):
            row = run_version(version, path, python)
            table.file_of(row).write_text(json.dumps(row, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
