"""The interface that collectives go through is what the user or the route says, and nothing where nobody knows."""

import socket
import threading
import time

import pytest

from pacecar.profiler.hook.identity import collective_interface
from pacecar.profiler.transport import rendezvous

THERE = [(1, "lo"), (2, "eth0"), (3, "eth1"), (4, "ib0")]


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    monkeypatch.setattr(socket, "if_nameindex", lambda: THERE)


@pytest.mark.parametrize(
    ("backend", "environ", "expected"),
    [
        ("gloo", {"GLOO_SOCKET_IFNAME": "eth1"}, "eth1"),
        ("gloo", {"GLOO_SOCKET_IFNAME": "eth1,eth0"}, "eth1"),
        ("gloo", {"NCCL_SOCKET_IFNAME": "eth1"}, None),
        ("nccl", {"NCCL_SOCKET_IFNAME": "=eth0"}, "eth0"),
        ("nccl", {"NCCL_SOCKET_IFNAME": "ib"}, "ib0"),
        ("nccl", {"NCCL_SOCKET_IFNAME": "eth"}, None),
        ("nccl", {"NCCL_SOCKET_IFNAME": "^eth0"}, None),
        ("cpu:gloo,cuda:nccl", {"NCCL_SOCKET_IFNAME": "eth0"}, "eth0"),
        ("gloo", {}, None),
        (None, {"GLOO_SOCKET_IFNAME": "eth1"}, None),
    ],
)
def test_what_the_user_named_counts_if_it_is_one_that_is_there(backend, environ, expected, tmp_path):
    assert collective_interface(backend, environ=environ, sys_root=tmp_path) == expected


def test_the_route_to_the_master_says_it_otherwise():
    assert collective_interface("gloo", environ={"MASTER_ADDR": "127.0.0.1"}) == "lo"


def test_where_nccl_has_infiniband_no_interface_is_used_unless_it_is_told_not_to(tmp_path):
    (tmp_path / "class/infiniband/mlx5_0").mkdir(parents=True)
    named = {"NCCL_SOCKET_IFNAME": "eth0"}
    assert collective_interface("nccl", environ=named, sys_root=tmp_path) is None
    for switch in ({"NCCL_IB_DISABLE": "1"}, {"NCCL_NET": "Socket"}):
        assert collective_interface("nccl", environ=named | switch, sys_root=tmp_path) == "eth0"
    assert collective_interface("gloo", environ={"GLOO_SOCKET_IFNAME": "eth0"}, sys_root=tmp_path) == "eth0"


def test_a_name_server_that_does_not_answer_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(rendezvous, "RESOLVE_SECONDS", 0.05)
    is_over = threading.Event()

    def late(*_, **__):
        is_over.wait(60.0)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", late)
    begun = time.monotonic()
    assert collective_interface("gloo", environ={"MASTER_ADDR": "far.example"}) is None
    assert time.monotonic() - begun < 30.0
    is_over.set()


def test_a_name_that_nobody_knows_is_no_interface(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert collective_interface("gloo", environ={"MASTER_ADDR": "nowhere"}) is None


def test_a_machine_without_interfaces_is_none(monkeypatch):
    def fail():
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(socket, "if_nameindex", fail)
    assert collective_interface("gloo", environ={"MASTER_ADDR": "127.0.0.1"}) is None
