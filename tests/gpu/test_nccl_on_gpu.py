"""What torch's NCCL backend tells on one GPU with one rank, and whether pacecar reads it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pacecar.records import CollectiveWindow, JobRecord, StepRecord
from tests.gpu.conftest import Figures
from tests.gpu.jobs import run_json
from tests.kit.net import free_port

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.xdist_group("nccl")]

JOB = "tests.gpu.nccl_job"
SECONDS = 75
NO_NCCL = "there is no NCCL here; the job ran with gloo"

CALLED = {"all_reduce", "all_gather", "broadcast", "all_to_all"}
"""Operations that the job calls, by the names of the product.  Gloo makes a reduce-scatter of all-reduces."""

OWN_KERNEL = {"all_reduce of averages", "all_to_all", "all_to_all by sizes"}
"""Collectives of one rank that may launch a kernel; the others are nothing or a plain copy."""


@pytest.fixture(scope="module")
def untimed() -> dict[str, Any]:
    """Return what a job with torch's own settings says."""
    return run_json(JOB, "recorder", seconds=SECONDS)


@pytest.fixture(scope="module")
def timed() -> dict[str, Any]:
    """Return the same with torch's timing of collectives, and NCCL's RAS at another port."""
    environ = {"TORCH_NCCL_ENABLE_TIMING": "1", "NCCL_RAS_ADDR": f"127.0.0.1:{free_port()}"}
    return run_json(JOB, "recorder", seconds=SECONDS, environ=environ)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory, is_real: bool) -> tuple[dict[str, Any], Path]:
    """Return what profiled steps and collectives show, and the run folder."""
    folder = tmp_path_factory.mktemp("nccl")
    steps = "60" if is_real else "20"
    return run_json(JOB, "windows", "--folder", str(folder), "--steps", steps, seconds=SECONDS), folder


def table(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each dump."""
    shown = ("is_there", "error", "version", "bytes", "took_ms", "entries", "timed", "states")
    return [{"dump": name} | {key: said.get(key) for key in shown} for name, said in found["dumps"].items()]


@pytest.mark.parametrize("timing", ["untimed", "timed"])
def test_dumps(timing: str, request: pytest.FixtureRequest, is_real: bool, figures: Figures) -> None:
    """NCCL's flight recorder holds every collective, with durations where TORCH_NCCL_ENABLE_TIMING is set."""
    found: dict[str, Any] = request.getfixturevalue(timing)
    dumps = found["dumps"]
    figures(**{key: found[key] for key in ("torch", "nccl", "failed", "side_failed")}, dumps=table(found))
    for name, said in dumps.items():
        for key in ("keys", "entry_keys", "pg_config", "pg_status", "names", "first", "last", "doc"):
            figures(**{f"{name.strip('_')}_{key}": said.get(key)})
    assert not found["side_failed"]
    if not is_real:
        assert dumps["_dump_fr_trace_json"]["entries"]
        pytest.skip(NO_NCCL)
    nccl = dumps["_dump_nccl_trace_json"]
    assert nccl["entries"] >= len(CALLED)
    assert dumps["_dump_nccl_trace"]["entries"] == nccl["entries"]
    assert bool(nccl["timed"]) == (timing == "timed")


@pytest.mark.parametrize("timing", ["untimed", "timed"])
def test_reader(timing: str, request: pytest.FixtureRequest, is_real: bool, figures: Figures) -> None:
    """Pacecar names each collective of the dumps of NCCL and gloo, with its number, and says that it is completed."""
    found: dict[str, Any] = request.getfixturevalue(timing)
    json_dumps = {name: said for name, said in found["dumps"].items() if name.endswith("_json") and said.get("entries")}
    figures(product=found["product"], **{name.strip("_"): said["described"] for name, said in json_dumps.items()})
    assert json_dumps
    seen = {operation for said in json_dumps.values() for operation in said["operations"]}
    assert seen >= CALLED
    for said in json_dumps.values():
        assert all(text is not None for text in said["described"])
        assert not is_real or all(text.endswith("completed") for text in said["described"]), said["described"]
    assert found["product"]["sequence"] >= len(CALLED)
    if not is_real:
        pytest.skip(NO_NCCL)
    assert json_dumps.keys() >= {"_dump_nccl_trace_json"}
    assert found["product"]["last_collective"] is not None


@pytest.mark.parametrize("timing", ["untimed", "timed"])
def test_under_way(timing: str, request: pytest.FixtureRequest, is_real: bool, figures: Figures) -> None:
    """While a collective waits for the device, pacecar names it, and asking whether it has ended does not block."""
    found: dict[str, Any] = request.getfixturevalue(timing)["completion"]
    figures(**found)
    assert found["is_completed"]
    if not is_real:
        pytest.skip(NO_NCCL)
    assert not found["first_answer"]
    assert found["first_answer_us"] < 5000
    assert "completed" not in str(found["meanwhile"])


def test_duration(timed: dict[str, Any], untimed: dict[str, Any], is_real: bool, figures: Figures) -> None:
    """A work of NCCL tells its duration where TORCH_NCCL_ENABLE_TIMING is set, and otherwise raises."""
    said = {name: found["completion"]["_get_duration"] for name, found in (("timed", timed), ("untimed", untimed))}
    figures(**said)
    if not is_real:
        pytest.skip(NO_NCCL)
    assert float(said["timed"]) >= 0.0
    assert "Error" in said["untimed"]


@pytest.mark.parametrize("timing", ["untimed", "timed"])
def test_ras(timing: str, request: pytest.FixtureRequest, is_real: bool, figures: Figures) -> None:
    """NCCL's RAS answers on loopback, at its own port and at the one in NCCL_RAS_ADDR."""
    found: dict[str, Any] = request.getfixturevalue(timing)
    figures(nccl=found["nccl"], **found["ras"])
    if not is_real:
        pytest.skip(NO_NCCL)
    assert found["ras"]["answer"]


def test_inspector(is_real: bool, figures: Figures) -> None:
    """NCCL's wheel brings no profiler plugin, so nothing of its Inspector can be read without building it."""
    spec = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    folders = [Path(place) for place in spec.submodule_search_locations or ()] if spec is not None else []
    folders.append(Path(torch.__file__).parent)
    files = sorted(
        str(path.relative_to(folder.parent))
        for folder in folders
        for path in (*folder.glob("lib/*.so*"), *folder.glob("bin/*"))
        if "nccl" in str(path.relative_to(folder.parent))
    )
    figures(is_there=spec is not None, files=files)
    if spec is None:
        pytest.skip("the wheel of NCCL is not installed here")
    assert not [file for file in files if "profiler" in file or "inspector" in file]


# --- the profiler's rows --------------------------------------------------------------------------


def skip_without_kernel(found: dict[str, Any]) -> None:
    """Skip where one rank alone makes NCCL launch nothing by which it could be known."""
    if not any("nccl" in name.lower() for name in found["trace_kernels"]):
        pytest.skip("no kernel of NCCL ran in a group of one rank")


@pytest.mark.slow
def test_rows(profiled: tuple[dict[str, Any], Path], is_real: bool, figures: Figures) -> None:
    """In a window of pacecar's what a collective of NCCL launches is called communication, and nothing else of it."""
    found = profiled[0]
    rows = [
        {"what": what, **{key: row[key] for key in ("type", "name", "us", "linked", "kind", "operation")}}
        for what, window in found["windows"].items()
        for row in window["device_rows"]
    ]
    figures(
        rows=rows,
        sums=[{"what": what, **one} for what, window in found["windows"].items() for one in window["sums"]],
        windows=[
            {"what": what, "rows": window["rows"], "row_class": window["row_class"], "calls": len(window["calls"]),
             **{f"{kind.lower()}_us": us for kind, us in window["work_us"].items()}}
            for what, window in found["windows"].items()
        ],
        call=next((call for window in found["windows"].values() for call in window["calls"]), None),
        said=next((row["said"] for window in found["windows"].values() for row in window["device_rows"]), None),
        failed=found["failed"],
    )  # fmt: skip
    assert found["windows"]["ddp step"]["rows"]
    if not is_real:
        assert found["windows"]["ddp step"]["sums"][0]["operation"] == "all_reduce"
        pytest.skip(NO_NCCL)
    skip_without_kernel(found)
    for row in rows:
        is_known = "nccl" in row["name"].lower() or row["linked"] == "record_param_comms"
        if row["what"] in OWN_KERNEL and row["type"] == "kernel" and is_known:
            assert row["kind"] == "COMMUNICATION", row
        if row["what"] == "ddp step" and not is_known:
            assert row["kind"] != "COMMUNICATION", row


def test_sizes(profiled: tuple[dict[str, Any], Path], is_real: bool, figures: Figures) -> None:
    """A window's sum of NCCL's all-to-all says how many bytes it moved."""
    windows = [window for what, window in profiled[0]["windows"].items() if what in OWN_KERNEL]
    sums = [one for window in windows for one in window["sums"]]
    figures(sums=sums, row_class=windows[0]["row_class"])
    if not is_real:
        pytest.skip(NO_NCCL)
    if windows[0]["row_class"] == "_KinetoEventRow":
        pytest.skip("rows of this torch have no link to what says the size (torch < 2.13)")
    assert any(one["operation"] == "all_to_all" and one["bytes"] == 4 * (1 << 16) for one in sums), sums


@pytest.mark.slow
def test_trace(profiled: tuple[dict[str, Any], Path], is_real: bool, figures: Figures) -> None:
    """`pacecar analyze` finds NCCL's kernels in a trace of torch.profiler, with operation, size and group."""
    found = profiled[0]
    figures(told=found["told"], kernels=found["trace_kernels"])
    ended = subprocess.run(
        [sys.executable, "-m", "pacecar", "analyze", "--json", found["trace"]],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    figures(exit_code=ended.returncode, stderr=ended.stderr[-500:])
    assert ended.returncode == 0, ended.stderr[-1500:]
    document = json.loads(ended.stdout)
    collectives = [one for trace in document["traces"] for one in trace["collectives"]]
    figures(collectives=collectives, ledger=document["traces"][0].get("ledger"))
    if not is_real:
        pytest.skip(NO_NCCL)
    skip_without_kernel(found)
    assert any(one["operation"] == "all_to_all" for one in collectives)


def test_attached(profiled: tuple[dict[str, Any], Path], is_real: bool, figures: Figures) -> None:
    """Exact steps of a job with NCCL hold communication, and a record of its collectives by operation."""
    found, folder = profiled
    figures(inert_because=found["inert_because"])
    assert found["inert_because"] is None
    decoder = msgspec.json.Decoder(JobRecord)
    records = [decoder.decode(line) for line in (folder / "rank0.jsonl").read_bytes().splitlines()]
    exact = [record for record in records if isinstance(record, StepRecord) and record.source == "exact"]
    told = [record for record in records if isinstance(record, CollectiveWindow)]
    figures(
        exact_steps=len(exact),
        uncalibrated=[record.uncalibrated for record in records if isinstance(record, StepRecord)][-1],
        ledgers=[
            {"step": record.step, "wall_ms": record.wall_ns / 1e6, "compute_ms": record.ledger.compute_ns / 1e6,
             "exposed_communication_ms": record.ledger.exposed_communication_ns / 1e6,
             "exposed_copy_ms": record.ledger.exposed_copy_ns / 1e6} for record in exact[-4:]
        ],
        sums=[{"step": one.step, **msgspec.to_builtins(each)} for one in told[-3:] for each in one.sums],
    )  # fmt: skip
    assert exact
    assert told
    if not is_real:
        pytest.skip(NO_NCCL)
    skip_without_kernel(found)
    assert exact[-1].ledger.exposed_communication_ns > 0
    # Without the link (torch < 2.13) the kernel's name says how it is done, and not what.
    assert any(each.operation in ("all_to_all", "send_recv") for one in told for each in one.sums)
