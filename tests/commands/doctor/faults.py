"""One planted fault for each condition of each rule: the machine, the edit, and the expected finding.

A fault that brings another with it names both; everything else found beside it is a mistake of the doctor's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pacecar.monitor.gpu.driver import Fabric, Number
from pacecar.monitor.gpu.known_gpus import KnownGpu
from pacecar.records import Decision, DeviceMemory, Straggler, TunerStatus
from tests.commands.doctor.machine import (
    CLOSED_MODULE,
    HOST,
    LOG,
    MS,
    PID,
    Machine,
    config,
    gpu_path,
    h100_node,
    nic_path,
    no_gpu,
    records,
    tcp_node,
    workstation,
)
from tests.kit.nccl_files import inspector_line
from tests.kit.ras_server import ras_answer

INTERVAL = "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS"
WRITES = {INTERVAL: "1000000"}


class Fault(NamedTuple):
    """One planted fault."""

    rule: str
    machine: Callable[[], Machine]
    plant: Callable[[Machine], object]
    also: frozenset[str] = frozenset()
    shows: str = ""
    """A text that the evidence must contain."""


def variable(name: str, value: str) -> Callable[[Machine], object]:
    return lambda machine: machine.environ.update({name: value})


def file(name: str, text: str | bytes) -> Callable[[Machine], object]:
    def plant(machine: Machine) -> None:
        assert name in machine.files, f"{name} is not in the healthy machine"
        machine.files[name] = text

    return plant


def inspected(times_us: Sequence[int], **environ: str) -> Callable[[Machine], object]:
    """Return what gives the job an Inspector, which saw a communicator for each time of its all-reduces."""

    def plant(machine: Machine) -> None:
        machine.environ |= {"NCCL_INSPECTOR_ENABLE": "1", "NCCL_INSPECTOR_DUMP_DIR": "inspector", **environ}
        for number, time_us in enumerate(times_us):
            line = inspector_line(id=f"0xc{number}", name=f"dp {number}", time_us=time_us)
            machine.files[f"proc/{PID}/cwd/inspector/{HOST}-pid{number}.log"] = line * 20

    return plant


def number(which: Number, value: int, gpu: int = 3) -> Callable[[Machine], object]:
    return lambda machine: machine.boards[gpu].numbers.update({which: value})


def board(gpu: int = 3, **values: object) -> Callable[[Machine], object]:
    def plant(machine: Machine) -> None:
        for name, value in values.items():
            assert hasattr(machine.boards[gpu], name)
            setattr(machine.boards[gpu], name, value)

    return plant


def job(**changes: object) -> Callable[[Machine], object]:
    def plant(machine: Machine) -> None:
        machine.run = {rank: records(rank, **dict(changes)) for rank in range(2)}  # type: ignore[arg-type]

    return plant


def said(record: object) -> Callable[[Machine], object]:
    def plant(machine: Machine) -> None:
        machine.run[0] = records(0, more=[record])

    return plant


def script(old: str, new: str) -> Callable[[Machine], object]:
    def plant(machine: Machine) -> None:
        assert machine.script is not None
        assert old in machine.script
        machine.script = machine.script.replace(old, new)

    return plant


def ras(answer: bytes) -> Callable[[Machine], object]:
    return lambda machine: setattr(machine, "ras", (answer, answer))


def log(old: str, new: str) -> Callable[[Machine], object]:
    assert old in LOG
    return lambda machine: setattr(machine, "log", LOG.replace(old, new))


def both(*plants: Callable[[Machine], object]) -> Callable[[Machine], object]:
    return lambda machine: [plant(machine) for plant in plants]


def known(*gpus: int) -> Callable[[Machine], object]:
    """The daemon has recorded these boards; numbers above 7 are additional ones."""

    def plant(machine: Machine) -> None:
        machine.known_gpus = [
            KnownGpu(f"GPU-{gpu}", "NVIDIA H100 80GB HBM3", f"00000000:{0x13 + 0x10 * gpu:02X}:00.0", str(gpu), 10**18)
            for gpu in gpus
        ]

    return plant


def no_links(machine: Machine) -> None:
    for one in machine.boards:
        one.links = []


def unshared(machine: Machine) -> None:
    machine.peers[0, 1] = 5


def no_run(machine: Machine) -> None:
    machine.run = None


def without_far_ports(machine: Machine) -> None:
    for index in range(4, 8):
        machine.remove(f"sys/class/infiniband/mlx5_{index}")


def no_card_is_known(machine: Machine) -> None:
    machine.boards.clear()
    machine.driver_missing = True


def gpu_off_its_switch(machine: Machine) -> None:
    """The port beside GPU 3 is down."""
    machine.files["sys/class/infiniband/mlx5_3/ports/1/state"] = "1: DOWN\n"


def slower_second_card(machine: Machine) -> None:
    machine.add_card("pci0000:00/0000:00:03.0/0000:04:00.0", "0x020000", "0x8086", 0, speed="16.0 GT/s PCIe")
    machine.add_interface("eth1", 10_000, 1500, "pci0000:00/0000:00:03.0/0000:04:00.0")


def intel_powersave(machine: Machine) -> None:
    """Every CPU under the driver's own governor, which follows the load."""
    machine.files["sys/devices/system/cpu/cpu0/cpufreq/scaling_driver"] = "intel_pstate\n"
    for n in range(16):
        machine.files[f"sys/devices/system/cpu/cpu{n}/cpufreq/scaling_governor"] = "powersave\n"


def pressure(resource: str, kind: str, share: float) -> Callable[[Machine], object]:
    lines = [
        f"{one} avg10=0.00 avg60={share * 100 if one == kind else 0:.2f} avg300=0.00 total=7\n"
        for one in ("some", "full")
    ]
    return lambda machine: machine.files.update({f"proc/pressure/{resource}": "".join(lines)})


def load(*, of_five_minutes: float) -> Callable[[Machine], object]:
    return lambda machine: machine.files.update({"proc/loadavg": f"1.00 {of_five_minutes} 3.00 4/512 77\n"})


def on_processors(ranks: int, **changes: object) -> Callable[[Machine], object]:
    """The job runs on the CPUs of a machine without GPUs, with an empty script."""

    def plant(machine: Machine) -> None:
        known = {"device": "cpu", "backend": "gloo", "world_size": ranks, "arithmetic": None} | changes
        machine.run = {rank: records(rank, **dict(known)) for rank in range(ranks)}  # type: ignore[arg-type]

    return plant


def measured_round_trip(machine: Machine) -> None:
    machine.round_trip_ns = 2 * MS


SWITCH_PORT = f"sys/devices/{gpu_path(3).rpartition('/')[0]}/config"
STRAGGLER = Straggler(
    job="j", late_rank=1, cause="throttled", phase="compute", since_step=5, step=19, wall_ns=1, excess_ns=9 * MS,
    evidence="late",
)  # fmt: skip
TUNING = TunerStatus(
    job="j", rank=0, state="watching", detail="", step=19, wall_ns=1, exploration_ns=0, trials=3
)  # fmt: skip
ADVICE = Decision(
    job="j", decision=1, kind="advise", knob="bucket_bytes", from_value=26214400, to_value=52428800, step=9, wall_ns=1,
    reason="bucket_bytes 25 MiB -> 50 MiB", expected_gain_ratio=0.07,
)  # fmt: skip
FRAGMENTED = DeviceMemory(
    allocated_bytes=40 * 2**30, reserved_bytes=70 * 2**30, inactive_split_bytes=24 * 2**30, total_allocation_retries=3,
    total_out_of_memory=0,
)  # fmt: skip
DDP = "DDP(torch.nn.Linear(8, 8).cuda(), gradient_as_bucket_view=True)"
WORKERS = "num_workers=8, "
ASYNC_SAVE = "torch.distributed.checkpoint.async_save(state, checkpoint_id=path)"

FAULTS = (
    # GPUs
    Fault("gpu-driver-missing", h100_node, both(no_run, no_card_is_known), shows="Driver Not Loaded"),
    Fault("gpu-lost", h100_node, board(lost=True), shows="GPU is lost"),
    Fault("gpu-missing", h100_node, known(*range(9)), shows="at 0000:93:00.0: not on the PCI bus, last seen 2001"),
    Fault("gpu-missing", h100_node, both(known(*range(8)), lambda machine: machine.boards.pop()),
          shows="GPU-7, at 0000:83:00.0: still on the PCI bus"),
    Fault("gpu-persistence-off", h100_node, number(Number.PERSISTENCE, 0), shows="off"),
    Fault("gpu-power-cap", h100_node, number(Number.POWER_LIMIT, 500_000), shows="500 W"),
    Fault("gpu-throttled", h100_node, number(Number.CLOCK_REASONS, 0x40), shows="hw_thermal_slowdown"),
    Fault("gpu-clocks-locked", h100_node,
          both(number(Number.CLOCK_REASONS, 0x2), number(Number.CLOCK_SM, 1200)), shows="1200 of 1980"),
    Fault("gpu-pcie-link", h100_node, number(Number.PCIE_WIDTH, 8), shows="8 of 16 lanes"),
    Fault("gpu-pcie-link", h100_node, number(Number.PCIE_GENERATION, 3), shows="generation 3 of 5"),
    Fault("gpu-memory-pending", h100_node, board(fields={31: 0, 144: 1, 145: 0}), shows="row remapping"),
    Fault("gpu-memory-pending", h100_node, board(fields={31: 1, 144: 0, 145: 0}), shows="page retirement"),
    Fault("gpu-memory-failed", h100_node, board(fields={31: 0, 144: 0, 145: 1}), shows="no spare row"),
    Fault("gpu-nvlink-down", h100_node, board(links=[True] * 17 + [False]), shows="17 links up; down: 17"),
    Fault("gpu-memory-errors", h100_node, board(fields={4: 2}), shows="2 since the last reset"),
    Fault("gpu-fabric-unready", h100_node, board(fabric=Fabric(2, 0, "", 0, 0)), shows="in progress for 300 minutes"),
    Fault("gpu-fabric-unready", h100_node, board(fabric=Fabric(1, 0, "", 0)), shows="not started for 300 minutes"),
    Fault("gpu-fabric-misconfigured", h100_node, board(fabric=Fabric(3, 0, "", 0, 0x400)), shows="(no partition)"),
    Fault("gpu-fabric-degraded", h100_node, board(fabric=Fabric(3, 0, "", 0, 0x15)), shows="route unhealthy"),
    Fault("gpu-fabric-degraded", h100_node, board(fabric=Fabric(3, 0, "", 0, None, 3)), shows="limited capacity"),
    Fault("gpu-memory-failed", h100_node, board(sram_over_threshold=True), shows="than NVIDIA allows"),
    Fault("gpu-fabric-unready", h100_node, board(fabric=Fabric(3, 999, "", 0, 0)), shows="error 999"),
    Fault("gpu-p2p-off", workstation, lambda machine: machine.peers.update({(0, 1): 4}), shows="registry key"),
    Fault("gpu-p2p-off", h100_node, lambda machine: machine.peers.update({(2, 5): 5}), shows="not supported"),
    Fault("gpu-mig-on", h100_node, number(Number.MIG_MODE, 1), shows="on"),
    Fault("gpu-mixed", h100_node, board(name="NVIDIA H100 PCIe"), shows="NVIDIA H100 PCIe"),
    # PCIe and RDMA
    Fault("nic-pcie-link", h100_node, file(f"sys/devices/{nic_path(2)}/current_link_width", "8\n"),
          shows="8 of 16 lanes"),
    Fault("nic-pcie-link", h100_node, file(f"sys/devices/{nic_path(2)}/current_link_speed", "16.0 GT/s PCIe\n"),
          shows="16 of 32 GT/s"),
    Fault("pci-acs", h100_node, file(SWITCH_PORT, config(acs=0x1D)), shows="redirects"),
    Fault("pci-iommu", h100_node, file("sys/kernel/iommu_groups/0000:43:00.0/type", "DMA-FQ\n"), shows="DMA-FQ"),
    Fault("rdma-port-down", h100_node, file("sys/class/infiniband/mlx5_3/ports/1/state", "1: DOWN\n"), shows="DOWN"),
    Fault("rdma-port-slow", h100_node, file("sys/class/infiniband/mlx5_5/ports/1/rate", "200 Gb/sec (4X HDR)\n"),
          shows="200 Gbit/s, others of this node 400"),
    Fault("rdma-no-gpudirect", h100_node,
          both(file("proc/driver/nvidia/version", CLOSED_MODULE),
               lambda machine: machine.remove("sys/module/nvidia_peermem")),
          shows="not loaded"),
    Fault("rdma-far", h100_node, without_far_ports, shows="on NUMA node 1"),
    # NCCL
    Fault("nccl-ib-disabled", h100_node, variable("NCCL_IB_DISABLE", "1"), shows="ACTIVE, 400 Gbit/s"),
    Fault("nccl-ib-disabled", h100_node, variable("NCCL_NET", "Socket"), shows="Socket"),
    Fault("nccl-ib-disabled", h100_node, file("etc/nccl.conf", "NCCL_DEBUG=WARN\nNCCL_IB_DISABLE=1\n"),
          shows="nccl.conf:2"),
    Fault("nccl-p2p-disabled", h100_node, variable("NCCL_P2P_DISABLE", "1"), shows="18 NVLinks up"),
    Fault("nccl-p2p-disabled", h100_node, variable("NCCL_P2P_LEVEL", "LOC"), shows="LOC"),
    Fault("nccl-p2p-disabled-pcie", workstation, variable("NCCL_P2P_DISABLE", "1"), shows="possible"),
    Fault("nccl-shm-disabled", workstation, both(unshared, variable("NCCL_SHM_DISABLE", "1")), shows="not possible"),
    Fault("nccl-algo-excludes-nvls", h100_node, variable("NCCL_ALGO", "Ring"), shows="Ring"),
    Fault("nccl-algo-excludes-nvls", h100_node, variable("NCCL_ALGO", "^NVLS"), shows="^NVLS"),
    Fault("nccl-nvls-off", h100_node, variable("NCCL_NVLS_ENABLE", "0"), shows="0"),
    Fault("nccl-algo-set", tcp_node, variable("NCCL_ALGO", "Tree"), shows="Tree"),
    Fault("nccl-proto-slow", h100_node, variable("NCCL_PROTO", "LL"), shows="LL"),
    Fault("nccl-proto-slow", h100_node, variable("NCCL_PROTO", "^Simple,LL128"), shows="^Simple,LL128"),
    Fault("nccl-proto-set", h100_node, variable("NCCL_PROTO", "Simple"), shows="Simple"),
    Fault("nccl-no-interface", h100_node, variable("NCCL_SOCKET_IFNAME", "=bond0"), shows="=bond0"),
    Fault("nccl-no-interface", tcp_node, variable("GLOO_SOCKET_IFNAME", "eth7"), shows="eth7"),
    Fault("nccl-slow-interface", tcp_node, both(slower_second_card, variable("NCCL_SOCKET_IFNAME", "eth1")),
          shows="10 Gbit/s"),
    Fault("nccl-no-hca", h100_node, variable("NCCL_IB_HCA", "bnxt"), shows="bnxt"),
    Fault("nccl-few-hcas", h100_node, variable("NCCL_IB_HCA", "=mlx5_0,mlx5_1:1"), shows="mlx5_2:1"),
    Fault("nccl-few-hcas", h100_node, variable("NCCL_IB_HCA", "^=mlx5_0"), shows="mlx5_0:1"),
    Fault("nccl-socket-product", tcp_node,
          both(variable("NCCL_SOCKET_NTHREADS", "16"), variable("NCCL_NSOCKS_PERTHREAD", "8")),
          shows="128, at most 64"),
    Fault("nccl-socket-threads", tcp_node, lambda machine: machine.environ.clear(), shows="100 Gbit/s"),
    Fault("nccl-gdr-off", h100_node, variable("NCCL_NET_GDR_LEVEL", "LOC"), shows="LOC"),
    Fault("nccl-gdr-off", h100_node, variable("NCCL_NET_GDR_READ", "0"), shows="0"),
    Fault("log-sockets", h100_node, log("NET/IB/0/GDRDMA", "NET/Socket/0"), shows="NET/Socket/0"),
    Fault("log-no-gpudirect", h100_node, log("/GDRDMA", ""), shows="NET/IB/0"),
    Fault("log-shared-memory", h100_node, log("P2P/CUMEM/read", "SHM/direct/direct"), shows="SHM"),
    Fault("log-warnings", h100_node,
          log("NCCL INFO Connected", "NCCL WARN Call to ibv_reg_mr failed\nNCCL INFO Connected"),
          shows="ibv_reg_mr"),
    Fault("log-slow-init", h100_node,
          log("NCCL INFO Connected all rings",
              "NCCL INFO Init timings - ncclCommInitRank: rank 0 nranks 16 total 41.52 (kernels 0.20, alloc 0.10, "
              "bootstrap 40.90, allgathers 0.01, topo 0.20, graphs 0.01, connections 0.09, rest 0.01)"),
          shows="42 s, mostly bootstrap"),
    Fault("ras-missing", h100_node, ras(ras_answer({0: 7, 1: 7}, missing={2: False, 3: True})), shows="(given up)"),
    Fault("ras-missing", h100_node,
          ras(ras_answer({0: 7}, missing={1: True}).replace(b"1001", b"-1").replace(b"10.0.0.1", b"unknown")),
          shows="rank 1 (of an unknown process)"),
    Fault("ras-behind", h100_node, ras(ras_answer({0: 7, 1: 7, 2: 6, 3: 7})), shows="rank 2 (pid 1002 on 10.0.0.2)"),
    # TCP
    Fault("net-tcp-buffers", tcp_node,
          both(measured_round_trip, file("proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t6291456\n")),
          shows="2 ms round trip"),
    Fault("net-tcp-buffers-assumed", tcp_node, file("proc/sys/net/ipv4/tcp_wmem", "4096\t16384\t4194304\n"),
          shows="4194304"),
    Fault("net-core-buffers", tcp_node, file("proc/sys/net/core/rmem_max", "212992\n"), shows="212992"),
    Fault("net-reno", tcp_node, file("proc/sys/net/ipv4/tcp_congestion_control", "reno\n"), shows="reno"),
    Fault("net-retransmits", tcp_node, file("proc/net/snmp", "Tcp: OutSegs RetransSegs\nTcp: 90000000 900000\n"),
          shows="1.00%"),
    Fault("net-mtu", tcp_node, file("sys/class/net/eth0/mtu", "1500\n"), shows="1500"),
    Fault("net-half-duplex", workstation, file("sys/class/net/eth0/duplex", "half\n"), shows="half"),
    Fault("net-slow-start", tcp_node, job(interface="eth0", ledger={"compute": 400}), shows="410 ms"),
    Fault("net-slower-card", tcp_node, both(slower_second_card, job(interface="eth1")), shows="eth1"),
    # NCCL's Inspector
    Fault("inspector-slow-communicator", h100_node, inspected([1000, 990, 1010, 1600], **WRITES),
          shows="on communicator 0xc3 (dp 3)"),
    Fault("inspector-slow-communicator", h100_node, inspected([1000, 990, 1010, 1600], **WRITES),
          shows="bus bandwidth 28.7 GB/s, the median of its 3 peers 45.9 GB/s"),
    Fault("inspector-writes-nothing", h100_node, inspected([]), shows="not set, so nothing is ever written"),
    Fault("inspector-writes-nothing", h100_node, inspected([], **{INTERVAL: "-1"}), shows="-1"),
    Fault("inspector-writes-nothing", h100_node, inspected([], **WRITES, NCCL_INSPECTOR_DUMP_THREAD_ENABLE="0"),
          shows="0"),
    Fault("inspector-writes-nothing", h100_node, inspected([], **WRITES, NCCL_PROFILER_PLUGIN="none.so"),
          shows="none.so"),
    # the host
    Fault("cpu-governor-slow", h100_node, file("sys/devices/system/cpu/cpu5/cpufreq/scaling_governor", "powersave\n"),
          shows="powersave on 1 CPU"),
    Fault("cpu-governor-follows", h100_node,
          file("sys/devices/system/cpu/cpu5/cpufreq/scaling_governor", "schedutil\n"),
          shows="schedutil"),
    Fault("cpu-governor-follows", h100_node, intel_powersave, shows="powersave on 16 CPUs"),
    Fault("cpu-boost-off", h100_node,
          lambda machine: machine.files.update({"sys/devices/system/cpu/intel_pstate/no_turbo": "1\n"}),
          shows="no_turbo"),
    Fault("cpu-boost-off", h100_node, file("sys/devices/system/cpu/cpufreq/boost", "0\n"), shows="0"),
    Fault("numa-balancing-on", h100_node, file("proc/sys/kernel/numa_balancing", "1\n"), shows="1"),
    Fault("numa-far", h100_node, file(f"proc/{PID}/status", "Cpus_allowed_list:\t8-15\n"), shows="of NUMA node 1"),
    Fault("numa-unbound", h100_node, file(f"proc/{PID}/status", "Cpus_allowed_list:\t0-15\n"),
          shows="of NUMA node 0, 1"),
    Fault("cpu-throttled", h100_node, file("sys/fs/cgroup/job/cpu.stat", "nr_periods 1000\nnr_throttled 250\n"),
          shows="25%"),
    Fault("shm-small", h100_node, file(f"proc/{PID}/mounts", "shm /dev/shm tmpfs rw,size=65536k 0 0\n"),
          shows="64 MiB"),
    Fault("shm-small", h100_node, file(f"proc/{PID}/mounts", "proc /proc proc rw 0 0\n"), shows="no mount"),
    Fault("files-low", h100_node,
          lambda machine: machine.files.update({f"proc/{PID}/limits": "Max open files 1024 4096 files\n"}),
          shows="1024"),
    Fault("memlock-low", h100_node,
          lambda machine: machine.files.update({f"proc/{PID}/limits": "Max locked memory 8388608 8388608 bytes\n"}),
          shows="8 MiB"),
    # other load on the machine
    Fault("cpu-contended", h100_node, both(pressure("cpu", "some", 0.31), load(of_five_minutes=9)),
          shows="31% of the last minute"),
    Fault("cpu-contended", h100_node, load(of_five_minutes=40), shows="load over five minutes 40"),
    Fault("cpu-contended", h100_node, both(load(of_five_minutes=40), job(ledger={"host_bound": 105})),
          shows="load over five minutes 40"),
    Fault("memory-pressure", h100_node, pressure("memory", "full", 0.02), shows="2% of the last minute"),
    Fault("io-pressure", h100_node, pressure("io", "full", 0.4), shows="40% of the last minute"),
    Fault("cpu-omp-threads", h100_node, variable("OMP_NUM_THREADS", "12"), shows="ranks on this machine 2"),
    Fault("cpu-omp-threads", h100_node, both(no_run, variable("OMP_NUM_THREADS", "64,2")), shows="64,2"),
    Fault("cpu-oversubscribed", no_gpu, on_processors(24), shows="24 ranks on node-a"),
    Fault("cpu-oversubscribed", no_gpu, on_processors(24, ledger={"host_bound": 105}), shows="24 ranks on node-a"),
    # the job's records
    Fault("job-exposed-communication", h100_node, job(ledger={"exposed_communication": 30}), shows="23.8%"),
    Fault("job-exposed-communication", h100_node,
          both(job(ledger={"exposed_communication": 30}), lambda machine: machine.run[0].append(TUNING)),
          shows="watching"),
    Fault("job-data-wait", h100_node, job(ledger={"data_wait": 25}, knobs={"loader_workers": 1}),
          shows="loader_workers 1"),
    Fault("job-data-wait", h100_node, job(ledger={"data_wait": 25}), shows="20.0%"),
    Fault("job-host-bound", h100_node, job(ledger={"host_bound": 105}), shows="52.5%"),
    Fault("job-host-bound", h100_node,
          both(job(ledger={"host_bound": 105}), script("loader =", "model = torch.compile(model)\nloader =")),
          shows="compiled already"),
    Fault("job-recompiles", h100_node, job(compile_ns=3 * MS), shows="6.0% of its last steps"),
    Fault("job-copies", h100_node, job(ledger={"exposed_copy": 25}), shows="20.0%"),
    Fault("job-optimizer", h100_node, job(ledger={"optimizer_host": 25}), shows="20.0%"),
    Fault("job-checkpoint", h100_node, job(checkpoint_ns=80 * MS), shows="8.0%"),
    Fault("job-checkpoint", h100_node, job(ledger={"checkpoint": 25}), shows="20.0%"),
    Fault("job-checkpoint", h100_node,
          both(job(checkpoint_ns=80 * MS), script("loss.backward()", f"loss.backward(); {ASYNC_SAVE}")),
          shows="in the background already"),
    Fault("job-checkpoint-notable", h100_node, job(checkpoint_ns=30 * MS), shows="3.0%"),
    Fault("job-fragmentation", h100_node, job(memory=FRAGMENTED), shows="3 retries"),
    Fault("job-fragmentation", h100_node,
          both(job(memory=FRAGMENTED), variable("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")),
          shows="expandable_segments:True"),
    Fault("job-straggler", h100_node, said(STRAGGLER), shows="rank 1: throttled compute, 9.0 ms"),
    Fault("job-gloo-on-gpu", h100_node, job(backend="gloo"), shows="gloo, on cuda:0"),
    Fault("job-fp32", h100_node, job(arithmetic="float32"), shows="float32"),
    Fault("job-tf32", h100_node, job(arithmetic="tf32"), shows="tf32"),
    Fault("job-advice", h100_node, said(ADVICE), shows="25 MiB -> 50 MiB"),
    # variables and the script
    Fault("env-launch-blocking", h100_node, variable("CUDA_LAUNCH_BLOCKING", "1"), shows="1"),
    Fault("env-launch-blocking", h100_node,
          script("import torch\n", 'import os\nos.environ["CUDA_LAUNCH_BLOCKING"] = "1"\n'),
          shows="os.environ"),
    Fault("env-no-memory-cache", h100_node, variable("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")),
    Fault("env-debug-detail", h100_node, variable("TORCH_DISTRIBUTED_DEBUG", "DETAIL"), shows="DETAIL"),
    Fault("env-blocking-wait", h100_node, variable("TORCH_NCCL_BLOCKING_WAIT", "1")),
    Fault("env-tf32-off", h100_node, variable("NVIDIA_TF32_OVERRIDE", "0")),
    Fault("script-find-unused", h100_node,
          script("view=True", "view=True, static_graph=True, find_unused_parameters=True"),
          shows="find_unused_parameters=True"),
    Fault("script-bucket-view", h100_node, script(", gradient_as_bucket_view=True", ""), shows="model = DDP("),
    Fault("script-static-graph", h100_node,
          script("loss = model", "loss = torch.utils.checkpoint.checkpoint(f, x) + model"), shows="checkpoint"),
    Fault("script-static-graph", h100_node, script("view=True", "view=True, find_unused_parameters=True"),
          frozenset({"script-find-unused"})),
    Fault("script-bucket-size", h100_node, script("view=True", "view=True, bucket_cap_mb=1"), shows="bucket_cap_mb=1"),
    Fault("script-loader-workers", h100_node, both(no_run, script(WORKERS, "")), shows="DataLoader("),
    Fault("script-loader-workers", h100_node, both(job(ledger={"data_wait": 2}), script(WORKERS, "num_workers=0, "))),
    Fault("script-loader-settings", h100_node,
          both(job(ledger={"data_wait": 25}), script(", persistent_workers=True", "")),
          frozenset({"job-data-wait"}), shows="workers without persistent_workers"),
    Fault("script-loader-settings", h100_node, both(job(ledger={"data_wait": 25}), script(", prefetch_factor=4", "")),
          frozenset({"job-data-wait"}), shows="20.0%"),
    Fault("script-pin-memory", h100_node, both(no_run, script(", pin_memory=True", "")), shows="DataLoader("),
    Fault("script-full-precision", h100_node,
          both(no_run, script('with torch.autocast("cuda", dtype=torch.bfloat16):', "if True:")), shows="9.0"),
    Fault("script-anomaly", h100_node,
          script("loss.backward()", "torch.autograd.set_detect_anomaly(True); loss.backward()")),
    Fault("script-data-parallel", h100_node, script(DDP, "torch.nn.DataParallel(torch.nn.Linear(8, 8).cuda())")),
    Fault("script-gloo", h100_node, script('"nccl"', '"gloo"'), shows="gloo"),
    Fault("script-empty-cache", h100_node, script("loss.backward()", "loss.backward(); torch.cuda.empty_cache()")),
)  # fmt: skip
