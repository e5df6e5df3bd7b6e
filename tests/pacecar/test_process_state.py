"""What the kernel says of how a process ended: by itself, by a signal, or for want of memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pacecar.kernel_files.reader import KernelFiles
from pacecar.process_state import (
    CGROUPS,
    ProcessIdentity,
    identity_of,
    memory_kills,
    own_age_ns,
    read_process,
    thread_age_ns,
)
from pacecar.records.hangs import ProcessState
from tests.kit.waiting import until

PID, BEGAN = 77, 4711
FIELDS = ["0"] * 18 + [str(BEGAN)] + ["0"] * 29
"""Of /proc/PID/stat from `ppid` to `env_end`; the state comes before, the exit code after."""


class Machine:
    """A host with one process, in a control group of the given version or in none."""

    def __init__(self, root: Path, hierarchy: str) -> None:
        self.files = KernelFiles(root / "proc", root / "sys")
        self.cgroups = root / "sys/fs/cgroup"
        self.process = root / "proc" / str(PID)
        self.process.mkdir(parents=True)
        (self.process / "cgroup").write_text("4:memory:/job\n0::/\n" if hierarchy == "v1" else "0::/job\n")
        self.counts = {
            "v2": self.cgroups / "job/memory.events",
            "v1": self.cgroups / "memory/job/memory.oom_control",
            "none": root / "proc/vmstat",
        }[hierarchy]
        self.counts.parent.mkdir(parents=True, exist_ok=True)
        self.kill_for_memory(0)
        self.is_in("S")
        self.who = identity_of(PID, self.files, cgroups=self.cgroups)
        self.kills_before = memory_kills(self.who, self.files)

    def is_in(self, state: str, exit_code: int = 0) -> None:
        (self.process / "stat").write_text(f"{PID} (a b) c) {state} {' '.join(FIELDS)} {exit_code}\n")

    def kill_for_memory(self, count: int) -> None:
        self.counts.write_text(f"oom 9\noom_kill {count}\nunder_oom 0\n")

    def state(self) -> ProcessState:
        return read_process(self.who, self.files, self.cgroups, kills_before=self.kills_before)


@pytest.fixture(params=["v2", "v1", "none"])
def machine(tmp_path: Path, request: pytest.FixtureRequest) -> Machine:
    return Machine(tmp_path, request.param)


def test_zero_is_a_measurement(machine: Machine) -> None:
    assert machine.kills_before == 0
    assert (machine.who.began, machine.state().exists) == (BEGAN, True)


def test_a_signal_alone_is_not_a_kill_for_memory(machine: Machine) -> None:
    machine.is_in("Z", signal.SIGKILL)
    state = machine.state()
    assert (state.exists, state.ended_by, state.killed_for_memory) == (False, signal.SIGKILL, False)


def test_a_kill_for_memory_is_one_that_was_counted_since(machine: Machine) -> None:
    machine.kill_for_memory(1)
    assert machine.state().exists, "of another process"
    machine.is_in("Z", signal.SIGKILL)
    assert machine.state().killed_for_memory
    machine.kills_before = 1
    assert not machine.state().killed_for_memory


def test_a_process_that_exited_was_not_killed(machine: Machine) -> None:
    machine.kill_for_memory(1)
    machine.is_in("Z", signal.SIGTERM)
    assert not machine.state().killed_for_memory


def test_once_its_parent_has_asked_only_its_own_group_is_evidence(machine: Machine) -> None:
    machine.kill_for_memory(1)
    (machine.process / "stat").unlink()
    state = machine.state()
    assert (state.exists, state.ended_by) == (False, None)
    assert state.killed_for_memory == (machine.who.kills_file is not None)


def test_nothing_is_claimed_without_an_earlier_count(machine: Machine) -> None:
    machine.kill_for_memory(1)
    machine.is_in("Z", signal.SIGKILL)
    machine.kills_before = None
    assert not machine.state().killed_for_memory
    machine.kills_before = 0
    machine.counts.unlink()
    assert not machine.state().killed_for_memory


# --- real processes ---------------------------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with 100 MB, of either version."""
    is_v1 = (CGROUPS / "memory").is_dir()
    made = (CGROUPS / "memory" if is_v1 else CGROUPS) / f"pacecar-test-{os.getpid()}"
    try:
        made.mkdir()
        (made / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text("100000000")
    except OSError as error:
        if made.is_dir():
            made.rmdir()
        pytest.skip(f"no memory control group can be made here: {error}")
    yield made
    until(lambda: not (made / "cgroup.procs").read_text().split(), "the group is empty")
    made.rmdir()


PROGRAM = """
import sys
open(sys.argv[1], "w").write("0")
print("in", flush=True)
sys.stdin.readline()
kept = []
while True:
    kept.append(bytearray(1 << 20))
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_for_memory", [True, False])
def test_a_real_process_that_the_kernel_killed_for_memory_is_told_from_one_that_was_killed(
    group: Path, is_for_memory: bool
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, group / "cgroup.procs"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == b"in\n"
        who: ProcessIdentity = identity_of(child.pid, KernelFiles())
        kills_before = memory_kills(who)
        assert who.kills_file is not None
        assert Path(who.kills_file).parent == group
        assert kills_before == 0
        if is_for_memory:
            child.stdin.write(b"\n")
            child.stdin.flush()
        else:
            child.kill()
        until(lambda: not read_process(who).exists, "it ended")
        state = read_process(who, kills_before=kills_before)
        assert (state.ended_by, state.killed_for_memory) == (signal.SIGKILL, is_for_memory)
        child.wait()
        state = read_process(who, kills_before=kills_before)
        assert (state.ended_by, state.killed_for_memory) == (None, is_for_memory)


def test_the_ages_of_a_process_and_of_its_named_threads(tmp_path: Path) -> None:
    files, began = KernelFiles(tmp_path), {"self": 100, "self/task/7": 100, "self/task/8": 300, "self/task/9": 250}
    for name, ticks in began.items():
        (tmp_path / name).mkdir(parents=True)
        fields = ["0"] * 18 + [str(ticks)] + ["0"] * 30
        (tmp_path / name / "stat").write_text(f"7 (a b) c) S {' '.join(fields)}\n")
    for number, name in ((7, "python"), (8, "pt_gloo_runloop"), (9, "pt_gloo_runloop")):
        (tmp_path / f"self/task/{number}/comm").write_text(name + "\n")
    assert own_age_ns(files, boot_ns=3_000_000_000) == 2_000_000_000
    assert thread_age_ns(["pt_nccl_", "pt_gloo_"], files, boot_ns=3_000_000_000) == 500_000_000
    assert thread_age_ns(["pt_nccl_"], files, boot_ns=3_000_000_000) is None
    assert own_age_ns(KernelFiles(tmp_path / "nowhere")) is None
    assert thread_age_ns([""], KernelFiles(tmp_path / "nowhere")) is None
