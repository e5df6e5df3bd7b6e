"""What a user is told by pacecar's commands beside a training job on a GPU, and whether it is true."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.commands_job import JOB, TRACED_STEPS
from tests.gpu.conftest import Figures
from tests.gpu.daemons import running, running_daemon
from tests.gpu.nvml_driver import STANDIN_FACTS, find_driver
from tests.kit.net import free_port
from tests.kit.waiting import until

pytestmark = [pytest.mark.gpu, pytest.mark.exclusive, pytest.mark.slow]

COMMAND_SECONDS_MAX = 60.0
JOB_SECONDS_MAX = 90.0
TEXT_MAX = 4000

PACE_TOLERANCE = 0.3
MEMORY_TOLERANCE = 0.02
"""torch leaves out what the driver keeps for itself."""

BUSY_TOLERANCE = 0.02
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
SIZES = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
MILLISECONDS = {"ns": 1e-6, "us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3}


@dataclass(frozen=True)
class Said:
    """How a command ended and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """What it wrote as JSON."""
        found: dict[str, Any] = json.loads(self.out)
        return found


@dataclass(frozen=True)
class Site:
    """A job that ran beside a daemon, and what the commands said meanwhile and afterwards.

    `before` and `after` are the job's own words around `top`; `name`, `memory_bytes` and `driver` are torch's and
    nvidia-smi's of the GPU, or the stand-in's.
    """

    folder: Path
    said: dict[str, Said] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    truth: dict[str, Any] = field(default_factory=dict)


def command(environ: dict[str, str], *arguments: str | Path) -> Said:
    """Run `pacecar` as a user does."""
    done = subprocess.run(
        [sys.executable, "-m", "pacecar", *map(str, arguments)],
        env=environ, capture_output=True, text=True, timeout=COMMAND_SECONDS_MAX, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    return Said(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def site(is_real: bool, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Train beside a daemon and ask all commands."""
    folder = tmp_path_factory.mktemp("commands")
    driver = find_driver(folder, is_real=is_real)
    site, progress = Site(folder), folder / "progress.json"
    environ = {
        **driver.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "1", "RANK": "0",
        "LOCAL_RANK": "0", "PACECAR_HOOK_SOCKET": str(folder / "s"),
    }  # fmt: skip
    job = [sys.executable, "-m", "tests.gpu.commands_job", str(folder), "cuda" if is_real else "cpu"]
    with running_daemon(folder, driver.environ) as daemon, running(job, environ, folder / "job.log") as process:

        def told() -> dict[str, Any]:
            assert process.poll() is None, (folder / "job.log").read_text()[-2000:]
            found: dict[str, Any] = json.loads(progress.read_text()) if progress.exists() else {}
            return found

        least = 6.0 if is_real else 4.0
        until(lambda: told().get("seconds", 0.0) > least, "the job does not train", JOB_SECONDS_MAX, 0.2)
        site.before.update(told())
        site.said["top"] = command(driver.environ, "top", "--once", f"127.0.0.1:{daemon.port}")
        site.after.update(told())
        site.said["sample"] = command(driver.environ, "sample")
        site.said["sample --json"] = command(driver.environ, "sample", "--json")
        site.said["doctor"] = command(driver.environ, "doctor")
        site.said["doctor --json"] = command(driver.environ, "doctor", "--json")
        (folder / "stop").touch()
        process.wait(JOB_SECONDS_MAX)
        assert process.returncode == 0, (folder / "job.log").read_text()[-2000:]
    site.result.update(json.loads((folder / "result.json").read_text()))
    for name, arguments in {
        "report": ("report", folder / "run"),
        "report --markdown": ("report", folder / "run", "--markdown"),
        "report --json": ("report", folder / "run", "--json"),
        "analyze": ("analyze", folder / "trace.json"),
        "analyze --json": ("analyze", folder / "trace.json", "--json"),
    }.items():
        site.said[name] = command(driver.environ, *arguments)
    smi = driver.smi()
    site.truth.update(
        name=site.result["name"] if is_real else "Stand-in",
        memory_bytes=site.result["memory_bytes"] if is_real else 150010,
        driver=smi.text("/driver_version") if is_real else STANDIN_FACTS["/driver_version"],
    )
    return site


def texts(site: Site, *names: str) -> dict[str, Any]:
    """Return what commands said as figures."""
    found: dict[str, Any] = {}
    for name in names:
        key = name.replace(" --", "_")
        found |= {key: site.said[name].out[:TEXT_MAX], f"{key}_exit_code": site.said[name].code}
        if site.said[name].err:
            found[f"{key}_stderr"] = site.said[name].err[:TEXT_MAX]
    return found


def is_near(value: float, other: float, tolerance: float) -> bool:
    """Return whether two numbers differ by at most that share of the second."""
    return abs(value - other) <= tolerance * abs(other)


def size(text: str) -> float:
    """Return "140G" in bytes."""
    found = re.fullmatch(r"([\d.]+)([A-Z]?)B?", text)
    assert found is not None, text
    return float(found[1]) * SIZES[found[2]]


@pytest.mark.full
@pytest.mark.slow
def test_exits(site: Site, figures: Figures) -> None:
    """No command fails, and none prints a traceback."""
    figures(
        commands=[
            {"command": name, "exit_code": said.code, "stderr": said.err[:300]} for name, said in site.said.items()
        ],
        job=site.result,
    )
    assert site.result["inert_because"] is None
    logs = "".join((site.folder / name).read_text() for name in ("daemon.log", "job.log"))
    assert "Traceback" not in logs
    assert not any("Traceback" in said.out + said.err for said in site.said.values())
    codes = {name: said.code for name, said in site.said.items() if not name.startswith("doctor")}
    assert set(codes.values()) == {0}, codes


def test_sample(site: Site, figures: Figures) -> None:
    """`sample` names the GPU, its memory and its driver as torch and nvidia-smi do."""
    collectors = site.said["sample --json"].document["collectors"]
    series = {one["metric"]: one for one in collectors["gpu"]["samples"] if one["labels"].get("gpu") == "0"}
    facts, memory = series["pacecar_gpu_info"]["labels"], series["pacecar_gpu_memory_size_bytes"]["value"]
    lines = [line for line in site.said["sample"].out.splitlines() if "pacecar_gpu_" in line]
    figures(
        truth=site.truth, facts=facts, memory_bytes=memory, gpu_series=len(lines), sample="\n".join(lines)[:TEXT_MAX],
        outcomes={name: one["outcome"] for name, one in collectors.items()},
    )  # fmt: skip
    assert collectors["gpu"]["outcome"] == "ok"
    assert facts["name"] == site.truth["name"]
    assert facts["driver"] == site.truth["driver"]
    assert is_near(memory, site.truth["memory_bytes"], MEMORY_TOLERANCE)
    assert any(f'name="{site.truth["name"]}"' in line for line in lines)
    assert any("pacecar_gpu_memory_size_bytes{" in line and str(memory) in line for line in lines)


def test_doctor(site: Site, figures: Figures) -> None:
    """`doctor` names the GPU, its memory and its driver, and exits with 1 only where it warns."""
    document = site.said["doctor --json"].document
    gpus, counts = document["inventory"]["gpus"], document["counts"]
    figures(
        truth=site.truth, gpus=gpus, counts=counts, driver=document["inventory"]["driver"],
        findings=[{"id": one["id"], "severity": one["severity"]} for one in document["findings"]],
        **texts(site, "doctor"),
    )  # fmt: skip
    expected = 1 if counts["critical"] + counts["warning"] else 0
    assert [site.said[name].code for name in ("doctor", "doctor --json")] == [expected, expected]
    assert gpus[0]["name"] == site.truth["name"]
    assert is_near(gpus[0]["memory_bytes"], site.truth["memory_bytes"], MEMORY_TOLERANCE)
    assert document["inventory"]["driver"]["version"] == site.truth["driver"]
    assert str(site.truth["name"]) in site.said["doctor"].out
    assert str(site.truth["driver"]) in site.said["doctor"].out


def test_top(site: Site, is_real: bool, figures: Figures) -> None:
    """`top --once` shows the GPU, and the job at the step and pace that the job itself counts."""
    said = site.said["top"].out
    row = re.search(rf"^{JOB} +(\d+) +([\d.]+)(ns|us|µs|ms|s)\b", said, re.MULTILINE)
    gpu = re.search(r"^ *0 (.*?) +\[.*?/([\d.]+[KMGT]?)B?\]", said, re.MULTILINE)
    step = None if row is None else int(row[1])
    pace_ms = None if row is None else float(row[2]) * MILLISECONDS[row[3]]
    figures(
        truth=site.truth, job_before=site.before, job_after=site.after, step=step, pace_ms=pace_ms,
        gpu=None if gpu is None else gpu[1], memory=None if gpu is None else gpu[2], **texts(site, "top"),
    )  # fmt: skip
    assert step is not None
    assert pace_ms is not None
    # What the page shows may be a second old, and the step before the first words of the job.
    behind = 2_000 / site.before["pace_ms"] + 2
    assert site.before["steps"] - behind <= step <= site.after["steps"] + TRACED_STEPS + behind
    assert gpu is not None
    assert str(site.truth["name"]).startswith(gpu[1].rstrip("…"))
    assert is_near(size(gpu[2]), site.truth["memory_bytes"], MEMORY_TOLERANCE)
    if is_real:
        assert any(is_near(pace_ms, told["pace_ms"], PACE_TOLERANCE) for told in (site.before, site.after))


def test_report(site: Site, is_real: bool, figures: Figures) -> None:
    """`report` counts the steps of the job, and its median step is that of the job's own clock."""
    document = site.said["report --json"].document
    side, (rank,) = document["before"], document["ranks"]
    page = site.folder / "run" / "report.html"
    figures(
        job=site.result, device=document["device"], backend=document["backend"], steps=document["steps"],
        steps_compared=side["steps"], is_sampled=document["is_sampled"], mean_of_all_ms=rank["step_mean_ns"] / 1e6,
        mean_ms=side["step_mean_ns"] / 1e6, median_ms=side["step_p50_ns"] / 1e6, ledger_ns=side["ledger_ns"],
        overhead=document["overhead"], page_bytes=page.stat().st_size if page.exists() else None,
        notices=document["notices"], **texts(site, "report", "report --markdown"),
    )  # fmt: skip
    assert document["job"] == JOB
    assert page.exists()
    assert abs(document["steps"] - site.result["steps"]) <= 1
    assert rank["dropped_records"] == 0
    if is_real:  # of a job as fast as the stand-in's the files hold some steps only
        assert is_near(side["step_p50_ns"] / 1e6, site.result["median_ms"], PACE_TOLERANCE)


def union_ns(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of spans in microseconds, in nanoseconds."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total * 1e3


def test_analyze(site: Site, is_real: bool, figures: Figures) -> None:
    """`analyze` says of a trace how long the device was busy, as the union of its rows in the file says."""
    events = json.loads((site.folder / "trace.json").read_text())["traceEvents"]
    rows = [one for one in events if one.get("ph") == "X" and one.get("cat") in DEVICE_WORK]
    spans = {cat: [(one["ts"], one["ts"] + one["dur"]) for one in rows if one["cat"] == cat] for cat in DEVICE_WORK}
    (report,) = site.said["analyze --json"].document["traces"]
    busy_ns = report["span_ns"] - report["idle_ns"]
    expected_ns = union_ns([span for found in spans.values() for span in found])
    kernels_ns = union_ns(spans["kernel"])
    figures(
        busy_ms=busy_ns / 1e6 if is_real else None, union_ms=expected_ns / 1e6 if rows else None,
        kernel_union_ms=kernels_ns / 1e6 if rows else None,
        compute_and_exposed_communication_ms=(report["compute_ns"] + report["exposed_communication_ns"]) / 1e6,
        rows={cat: len(found) for cat, found in spans.items()}, steps=len(report["steps"]),
        parts_ms={key: value / 1e6 for key, value in report.items() if key.endswith("_ns") and value is not None},
        gpus=report["gpus"], warnings=report["warnings"], trace_bytes=os.path.getsize(site.folder / "trace.json"),
        **texts(site, "analyze"),
    )  # fmt: skip
    assert site.said["analyze"].out
    assert len(report["steps"]) == TRACED_STEPS
    if is_real:
        assert rows
        assert is_near(busy_ns, expected_ns, BUSY_TOLERANCE)
        assert report["gpus"] == [site.truth["name"]]
