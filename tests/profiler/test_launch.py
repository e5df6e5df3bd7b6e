"""A launch: all ranks of one start have the same, two starts never, and no store can hold the job up."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

from pacecar.profiler.hook.identity import agree, launch_of, make_hello
from pacecar.records.job_identity import LAUNCH
from tests.kit.net import free_port
from tests.kit.ranks import finish, run_ranks, start_ranks

ALIKE = {"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "2"}
"""What every static torchrun start gives its ranks."""

SAY = """
import sys, time
import torch.distributed as dist
from torch import nn
from pacecar.profiler.hook.identity import make_hello
dist.init_process_group("gloo")
if "late" in sys.argv and dist.get_rank() == 0:
    time.sleep(0.3)
if not ("absent" in sys.argv and dist.get_rank() == 0):
    hello = make_hello(nn.Linear(1, 1), environ={"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500"})
    print(hello.job, hello.launch)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_ranks_of_one_start_agree_and_two_starts_of_one_name_differ(tmp_path: Path) -> None:
    (tmp_path / "say.py").write_text(SAY)
    first = start_ranks([tmp_path / "say.py", "late"], 2)
    second = start_ranks([tmp_path / "say.py"], 2)
    said = [[rank.out.split() for rank in finish(job)] for job in (first, second)]
    assert {name for job in said for name, _ in job} == {"torchrun-29500"}
    launches = [{launch for _, launch in job} for job in said]
    assert [len(of) for of in launches] == [1, 1]
    assert launches[0] != launches[1]
    assert all(LAUNCH.fullmatch(launch) for of in launches for launch in of)


@pytest.mark.distributed
def test_a_rank_that_never_attaches_is_not_missed(tmp_path: Path) -> None:
    (tmp_path / "say.py").write_text(SAY)
    said = [out.split() for out in run_ranks([tmp_path / "say.py", "absent"], 2)]
    assert said[0] == []
    assert said[1][0] == "torchrun-29500"


def test_one_process_has_a_launch_of_its_own_however_often_it_attaches() -> None:
    first, again = (make_hello(nn.Linear(1, 1), environ={}) for _ in range(2))
    assert first.launch == again.launch
    assert len(first.launch) == 16


@pytest.mark.slow
def test_a_forked_process_is_another_launch(tmp_path: Path) -> None:
    (tmp_path / "fork.py").write_text(
        "import os\nfrom pacecar.profiler.hook.identity import launch_of\n"
        "print(launch_of('j', 1, {}), flush=True)\n"
        "if os.fork() == 0:\n    print(launch_of('j', 1, {}), flush=True)\n    os._exit(0)\nos.wait()\n"
    )
    (out,) = run_ranks([tmp_path / "fork.py"], 1)
    assert len(set(out.split())) == 2


def test_what_a_restart_by_the_agent_keeps_is_the_same_launch() -> None:
    """Torchrun's agent keeps its store, and torch puts a prefix of the attempt around it."""
    store = dist.HashStore()
    attempts = [dist.PrefixStore("default_pg", dist.PrefixStore(f"attempt_{n}", store)) for n in range(2)]
    assert agree(attempts[0], "0" * 16) == agree(attempts[1], "1" * 16) == "0" * 16


def test_a_tcp_store_agrees_among_clients() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    assert agree(client, "1" * 16) == agree(server, "0" * 16) == "1" * 16


STARTED = """
import os
import torch.distributed as dist
from torch import nn
from pacecar.profiler.hook.identity import make_hello
dist.init_process_group("gloo")
hello = make_hello(nn.Linear(1, 1))
os.write(1, f"{hello.job} {hello.launch}\\n".encode())  # in one piece: the other rank writes to the same pipe
dist.barrier()
os._exit(0)
"""


def torchrun(folder: Path, *options: str) -> list[list[str]]:
    """Return name and launch of each rank."""
    (folder / "job.py").write_text(STARTED)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--monitor-interval", "0.1"]
    ran = subprocess.run(
        [*command, *options], cwd=folder, capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [line.split() for line in ran.stdout.splitlines() if line.startswith("torchrun-")]


@pytest.mark.distributed
@pytest.mark.full
def test_two_static_starts_by_torchrun_have_one_name_and_two_launches(tmp_path: Path) -> None:
    port = str(free_port())
    static = ("--nnodes", "1", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", port, "job.py")
    first, second = torchrun(tmp_path, *static), torchrun(tmp_path, *static)
    assert {name for name, _ in first + second} == {f"torchrun-{port}"}
    assert [len({launch for _, launch in said}) for said in (first, second, first + second)] == [1, 1, 2]


class Silent:
    """A store that answers nothing, as one behind a network that lost its packets."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def compare_set(self, *_: str) -> bytes:
        self.released.wait(60)
        return b""


@pytest.mark.slow
def test_a_store_that_does_not_answer_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    store = Silent()
    before = time.monotonic()
    assert agree(store, "0" * 16, seconds=0.2) is None
    assert time.monotonic() - before < 30
    store.released.set()
    assert "did not answer" in caplog.text


def test_a_store_that_forgets_or_fails_or_holds_nonsense_leaves_the_job_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forgetful = dist.FileStore(str(tmp_path / "store"), 2)
    forgetful.set("long ago", "x" * 4096)
    forgetful.get("long ago")
    (tmp_path / "store").unlink()
    nonsense = dist.HashStore()
    nonsense.set("pacecar/launch", "<b>not a launch</b>")
    gone = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    lost = dist.TCPStore("127.0.0.1", gone.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))
    del gone
    for store in (forgetful, nonsense, lost, None):
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr("pacecar.profiler.hook.identity.need", lambda _, store=store: lambda: store)
        assert LAUNCH.fullmatch(launch_of("j", 2, ALIKE))
    assert caplog.text.count("cannot read the launch") == 4


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"SLURM_JOB_ID": "1"}, {"SLURM_JOB_ID": "2"}),
        ({"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"}, {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "1"}),
        ({"SLURM_JOB_ID": "1"}, {"SLURM_JOB_ID": "1", "SLURM_RESTART_COUNT": "1"}),
        ({"PMIX_NAMESPACE": "prterun-a-1@1"}, {"PMIX_NAMESPACE": "prterun-a-2@1"}),
        ({"LSB_JOBID": "1"}, {"LSB_JOBID": "2"}),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, {"MASTER_ADDR": "b", "MASTER_PORT": "1"}),
    ],
)
def test_without_a_store_the_launcher_tells_starts_apart(one: dict[str, str], other: dict[str, str]) -> None:
    assert launch_of("j", 2, one) == launch_of("j", 2, dict(one))
    assert launch_of("j", 2, one) != launch_of("j", 2, other)


def test_ranks_of_mpi_agree_though_only_some_are_in_a_slurm_step() -> None:
    here = {"PMIX_NAMESPACE": "prterun-a-1@1", "SLURM_JOB_ID": "1"}
    assert launch_of("j", 2, here) == launch_of("j", 2, {**here, "SLURM_STEP_ID": "0"})
