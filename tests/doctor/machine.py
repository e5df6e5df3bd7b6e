"""Recorded machines for the doctor: 8 H100 with NVLink and InfiniBand, a node without RDMA, and a workstation.

A machine is a dictionary of files, links and a driver's answers, so that a fault is one edit.  All three are healthy as
they come.  Files have the kernel's forms (Documentation/ABI, proc(5)), the log those of NCCL 2.21.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pacecar.doctor.examination import examine
from pacecar.doctor.places import Places
from pacecar.monitor.gpu.driver import (
    DriverMissingError,
    Fabric,
    FieldValue,
    GpuLostError,
    Identity,
    Memory,
    Number,
    Process,
    RemoteLink,
    UnsupportedError,
)
from pacecar.records import Bound, DeviceMemory, JobHello, Knobs, Ledger, Rung, StepRecord, Vitals, WhatIf

HOST = "node-a"
PID = 4242
MS = 1_000_000
OPEN_MODULE = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder)\n"
    "GCC version:  gcc version 11.4.0\n"
)
CLOSED_MODULE = OPEN_MODULE.replace("Open Kernel Module for x86_64", "x86_64 Kernel Module")
RUNGS = {
    "communication_hidden": "exposed_communication", "data_free": "data_wait", "launch_gaps_gone": "host_bound",
}  # fmt: skip
ACS_AT = 0x106
SCRIPT = """\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

torch.distributed.init_process_group("nccl")
model = DDP(torch.nn.Linear(8, 8).cuda(), gradient_as_bucket_view=True)
loader = DataLoader(dataset, batch_size=8, num_workers=8, pin_memory=True)
for batch in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(batch.cuda(non_blocking=True)).mean()
    loss.backward()
"""
LOG = """\
node-a:4242:4300 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>
NCCL version 2.21.5+cuda12.4
node-a:4242:4300 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>
node-a:4242:4300 [0] NCCL INFO Using network IB
node-a:4242:4310 [0] NCCL INFO Channel 00/0 : 15[7] -> 0[0] [receive] via NET/IB/0/GDRDMA
node-a:4242:4310 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
node-a:4242:4310 [0] NCCL INFO Connected all rings
"""


def config(acs: int = 0) -> bytes:
    """Return a port's configuration space with one extended capability: access control."""
    space = bytearray(4096)
    space[0x100:0x104] = (0x0001000D).to_bytes(4, "little")
    space[ACS_AT : ACS_AT + 2] = acs.to_bytes(2, "little")
    return bytes(space)


@dataclass
class Board:
    """What the driver says of one GPU."""

    address: str
    name: str = "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] = (9, 0)
    memory: int = 85_520_809_984
    links: list[bool] = field(default_factory=lambda: [True] * 18)
    fabric: Fabric = field(default_factory=lambda: Fabric(3, 0, 0))
    fields: dict[int, int] = field(default_factory=lambda: {31: 0, 144: 0, 145: 0})
    pids: tuple[int, ...] = ()
    lost: bool = False
    remote: str = "switch"
    numbers: dict[Number, int] = field(
        default_factory=lambda: {
            Number.PERSISTENCE: 1, Number.POWER_LIMIT: 700_000, Number.POWER_LIMIT_DEFAULT: 700_000,
            Number.CLOCK_REASONS: 0, Number.CLOCK_SM: 1980, Number.CLOCK_MAX_SM: 1980, Number.PERFORMANCE_STATE: 0,
            Number.PCIE_GENERATION: 5, Number.PCIE_GENERATION_MAX: 5, Number.PCIE_WIDTH: 16, Number.PCIE_WIDTH_MAX: 16,
            Number.MIG_MODE: 0,
        }
    )  # fmt: skip


class RecordedDriver:
    """Those methods of `Nvml` that the doctor uses, answered from boards."""

    def __init__(self, boards: list[Board], peers: dict[tuple[int, int], int], *, missing: bool) -> None:
        self.boards, self.peers, self.missing = boards, peers, missing
        self.stops = 0

    def start(self) -> None:
        if self.missing:
            raise DriverMissingError("Driver Not Loaded (NVML error 9)", 9)

    def stop(self) -> None:
        self.stops += 1

    def driver_version(self) -> str:
        return "570.86.15"

    def cuda_version(self) -> str:
        return "12.8"

    def device_count(self) -> int:
        return len(self.boards)

    def device(self, index):
        if self.boards[index].lost:
            raise GpuLostError("GPU is lost (NVML error 15)", 15)
        return index

    def identity(self, handle):
        return Identity(f"GPU-{handle}", self.boards[handle].name, f"0000{self.boards[handle].address.upper()}")

    def number(self, handle, which):
        if which not in self.boards[handle].numbers:
            raise UnsupportedError("Not Supported (NVML error 3)", 3)
        return self.boards[handle].numbers[which]

    def compute_capability(self, handle):
        return self.boards[handle].capability

    def peer_status(self, handle, other):
        return self.peers.get((handle, other), self.peers.get((other, handle), 0))

    def memory(self, handle):
        return Memory(self.boards[handle].memory, 0, 0)

    def fields(self, handle, ids):
        known = {91: len(self.boards[handle].links), **self.boards[handle].fields}
        return [FieldValue(known[number], 32) if number in known else UnsupportedError("no") for number, _ in ids]

    def processes(self, handle):
        return [Process(pid, None) for pid in self.boards[handle].pids]

    def fabric(self, handle):
        return self.boards[handle].fabric

    def link_active(self, handle, link):
        if link >= len(self.boards[handle].links):
            raise UnsupportedError("Invalid Argument (NVML error 2)", 2)
        return self.boards[handle].links[link]

    def link_remote(self, handle, link):
        return RemoteLink("4.0", self.boards[handle].remote, "")


@dataclass
class Machine:
    """A machine that can be written into a folder and looked at."""

    files: dict[str, str | bytes] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    boards: list[Board] = field(default_factory=list)
    peers: dict[tuple[int, int], int] = field(default_factory=dict)
    driver_missing: bool = False
    environ: dict[str, str] = field(default_factory=dict)
    script: str | None = None
    log: str | None = None
    run: dict[int, list[object]] | None = None
    pid: int | None = None
    round_trip_ns: int | None = None

    def write(self, root: Path) -> None:
        environ = "".join(f"{name}={value}\0" for name, value in self.environ.items())
        self.files.setdefault(f"proc/{PID}/environ", environ)
        for name, text in self.files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        for name, target in self.links.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(os.path.relpath(root / target, path.parent))
        if self.run is not None:
            (root / "run").mkdir()
            for rank, records in self.run.items():
                lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
                (root / f"run/rank{rank}.jsonl").write_bytes(lines)
        for name, text in (("train.py", self.script), ("nccl.log", self.log)):
            if text is not None:
                (root / name).write_text(text)

    def places(self, root: Path) -> Places:
        driver = RecordedDriver(self.boards, self.peers, missing=self.driver_missing)
        for folder in ("proc", "sys", "etc", "home"):
            (root / folder).mkdir(exist_ok=True)
        return Places(root / "proc", root / "sys", root / "etc", root / "home", self.environ, driver, self.pid)  # type: ignore[arg-type]  # the driver answers what the doctor asks

    def examine(self, root: Path):
        self.write(root)
        return examine(
            self.places(root),
            host=HOST,
            round_trip_ns=self.round_trip_ns,
            run=None if self.run is None else root / "run",
            script=None if self.script is None else root / "train.py",
            log=None if self.log is None else root / "nccl.log",
        )

    def remove(self, prefix: str) -> None:
        self.files = {name: text for name, text in self.files.items() if not name.startswith(prefix)}
        self.links = {name: target for name, target in self.links.items() if not name.startswith(prefix)}

    def add_card(self, path: str, kind: str, vendor: str, node: int, *, speed: str = "32.0 GT/s PCIe", acs: int = 0):
        """Add a PCI device at the end of `path` below sys/devices, and the ports on the way to it."""
        parts = path.split("/")
        for depth in range(1, len(parts)):
            folder, address = f"sys/devices/{'/'.join(parts[: depth + 1])}", parts[depth]
            self.links[f"sys/bus/pci/devices/{address}"] = folder
            is_card = depth == len(parts) - 1
            values = {"class": "0x060400", "max_link_speed": speed, "max_link_width": "16"}
            if is_card:
                values |= {
                    "class": kind, "vendor": vendor, "current_link_speed": speed, "current_link_width": "16",
                    "numa_node": str(node), "local_cpulist": "0-7" if node == 0 else "8-15",
                }  # fmt: skip
            for name, value in values.items():
                self.files[f"{folder}/{name}"] = f"{value}\n"
            if not is_card:
                self.files[f"{folder}/config"] = config(acs)
        self.files[f"sys/kernel/iommu_groups/{parts[-1]}/type"] = "identity\n"
        self.links[f"sys/devices/{path}/iommu_group"] = f"sys/kernel/iommu_groups/{parts[-1]}"

    def add_interface(self, name: str, megabits: int, mtu: int, device: str) -> None:
        folder = f"sys/class/net/{name}"
        for key, value in {"operstate": "up", "speed": megabits, "mtu": mtu, "duplex": "full"}.items():
            self.files[f"{folder}/{key}"] = f"{value}\n"
        self.links[f"{folder}/device"] = f"sys/devices/{device}"


def gpu_path(index: int) -> str:
    first = 0x10 + 0x10 * index
    ports = f"pci0000:{first:02x}/0000:{first:02x}:01.0/0000:{first + 1:02x}:00.0/0000:{first + 2:02x}:00.0"
    return f"{ports}/0000:{first + 3:02x}:00.0"


def nic_path(index: int) -> str:
    first = 0x10 + 0x10 * index
    ports = f"pci0000:{first:02x}/0000:{first:02x}:01.0/0000:{first + 1:02x}:00.0/0000:{first + 2:02x}:01.0"
    return f"{ports}/0000:{first + 4:02x}:00.0"


def host(nodes: int) -> Machine:
    """Return a machine without GPUs and without a network: 8 CPUs on each of `nodes` NUMA nodes."""
    machine = Machine()
    cpus = 8 * nodes
    machine.files |= {
        "proc/cpuinfo": "\n".join(
            f"processor\t: {n}\nmodel name\t: Intel Xeon Platinum 8480C\nphysical id\t: {n // 8}\nflags\t\t: fpu\n"
            for n in range(cpus)
        ),
        "proc/meminfo": "MemTotal:       2113513564 kB\nMemFree:        1000000000 kB\n",
        "proc/sys/kernel/osrelease": "5.15.0-1030-nvidia\n",
        "proc/sys/kernel/numa_balancing": "0\n",
        "sys/devices/system/cpu/cpufreq/boost": "1\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver": "acpi-cpufreq\n",
    }
    for n in range(cpus):
        machine.files[f"sys/devices/system/cpu/cpu{n}/cpufreq/scaling_governor"] = "performance\n"
    for node in range(nodes):
        machine.files[f"sys/devices/system/node/node{node}/cpulist"] = f"{8 * node}-{8 * node + 7}\n"
    for who in ("self", str(PID)):
        machine.files |= {
            f"proc/{who}/limits": (
                "Limit                     Soft Limit           Hard Limit           Units     \n"
                "Max open files            1048576              1048576              files     \n"
                "Max locked memory         unlimited            unlimited            bytes     \n"
            ),
            f"proc/{who}/mounts": "tmpfs /dev/shm tmpfs rw,nosuid,nodev,size=1056756780k 0 0\n",
            f"proc/{who}/cgroup": "0::/job\n",
            f"proc/{who}/status": "Name:\tpython\nCapEff:\t0000000000000000\nCpus_allowed_list:\t0-7\n",
        }
    machine.files["sys/fs/cgroup/job/cpu.stat"] = "usage_usec 5\nnr_periods 0\nnr_throttled 0\nthrottled_usec 0\n"
    add_network(machine)
    return machine


def add_network(machine: Machine) -> None:
    """Add one Ethernet card, and TCP as distributions set it."""
    machine.add_card("pci0000:00/0000:00:02.0/0000:03:00.0", "0x020000", "0x8086", 0, speed="16.0 GT/s PCIe")
    machine.add_interface("eth0", 10_000, 9000, "pci0000:00/0000:00:02.0/0000:03:00.0")
    machine.files |= {
        "sys/class/net/lo/operstate": "unknown\n",
        "sys/class/net/lo/mtu": "65536\n",
        "proc/sys/net/core/rmem_max": "212992\n",
        "proc/sys/net/core/wmem_max": "212992\n",
        "proc/sys/net/ipv4/tcp_rmem": "4096\t131072\t6291456\n",
        "proc/sys/net/ipv4/tcp_wmem": "4096\t16384\t4194304\n",
        "proc/sys/net/ipv4/tcp_congestion_control": "cubic\n",
        "proc/sys/net/ipv4/tcp_slow_start_after_idle": "1\n",
        "proc/net/snmp": "Tcp: ActiveOpens OutSegs RetransSegs\nTcp: 100 90000000 900\n",
    }


def add_job(machine: Machine, interface: str | None = None) -> None:
    """Add a healthy job of two ranks: records, script, process."""
    machine.script = SCRIPT
    machine.run = {rank: records(rank, interface=interface) for rank in range(2)}
    machine.pid = PID
    machine.boards[0].pids = (PID,)


def records(rank: int, **changes) -> list[object]:
    """Return what a healthy rank writes; `changes` are fields of its records, and `ledger` shares of the step in ms."""
    parts = {"compute": 90, "exposed_communication": 4, "data_wait": 0, "host_bound": 5, "unknown": 1}
    parts |= changes.pop("ledger", {})
    wall = sum(parts.values()) * MS
    overlapped = {"overlapped_communication_ns": 9 * MS, "communication_ns": (9 + parts["exposed_communication"]) * MS}
    ledger = Ledger(wall_ns=wall, **{f"{name}_ns": ms * MS for name, ms in parts.items()}, **overlapped)
    hello = JobHello(
        job="j", rank=rank, local_rank=rank, world_size=changes.pop("world_size", 16), pid=PID + rank,
        host=changes.pop("host", HOST),
        device=f"cuda:{rank}", backend=changes.pop("backend", "nccl"), framework="torch 2.9.0", pacecar_version="0.1.0",
        started_wall_ns=1, interface=changes.pop("interface", None),
    )  # fmt: skip
    knobs = Knobs(values={"bucket_bytes": 26214400, "loader_workers": 8} | changes.pop("knobs", {}))
    steps = [
        StepRecord(
            job="j", rank=rank, step=n, ended_wall_ns=n, wall_ns=wall, data_wait_ns=0, forward_ns=1, backward_ns=1,
            optimizer_ns=1, micro_batches=1, samples=1, tokens=None, ledger=ledger, source="exact",
            calibration_age_steps=0, totals=Ledger(wall_ns=1000 * MS, compute_ns=1000 * MS), total_steps=n + 1,
            total_samples=None, total_tokens=None, overhead_ns=0, total_overhead_ns=0, total_windows=0,
            dropped_records=0, knobs=knobs,
        )
        for n in range(20)
    ]  # fmt: skip
    memory = DeviceMemory(allocated_bytes=60 * 2**30, reserved_bytes=64 * 2**30, inactive_split_bytes=2**30,
                          total_allocation_retries=0, total_out_of_memory=0)  # fmt: skip
    vitals = Vitals(
        job="j", rank=rank, step=19, ended_wall_ns=1, steps=20, wall_ns=20 * wall, samples=20, tokens=None,
        arithmetic=changes.pop("arithmetic", "bfloat16"), memory=changes.pop("memory", memory),
        total_checkpoints=1, total_checkpoint_ns=changes.pop("checkpoint_ns", 5 * MS),
    )  # fmt: skip
    rungs = tuple(
        Rung(name=name, step_ns=int(wall * (1 - gain)), gain_ratio=gain, bound=Bound.COMPUTE)
        for name, heading in RUNGS.items()
        for gain in (parts[heading] * MS / wall,)
    )
    ladder = WhatIf(job="j", of_rank=None, step=19, wall_ns=1, steps=20, pace_ns=wall, source="exact",
                    calibration_age_steps=0, rungs=rungs)  # fmt: skip
    more = changes.pop("more", [])
    assert not changes, changes
    return [hello, *steps, vitals, *([ladder] if rank == 0 else []), *more]


def h100_node() -> Machine:
    """8 H100 on NVSwitch, 2 sockets, 8 InfiniBand cards each below one switch with its GPU."""
    machine = host(nodes=2)
    for index in range(8):
        node = index // 4
        machine.add_card(gpu_path(index), "0x030200", "0x10de", node)
        machine.add_card(nic_path(index), "0x020700", "0x15b3", node)
        machine.boards.append(Board(gpu_path(index).rpartition("/")[2]))
        port = f"sys/class/infiniband/mlx5_{index}/ports/1"
        machine.files |= {
            f"{port}/state": "4: ACTIVE\n", f"{port}/rate": "400 Gb/sec (4X NDR)\n",
            f"{port}/link_layer": "InfiniBand\n",
        }  # fmt: skip
        machine.links[f"sys/class/infiniband/mlx5_{index}/device"] = f"sys/devices/{nic_path(index)}"
        machine.add_interface(f"ib{index}", 400_000, 4092, nic_path(index))
    # For management: a port that is not beside a GPU, and down, as on many a node.
    machine.files |= {
        "sys/class/infiniband/mlx5_8/ports/1/state": "1: DOWN\n",
        "sys/class/infiniband/mlx5_8/ports/1/rate": "40 Gb/sec (4X QDR)\n",
        "sys/class/infiniband/mlx5_8/ports/1/link_layer": "InfiniBand\n",
    }
    machine.links["sys/class/infiniband/mlx5_8/device"] = "sys/devices/pci0000:00/0000:00:02.0/0000:03:00.0"
    machine.files |= {
        "proc/driver/nvidia/version": OPEN_MODULE,
        "sys/module/nvidia_peermem/initstate": "live\n",
        "etc/nccl.conf": "# site\nNCCL_DEBUG=WARN\n",
    }
    machine.environ = {"NCCL_IB_HCA": "mlx5", "NCCL_SOCKET_IFNAME": "^docker,lo", "HOME": "/root"}
    machine.log = LOG
    add_job(machine)
    return machine


def tcp_node() -> Machine:
    """2 A100 on NVLink bridges, no RDMA: gradients go over 100 Gbit/s Ethernet, set up for it."""
    machine = host(nodes=1)
    for index in range(2):
        machine.add_card(gpu_path(index), "0x030200", "0x10de", 0)
        machine.boards.append(Board(gpu_path(index).rpartition("/")[2], "NVIDIA A100-SXM4-80GB", (8, 0)))
        machine.boards[-1].fabric, machine.boards[-1].remote = Fabric(0, 0, None), "gpu"
    machine.add_interface("eth0", 100_000, 9000, "pci0000:00/0000:00:02.0/0000:03:00.0")
    machine.files |= {
        "proc/driver/nvidia/version": OPEN_MODULE,
        "proc/sys/net/core/rmem_max": "67108864\n",
        "proc/sys/net/core/wmem_max": "67108864\n",
        "proc/sys/net/ipv4/tcp_rmem": "4096\t131072\t67108864\n",
        "proc/sys/net/ipv4/tcp_wmem": "4096\t16384\t67108864\n",
    }
    machine.environ = {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}
    add_job(machine, interface="eth0")
    return machine


def workstation() -> Machine:
    """2 consumer cards on PCIe that reach each other, no NVLink, no RDMA, 1 Gbit/s."""
    machine = host(nodes=1)
    for index in range(2):
        machine.add_card(gpu_path(index), "0x030000", "0x10de", 0)
        board = Board(gpu_path(index).rpartition("/")[2], "NVIDIA RTX A6000", (8, 6), links=[])
        board.fabric = Fabric(0, 0, None)
        machine.boards.append(board)
    machine.add_interface("eth0", 1000, 1500, "pci0000:00/0000:00:02.0/0000:03:00.0")
    machine.files["proc/driver/nvidia/version"] = CLOSED_MODULE
    add_job(machine)
    return machine
