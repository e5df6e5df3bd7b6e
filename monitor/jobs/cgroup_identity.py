"""Finds the container, pod and Slurm job of a process in the path of its control group.

Asking the runtime (docker, containerd, CRI-O), the kubelet and slurmctld would take four clients and sockets that only
root may open, and the answers hang when a node is in trouble.  But all of them put a process into a control group whose
path contains the ids, and the kernel shows that path to every user:

    cgroupfs driver   /kubepods/burstable/pod<uid>/<container>    /docker/<container>
    systemd driver    /kubepods.slice/.../kubepods-burstable-pod<uid>.slice/crio-<container>.scope
    both at odds      .../kubepods-burstable-pod<uid>.slice:cri-containerd:<container>
    Slurm             /slurm/uid_1000/job_42/step_0/task_0    /system.slice/slurmstepd.scope/job_42/step_0/user/task_0

systemd writes the dashes of a pod's uid as underscores, because a dash in a slice's name nests it.  If containers are
nested (kind, a runtime in a pod), the innermost is the process's own.

A daemon in a control group namespace, as in containers with cgroup v2, sees paths relative to its own group
(cgroup_namespaces(7)): / is its own container, and /../<name> may be another container of its pod.  The kernel hides
what is above, so there the process's own claim counts.

No path has a pod's name.  But the kubelet names its log folders <namespace>_<pod>_<uid>, and none of the three parts
can have an underscore.

Source: kubernetes pkg/kubelet/cm (cgroup names), pkg/kubelet/kuberuntime (log folders); opencontainers/runc
libcontainer/cgroups/systemd; slurm.schedmd.com/cgroup_v2.html; systemd.slice(5).  Left out: reading
(`collectors.identity`), and container names given by people (ctr, nerdctl), which have no fixed form.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pacecar.records import JobHello

__all__ = ["CgroupIdentity", "PodName", "Residence", "membership_of", "parse_pod_folder", "reside"]

_UID = r"[0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32}"
_POD = re.compile(rf"(?:^|-)pod(?P<uid>{_UID})(?:\.slice)?(?:$|:)")
"""The second form of uid belongs to static pods; it is a hash of their file."""

_CONTAINER = re.compile(
    r"^(?:[^:]+:)?(?:(?:cri-containerd|nerdctl|crio|docker|libpod)[-:])?(?P<id>[0-9a-f]{64})(?:\.scope)?$"
)
"""A name with another prefix is not a container: crio-conmon-<id>.scope is the process that watches one."""

_SLURM = re.compile(r"^(?:slurm(?:_.+)?|(?:.+_)?slurmstepd\.scope)$")
_SLURM_JOB = re.compile(r"^job_(?P<id>[0-9]{1,20})$")
_FOLDER = re.compile(rf"^(?P<namespace>[a-z0-9-]{{1,63}})_(?P<name>[a-z0-9.-]{{1,253}})_(?P<uid>{_UID})$")


class CgroupIdentity(NamedTuple):
    """Where the kernel shows one process; None for what it is not in, as far as the daemon's namespace shows it."""

    pod_uid: str | None = None
    container_id: str | None = None
    slurm_job: str | None = None
    is_cut_off: bool = False
    """Whether the path begins at or beside the daemon's own group instead of the root, and names no pod."""


class PodName(NamedTuple):
    """A pod's name and namespace."""

    name: str
    namespace: str


class Residence(NamedTuple):
    """Where a process runs, as labels: empty (absent to Prometheus) if unknown or not in one."""

    pod_name: str = ""
    pod_namespace: str = ""
    pod_uid: str = ""
    container_id: str = ""
    slurm_job: str = ""


def membership_of(paths: Iterable[str]) -> CgroupIdentity:
    """Return what the paths of one process's control groups contain; with several (v1), the first match counts."""
    found = CgroupIdentity()
    is_cut_off = True
    for path in paths:
        here = _membership(path)
        found = CgroupIdentity(
            found.pod_uid or here.pod_uid, found.container_id or here.container_id, found.slurm_job or here.slurm_job
        )
        is_cut_off = is_cut_off and (path == "/" or path.startswith("/.."))
    return found._replace(is_cut_off=is_cut_off and found.pod_uid is None)


def _membership(path: str) -> CgroupIdentity:
    pod_uid = container_id = slurm_job = None
    is_slurm = False
    for name in path.split("/"):
        if pod := _POD.search(name):
            pod_uid, container_id = pod["uid"].replace("_", "-"), None
        if container := _CONTAINER.match(name):
            container_id = container["id"]
        if is_slurm and (job := _SLURM_JOB.match(name)):
            slurm_job = job["id"]
        is_slurm = is_slurm or _SLURM.match(name) is not None
    return CgroupIdentity(pod_uid, container_id, slurm_job)


def parse_pod_folder(folder: str) -> tuple[str, PodName] | None:
    """Return (uid, name) of one of the kubelet's log folders; None for a folder of another form."""
    found = _FOLDER.match(folder)
    return None if found is None else (found["uid"], PodName(found["name"], found["namespace"]))


def reside(membership: CgroupIdentity | None, pods: Mapping[str, PodName], hello: JobHello | None) -> Residence:
    """Return where a process runs; `membership` is None if the kernel does not show it to us.

    The kernel and the kubelet take precedence over the process's own claim.  A process that the kernel shows outside of
    any pod is in none, whatever it claims; one that is cut off may be in one.  Without Slurm's control groups only the
    claim remains.
    """
    seen = membership or CgroupIdentity()
    may_be_in_pod = membership is None or seen.pod_uid is not None or seen.is_cut_off
    pod = pods.get(seen.pod_uid) if seen.pod_uid is not None else None
    if pod is None and hello is not None and may_be_in_pod:
        pod = PodName(hello.pod_name or "", hello.pod_namespace or "")
    name, namespace = pod or PodName("", "")
    slurm_job = seen.slurm_job or (hello.slurm_job if hello is not None else None)
    return Residence(name, namespace, seen.pod_uid or "", seen.container_id or "", slurm_job or "")
