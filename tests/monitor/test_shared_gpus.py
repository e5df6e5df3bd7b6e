"""GPUs that several jobs share: cut into MIG instances, under MPS, and time-sliced between pods.

The machine is made up, by the documented formats, as no recording of such a node can be had: an H100 with MIG profiles
1g.10gb, 1g.10gb and 3g.40gb (NVIDIA Multi-Instance GPU User Guide, "GPU Instance Profiles"; UUIDs as `nvidia-smi -L`
writes them since driver 470), and the processes of an MPS node as nvml.h describes the two lists.
"""

import contextlib
from types import SimpleNamespace

import pytest

from pacecar.clock import NS_PER_SECOND
from pacecar.monitor.gpu.driver import DriverProcess, Instance, NvmlError
from pacecar.monitor.gpu.queries.queries import InstanceProcesses, Processes
from pacecar.monitor.jobs.job_energy import MIN_SECONDS, JobEnergies
from pacecar.monitor.jobs.node_signals import SIGNAL_TICKS, NodeSignalsSource, Throttles
from pacecar.monitor.jobs.tracked_job import JobView, RankView
from pacecar.records import Ok, Sample, Snapshot

GPU = "GPU-5d0f1d5e-6f0a-1c55-9d4e-2f4d1a6f0b11"
INSTANCES = {
    ("9", "0"): ("MIG-3b0d6a2c-51a4-5a0e-8a30-6a3c1f0e7d01", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10 << 30),
    ("11", "0"): ("MIG-8f2c4e6a-2c6b-5d1f-9b41-7b4d2a1f8e02", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10 << 30),
    ("2", "0"): ("MIG-c1a3e5f7-0d7c-5e2a-ac52-8c5e3b2a9f03", "NVIDIA H100 80GB HBM3 MIG 3g.40gb", 40 << 30),
}
UUIDS = [uuid for uuid, _, _ in INSTANCES.values()]


def h100(second, energy=0, mig="on"):
    """Return a tick of the H100; it has no utilization, which NVML does not support in MIG mode."""
    info = ("0", GPU, "NVIDIA H100 80GB HBM3", "570.86", "00000000:3B:00.0", "hopper", "12.8", "", mig)
    samples = [
        Sample("pacecar_gpu_info", info, 1),
        Sample("pacecar_gpu_up", ("0",), 1),
        Sample("pacecar_gpu_energy_joules_total", ("0",), energy),
        Sample("pacecar_gpu_memory_size_bytes", ("0",), 80 << 30),
        Sample("pacecar_gpu_memory_free_bytes", ("0",), 60 << 30),
        Sample("pacecar_gpu_clock_event_seconds_total", ("0", "sw_power_cap", "driver"), second * NS_PER_SECOND),
    ]
    for key, (uuid, name, size) in INSTANCES.items():
        samples += [
            Sample("pacecar_gpu_instance_info", ("0", *key, uuid, name), 1),
            Sample("pacecar_gpu_instance_memory_size_bytes", ("0", *key), size),
            Sample("pacecar_gpu_instance_memory_free_bytes", ("0", *key), size // 4),
        ]
    return Snapshot(second, second * NS_PER_SECOND, 0, 0, {"gpu": Ok(tuple(samples))}, {"gpu": 1})


def test_a_rank_on_an_instance_is_told_of_its_own_memory_and_of_its_gpus_clocks(make_hello):
    source, throttles = NodeSignalsSource(NS_PER_SECOND), Throttles()
    told = [(source.update(h100(second)), throttles.update(h100(second))) for second in range(2 * SIGNAL_TICKS)]
    signals, held = next(one for one in reversed(told) if one[0] is not None)
    seen = {
        uuid: signals.of(make_hello(device_uuid=uuid), held.get(uuid)) for uuid in (*UUIDS, GPU, "MIG-of another node")
    }
    of_instances = [(seen[uuid].device_total_bytes >> 30, seen[uuid].device_free_bytes >> 20) for uuid in UUIDS]
    assert of_instances == [(10, 2560), (10, 2560), (40, 10240)]
    assert (seen[GPU].device_total_bytes, seen[GPU].device_free_bytes) == (80 << 30, 60 << 30)
    assert {seen[uuid].throttled_by for uuid in (*UUIDS, GPU)} == {("sw_power_cap",)}
    assert {seen[uuid].faults for uuid in (*UUIDS, GPU)} == {()}
    stranger = seen["MIG-of another node"]
    assert (stranger.device_total_bytes, stranger.throttled_by, stranger.faults) == (None, None, None)


@pytest.mark.parametrize("mig", ["on", ""])
@pytest.mark.parametrize("uuids", [UUIDS[:1], UUIDS[:2], [GPU], [GPU, UUIDS[0]]])
def test_the_energy_of_a_gpu_that_is_or_may_be_cut_is_charged_to_no_job(make_hello, make_step, uuids, mig):
    """Not to one whose CUDA says the UUID of the whole GPU, either: the other instances used it too."""
    energies, found = JobEnergies(), []
    for second in range(3 * MIN_SECONDS):
        jobs = [
            JobView(
                job=f"run-{number}", launch="", uid=1,
                ranks=(RankView(
                    hello=make_hello(job=f"run-{number}", world_size=1, device_uuid=uuid), connected=True, goodbye=None,
                    switch=None, switches=0, step_age_ns=0, step=make_step(job=f"run-{number}", total_steps=second),
                ),),
            )
            for number, uuid in enumerate(uuids)
        ]  # fmt: skip
        found += energies.update(h100(second, 400_000 * second, mig), lambda jobs=jobs: jobs)
    assert found == []


def listed(processes, clients):
    """Return what the queries of processes yield of a GPU, asked in their order."""
    driver = SimpleNamespace(
        processes=lambda handle: list(processes), mps_processes=lambda handle: list(clients),
        process_shares=lambda handle, since: [],
    )  # fmt: skip
    return [sample for query in Processes("0").queries() for sample in query.ask(driver, None)]


def test_clients_of_mps_are_processes_of_the_gpu_beside_their_server():
    found = listed([DriverProcess(100, 30)], [DriverProcess(201, 4000), DriverProcess(202, 5000)])
    memory = {s.labels[1]: s.value for s in found if s.metric == "pacecar_gpu_process_memory_bytes"}
    assert memory == {"100": 30, "201": 4000, "202": 5000}
    counts = {s.metric: s.value for s in found if s.metric.endswith("processes")}
    assert counts == {"pacecar_gpu_processes": 1, "pacecar_gpu_mps_processes": 2}


def test_a_client_that_is_in_both_lists_has_its_memory_counted_once():
    found = listed([DriverProcess(201, 4000)], [DriverProcess(201, 4000)])
    assert [s.value for s in found if s.metric == "pacecar_gpu_process_memory_bytes"] == [4000]


def test_two_pods_that_take_turns_on_one_gpu_are_both_seen():
    found = listed([DriverProcess(301, 4000), DriverProcess(302, 5000)], [])
    memory = {s.labels[1]: s.value for s in found if s.metric == "pacecar_gpu_process_memory_bytes"}
    assert memory == {"301": 4000, "302": 5000}


def of_instances(lists, clients):
    """Return what is known of the processes of a GPU in MIG mode whose instances list these; None is an error."""
    processes = InstanceProcesses("0")

    def ask(answers, handle):
        if answers[handle] is None:
            raise NvmlError("Unknown Error", 999)
        return list(answers[handle])

    driver = SimpleNamespace(
        processes=lambda handle: ask(lists, handle), mps_processes=lambda handle: ask(clients, handle)
    )
    for number in range(len(lists)):
        for query in processes.queries(Instance(number, number, 0, "", "")):
            with contextlib.suppress(NvmlError):
                list(query.ask(driver, None))
    return {
        (s.metric.removeprefix("pacecar_gpu_"), *s.labels[1:]): s.value for s in processes.samples(are_all_known=True)
    }


SERVER, CLIENT, ALONE = DriverProcess(100, 30), DriverProcess(201, 4000), DriverProcess(301, 50)


def test_clients_of_mps_on_an_instance_are_processes_of_the_gpu():
    assert of_instances([[SERVER], [ALONE], []], [[CLIENT], [], []]) == {
        ("processes",): 2, ("mps_processes",): 1, ("process_memory_bytes", "100"): 30,
        ("process_memory_bytes", "201"): 4000, ("process_memory_bytes", "301"): 50,
    }  # fmt: skip


def test_of_instances_that_give_no_list_nothing_is_counted():
    assert of_instances([[SERVER], None], [[], []]) == {("mps_processes",): 0, ("process_memory_bytes", "100"): 30}
    assert of_instances([[SERVER], [ALONE]], [None, []]) == {
        ("processes",): 2, ("process_memory_bytes", "100"): 30, ("process_memory_bytes", "301"): 50,
    }  # fmt: skip
    assert of_instances([None], [None]) == {}


def test_a_gpu_without_instances_has_no_processes():
    assert of_instances([], []) == {("processes",): 0, ("mps_processes",): 0}
