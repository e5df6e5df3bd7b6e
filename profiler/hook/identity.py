"""Identifies this process in the job: job name, launch, rank, host, device and network interface, in one `JobHello`.

A rank number does not identify a series: two jobs on a node both have a rank 0.  So every record carries a job name
that all ranks agree on without communicating: the user's (PACECAR_JOB), or one that the launcher gave to all of them,
or the script's name and a process id (the parent's, or its own).

    torchrun     its run id; without one ("none") the cluster's job id and the rendezvous port; with a random one from
                 `--standalone` the cluster's job id and the script's name
    Slurm, LSF, PBS   the job id
    Kubernetes   the job's name, which is a part of its pods' names (Kubeflow's masters, indexed jobs)
    MPI          the namespace that PMIx gives a launch

Launchers use the port, the script or nothing, and users reuse names.  So a hello also has the *launch*, a number that
all ranks of one start of a job share with no other start.  The first rank that attaches puts a random one into the
job's store by compare-and-set, and all others read it.  No rank waits for another: a rank that attaches late reads the
same number, and one that never attaches is not missed.

    store of torch.distributed    the number in it; without its prefixes, so that a restart by torchrun's agent, which
                                  keeps its store, is the same launch
    a launcher, no store (MPI)    a digest of the user and of what the launcher gave to all ranks
    one process                   a random number, the same for everything attached in this process

A store may not answer: it is asked on a separate thread, and after AGREE_SECONDS the job goes on without it.  Two
starts that share a store (a reused file, a TCPStore kept by a service) are not told apart: torch's own keys collide
there too.

Ranks come from torch.distributed if it is initialized, else from the launcher's environment; otherwise the process is
the only one.  The network interface of the collectives, which the daemon cannot know, is the one named by the user,
else the one that reaches the job's master; None if NCCL can use InfiniBand or RoCE, which bypass every interface, or if
it is unknown.  The choices of UCC and MPI, and several interfaces at once, are not covered.

A hello also says when the process began, which the kernel knows, and when its process group existed: when the first
thread of torch's began that serves one (ProcessGroupGloo and ProcessGroupNCCL start theirs once the ranks have met).

Source: Gloo's and NCCL's variables GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME ("=eth0" exactly, "eth" by prefix, "^" not
these), NCCL_IB_DISABLE and NCCL_NET (NVIDIA, NCCL user guide, "Environment variables").
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import multiprocessing
import os
import re
import secrets
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from uuid import UUID

import torch
import torch.distributed as dist
from torch import nn

from pacecar.clock import Clock, SystemClock
from pacecar.process_state import own_age_ns, thread_age_ns
from pacecar.records import JobHello
from pacecar.records.job_identity import LAUNCH, LAUNCH_DIGITS
from pacecar.torch_internals import need

from ..ranks.data_parallel import parallel_of
from ..transport.record_queue import FieldFilter
from ..transport.rendezvous import innermost, interface_addresses, route_to

__all__ = [
    "AGREE_SECONDS",
    "agree",
    "attempt_of",
    "collective_interface",
    "job_id",
    "launch_of",
    "make_hello",
    "model_device",
]

JOB_LENGTH_MAX = 128
"""The longest job id; it becomes a label value."""

RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
WORLD_SIZE = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
"""Variables of the launchers: torchrun, Slurm, Open MPI, PMIx; MPICH and Intel MPI (Hydra)."""

RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
"""How often Slurm has requeued the job (absent before the first time), and torchrun's agent has restarted its ranks."""

GROUP_THREADS = ("pt_gloo_", "pt_nccl_")
"""Names of the threads of a process group (torch/csrc/distributed/c10d, since 2.3)."""

SCHEDULERS = (("slurm", "SLURM_JOB_ID"), ("lsf", "LSB_JOBID"), ("pbs", "PBS_JOBID"))
DRAWN_RUN_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""The run id that `torchrun --standalone` generates for each start: a UUID."""

PYTHON = "python"
"""The name of a job without a script."""

NO_SCRIPT = ("", "-", "-c", "-m")
"""`sys.argv[0]` when Python has no script: at its prompt, from standard input, with `-c`, and before `-m` has found its
module (docs.python.org/3/library/sys.html#sys.argv)."""

MIG_UUID = re.compile(r"MIG-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""A complete UUID, as in drivers since 470: CUDA also accepts the first digits, and older drivers wrote
MIG-GPU-<uuid>/<gi>/<ci>."""

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
    """Return the identity of this process; `job` (from the configuration) takes precedence over the environment.

    `overhead_budget` is the configured limit for pacecar, as a share of wall time.
    If the job initializes `torch.distributed`, call this afterwards.
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
    wall_ns, age_ns = (clock or SystemClock()).wall_ns(), own_age_ns()
    met_ns = thread_age_ns(GROUP_THREADS) if is_distributed else None
    hello = JobHello(
        job=name,
        launch=launch_of(name, world_size, environ),
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        pid=os.getpid(),
        host=socket.gethostname(),
        device=str(device),
        device_uuid=device_uuid(torch.cuda.get_device_properties(device), environ, device.index) if is_cuda else None,
        backend=backend,
        framework=f"torch {torch.__version__}",
        pacecar_version=metadata.version("pacecar"),
        parallel=parallel_of(model),
        started_wall_ns=wall_ns,
        interface=collective_interface(backend, environ=environ),
        slurm_job=_label(environ, "SLURM_JOB_ID", "SLURM_JOBID"),
        pod_name=_label(environ, "POD_NAME", "MY_POD_NAME"),
        pod_namespace=_label(environ, "POD_NAMESPACE", "MY_POD_NAMESPACE"),
        overhead_budget=overhead_budget,
        attempt=attempt_of(environ),
        process_wall_ns=None if age_ns is None else wall_ns - age_ns,
        rendezvous_wall_ns=None if met_ns is None else wall_ns - met_ns,
    )
    sendable = FieldFilter("anybody").make(hello)
    return sendable if isinstance(sendable, JobHello) else hello


def attempt_of(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return how often the job was restarted before: the user's PACECAR_ATTEMPT, or the launchers' counts together.

    None if none of them is set, as in a job that a shell starts again.
    """
    told = _number(environ, "PACECAR_ATTEMPT")
    if told is not None:
        return told
    counts = [count for name in RESTARTS if (count := _number(environ, name)) is not None]
    if not counts:
        return 0 if environ.get("SLURM_JOB_ID") else None
    return sum(counts)


def job_id(environ: Mapping[str, str] = os.environ) -> str:
    """Return the job id from the environment, the same on all ranks of a launched job."""
    torchrun = environ.get("TORCHELASTIC_RUN_ID")
    cluster = _cluster_job(environ)
    if torchrun == "none":  # torchrun's default for no run id; the rendezvous port tells two in one job apart
        torchrun = f"{cluster or 'torchrun'}-{environ.get('MASTER_PORT', 'none')}"
    elif torchrun and DRAWN_RUN_ID.fullmatch(torchrun):  # generated for each start, so meaningless to a user
        torchrun = f"{cluster}-{_script()}" if cluster else _script()
    name = environ.get("PACECAR_JOB") or torchrun or cluster or _mpi_job(environ)
    if not name:
        script = _script()
        parent = multiprocessing.parent_process()  # torch.multiprocessing.spawn starts all ranks of a node
        port = environ.get("MASTER_PORT")  # or the ranks were started one by one
        name = f"{script}-{parent.pid if parent is not None else port or os.getpid()}"
    if not environ.get("PACECAR_JOB"):
        name = name.lstrip("-") or PYTHON  # commands would mistake it for an option
    return re.sub(r"[^\w.:@+-]", "_", name)[:JOB_LENGTH_MAX]


def _script() -> str:
    """Return the name of the script, or of the folder if a package is run as a module."""
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
    """Return the first of these variables that is set: Slurm's own, or the usual ones for a pod's downward API."""
    return next((environ[name][:NAME_LENGTH_MAX] for name in names if environ.get(name)), None)


def device_uuid(
    properties: object, environ: Mapping[str, str], index: int | None = None, driver: ctypes.CDLL | None = None
) -> str | None:
    """Return the UUID of CUDA device `index` (None: the current one) as NVML writes it: GPU-..., or MIG-....

    CUDA has no prefix for a MIG instance (its name shows that it is one), and before CUDA 12 its runtime reports the
    UUID of the whole GPU.  So the driver is asked first, then CUDA_VISIBLE_DEVICES, which selected the instance.
    NVIDIA_VISIBLE_DEVICES of a container does not help: it may list several, and with CDI and DRA it is "void".
    """
    if " MIG " not in getattr(properties, "name", ""):
        uuid = getattr(properties, "uuid", None)
        return None if uuid is None else f"GPU-{uuid}"
    told = _driver_uuid(index, driver)
    if told is not None:
        return f"MIG-{told}"
    first = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if MIG_UUID.fullmatch(first):
        return first
    uuid = getattr(properties, "uuid", None)
    return None if uuid is None else f"MIG-{uuid}"


def _driver_uuid(index: int | None, driver: ctypes.CDLL | None) -> UUID | None:
    """Return the UUID from cuDeviceGetUuid_v2 (drivers since 470), for a MIG instance its own."""
    try:
        driver = driver or ctypes.CDLL("libcuda.so.1")
        device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        ordinal = torch.cuda.current_device() if index is None else index
        if driver.cuDeviceGet(ctypes.byref(device), ordinal) or driver.cuDeviceGetUuid_v2(ctypes.byref(uuid), device):
            return None
    except (OSError, AttributeError):  # no such library, or one without the function
        return None
    return UUID(bytes=bytes(uuid))


AGREE_SECONDS = 5.0
"""A store answers within a few milliseconds even over a network; a job whose store is gone is about to fail."""

KEY = "pacecar/launch"

_JOB = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "LSB_JOBID", "PBS_JOBID")
_OF_MPI = (*_JOB, "PMIX_NAMESPACE")
"""Slurm's step is not included: mpirun starts the ranks of its own node outside of one."""

_OF_OTHERS = (*_JOB, "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")

_log = logging.getLogger(__name__)

_own: tuple[int, str] | None = None


def launch_of(name: str, world_size: int, environ: Mapping[str, str] = os.environ) -> str:
    """Return the launch of this process's job; `name` is the job's name.

    A job of several ranks with neither a store nor a launcher that distinguishes starts gets a digest of its user and
    name; users should name such jobs.
    """
    if dist.is_available() and dist.is_initialized():
        try:
            agreed = agree(need("torch.distributed.distributed_c10d._get_default_store")(), _of_process())
        except Exception as error:  # noqa: BLE001  the outer boundary: no job may fail for lack of a launch id
            agreed = None
            _log.warning("pacecar: cannot read the launch from the job's store: %s: %s", type(error).__name__, error)
        if agreed is not None:
            return agreed
    if world_size == 1:
        return _of_process()
    facts = _OF_MPI if environ.get("PMIX_NAMESPACE") else _OF_OTHERS
    said = [name, str(os.getuid()), str(world_size), *(f"{fact}={environ.get(fact, '')}" for fact in facts)]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()[:LAUNCH_DIGITS]


def agree(store: Any, proposal: str, *, seconds: float = AGREE_SECONDS) -> str | None:  # noqa: ANN401  dist.Store
    """Return the launch in `store`, `proposal` if there is none yet; None: the store does not answer in time."""
    said: list[str | Exception] = []

    def ask() -> None:
        try:
            said.append(_exchange(store, proposal))
        except Exception as error:  # noqa: BLE001  raised on the caller's thread
            said.append(error)

    asking = threading.Thread(target=ask, name="pacecar-launch", daemon=True)
    asking.start()
    asking.join(seconds)
    if not said:
        _log.warning("pacecar: the job's store did not answer within %g s; the launch is unknown", seconds)
        return None
    if isinstance(said[0], Exception):
        raise said[0]
    return said[0]


def _exchange(store: Any, proposal: str) -> str:  # noqa: ANN401
    store = innermost(store)
    launch: str = store.compare_set(KEY, "", proposal).decode()
    if not store.check([KEY]):  # torch's FileStore after its file was removed
        raise LookupError("it forgets what is written to it")
    if not launch or not LAUNCH.fullmatch(launch):
        raise ValueError(f"{KEY!r} holds {launch[:40]!r}")
    return launch


def _of_process() -> str:
    """Return this process's own number; a forked child has a different one."""
    global _own
    if _own is None or _own[0] != os.getpid():
        _own = (os.getpid(), secrets.token_hex(LAUNCH_DIGITS // 2))
    return _own[1]


INTERFACES_MAX = 256
"""The most interfaces considered, as many as the daemon serves."""

_DISCARD_PORT = 9


def collective_interface(
    backend: str | None,
    *,
    environ: Mapping[str, str] = os.environ,
    sys_root: Path = Path("/sys"),
) -> str | None:
    """Return the interface's name; None if none is used or it is unknown.  Sends nothing and never raises."""
    if backend is None:
        return None
    try:
        if "nccl" in backend and _has_rdma(environ, sys_root):
            return None
        there = [name for _, name in socket.if_nameindex()][:INTERFACES_MAX]
        named = environ.get("NCCL_SOCKET_IFNAME" if "nccl" in backend else "GLOO_SOCKET_IFNAME", "")
        return _named(named, there) or _towards(environ.get("MASTER_ADDR", ""), there)
    except OSError:
        return None


def _has_rdma(environ: Mapping[str, str], sys_root: Path) -> bool:
    if environ.get("NCCL_IB_DISABLE") == "1" or environ.get("NCCL_NET", "").lower() == "socket":
        return False
    folder = sys_root / "class" / "infiniband"
    return folder.is_dir() and any(folder.iterdir())


def _named(text: str, there: Sequence[str]) -> str | None:
    """Return the one interface that the user's list selects; None for none or several."""
    wanted = text.split(",")[0]
    if wanted.removeprefix("=") in there:
        return wanted.removeprefix("=")
    found = [name for name in there if wanted and wanted[0] not in "=^" and name.startswith(wanted)]
    return found[0] if len(found) == 1 else None


def _towards(host: str, there: Sequence[str]) -> str | None:
    """Return the interface from whose address packets to `host` would leave; connecting a UDP socket sends none."""
    route = route_to(host, _DISCARD_PORT) if host else None
    return None if route is None else next((name for name in there if route[0] in interface_addresses(name)), None)
