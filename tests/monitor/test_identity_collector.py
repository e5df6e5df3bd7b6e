"""Where processes run: paths of every runtime and driver, and a reader that is bounded and cached."""

import pytest

from pacecar.clock import NS_PER_SECOND
from pacecar.monitor.collectors import identity
from pacecar.monitor.collectors.identity import IdentityCollector, gpu_processes
from pacecar.monitor.jobs.cgroup_identity import (
    CgroupIdentity,
    PodName,
    Residence,
    membership_of,
    parse_pod_folder,
    reside,
)
from pacecar.records import Absent, Ok, Sample, Snapshot

ID = "0123456789abcdef" * 4
INNER = "fedcba9876543210" * 4
UID = "3f2a8c1e-9b7d-4e6f-8a12-0c5d9e7b1f34"
FLAT = UID.replace("-", "_")
STATIC = "0f343b0931126a20f133d67c2b018a3b"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        # cgroupfs driver
        (f"/kubepods/burstable/pod{UID}/{ID}", CgroupIdentity(UID, ID)),
        (f"/kubepods/pod{UID}/{ID}", CgroupIdentity(UID, ID)),
        (f"/kubepods/besteffort/pod{UID}/crio-{ID}", CgroupIdentity(UID, ID)),
        (f"/kubepods/burstable/pod{STATIC}/{ID}", CgroupIdentity(STATIC, ID)),
        (f"/docker/{ID}", CgroupIdentity(None, ID)),
        # systemd driver
        (f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{FLAT}.slice/cri-containerd-{ID}.scope",
         CgroupIdentity(UID, ID)),
        (f"/kubepods.slice/kubepods-pod{FLAT}.slice/crio-{ID}.scope", CgroupIdentity(UID, ID)),
        (f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{FLAT}.slice/docker-{ID}.scope/init.scope",
         CgroupIdentity(UID, ID)),
        (f"/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{FLAT}.slice/cri-containerd-{ID}.scope",
         CgroupIdentity(UID, ID)),
        (f"/system.slice/docker-{ID}.scope", CgroupIdentity(None, ID)),
        (f"/machine.slice/libpod-{ID}.scope/container", CgroupIdentity(None, ID)),
        (f"/user.slice/user-1000.slice/user@1000.service/user.slice/nerdctl-{ID}.scope", CgroupIdentity(None, ID)),
        # containerd and the kubelet disagree on the driver
        (f"/system.slice/containerd.service/kubepods-burstable-pod{FLAT}.slice:cri-containerd:{ID}",
         CgroupIdentity(UID, ID)),
        # containers in containers, and a daemon in a control group namespace of its own
        (f"/docker/{ID}/kubelet/kubepods/besteffort/pod{UID}/{INNER}", CgroupIdentity(UID, INNER)),
        (f"/kubepods/burstable/pod{UID}/{ID}/docker/{INNER}", CgroupIdentity(UID, INNER)),
        (f"/../../pod{UID}/{ID}", CgroupIdentity(UID, ID)),
        (f"/docker/{ID}/kubelet/kubepods/pod{UID}", CgroupIdentity(UID, None)),
        # Slurm
        ("/slurm/uid_1000/job_42/step_0/task_0", CgroupIdentity(None, None, "42")),
        ("/slurm_node1/uid_1000/job_42/step_batch", CgroupIdentity(None, None, "42")),
        ("/system.slice/slurmstepd.scope/job_4711/step_0/user/task_3", CgroupIdentity(None, None, "4711")),
        ("/system.slice/node1_slurmstepd.scope/job_4711/step_extern/user", CgroupIdentity(None, None, "4711")),
        # none of these
        ("/system.slice/pacecar.service", CgroupIdentity()),
        ("/user.slice/user-1000.slice/session-3.scope", CgroupIdentity()),
        ("/batch/job_42/step_0", CgroupIdentity()),
        (f"/kubepods/pod{UID}/crio-conmon-{ID}.scope", CgroupIdentity(UID, None)),
        (f"/x/podcast-{ID}", CgroupIdentity()),
        ("", CgroupIdentity()),
        # the other forms of the kubelet's and the runtimes' names (kubernetes, pkg/kubelet/cm: qos and driver; cri-o,
        # internal/config/cgmgr; crun's group below the scope); static pods, and those of a kubelet in a pod (kind)
        (f"/kubepods/burstable/pod{UID}/crio-{ID}", CgroupIdentity(UID, ID)),
        (f"/kubepods/pod{UID}/crio-{ID}/container", CgroupIdentity(UID, ID)),
        (f"/kubepods/besteffort/pod{UID}/{ID}", CgroupIdentity(UID, ID)),
        (f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{FLAT}.slice/crio-{ID}.scope/container",
         CgroupIdentity(UID, ID)),
        (f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{FLAT}.slice/cri-containerd-{ID}.scope",
         CgroupIdentity(UID, ID)),
        (f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{STATIC}.slice/cri-containerd-{ID}.scope",
         CgroupIdentity(STATIC, ID)),
        (f"/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/"
         f"kubelet-kubepods-burstable-pod{FLAT}.slice/cri-containerd-{ID}.scope", CgroupIdentity(UID, ID)),
        # as a daemon in a control group namespace sees them (cgroup_namespaces(7)): a pod of its class of service, of
        # another, a container beside it in its pod, and its own container
        (f"/../../kubepods-burstable-pod{FLAT}.slice/cri-containerd-{ID}.scope", CgroupIdentity(UID, ID)),
        (f"/../../../kubepods-pod{FLAT}.slice/crio-{ID}.scope", CgroupIdentity(UID, ID)),
        (f"/../../../besteffort/pod{UID}/{ID}", CgroupIdentity(UID, ID)),
        (f"/../cri-containerd-{ID}.scope", CgroupIdentity(None, ID, is_cut_off=True)),
        (f"/../{ID}", CgroupIdentity(None, ID, is_cut_off=True)),
        ("/", CgroupIdentity(is_cut_off=True)),
    ],
)  # fmt: skip
def test_paths(path, expected):
    assert membership_of([path]) == expected


def test_of_several_hierarchies_the_first_that_says_it_counts():
    paths = ["/", "/slurm/uid_0/job_7/step_0", f"/docker/{ID}", f"/kubepods/pod{UID}/{INNER}"]
    assert membership_of(paths) == CgroupIdentity(UID, ID, "7")


def test_a_hierarchy_that_is_not_cut_off_shows_that_there_is_no_pod():
    """With cgroup v1 a process of the host is at the root of the hierarchies that systemd does not use."""
    assert membership_of(["/", "/system.slice/ssh.service", "/"]) == CgroupIdentity()


@pytest.mark.parametrize(("path", "container"), [("/", ""), (f"/../cri-containerd-{ID}.scope", ID)])
def test_beside_a_daemon_in_a_pod_of_its_own_the_process_names_its_pod(make_hello, path, container):
    """In its container, or in another of the pod, where the namespace hides the pod's group."""
    hello = make_hello(pod_name="trainer-0", pod_namespace="ml")
    assert reside(membership_of([path]), {}, hello) == Residence("trainer-0", "ml", "", container, "")
    assert reside(membership_of([path]), {}, None) == Residence(container_id=container)
    assert reside(membership_of(["/system.slice/x.service"]), {}, hello) == Residence()


def test_folders_of_the_kubelet():
    assert parse_pod_folder(f"ml-team_trainer-0_{UID}") == (UID, PodName("trainer-0", "ml-team"))
    assert parse_pod_folder(f"kube-system_etcd-node.a_{STATIC}") == (STATIC, PodName("etcd-node.a", "kube-system"))
    for other in ("lost+found", f"trainer-0_{UID}", "a_b_c", f"A_b_{UID}", ""):
        assert parse_pod_folder(other) is None


def test_the_kernels_word_goes_before_the_process_own(make_hello):
    liar = make_hello(slurm_job="1", pod_name="victim", pod_namespace="prod")
    assert reside(CgroupIdentity(None, ID, "42"), {}, liar) == Residence(container_id=ID, slurm_job="42")
    assert reside(CgroupIdentity(UID, ID), {UID: PodName("real", "dev")}, liar)[:3] == ("real", "dev", UID)
    assert reside(CgroupIdentity(UID, ID), {}, liar)[:3] == ("victim", "prod", UID), (
        "unknown to us: its word is all there is"
    )
    assert reside(None, {}, liar) == Residence("victim", "prod", "", "", "1")
    assert reside(None, {}, None) == Residence()


@pytest.fixture
def node(machine, files, clock, make_hello):
    """A collector over a recorded machine, its inputs, and a way to add processes."""

    class Node:
        def __init__(self):
            self.ranks, self.others, self.reads = [], [], 0
            self.logs = machine / "pods"
            read = files.read

            def counting(path):
                self.reads += 1
                return read(path)

            files.read = counting
            self.collector = IdentityCollector(
                files, clock, lambda: self.ranks, lambda: self.others, pod_logs=str(self.logs), forget_seconds=100
            )

        def process(self, pid, path):
            (machine / "proc" / str(pid)).mkdir(exist_ok=True)
            (machine / "proc" / str(pid) / "cgroup").write_text(f"0::{path}\n")

        def infos(self):
            samples = self.collector.collect().samples
            return {s.labels[0]: s.labels[1:] for s in samples if s.metric == "pacecar_process_info"}

    return Node()


def test_a_rank_and_a_process_on_a_gpu_are_found_and_read_once_a_minute(node, clock, make_hello):
    hello = make_hello()
    node.ranks, node.others = [(50, hello)], [50, 60]
    node.process(50, f"/kubepods/pod{UID}/{ID}")
    node.process(60, "/slurm/uid_1/job_9/step_0")
    (node.logs / f"ml_trainer-0_{UID}").mkdir(parents=True)
    assert node.infos() == {
        "50": ("run-7", "", "0", "trainer-0", "ml", UID, ID, ""),
        "60": ("", "", "", "", "", "", "", "9"),
    }
    assert node.collector.residence(hello) == Residence("trainer-0", "ml", UID, ID, "")
    reads = node.reads
    for _ in range(30):
        clock.advance(NS_PER_SECOND)
        assert len(node.infos()) == 2
        node.collector.residence(hello)
    assert node.reads == reads == 2
    node.process(60, f"/docker/{ID}")  # the pid is another process's by now
    clock.advance(60 * NS_PER_SECOND)
    assert node.infos()["60"][-2:] == (ID, "")


def test_a_pod_that_the_kubelet_names_later_is_named_later(node, clock, make_hello):
    hello = make_hello()
    node.ranks = [(50, hello)]
    node.process(50, f"/kubepods/pod{UID}/{ID}")
    assert node.infos()["50"][3:6] == ("", "", UID)
    (node.logs / f"ml_trainer-0_{UID}").mkdir(parents=True)
    clock.advance(5 * NS_PER_SECOND)
    assert node.infos()["50"][3:6] == ("", "", UID), "not looked for at every tick"
    clock.advance(5 * NS_PER_SECOND)
    assert node.infos()["50"][3:6] == ("trainer-0", "ml", UID)


def test_a_rank_that_left_keeps_its_place_until_its_job_is_forgotten(node, clock, make_hello):
    hello = make_hello()
    node.ranks = [(50, hello)]
    node.process(50, f"/docker/{ID}")
    node.infos()
    node.ranks = []
    clock.advance(99 * NS_PER_SECOND)
    assert node.infos() == {}
    assert node.collector.residence(hello).container_id == ID
    clock.advance(2 * NS_PER_SECOND)
    node.infos()
    assert node.collector.residence(hello) == Residence()


def test_processes_are_bounded_and_those_left_out_counted(node, clock, make_hello, monkeypatch):
    monkeypatch.setattr(identity, "PROCESSES_MAX", 20)
    monkeypatch.setattr(identity, "READS_PER_TICK", 8)
    node.ranks = [(pid, make_hello(rank=pid, world_size=1000)) for pid in range(100, 130)]
    for pid, _ in node.ranks:
        node.process(pid, f"/docker/{ID}")
    seen = []
    for _ in range(4):
        before = node.reads
        outcome = node.collector.collect()
        seen.append(sum(s.metric == "pacecar_process_info" for s in outcome.samples))
        assert node.reads - before <= 8
        clock.advance(NS_PER_SECOND)
    assert seen == [8, 16, 20, 20]
    assert [s.value for s in outcome.samples if s.metric == "pacecar_processes_left_out"] == [10]
    assert len(node.collector._kept) == 20
    node.ranks = node.ranks[20:]  # the others end; who was left out finds room
    assert sum(s.metric == "pacecar_process_info" for s in node.collector.collect().samples) == 8


def test_a_process_that_ended_and_a_broken_line_cost_themselves_only(node, machine, make_hello):
    node.others = [50, 51, 52]
    node.process(50, f"/docker/{ID}")
    node.process(52, "")
    (machine / "proc" / "52" / "cgroup").write_text("rubbish\n")
    outcome = node.collector.collect()
    assert "rubbish" in outcome.reason
    found = {s.labels[0]: s.labels[7] for s in outcome.samples if s.metric == "pacecar_process_info"}
    assert found == {"50": ID, "51": "", "52": ""}


def test_nobody_there_is_healthy(node):
    outcome = node.collector.collect()
    assert not isinstance(outcome, Absent)
    assert [s.value for s in outcome.samples] == [0]


def test_pids_come_from_the_gpus_samples():
    samples = [Sample("pacecar_gpu_process_memory_bytes", ("0", "77"), 1), Sample("pacecar_gpu_processes", ("0",), 1)]
    outcomes = {"gpu": Ok(tuple(samples))}
    snapshot = Snapshot(tick=0, started_ns=0, wall_ns=0, lateness_ns=0, outcomes=outcomes, durations_ns={})
    assert gpu_processes(snapshot) == {77}
