"""Healthy machines unlike an 8-GPU node have no findings."""

from __future__ import annotations

import dataclasses

import pytest

from pacecar.commands.doctor.rules.registry import judge
from pacecar.commands.doctor.transport_paths import loader_workers
from pacecar.monitor.gpu.driver import Fabric, Number
from tests.commands.doctor.faults import measured_round_trip
from tests.commands.doctor.machine import (
    CLOSED_MODULE,
    LOG,
    PID,
    Board,
    Machine,
    gpu_path,
    h100_node,
    tcp_node,
    workstation,
)

IDLE = 0x1
BOTH = "7[7] -> 8[0] [receive] via NET/IB/0/GDRDMA", "7[7] -> 8[0] [send] via NET/IB/0"


def bare(machine: Machine) -> Machine:
    machine.run = machine.script = machine.log = machine.pid = None
    return machine


def found(machine: Machine, root) -> dict:
    facts = machine.collect_facts(root)
    judgement = judge(facts)
    assert judgement.failed == ()
    assert facts.unreadable == ()
    return {finding.id: finding for finding in judgement.findings}


def resting_node() -> Machine:
    """Data centre boards rest in P0, with low clocks and a PCIe link of the first generation."""
    machine = bare(h100_node())
    for board in machine.boards:
        board.numbers |= {
            Number.PERFORMANCE_STATE: 0, Number.CLOCK_REASONS: IDLE, Number.CLOCK_SM: 345, Number.PCIE_GENERATION: 1
        }  # fmt: skip
    return machine


def grace_hopper() -> Machine:
    """One GPU beside its processor by NVLink-C2C: ARM, a PCIe link of one lane, nodes of memory without CPUs."""
    machine = bare(workstation())
    machine.boards = [machine.boards[0]]
    board = machine.boards[0]
    board.name, board.capability, board.fields = "NVIDIA GH200 480GB", (9, 0), {31: 0, 144: 0, 145: 0, 170: 10}
    board.numbers[Number.PCIE_WIDTH] = 1
    machine.files["proc/cpuinfo"] = "".join(f"processor\t: {n}\nFeatures\t: fp asimd\n\n" for n in range(72))
    machine.remove("sys/devices/system/cpu/cpufreq")
    machine.files["sys/devices/system/cpu/cpu0/cpufreq/scaling_driver"] = "cppc_cpufreq\n"
    machine.files |= {"sys/devices/system/node/node1/cpulist": "\n", "proc/sys/kernel/numa_balancing": "1\n"}
    return machine


def cards_with_a_bridge() -> Machine:
    """Four cards, two of them joined by a bridge; the chipset does not support P2P."""
    machine = bare(workstation())
    machine.boards = [Board(gpu_path(n).rpartition("/")[2], "NVIDIA RTX A6000", (8, 6), links=[]) for n in range(4)]
    for n, board in enumerate(machine.boards):
        board.fabric, board.links, board.remote = Fabric(0, 0, "", 0, None), [n < 2] * 4, "gpu"
        if n >= 2:
            machine.add_card(gpu_path(n), "0x030000", "0x10de", 0)
        machine.files[f"sys/kernel/iommu_groups/{board.address}/type"] = "DMA-FQ\n"
    pairs = {(one, other) for one in range(4) for other in range(one + 1, 4)} - {(0, 1)}
    machine.peers = dict.fromkeys(pairs, 1)
    return machine


def unbridged_consumer_cards() -> Machine:
    """GeForce boards have neither NVLink nor P2P, whatever the IOMMU does."""
    machine = cards_with_a_bridge()
    for board in machine.boards:
        board.links, board.name = [], "NVIDIA GeForce RTX 4090"
    machine.peers[0, 1] = 1
    return machine


def partly_cut_node() -> Machine:
    """MIG turns a GPU's NVLinks and P2P off; the other seven are whole."""
    machine = bare(h100_node())
    machine.boards[2].numbers[Number.MIG_MODE] = 1
    machine.boards[2].links = [False] * 18
    machine.peers = {tuple(sorted((2, other))): 5 for other in range(8) if other != 2}
    return machine


def passed_through() -> Machine:
    """A host that gave its GPU to a virtual machine."""
    machine = bare(workstation())
    machine.boards.clear()
    machine.driver_missing = True
    for n in range(2):
        machine.links[f"sys/devices/{gpu_path(n)}/driver"] = "sys/bus/pci/drivers/vfio-pci"
    return machine


def bond_and_bridges() -> Machine:
    """Two cards in a bond, docker's bridge with its virtual interfaces, a dead port; NCCL uses the bond."""
    machine = bare(tcp_node())
    for n in (1, 2):
        card = f"pci0000:00/0000:00:0{n + 2}.0/0000:0{n + 3}:00.0"
        machine.add_card(card, "0x020000", "0x8086", 0)
        machine.add_interface(f"eth{n}", 100_000, 9000, card)
        machine.links[f"sys/class/net/eth{n}/master"] = "sys/class/net/bond0"
    machine.files["sys/class/net/bond0/bonding/mode"] = "802.3ad 4\n"
    for name, speed, state in (("bond0", 200_000, "up"), ("docker0", 400_000, "up"), ("veth1", 400_000, "up"),
                               ("eth9", -1, "down")):  # fmt: skip
        machine.files[f"sys/class/net/{name}/speed"] = f"{speed}\n"
        machine.files[f"sys/class/net/{name}/operstate"] = f"{state}\n"
        machine.files[f"sys/class/net/{name}/mtu"] = "9000\n"
    machine.environ["NCCL_SOCKET_IFNAME"] = "bond0"
    return machine


def slow_card_in_a_wide_slot() -> Machine:
    """10 Gbit/s need a quarter of the lanes that the card could have."""
    machine = bare(workstation())
    machine.add_interface("eth0", 10_000, 1500, "pci0000:00/0000:00:02.0/0000:03:00.0")
    machine.files["sys/devices/pci0000:00/0000:00:02.0/0000:03:00.0/current_link_width"] = "4\n"
    return machine


def spare_ports() -> Machine:
    """Cards with two ports of which one is cabled, on each card the same."""
    machine = bare(h100_node())
    for n in range(8):
        name, address = f"mlx5_{n + 10}", f"0000:{0x14 + 0x10 * n:02x}:00.1"
        folder = f"sys/class/infiniband/{name}"
        machine.files |= {
            f"{folder}/ports/1/state": "1: DOWN\n", f"{folder}/ports/1/rate": "40 Gb/sec (4X QDR)\n",
            f"{folder}/ports/1/link_layer": "InfiniBand\n",
        }  # fmt: skip
        path = f"pci0000:{0x10 + 0x10 * n:02x}/0000:{0x10 + 0x10 * n:02x}:01.0/0000:{0x11 + 0x10 * n:02x}:00.0"
        machine.add_card(f"{path}/0000:{0x12 + 0x10 * n:02x}:01.0/{address}", "0x020700", "0x15b3", n // 4)
        machine.links[f"{folder}/device"] = machine.links[f"sys/bus/pci/devices/{address}"]
    return machine


def azure_like() -> Machine:
    """A virtual machine whose Ethernet card has a port without RDMA, which the job disables."""
    machine = bare(tcp_node())
    machine.files["proc/cpuinfo"] = machine.files["proc/cpuinfo"].replace("fpu", "fpu hypervisor")  # type: ignore[union-attr,arg-type]
    machine.files |= {
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "sys/class/infiniband/mlx5_0/ports/1/rate": "100 Gb/sec (4X EDR)\n",
        "sys/class/infiniband/mlx5_0/ports/1/link_layer": "Ethernet\n",
    }
    machine.environ["NCCL_IB_DISABLE"] = "1"
    return machine


def one_node_job() -> Machine:
    """All ranks of the job are on this node, so network settings do not matter."""
    machine = h100_node()
    machine.log = None
    machine.environ["NCCL_IB_DISABLE"] = "1"
    for records in machine.run.values():
        records[0] = dataclass_like(records[0], world_size=2)
    return machine


def dataclass_like(record, **changes):
    import msgspec

    return msgspec.structs.replace(record, **changes)


def old_peermem() -> Machine:
    """The predecessor of the driver's own module."""
    machine = bare(h100_node())
    machine.remove("sys/module/nvidia_peermem")
    machine.files["proc/driver/nvidia/version"] = CLOSED_MODULE
    machine.files["sys/kernel/mm/memory_peers/nv_mem/version"] = "1.1-0\n"
    return machine


def user_clock() -> Machine:
    """`userspace` is a chosen clock; tiering does not balance between nodes; the locked memory suffices."""
    machine = bare(h100_node())
    for n in range(16):
        machine.files[f"sys/devices/system/cpu/cpu{n}/cpufreq/scaling_governor"] = "userspace\n"
    machine.files["proc/sys/kernel/numa_balancing"] = "2\n"
    machine.files["proc/self/limits"] = f"Max locked memory {200 << 30} {200 << 30} bytes\n"
    machine.files["proc/self/mounts"] = "/dev/sda1 /dev/shm ext4 rw 0 0\n"
    return machine


def lists_for_one_collective() -> Machine:
    """Since NCCL 2.24 a list may be for broadcast only, without effect on all-reduce."""
    machine = bare(h100_node())
    machine.environ |= {"NCCL_ALGO": "broadcast:ring", "NCCL_PROTO": "broadcast:LL"}
    return machine


def pcie_sender() -> Machine:
    """Without NVLink NCCL sends through the host anyway, so a variable that requests it changes nothing."""
    machine = h100_node()
    for board in machine.boards:
        board.links, board.fabric = [], Fabric(0, 0, "", 0, None)
    machine.environ["NCCL_NET_GDR_READ"] = "0"
    machine.log = LOG + "".join(f"node-a:4242:4310 [0] NCCL INFO Channel 01/0 : {way}\n" for way in BOTH)
    return machine


def log_of_another_node() -> Machine:
    machine = h100_node()
    machine.log = LOG.replace("node-a", "node-z").replace("NET/IB/0/GDRDMA", "NET/Socket/0").replace("P2P/CUMEM", "SHM")
    return machine


ODD = (
    (resting_node, set()), (grace_hopper, set()), (cards_with_a_bridge, set()), (unbridged_consumer_cards, set()),
    (partly_cut_node, {"gpu-mig-on"}), (passed_through, set()), (bond_and_bridges, set()),
    (slow_card_in_a_wide_slot, set()), (spare_ports, set()), (azure_like, set()), (one_node_job, set()),
    (old_peermem, set()), (user_clock, set()), (lists_for_one_collective, {"nccl-algo-set", "nccl-proto-set"}),
    (pcie_sender, set()), (log_of_another_node, set()),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("machine", "expected"), ODD, ids=[machine.__name__ for machine, _ in ODD])
def test_what_is_healthy_there_is_no_finding(machine, expected, tmp_path):
    assert found(machine(), tmp_path).keys() == expected


def test_at_work_a_slow_pcie_link_is_a_finding_and_its_command_names_the_card(tmp_path):
    """Also if an earlier GPU is unreadable, so that numbers and list indices differ."""
    machine = bare(h100_node())
    machine.boards[6].numbers |= {Number.PCIE_GENERATION: 3, Number.PCIE_WIDTH: 8}
    facts = machine.collect_facts(tmp_path)
    boards = tuple(gpu for gpu in facts.gpus.boards if gpu.index != 1)
    facts = dataclasses.replace(facts, gpus=dataclasses.replace(facts.gpus, boards=boards))
    (finding,) = judge(facts).findings
    assert finding.evidence[0].value == "8 of 16 lanes, generation 3 of 5 at work (P0)"
    assert f"-s {machine.boards[6].address} " in finding.remedy


def test_one_bridge_of_a_pair_that_lost_links_is_a_finding(tmp_path):
    machine = cards_with_a_bridge()
    machine.boards[1].links = [True, True, False, False]
    finding = found(machine, tmp_path)["gpu-nvlink-down"]
    assert [e.where for e in finding.evidence] == [f"NVML, GPU 1 ({machine.boards[1].address})"]


def test_the_second_port_is_missed_where_other_cards_use_theirs(tmp_path):
    machine = spare_ports()
    for n in range(1, 8):
        machine.files[f"sys/class/infiniband/mlx5_{n + 10}/ports/1/state"] = "4: ACTIVE\n"
        machine.files[f"sys/class/infiniband/mlx5_{n + 10}/ports/1/rate"] = "400 Gb/sec (4X NDR)\n"
    assert [e.what for e in found(machine, tmp_path)["rdma-port-down"].evidence] == ["mlx5_10 port 1"]


def test_the_named_interface_is_the_bond_never_its_card_nor_a_bridge(tmp_path):
    machine = bond_and_bridges()
    machine.environ["NCCL_SOCKET_IFNAME"] = "eth0"
    assert found(machine, tmp_path)["nccl-slow-interface"].remedy == "export NCCL_SOCKET_IFNAME=bond0"


def test_cards_of_two_kinds_are_named_in_the_order_of_their_numbers(tmp_path):
    machine = bare(h100_node())
    machine.boards[0].name = "NVIDIA L4"
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in found(machine, tmp_path)["gpu-mixed"].remedy


def test_what_somebody_chose_of_the_buffers_stays(tmp_path):
    machine = tcp_node()
    measured_round_trip(machine)
    machine.files["proc/sys/net/ipv4/tcp_rmem"] = "8192\t262144\t6291456\n"
    assert "tcp_rmem='8192 262144 67108864'" in found(machine, tmp_path)["net-tcp-buffers"].remedy


@pytest.mark.parametrize(
    ("text", "chosen"),
    [("mlx5_1:1", {"mlx5_1:1", "mlx5_10:1"}), ("=mlx5_1", {"mlx5_1:1", "mlx5_1:2"}), ("=mlx5_1:2", {"mlx5_1:2"}),
     ("^mlx5_1", set()), ("^=mlx5_10", {"mlx5_1:1", "mlx5_1:2"}), ("mlx5", {"mlx5_1:1", "mlx5_1:2", "mlx5_10:1"})],
)  # fmt: skip
def test_cards_are_chosen_as_nccl_chooses_them(text, chosen):
    from pacecar.commands.doctor.rules.nccl import _is_meant

    assert {name for name in ("mlx5_1:1", "mlx5_1:2", "mlx5_10:1") if _is_meant(name, text)} == chosen


def test_workers_are_those_that_the_control_group_has_time_for(tmp_path):
    machine = h100_node()
    machine.files["sys/fs/cgroup/job/cpu.max"] = "600000 100000\n"
    machine.files["sys/fs/cgroup/cpu.max"] = "max 100000\n"
    facts = machine.collect_facts(tmp_path)
    assert facts.cpus.quota == 6
    assert loader_workers(facts) == 2, "6 CPUs for 2 ranks, less one for each"


@pytest.mark.slow
def test_a_gain_is_only_that_of_a_run_on_this_machine(tmp_path):
    machine = h100_node()
    machine.environ["NCCL_IB_DISABLE"] = "1"
    for name, is_here in (("here", True), ("elsewhere", False)):
        (tmp_path / name).mkdir()
        if not is_here:
            machine.run = {rank: [dataclass_like(r[0], host="far"), *r[1:]] for rank, r in machine.run.items()}
        gain = found(machine, tmp_path / name)["nccl-ib-disabled"].gain
        assert (gain is not None) == is_here


def test_steps_that_are_full_of_communication_do_not_pause(tmp_path):
    from tests.commands.doctor.faults import job

    machine = tcp_node()
    job(interface="eth0", ledger={"compute": 180, "exposed_communication": 20})(machine)
    assert "net-slow-start" not in found(machine, tmp_path)


def test_a_far_process_is_told_its_gpus_node(tmp_path):
    """The command names the node that its GPU is on."""
    machine = h100_node()
    machine.files[f"proc/{PID}/status"] = "Cpus_allowed_list:\t8-15\n"
    assert "numactl --cpunodebind=0 --membind=0" in found(machine, tmp_path)["numa-far"].remedy
