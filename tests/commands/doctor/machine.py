"""Machines for the doctor: 8 H100 with NVLink and InfiniBand, a node without RDMA, a workstation, one without GPUs.

A machine is the files and links of a recording in tests/machines/, a driver's answers and a job, so that a fault is one
edit.  All are healthy as they come.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pacecar.commands.doctor.collect_facts import collect_facts
from pacecar.commands.doctor.host_access import HostAccess
from pacecar.monitor.gpu.driver import (
    DriverMemory,
    DriverMissingError,
    DriverProcess,
    Fabric,
    FieldValue,
    GpuLostError,
    Handle,
    Identity,
    Instance,
    Number,
    RemoteLink,
    SramErrors,
    UnsupportedError,
)
from pacecar.monitor.gpu.known_gpus import KnownGpu
from pacecar.nccl_ras import compare, parse_ras
from pacecar.records import Bound, DeviceMemory, JobHello, Knobs, Ledger, Rung, StepRecord, Vitals, WhatIf
from tests.kit.machines import MACHINES, Site, recording, write

HOST = "node-a"
PID = 4242
MS = 1_000_000
CLOSED_MODULE = str(recording("workstation").files["proc/driver/nvidia/version"])
RUNGS = {
    "communication_hidden": "exposed_communication", "data_free": "data_wait", "launch_gaps_gone": "host_bound",
}  # fmt: skip
ACS_AT = 0x106
SCRIPT = (MACHINES / "train_script.txt").read_text()
LOG = (MACHINES / "nccl_log.txt").read_text()
"""Of NCCL 2.21."""


def config(acs: int = 0) -> bytes:
    """Return a port's configuration space with one extended capability: access control."""
    space = bytearray(4096)
    space[0x100:0x104] = (0x0001000D).to_bytes(4, "little")
    space[ACS_AT : ACS_AT + 2] = acs.to_bytes(2, "little")
    return bytes(space)


@dataclass
class Board:
    """One GPU, as the driver reports it."""

    address: str
    name: str = "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] = (9, 0)
    memory: int = 85_520_809_984
    links: list[bool] = field(default_factory=lambda: [True] * 18)
    fabric: Fabric = field(default_factory=lambda: Fabric(3, 0, "", 0, 0))
    fields: dict[int, int] = field(default_factory=lambda: {31: 0, 144: 0, 145: 0})
    sram_over_threshold: bool | None = False
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
    """The methods of `Nvml` that the doctor uses, with answers from boards."""

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
        return DriverMemory(self.boards[handle].memory, 0, 0)

    def fields(self, handle, ids):
        known = {91: len(self.boards[handle].links), **self.boards[handle].fields}
        return [FieldValue(known[number], 32) if number in known else UnsupportedError("no") for number, _ in ids]

    def processes(self, handle):
        return [DriverProcess(pid, None) for pid in self.boards[handle].pids]

    def instance_slots(self, handle):
        return 1

    def instance_key(self, handle, slot):
        return handle

    def instance(self, handle, slot):
        """Return the single MIG instance of a board, which has all its processes."""
        return Instance(Handle(handle), 1, 0, f"MIG-{handle}", "MIG 7g.80gb")

    def sram_errors(self, handle):
        if self.boards[handle].sram_over_threshold is None:
            raise UnsupportedError("Not Supported (NVML error 3)", 3)
        return SramErrors(0, 0, 0, 0, 0, 0, self.boards[handle].sram_over_threshold)

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
    """A machine that can be written to a folder for the doctor to read."""

    files: dict[str, str | bytes] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    boards: list[Board] = field(default_factory=list)
    peers: dict[tuple[int, int], int] = field(default_factory=dict)
    driver_missing: bool = False
    known_gpus: list[KnownGpu] | None = None
    environ: dict[str, str] = field(default_factory=dict)
    script: str | None = None
    log: str | None = None
    run: dict[int, list[object]] | None = None
    pid: int | None = None
    round_trip_ns: int | None = None
    ras: tuple[bytes, bytes] | None = None
    """Two answers of NCCL's RAS."""

    def write(self, place: Path | Site) -> None:
        """Write the machine to an empty folder, or replace the one at a site."""
        root = place.root if isinstance(place, Site) else place
        environ = "".join(f"{name}={value}\0" for name, value in self.environ.items())
        self.files.setdefault(f"proc/{PID}/environ", environ)
        if isinstance(place, Site):
            place.build(self.files, self.links)
        else:
            write(root, self.files, self.links)
        if self.run is not None:
            shutil.rmtree(root / "run", ignore_errors=True)  # the previous machine may have had more ranks
            (root / "run").mkdir()
            for rank, records in self.run.items():
                lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
                (root / f"run/rank{rank}.jsonl").write_bytes(lines)
        (root / "known.json").unlink(missing_ok=True)
        if self.known_gpus is not None:
            (root / "known.json").write_bytes(msgspec.json.encode({"version": 1, "gpus": self.known_gpus}))
        for name, text in (("train.py", self.script), ("nccl.log", self.log)):
            if text is not None:
                (root / name).write_text(text)

    def access(self, root: Path) -> HostAccess:
        driver = RecordedDriver(self.boards, self.peers, missing=self.driver_missing)
        for folder in ("proc", "sys", "etc", "home"):
            (root / folder).mkdir(exist_ok=True)
        return HostAccess(
            root / "proc", root / "sys", root / "etc", root / "home", self.environ,
            driver,  # type: ignore[arg-type]  # a stand-in with the methods that the doctor calls
            self.pid, known_gpus=root / "known.json",
            ras=None if self.ras is None else lambda: compare(*map(parse_ras, self.ras or ())),
        )  # fmt: skip

    def collect_facts(self, place: Path | Site):
        self.write(place)
        root = place.root if isinstance(place, Site) else place
        return collect_facts(
            self.access(root),
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


def recorded(name: str) -> Machine:
    """Return the recorded machine, without the driver's answers and without a job."""
    files, links, _ = recording(name)
    return Machine(files, links)


def no_gpu() -> Machine:
    """Two sockets and one Ethernet card."""
    return recorded("no_gpu")


def add_job(machine: Machine, interface: str | None = None) -> None:
    """Add a healthy job of two ranks: records, script, process."""
    machine.script = SCRIPT
    machine.run = {rank: records(rank, interface=interface) for rank in range(2)}
    machine.pid = PID
    machine.boards[0].pids = (PID,)


def records(rank: int, **changes) -> list[object]:
    """Return the records of a healthy rank; `changes` replace fields, and `ledger` has shares of the step in ms."""
    parts = {"compute": 90, "exposed_communication": 4, "data_wait": 0, "host_bound": 5, "unknown": 1}
    parts |= changes.pop("ledger", {})
    wall = sum(parts.values()) * MS
    overlapped = {"overlapped_communication_ns": 9 * MS, "communication_ns": (9 + parts["exposed_communication"]) * MS}
    ledger = Ledger(wall_ns=wall, **{f"{name}_ns": ms * MS for name, ms in parts.items()}, **overlapped)
    hello = JobHello(
        job="j", rank=rank, local_rank=rank, world_size=changes.pop("world_size", 16), pid=PID + rank,
        host=changes.pop("host", HOST), device=changes.pop("device", f"cuda:{rank}"),
        backend=changes.pop("backend", "nccl"), framework="torch 2.9.0", pacecar_version="0.1.0", started_wall_ns=1,
        interface=changes.pop("interface", None),
    )  # fmt: skip
    knobs = Knobs(values={"bucket_bytes": 26214400, "loader_workers": 8} | changes.pop("knobs", {}))
    compile_ns = changes.pop("compile_ns", 0)
    steps = [
        StepRecord(
            job="j", rank=rank, step=n, ended_wall_ns=n, wall_ns=wall, data_wait_ns=0, forward_ns=1, backward_ns=1,
            optimizer_ns=1, micro_batches=1, samples=1, tokens=None, ledger=ledger, source="exact",
            calibration_age_steps=0, totals=Ledger(wall_ns=(n + 1) * 50 * MS, compute_ns=(n + 1) * 50 * MS),
            total_steps=n + 1, total_samples=None, total_tokens=None, overhead_ns=0, total_overhead_ns=0,
            total_windows=0, dropped_records=0, knobs=knobs, total_compile_ns=30 * MS + compile_ns * n,
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
        Rung(name=f"at_most_{name}", step_ns=int(wall * (1 - gain)), gain_ratio=gain, bound=Bound.COMPUTE)
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
    machine = recorded("h100_node")
    machine.boards = [Board(gpu_path(index).rpartition("/")[2]) for index in range(8)]
    machine.environ = {"NCCL_IB_HCA": "mlx5", "NCCL_SOCKET_IFNAME": "^docker,lo", "HOME": "/root"}
    machine.log = LOG
    add_job(machine)
    return machine


def tcp_node() -> Machine:
    """2 A100 on NVLink bridges, no RDMA: gradients go over 100 Gbit/s Ethernet, which is well configured."""
    machine = recorded("tcp_node")
    for index in range(2):
        machine.boards.append(Board(gpu_path(index).rpartition("/")[2], "NVIDIA A100-SXM4-80GB", (8, 0)))
        machine.boards[-1].fabric, machine.boards[-1].remote = Fabric(0, 0, "", 0, None), "gpu"
    machine.environ = {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}
    add_job(machine, interface="eth0")
    return machine


def workstation() -> Machine:
    """2 consumer cards on PCIe that reach each other, no NVLink, no RDMA, 1 Gbit/s."""
    machine = recorded("workstation")
    for index in range(2):
        board = Board(gpu_path(index).rpartition("/")[2], "NVIDIA RTX A6000", (8, 6), links=[])
        board.fabric = Fabric(0, 0, "", 0, None)
        machine.boards.append(board)
    add_job(machine)
    return machine
