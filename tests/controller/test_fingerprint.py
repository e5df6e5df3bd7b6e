"""The fingerprint changes with what the best knobs depend on, and with nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from pacecar.controller.memory.job_fingerprint import fingerprint, link
from pacecar.controller.memory.knob_store import Fingerprint
from tests.kit.records import job_hello


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """A machine with one card, whose default route goes over the faster of two interfaces."""
    for name, speed in (("eth0", "1000"), ("eth1", "25000"), ("veth", "-1")):
        folder = tmp_path / "sys/class/net" / name
        folder.mkdir(parents=True)
        (folder / "speed").write_text(speed + "\n")
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/route").write_text(
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
        "eth0\t00000000\t0100000A\t0003\t0\t0\t200\t00000000\n"
        "eth1\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\n"
        "eth0\t0000000A\t00000000\t0001\t0\t0\t0\t000000FF\n"
    )
    return {"proc_root": str(tmp_path / "proc"), "sys_root": str(tmp_path / "sys")}


def add_port(
    machine: dict[str, str], card: str, rate: str, state: str = "4: ACTIVE", layer: str = "InfiniBand"
) -> None:
    port = Path(machine["sys_root"], "class/infiniband", card, "ports/1")
    port.mkdir(parents=True)
    for name, text in (("rate", rate), ("state", state), ("link_layer", layer)):
        (port / name).write_text(text + "\n")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "ethernet 25 Gb/s"),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, "ethernet 1 Gb/s"),
        ({"GLOO_SOCKET_IFNAME": "veth"}, "ethernet"),
        ({"GLOO_SOCKET_IFNAME": "gone"}, "ethernet"),
        ({"GLOO_SOCKET_IFNAME": "^lo"}, "ethernet 25 Gb/s"),
        ({"NCCL_SOCKET_IFNAME": "eth0"}, "ethernet 25 Gb/s"),
        ({"LOCAL_WORLD_SIZE": "4"}, "local"),
        ({"LOCAL_WORLD_SIZE": "2"}, "ethernet 25 Gb/s"),
    ],
)
def test_the_link_is_that_of_the_interface_that_the_backend_takes(
    machine: dict[str, str], environ: dict[str, str], expected: str
) -> None:
    assert link(4, "gloo", environ=environ, **machine) == expected


def test_nccl_takes_the_fastest_active_rdma_port_unless_told_not_to(machine: dict[str, str]) -> None:
    add_port(machine, "mlx5_0", "100 Gb/sec (4X EDR)")
    add_port(machine, "mlx5_1", "200 Gb/sec (4X HDR)")
    add_port(machine, "mlx5_2", "400 Gb/sec (4X NDR)", state="1: DOWN")
    assert link(4, "nccl", environ={}, **machine) == "InfiniBand 200 Gb/s"
    assert link(4, "cpu:gloo,cuda:nccl", environ={}, **machine) == "InfiniBand 200 Gb/s"
    assert (
        link(4, "nccl", environ={"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "=eth0"}, **machine) == "ethernet 1 Gb/s"
    )
    assert link(4, "gloo", environ={}, **machine) == "ethernet 25 Gb/s"
    add_port(machine, "mlx5_3", "300 Gb/sec (4X)", layer="Ethernet")
    assert link(4, "nccl", environ={}, **machine) == "RoCE 300 Gb/s"


def test_a_machine_that_says_nothing_has_an_unnamed_link_and_one_rank_none(tmp_path: Path) -> None:
    nothing = {"proc_root": str(tmp_path), "sys_root": str(tmp_path)}
    assert link(4, None, environ={}, **nothing) == "ethernet"
    assert link(1, None, environ={}, **nothing) == "none"


def take(model: nn.Module, **changes: object) -> Fingerprint:
    return fingerprint(model, job_hello(**{"world_size": 4, **changes}), environ={"LOCAL_WORLD_SIZE": "4"})  # type: ignore[arg-type]


def test_values_names_and_the_job_do_not_matter_but_shapes_types_ranks_and_what_is_trained_do() -> None:
    base = take(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)))
    assert take(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)), job="b") == base
    assert base.elements == 8 * 4 + 4 + 4 * 2 + 2
    frozen = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    frozen[0].weight.requires_grad_(False)
    others = [
        take(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)), world_size=8),
        take(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))),
        take(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)).to(torch.bfloat16)),
        take(frozen),
    ]
    assert len({kind.key for kind in [base, *others]}) == 5
