"""A driver that fails, lacks functions or hangs loses only its own facts; pynvml has all functions that are used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from pacecar.commands.doctor.facts.gpu import read_gpus
from pacecar.commands.doctor.host_access import FactReader, HostAccess
from pacecar.commands.doctor.rules.registry import judge
from pacecar.monitor.gpu.driver import GpuLostError, NvmlError, UnsupportedError
from tests.commands.doctor.machine import RecordedDriver, h100_node
from tests.monitor.nvml_standin.standin import Control, build, compiler

pytestmark = pytest.mark.slow

CALLS = (
    "driver_version", "cuda_version", "device", "identity", "number", "compute_capability", "peer_status", "memory",
    "fields", "processes", "sram_errors", "fabric", "link_active", "link_remote",
)  # fmt: skip


class FailingDriver(RecordedDriver):
    """Fails at the n-th call of all."""

    def __init__(self, boards, fail_at, error):
        super().__init__(boards, {}, missing=False)
        self.calls, self.fail_at, self.error = 0, fail_at, error

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name not in CALLS:
            return found

        def call(*arguments):
            self.calls += 1
            if self.calls == self.fail_at:
                raise self.error
            return found(*arguments)

        return call


def look(driver, **options):
    reader = FactReader(HostAccess(nvml=driver))
    return read_gpus(reader, **options), reader


@pytest.mark.parametrize(
    "error", [NvmlError("Unknown Error", 999), UnsupportedError("no", 3), GpuLostError("lost", 15)]
)
def test_whichever_call_fails_the_other_gpus_are_read(error):
    machine = h100_node()
    boards = machine.boards[:3]
    fail_at = 0
    while True:
        fail_at += 1
        driver = FailingDriver(boards, fail_at, error)
        gpus, reader = look(driver)
        if driver.calls < fail_at:
            break
        assert driver.stops == 1, "the library is let go of, whatever happened"
        lost = [gpu for gpu in gpus.boards if gpu.lost is not None]
        assert len(gpus.working) >= 2 or reader.unreadable
        assert len(gpus.working) + len(lost) == 3 or reader.unreadable, "a GPU that is left out is named"
        assert all(gpu.name and gpu.memory_bytes != 0 for gpu in gpus.working)
        if isinstance(error, GpuLostError):
            assert lost or reader.unreadable
        elif not isinstance(error, UnsupportedError):
            assert reader.unreadable, "an error that means nothing is never passed over"
    assert fail_at > 100


def test_an_identity_that_is_refused_costs_one_gpu_and_names_it():
    class Nameless(RecordedDriver):
        def identity(self, handle):
            if handle == 1:
                raise NvmlError("Insufficient Permissions", 4)
            return super().identity(handle)

    gpus, reader = look(Nameless(h100_node().boards, {}, missing=False))
    assert [gpu.index for gpu in gpus.working] == [0, 2, 3, 4, 5, 6, 7]
    assert any("GPU 1" in note for note in reader.unreadable)


def test_a_gpu_that_hangs_is_named_within_the_deadline_and_the_ones_before_it_are_there():
    release = threading.Event()

    class Hanging(RecordedDriver):
        def memory(self, handle):
            if handle == 2:
                release.wait(30)
            return super().memory(handle)

    began = time.monotonic()
    gpus, reader = look(Hanging(h100_node().boards, {}, missing=False), answer_seconds=0.3)
    release.set()
    assert time.monotonic() - began < 5
    assert [gpu.index for gpu in gpus.working] == [0, 1]
    assert [gpu.index for gpu in gpus.boards if gpu.lost] == [2]
    assert any("no answer within 0.3 s" in note for note in reader.unreadable)


def test_a_driver_that_hangs_before_it_tells_of_a_gpu_is_no_machine_without_gpus(tmp_path):
    release = threading.Event()

    class Hanging(RecordedDriver):
        def start(self):
            release.wait(30)

    gpus, reader = look(Hanging(h100_node().boards, {}, missing=False), answer_seconds=0.2)
    release.set()
    assert gpus.absent == "no answer within 0.2 s"
    assert gpus.boards == ()
    assert any("no answer within 0.2 s" in note for note in reader.unreadable)


def test_zero_is_a_measurement_and_missing_is_missing(tmp_path):
    machine = h100_node()
    for board in machine.boards:
        board.numbers = dict.fromkeys(board.numbers, 0)
    gpu = machine.collect_facts(tmp_path).gpus.boards[0]
    assert (gpu.clock_sm, gpu.power_limit, gpu.is_persistent, gpu.has_mig) == (0, 0, False, False)
    (tmp_path / "second").mkdir()
    for board in machine.boards:
        board.numbers = {}
        board.fields = {}
    facts = machine.collect_facts(tmp_path / "second")
    gpu = facts.gpus.boards[0]
    assert (gpu.clock_sm, gpu.power_limit, gpu.is_persistent, gpu.has_mig, gpu.remap_pending) == (None,) * 5
    assert judge(facts).findings == ()


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if compiler() is None:
        pytest.skip("no C compiler")
    return build(tmp_path_factory.mktemp("driver"))


def run(control, *arguments):
    environ = {**os.environ, **control.environment()}
    return subprocess.run(
        [sys.executable, "-m", "pacecar", "doctor", "--json", *arguments],
        capture_output=True, text=True, timeout=60, check=False, env=environ,
    )  # fmt: skip


def test_the_real_pynvml_gives_each_answer_to_its_own_fact(library):
    control = Control(library / "control")
    control.page.reasons[2] = 0x40
    done = run(control)
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    gpus = document["inventory"]["gpus"]
    assert [gpu["compute_capability"] for gpu in gpus] == [f"9.{n}" for n in range(8)]
    assert gpus[3]["memory_bytes"] == 150010 + 3000
    found = {finding["id"]: finding for finding in document["findings"]}
    assert [e["where"][:11] for e in found["gpu-persistence-off"]["evidence"]] == [
        f"NVML, GPU {n}" for n in (0, 2, 4, 6)
    ]
    assert {e["what"] for e in found["gpu-throttled"]["evidence"]} == {"clocks held down by"}
    assert len(found["gpu-throttled"]["evidence"]) == 1
    assert found["gpu-pcie-link"]["evidence"][0]["value"] == "8 of 16 lanes"
    assert {e["value"] for e in found["gpu-memory-pending"]["evidence"]} == {
        "a row remapping and a page retirement wait for a reset"
    }
    assert len(found["gpu-memory-errors"]["evidence"]) == 8
    assert "error 21" in found["gpu-fabric-unready"]["evidence"][0]["value"]
    blocked = {e["what"]: e["value"] for e in found["gpu-p2p-off"]["evidence"]}
    assert "registry key" in blocked["P2P between GPU 0 and 4"]
    assert document["inventory"]["topology"]["p2p"] == {"pairs": 28, "possible": 4}


def test_a_driver_without_newer_calls_and_one_that_is_gone_are_no_fault(library):
    control = Control(library / "control")
    for name in ("PERSISTENCE", "CAPABILITY", "PEER", "DEFAULT_LIMIT", "FABRIC"):
        from tests.monitor.nvml_standin.standin import FUNCTION

        control.page.missing[FUNCTION[name]] = 1
    document = json.loads(run(control).stdout)
    assert document["unreadable"] == []
    assert {gpu["compute_capability"] for gpu in document["inventory"]["gpus"]} == {None}
    control.page.driver_missing = 1
    done = run(control, "--fail-on", "critical")
    document = json.loads(done.stdout)
    assert document["inventory"]["gpus"] == []
    assert "Driver Not Loaded" in document["inventory"]["driver"]["absent"]
    control.page.driver_missing = 0
