"""Identifies this process in the job: job name, launch, rank, host, device and network interface, in one `JobHello`.

A rank number alone does not name a series: two jobs on a node both have a rank 0.  So every record carries a job name
on which all ranks agree without communicating: the name that the user gave (PACECAR_JOB), else what the launcher gave
all of them, else the script's name and a process id (of the process that started them, or its own).  Two jobs may have
one name, so a hello also has the launch (`launch_id`), which no two have.

    torchrun     its run id; without one ("none") the cluster's job id, and its rendezvous' port; with one that
                 `--standalone` drew the cluster's job id and the script's name
    Slurm, LSF, PBS   the job's id
    Kubernetes   the job's name, which is a part of its pods' names (Kubeflow's masters, indexed jobs)
    MPI          the namespace that PMIx gives a launch

Ranks come from torch.distributed when it is initialized, else from the launcher's environment, else the process is
alone.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from pacecar.clock import Clock, SystemClock
from pacecar.records import JobHello

from ...ranks.data_parallel import parallel_of
from ...transport.field_filter import FieldFilter
from .launch_id import launch_of
from .network_interface import collective_interface

__all__ = ["job_id", "make_hello", "model_device"]

JOB_LENGTH_MAX = 128
"""The longest job id; it becomes a label value."""

RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
WORLD_SIZE = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
"""Variables of the launchers: torchrun, Slurm, Open MPI, PMIx; MPICH and Intel MPI (Hydra)."""

SCHEDULERS = (("slurm", "SLURM_JOB_ID"), ("lsf", "LSB_JOBID"), ("pbs", "PBS_JOBID"))
DRAWN_RUN_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""The run id that `torchrun --standalone` draws for each start: a UUID."""

PYTHON = "python"
"""The name of a job that runs no script."""

NO_SCRIPT = ("", "-", "-c", "-m")
"""What `sys.argv[0]` is where python has no script: at its prompt, from standard input, of `-c`, and before `-m` has
found its module (docs.python.org/3/library/sys.html#sys.argv)."""

NAME_LENGTH_MAX = 253
"""The longest name of a pod: a DNS subdomain (RFC 1123,
kubernetes.io/docs/concepts/overview/working-with-objects/names)."""


def make_hello(
    model: nn.Module,
    *,
    job: str | None = None,
    overhead_budget: float | None = None,
    environ: Mapping[str, str] = os.environ,
    clock: Clock | None = None,
) -> JobHello:
    """Return the identity of this process; `job` (of the configuration) takes precedence over the environment.

    `overhead_budget` is what the configuration allows pacecar, as a share of wall time.
    Call it after `torch.distributed` was initialized, if it will be.
    """
    is_distributed = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if is_distributed else _number(environ, *RANK) or 0
    world_size = dist.get_world_size() if is_distributed else _number(environ, *WORLD_SIZE) or 1
    local_rank = _number(environ, *LOCAL_RANK)
    device = model_device(model)
    is_cuda = device.type == "cuda"
    backend = dist.get_backend() if is_distributed else None
    if local_rank is None:
        local_rank = device.index if is_cuda and device.index is not None else rank
    name = job or job_id(environ)
    hello = JobHello(
        job=name,
        launch=launch_of(name, world_size, environ),
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        pid=os.getpid(),
        host=socket.gethostname(),
        device=str(device),
        device_uuid=_device_uuid(device) if is_cuda else None,
        backend=backend,
        framework=f"torch {torch.__version__}",
        pacecar_version=metadata.version("pacecar"),
        parallel=parallel_of(model),
        started_wall_ns=(clock or SystemClock()).wall_ns(),
        interface=collective_interface(backend, environ=environ),
        slurm_job=_label(environ, "SLURM_JOB_ID", "SLURM_JOBID"),
        pod_name=_label(environ, "POD_NAME", "MY_POD_NAME"),
        pod_namespace=_label(environ, "POD_NAMESPACE", "MY_POD_NAMESPACE"),
        overhead_budget=overhead_budget,
    )
    sendable = FieldFilter("anybody").make(hello)
    return sendable if isinstance(sendable, JobHello) else hello


def job_id(environ: Mapping[str, str] = os.environ) -> str:
    """Return the job id that the environment gives, the same on all ranks of a launched job."""
    torchrun = environ.get("TORCHELASTIC_RUN_ID")
    cluster = _cluster_job(environ)
    if torchrun == "none":  # torchrun's default names no run; with the port of its rendezvous two in one job differ
        torchrun = f"{cluster or 'torchrun'}-{environ.get('MASTER_PORT', 'none')}"
    elif torchrun and DRAWN_RUN_ID.fullmatch(torchrun):  # a new one for each start says nothing to a person
        torchrun = f"{cluster}-{_script()}" if cluster else _script()
    name = environ.get("PACECAR_JOB") or torchrun or cluster or _mpi_job(environ)
    if not name:
        script = _script()
        parent = multiprocessing.parent_process()  # torch.multiprocessing.spawn starts all ranks of a node
        port = environ.get("MASTER_PORT")  # or the ranks were started one by one
        name = f"{script}-{parent.pid if parent is not None else port or os.getpid()}"
    if not environ.get("PACECAR_JOB"):
        name = name.lstrip("-") or PYTHON  # commands would take it for an option
    return re.sub(r"[^\w.:@+-]", "_", name)[:JOB_LENGTH_MAX]


def _script() -> str:
    """Return the name of the script, of a package that is run as a module that of its folder."""
    first = sys.argv[0] if sys.argv else ""
    path = Path(PYTHON if first in NO_SCRIPT else first)
    return path.parent.name if path.stem == "__main__" and path.parent.name else path.stem


def _cluster_job(environ: Mapping[str, str]) -> str | None:
    for scheduler, variable in SCHEDULERS:
        if environ.get(variable):
            return f"{scheduler}-{environ[variable]}"
    if "KUBERNETES_SERVICE_HOST" not in environ:
        return None
    # Kubeflow's pods are called <job>-<kind>-<index>, and each gets the first one's name.
    for name in (environ.get("HOSTNAME", ""), environ.get("MASTER_ADDR", "")):
        pod = re.match(r"(.+)-(?:master|worker|launcher|node)-\d+(?:[.-]|$)", name)
        if pod:
            return f"k8s-{pod[1]}"
    # The host of an indexed Job's pod is called <job>-<index> (kubernetes.io, "Indexed Job"), the pod has a suffix.
    index = environ.get("JOB_COMPLETION_INDEX", "")
    indexed = re.match(rf"(.+)-{index}(?:-[a-z0-9]{{5}})?$", environ.get("HOSTNAME", "")) if index.isdigit() else None
    return f"k8s-{indexed[1]}" if indexed else None


def _mpi_job(environ: Mapping[str, str]) -> str | None:
    namespace = environ.get("PMIX_NAMESPACE")
    return f"mpi-{namespace}" if namespace else None


def model_device(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter; a model without parameters is on the CPU."""
    first = next(model.parameters(), None)
    return first.device if first is not None else torch.device("cpu")


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        text = environ.get(name, "")
        if text.isdigit():
            return int(text)
    return None


def _label(environ: Mapping[str, str], *names: str) -> str | None:
    """Return the first of these variables that is set: Slurm's own, or those usual for a pod's downward API."""
    return next((environ[name][:NAME_LENGTH_MAX] for name in names if environ.get(name)), None)


def _device_uuid(device: torch.device) -> str | None:
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return f"GPU-{uuid}" if uuid is not None else None
