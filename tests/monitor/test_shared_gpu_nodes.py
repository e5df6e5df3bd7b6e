"""A node whose GPU several pods share, as all views tell of it: MIG, MPS and time-slicing.

The whole daemon runs over the stand-in driver and a recorded machine in which the processes on the GPU are in pods.
What each view must not do: call a GPU idle that is not, count anything twice, or say 0 of what was not read.
"""

import json
import os
from functools import partial
from typing import NamedTuple

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families as parse_prometheus

from pacecar.commands.doctor.facts.gpu import read_gpus
from pacecar.commands.doctor.host_access import FactReader, HostAccess
from pacecar.commands.main import cli
from pacecar.config import DaemonConfig
from pacecar.metrics.catalog import by_name
from pacecar.monitor.daemon import Daemon
from pacecar.monitor.gpu.nvml import PyNvml
from tests.kit.net import scrape
from tests.kit.waiting import until
from tests.monitor.nvml_standin.standin import MIG_H100, MPS, TIME_SLICING

UIDS = [f"3f2a8c1e-9b7d-4e6f-8a12-0c5d9e7b1f3{number}" for number in range(3)]
FLAT = [uid.replace("-", "_") for uid in UIDS]
IDS = [f"{number}123456789abcdef" * 4 for number in range(3)]
PATHS = [
    # Guaranteed, burstable and best effort; the kubelet's systemd driver (kubernetes, pkg/kubelet/cm) with containerd
    # and CRI-O; the last as a daemon in a control group namespace of its own sees it (cgroup_namespaces(7)).
    f"/kubepods.slice/kubepods-pod{FLAT[0]}.slice/cri-containerd-{IDS[0]}.scope",
    f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{FLAT[1]}.slice/crio-{IDS[1]}.scope/container",
    f"/../../kubepods-besteffort.slice/kubepods-besteffort-pod{FLAT[2]}.slice/cri-containerd-{IDS[2]}.scope",
]
INSTANCES = {
    ("2", "0"): ("MIG-c1a3e5f7-0d7c-5e2a-ac52-8c5e3b2a9f03", "NVIDIA H100 80GB HBM3 MIG 3g.40gb", 40 << 30),
    ("9", "0"): ("MIG-3b0d6a2c-51a4-5a0e-8a30-6a3c1f0e7d01", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10 << 30),
    ("11", "0"): ("MIG-8f2c4e6a-2c6b-5d1f-9b41-7b4d2a1f8e02", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10 << 30),
}
GPU = "0"

pytestmark = pytest.mark.slow


class Told(NamedTuple):
    """What each view says: samples as {(metric, labels...): value}, documents, and texts."""

    metrics: dict
    gpu: dict
    ranks: list
    history: dict
    top: str
    sample: dict
    doctor: dict


SHOWN = ("pacecar_gpu_", "pacecar_process_info")


def once(samples):
    """Return {(metric without prefix, label values): value} of (metric, labels by name, value), each of them once."""
    found = [
        ((name.removeprefix("pacecar_"), *(labels.get(label, "") for label in by_name(name).labels)), value)
        for name, labels, value in samples
        if name.startswith(SHOWN)
    ]
    assert len({key for key, _ in found}) == len(found)
    return dict(found)


def scraped(page):
    return once((one.name, one.labels, one.value) for family in parse_prometheus(page) for one in family.samples)


def sampled(document):
    samples = [one for collector in document["collectors"].values() for one in collector["samples"]]
    return once((one["metric"], one["labels"], one["value"]) for one in samples)


def command(*arguments, **environ):
    done = CliRunner().invoke(cli, [*arguments], env={"PACECAR_STANDIN": None, **environ})  # the library has read it
    assert done.stdout, (done.exception, done.output)
    return done.stdout


@pytest.fixture
def tell(standin, machine, tmp_path, hooks, make_hello, make_step):
    """A function that starts a daemon over the stand-in's one GPU, and asks all views when it sees `pids`."""

    def ask(pids, uuid):
        standin.page.count, standin.page.links = 1, 0
        for pid, path in zip(pids, PATHS, strict=False):
            (machine / "proc" / str(pid)).mkdir()
            (machine / "proc" / str(pid) / "cgroup").write_text(f"0::{path}\n")
        for number, uid in enumerate(UIDS):
            (tmp_path / "pods" / f"ml_trainer-{number}_{uid}").mkdir(parents=True)
        roots = {"proc_root": str(machine / "proc"), "sys_root": str(machine / "sys")}
        config = DaemonConfig(
            port=0, socket=str(tmp_path / "s"), period_seconds=0.5, pod_logs=str(tmp_path / "pods"), mounts=("/",),
            recordings=str(tmp_path / "recordings"), cpu_budget=1.0, **roots,
        )  # fmt: skip
        daemon = Daemon(config)
        daemon.start()
        try:
            hook = hooks(daemon.socket)
            hook.say(make_hello(pid=os.getpid(), world_size=1, device_uuid=uuid, device="cuda:0"), make_step())

            get = partial(scrape, daemon.port)

            def seen():
                return {key[1] for key in scraped(get("/metrics")) if key[0] == "process_info"}

            until(lambda: seen() >= {str(pid) for pid in pids}, "the processes on the GPU are known", look_seconds=0.2)
            until(lambda: json.loads(get("/api/snapshot"))["jobs"], "the rank is known", look_seconds=0.2)
            document = json.loads(get("/api/snapshot"))
            (gpu,), ranks = document["gpus"], document["jobs"][0]["ranks"]
            said = scraped(get("/metrics")), gpu, ranks, json.loads(get("/api/history"))["series"]
            shown = command("top", "--once", f"127.0.0.1:{daemon.port}")
        finally:
            daemon.close()
        environ = {f"PACECAR_DAEMON_{name.upper()}": root for name, root in roots.items()}
        sample = sampled(json.loads(command("sample", "--json", **environ)))
        return Told(*said, shown, sample, json.loads(command("doctor", "--json", "--fail-on", "never")))

    return ask


def check_memory(told, memory):
    """Every view has the memory of these processes and of no other, and the pods are seen."""
    for samples in (told.metrics, told.sample):
        found = {key[2]: value for key, value in samples.items() if key[0] == "gpu_process_memory_bytes"}
        assert found == {str(pid): size for pid, size in memory.items()}
    pods = {key[1]: (key[5], key[7], key[8]) for key in told.metrics if key[0] == "process_info" and not key[2]}
    assert pods == {
        str(pid): (f"trainer-{number}", UIDS[number], IDS[number]) for number, pid in enumerate(sorted(memory))
    }


@pytest.mark.parametrize("unprivileged", [0, 1])
def test_mig(tell, standin, caplog, unprivileged):
    """With the list of the whole GPU, and without it, which the driver refuses to the unprivileged."""
    page = standin.page
    page.mig, page.first, page.unprivileged, page.reasons[7] = MIG_H100, 7, unprivileged, 0
    told = tell([4070, 4071, 4072], INSTANCES["2", "0"][0])
    check_memory(told, {4070: 14500, 4071: 15000, 4072: 15500})
    for samples in (told.metrics, told.sample):
        assert next(key[-1] for key in samples if key[0] == "gpu_info") == "on"
        assert [samples.get((name, GPU)) for name in ("gpu_mig_instances", "gpu_processes", "gpu_mps_processes")] == [
            3, 3, 0,
        ]  # fmt: skip
        infos = {key[2:4]: key[4:] for key in samples if key[0] == "gpu_instance_info"}
        sizes = {key[2:]: value for key, value in samples.items() if key[0] == "gpu_instance_memory_size_bytes"}
        assert {at: (*infos[at], sizes[at]) for at in infos} == INSTANCES
        assert {key[2:]: v for key, v in samples.items() if key[0] == "gpu_instance_processes"} == dict.fromkeys(
            INSTANCES, 1
        )
        idle = ("gpu_utilization", "gpu_memory_utilization", "gpu_sm_", "gpu_graphics_active", "gpu_process_sm")
        assert [key for key in samples if key[0].startswith(idle)] == []
    figures = ("utilization_ratio", "sm_active_ratio", "processes", "mps_processes", "mig_enabled")
    assert [told.gpu[figure] for figure in figures] == [None, None, 3, 0, 1]
    shown = {
        (one["gpu_instance"], one["compute_instance"]): (one["uuid"], one["name"], one["memory_size_bytes"])
        for one in told.gpu["instances"]
    }
    assert shown == INSTANCES
    assert [one["processes"] for one in told.gpu["instances"]] == [1, 1, 1]
    assert [rank["device_uuid"] for rank in told.ranks] == [INSTANCES["2", "0"][0]]
    assert not [name for name in told.history if "utilization" in name and "gpu" in name]
    assert [line.split()[0] for line in told.top.splitlines() if " MIG " in line] == ["0:2/0", "0:9/0", "0:11/0"]
    row = next(line for line in told.top.splitlines() if "Stand-in" in line)
    assert "%" not in row
    assert told.doctor["unreadable"] == told.doctor["limited"] == []
    assert "ermission" not in caplog.text
    page.count, page.first = 2, 6  # one GPU that is cut is nothing to tell
    found = [one for one in judged() if one["id"] == "gpu-mig-on"]
    assert [(e["value"], e["where"][:11]) for one in found for e in one["evidence"]] == [("on", "NVML, GPU 1")]


def judged():
    return json.loads(command("doctor", "--json", "--fail-on", "never"))["findings"]


def test_mps(tell, standin):
    """The server holds memory of its own, and its clients, the jobs, are in a list of theirs."""
    standin.page.sharing[0] = MPS
    told = tell([4000, 6000, 6001], "GPU-0")
    check_memory(told, {4000: 7000, 6000: 300, 6001: 301})
    for samples in (told.metrics, told.sample):
        assert next(key[-1] for key in samples if key[0] == "gpu_info") == "off"
        assert [samples[name, GPU] for name in ("gpu_processes", "gpu_mps_processes")] == [1, 2]
        assert samples["gpu_utilization_ratio", GPU] == 0.81
    assert [told.gpu[figure] for figure in ("utilization_ratio", "processes", "mps_processes")] == [0.81, 1, 2]
    assert told.doctor["unreadable"] == []


def test_time_slicing(tell, standin):
    standin.page.sharing[0] = TIME_SLICING
    told = tell([4000, 4001], "GPU-0")
    check_memory(told, {4000: 7000, 4001: 7001})
    for samples in (told.metrics, told.sample):
        assert [samples[name, GPU] for name in ("gpu_processes", "gpu_mps_processes")] == [2, 0]
        shares = {key[2]: value for key, value in samples.items() if key[0] == "gpu_process_sm_ratio"}
        assert shares == {"4000": 0.11, "4001": 0.31}
        assert samples["gpu_utilization_ratio", GPU] == 0.81
    assert [told.gpu[figure] for figure in ("utilization_ratio", "processes", "mps_processes")] == [0.81, 2, 0]
    assert "MPS" not in told.top
    assert told.doctor["unreadable"] == []


def test_the_doctor_sees_who_computes_on_instances(standin):
    page = standin.page
    page.count, page.first, page.mig, page.unprivileged = 1, 7, MIG_H100, 1
    looker = FactReader(HostAccess(nvml=PyNvml()))
    (board,) = read_gpus(looker).boards
    assert (board.pids, looker.unreadable) == ((4070, 4071, 4072), ())
