"""Who a process is, from the environment, torch.distributed or neither."""

import os
import re
import subprocess
import sys
import uuid
from types import SimpleNamespace
from uuid import UUID

import pytest
import torch
from torch import nn

from pacecar.profiler.hook.identity import JOB_LENGTH_MAX, attempt_of, device_uuid, job_id, make_hello
from tests.kit.forking_python import forking_python
from tests.kit.lone_rank import lone_rank
from tests.kit.ranks import ROOT


def test_the_job_id_is_what_all_ranks_were_given():
    assert job_id({"PACECAR_JOB": "mine", "TORCHELASTIC_RUN_ID": "r", "SLURM_JOB_ID": "9"}) == "mine"
    assert job_id({"TORCHELASTIC_RUN_ID": "r", "SLURM_JOB_ID": "9"}) == "r"
    assert job_id({"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29501"}) == "torchrun-29501"
    assert job_id({"SLURM_JOB_ID": "9"}) == "slurm-9"
    assert job_id({}).endswith(f"-{os.getpid()}")


def test_the_cluster_names_a_job_that_torchrun_does_not():
    none = {"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500"}
    assert job_id({**none, "SLURM_JOB_ID": "9"}) == "slurm-9-29500"
    assert job_id({"LSB_JOBID": "8"}) == "lsf-8"
    assert job_id({"PBS_JOBID": "7.head"}) == "pbs-7.head"
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert job_id({**pod, **none, "MASTER_ADDR": "llama-master-0.ns.svc"}) == "k8s-llama-29500"
    assert job_id({**pod, **none, "HOSTNAME": "llama-worker-12", "MASTER_ADDR": "localhost"}) == "k8s-llama-29500"
    assert job_id({**pod, "JOB_COMPLETION_INDEX": "3", "HOSTNAME": "gpt-2-3-x7k2p"}) == "k8s-gpt-2"
    assert job_id({**pod, "JOB_COMPLETION_INDEX": "3", "HOSTNAME": "gpt-3"}) == "k8s-gpt"
    assert job_id({**pod, **none}) == "torchrun-29500"
    assert job_id({"PMIX_NAMESPACE": "prterun-host-17@1"}) == "mpi-prterun-host-17@1"


def test_a_run_id_that_torchrun_drew_gives_way_to_the_scripts_name(monkeypatch):
    drawn = {"TORCHELASTIC_RUN_ID": str(uuid.uuid4())}
    for argv, name in [("/home/me/train.py", "train"), ("/site/nano/__main__.py", "nano"), ("", "python")]:
        monkeypatch.setattr(sys, "argv", [argv])
        assert job_id(drawn) == name
        assert job_id({**drawn, "SLURM_JOB_ID": "9"}) == f"slurm-9-{name}"
    assert job_id({**drawn, "PACECAR_JOB": "mine"}) == "mine"
    assert job_id({"TORCHELASTIC_RUN_ID": "0123abcd"}) == "0123abcd", "somebody's own"


@pytest.mark.parametrize("first", ["-c", "-", "-m", "", "-x.py", "/a/--.py", "./-", "/-/__main__.py"])
def test_a_name_that_is_derived_never_begins_with_a_dash(first, monkeypatch):
    monkeypatch.setattr(sys, "argv", [first])
    environs = [{}, {"TORCHELASTIC_RUN_ID": "-7"}, {"TORCHELASTIC_RUN_ID": str(uuid.uuid4())}, {"MASTER_PORT": "1"}]
    for environ in environs:
        assert re.match(r"\w", job_id(environ)), (first, environ)
    assert job_id({"PACECAR_JOB": "-mine"}) == "-mine", "its user chose it"


def test_python_without_a_script_is_called_python(monkeypatch):
    for first in ("-c", "-", ""):
        monkeypatch.setattr(sys, "argv", [first])
        assert job_id({}) == f"python-{os.getpid()}"


def test_a_job_id_can_be_a_label_and_a_file_name():
    assert job_id({"PACECAR_JOB": 'a "b"/c\n'}) == "a__b__c_"
    assert len(job_id({"PACECAR_JOB": "x" * 999})) == JOB_LENGTH_MAX


def test_alone_a_process_is_rank_zero_of_one():
    hello = make_hello(nn.Linear(2, 2), environ={})
    assert (hello.rank, hello.local_rank, hello.world_size) == (0, 0, 1)
    assert (hello.device, hello.device_uuid, hello.backend, hello.pid) == ("cpu", None, None, os.getpid())
    assert hello.framework == f"torch {torch.__version__}"


def test_ranks_come_from_the_launcher_and_the_given_job_wins():
    env = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "r"}
    hello = make_hello(nn.Identity(), environ=env, job="configured")
    assert (hello.rank, hello.local_rank, hello.world_size, hello.job) == (5, 1, 8, "configured")
    slurm = make_hello(nn.Identity(), environ={"SLURM_PROCID": "3", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"})
    assert (slurm.rank, slurm.local_rank, slurm.world_size) == (3, 0, 4)
    openmpi = {"OMPI_COMM_WORLD_RANK": "6", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}
    mpi = make_hello(nn.Identity(), environ=openmpi)
    assert (mpi.rank, mpi.local_rank, mpi.world_size) == (6, 2, 8)
    hydra = make_hello(nn.Identity(), environ={"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"})
    assert (hydra.rank, hydra.local_rank, hydra.world_size) == (1, 0, 2)


def test_torch_distributed_knows_better_than_the_environment(tmp_path):
    with lone_rank(tmp_path):
        hello = make_hello(nn.Identity(), environ={"RANK": "5", "WORLD_SIZE": "8"})
        assert (hello.rank, hello.world_size, hello.backend) == (0, 1, "gloo")


def test_slurm_and_kubernetes_are_what_the_environment_says_or_nothing():
    nowhere = make_hello(nn.Identity(), environ={"POD_NAME": ""})
    assert (nowhere.slurm_job, nowhere.pod_name, nowhere.pod_namespace) == (None, None, None)
    hello = make_hello(
        nn.Identity(), environ={"SLURM_JOB_ID": "42", "POD_NAME": "p" * 999, "MY_POD_NAMESPACE": "ml", "RANK": "0"}
    )
    assert (hello.slurm_job, hello.pod_name, hello.pod_namespace) == ("42", "p" * 253, "ml")


def test_the_overhead_budget_of_the_configuration_is_said_and_without_one_nothing():
    assert make_hello(nn.Identity(), environ={}).overhead_budget is None
    assert make_hello(nn.Identity(), environ={}, overhead_budget=0.0).overhead_budget == 0.0


OF_CUDA = "9f3c1a52-3d7e-5b0c-8a11-0d2f4c6e8a10"
OF_MIG = "MIG-3b0d6a2c-51a4-5a0e-8a30-6a3c1f0e7d01"


@pytest.mark.parametrize(
    ("name", "environ", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", {}, f"GPU-{OF_CUDA}"),
        ("NVIDIA H100 80GB HBM3", {"CUDA_VISIBLE_DEVICES": OF_MIG}, f"GPU-{OF_CUDA}"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", {}, f"MIG-{OF_CUDA}"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", {"CUDA_VISIBLE_DEVICES": OF_MIG}, OF_MIG),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", {"CUDA_VISIBLE_DEVICES": f"{OF_MIG},MIG-other"}, OF_MIG),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", {"CUDA_VISIBLE_DEVICES": "MIG-3b0d"}, f"MIG-{OF_CUDA}"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", {"CUDA_VISIBLE_DEVICES": "0"}, f"MIG-{OF_CUDA}"),
    ],
)
def test_a_rank_on_a_mig_instance_names_the_instance_and_not_a_gpu(name, environ, expected):
    """Where the driver does not say it."""
    for driver in (SimpleNamespace(), driver_of(None)):
        assert device_uuid(SimpleNamespace(name=name, uuid=OF_CUDA), environ, 0, driver) == expected


def driver_of(uuid):
    """Return the functions of libcuda.so.1 that give device 1's UUID; of others, and of None, there is an error."""

    def get(device, ordinal):
        device._obj.value = 10 + ordinal
        return 0

    def get_uuid(into, device):
        if uuid is None or device.value != 11:
            return 101
        into._obj[:] = UUID(uuid).bytes
        return 0

    return SimpleNamespace(cuDeviceGet=get, cuDeviceGetUuid_v2=get_uuid)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"NVIDIA_VISIBLE_DEVICES": "void"},  # CDI, and so Kubernetes DRA (nvidia-container-toolkit, CDI mode)
        {"NVIDIA_VISIBLE_DEVICES": "all"},  # of the image
        {"NVIDIA_VISIBLE_DEVICES": "MIG-8f2c4e6a-2c6b-5d1f-9b41-7b4d2a1f8e02"},  # the device plugin
        {"NVIDIA_VISIBLE_DEVICES": f"MIG-8f2c4e6a-2c6b-5d1f-9b41-7b4d2a1f8e02,{OF_MIG}"},  # the pod has two
        {"CUDA_VISIBLE_DEVICES": OF_MIG[:12]},
    ],
)
def test_the_instance_of_a_rank_is_the_drivers_word_however_the_container_got_it(environ):
    on_mig = SimpleNamespace(name="NVIDIA H100 80GB HBM3 MIG 1g.10gb", uuid=OF_CUDA)
    assert device_uuid(on_mig, environ, 1, driver_of(OF_MIG.removeprefix("MIG-"))) == OF_MIG
    assert device_uuid(on_mig, {"NVIDIA_VISIBLE_DEVICES": "MIG-of others"}, 1, SimpleNamespace()) == f"MIG-{OF_CUDA}"


def test_a_device_without_a_uuid_names_none():
    assert device_uuid(SimpleNamespace(name="AMD Instinct MI300X"), {}) is None


def test_the_attempt_is_what_the_launchers_counted_or_the_user_says():
    assert attempt_of({}) is None
    assert attempt_of({"SLURM_JOB_ID": "9"}) == 0, "Slurm sets the count only once it has requeued a job"
    assert attempt_of({"SLURM_JOB_ID": "9", "SLURM_RESTART_COUNT": "2"}) == 2
    assert attempt_of({"TORCHELASTIC_RESTART_COUNT": "0"}) == 0
    assert attempt_of({"SLURM_RESTART_COUNT": "2", "TORCHELASTIC_RESTART_COUNT": "3"}) == 5
    assert attempt_of({"SLURM_RESTART_COUNT": "2", "PACECAR_ATTEMPT": "0"}) == 0
    assert attempt_of({"PACECAR_ATTEMPT": "first"}) is None


def test_the_process_began_before_it_attached():
    hello = make_hello(nn.Linear(1, 1))
    assert hello.process_wall_ns < hello.started_wall_ns
    assert hello.started_wall_ns - hello.process_wall_ns < 3600 * 10**9
    assert hello.rendezvous_wall_ns is None


RENDEZVOUS = """
import sys, time
from pathlib import Path
from torch import nn
from pacecar.profiler.hook.identity import make_hello
from tests.kit.lone_rank import lone_rank
time.sleep(0.1)
before = time.time_ns()
with lone_rank(Path(sys.argv[1])):
    after = time.time_ns()
    time.sleep(0.1)
    met = make_hello(nn.Linear(1, 1)).rendezvous_wall_ns
assert before - 20_000_000 <= met <= after + 20_000_000, "the kernel counts in ticks of 10 ms"
"""
"""In a process of its own: a group that is gone may leave its threads."""


@pytest.mark.slow
def test_the_rendezvous_was_when_the_process_group_came_to_be(tmp_path):
    command = [forking_python(), "-c", RENDEZVOUS, str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
