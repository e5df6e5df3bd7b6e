"""Ranks meet, or all say who is absent; they find addresses that reach each other, or say in one line why not."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pacecar.profiler.transport import side_group
from pacecar.profiler.transport.rendezvous import (
    Place,
    RendezvousError,
    choose,
    interface_addresses,
    is_loopback,
    meet,
    route_to,
    whereabouts,
)
from tests.kit.hosts import LOOPBACK, NOWHERE, WIRE, Hosts, hosts
from tests.kit.ranks import finish, start_ranks
from tests.kit.shaping import why_not


def both(store: object, *, claims: tuple[str, str] = ("a", "a"), name: str = "0") -> list[str]:
    """Return what became of a meeting for each of two ranks."""
    ends = ["", ""]

    def come(rank: int) -> None:
        try:
            meet(store, rank, 2, claims[rank], name=name, seconds=2.0)
            ends[rank] = "met"
        except RendezvousError as error:
            ends[rank] = str(error)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return ends


def test_ranks_that_want_the_same_meet_and_others_do_not() -> None:
    store = dist.HashStore()
    assert both(store) == ["met", "met"]
    assert both(store, claims=("a", "b"), name="1") == ["rank 1 has b, rank 0 has a"] * 2


@pytest.mark.slow
def test_the_verdict_of_a_life_before_is_not_this_one_s(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()  # torchrun's agent keeps its store while it starts workers anew
    assert both(store) == ["met", "met"]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(RendezvousError, match="ranks \\[1\\] did not attach"):
        meet(store, 0, 2, "a", name="0", seconds=0.1)


def test_a_store_that_forgets_ends_the_meeting(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)
    store.set("long ago", "x" * 4096)
    store.get("long ago")
    (tmp_path / "store").unlink()
    with pytest.raises(RendezvousError, match="forgets"):
        meet(store, 1, 2, "a", name="0", seconds=0.1)


JOB = Path(__file__).with_name("job_side_group.py")

# --- the choice, from what all ranks say ----------------------------------------------------------------------------


def place(host: str, *addresses: str, store: str | None = None, is_by_store: bool = False) -> Place:
    return Place(host, addresses, "planted", store, is_by_store)


def test_ranks_of_one_host_may_use_its_loopback() -> None:
    assert choose([place("a", "127.0.0.1"), place("a", "127.0.0.1")]) == ["127.0.0.1", "127.0.0.1"]


def test_a_rank_that_sees_the_store_over_loopback_is_where_other_hosts_reach_the_store() -> None:
    near = place("a", "127.0.0.1", "::1", store="127.0.0.1", is_by_store=True)
    far = place("b", "10.0.0.2", store="10.0.0.1", is_by_store=True)
    assert choose([near, near, far]) == ["10.0.0.1", "10.0.0.1", "10.0.0.2"]


def test_all_ranks_get_addresses_of_one_family() -> None:
    assert choose([place("a", "10.0.0.1", "fd00::1"), place("b", "fd00::2")]) == ["fd00::1", "fd00::2"]
    assert choose([place("a", "fd00::1", "10.0.0.1"), place("b", "10.0.0.2", "fd00::2")]) == ["10.0.0.1", "10.0.0.2"]


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([place("a", "127.0.0.1"), place("b", "10.0.0.2")], "rank 0 is at 127.0.0.1 (planted), and others elsewhere"),
        ([place("a", "10.0.0.1"), place("b", "fd00::2")], "rank 0 is at 10.0.0.1 and rank 1 at fd00::2"),
        ([place("a", "172.17.0.1"), place("b", "172.17.0.1")], "on different hosts and both at 172.17.0.1"),
        ([place("a", "10.0.0.1"), place("b")], "rank 1: planted"),
    ],
    ids=["loopback", "two families", "a bridge that every host has", "no address"],
)
def test_what_cannot_work_is_refused_with_a_remedy(places: Sequence[Place], words: str) -> None:
    with pytest.raises(RendezvousError) as refused:
        choose(places)
    assert words in str(refused.value)
    assert "GLOO_SOCKET_IFNAME" in str(refused.value)
    assert "\n" not in str(refused.value)


# --- where one rank is ----------------------------------------------------------------------------------------------


def test_the_first_interface_of_the_list_that_has_an_address_counts() -> None:
    found = whereabouts(dist.HashStore(), {"GLOO_SOCKET_IFNAME": "gone0, lo,eth7"})
    assert found.addresses == interface_addresses("lo")
    assert "127.0.0.1" in found.addresses
    assert "GLOO_SOCKET_IFNAME=gone0, lo,eth7" in found.origin


def test_an_interface_that_is_not_there_is_refused_by_name_with_those_that_are() -> None:
    found = whereabouts(dist.HashStore(), {"GLOO_SOCKET_IFNAME": "gone0"})
    assert found.addresses == ()
    assert "GLOO_SOCKET_IFNAME=gone0 names no interface" in found.origin
    assert "lo" in found.origin


@pytest.mark.parametrize("told", ["", "g"])
def test_without_an_interface_or_one_that_torch_reads_the_way_to_the_store_counts(told: str) -> None:
    store = dist.TCPStore("localhost", 0, 1, True)
    wrapped = dist.PrefixStore("default_pg", dist.PrefixStore("0", store))
    found = whereabouts(wrapped, {"GLOO_SOCKET_IFNAME": told})
    assert found.is_by_store
    assert is_loopback(found.addresses[0])
    assert found.store is not None
    assert is_loopback(found.store)


def test_where_the_store_has_no_address_the_host_name_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = dist.FileStore(str(tmp_path / "store"), 1)
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert is_loopback(whereabouts(file, {}).addresses[0])
    assert whereabouts(file, {}).origin == "of the host name localhost"
    monkeypatch.setattr(socket, "gethostname", lambda: "no.such.host.invalid")
    assert whereabouts(file, {}).addresses == ("127.0.0.1",)
    assert "resolves to nothing" in whereabouts(file, {}).origin


def test_a_rank_that_closes_writes_nothing_into_the_file_of_a_file_store(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "store"
    store = dist.PrefixStore("default_pg", dist.FileStore(str(file), 2))
    monkeypatch.setattr(side_group, "need", lambda name: lambda: store)
    job = side_group.job_store()
    job.set("here", "")
    written = file.read_bytes()
    assert b"here" in written
    del job
    assert file.read_bytes() == written, "an exit in the middle of writing would hang the other ranks"


def test_an_ipv6_address_of_an_interface_is_one_that_other_hosts_can_use(tmp_path: Path) -> None:
    rows = (
        "fe800000000000000000000000000001 02 40 20 80 x0",  # link-local
        "fd000000000000000000000000000002 02 40 00 40 x0",  # not usable yet: others may have it
        "fd000000000000000000000000000003 02 40 00 80 x1",
        "fd000000000000000000000000000004 02 40 00 80 x0",
    )
    (tmp_path / "if_inet6").write_text("\n".join(rows))
    assert interface_addresses("x0", net_root=tmp_path) == ("fd00::4",)
    assert interface_addresses("x0", net_root=tmp_path / "none") == ()


def test_a_name_that_resolves_to_nothing_has_no_route() -> None:
    assert route_to("no.such.host.invalid", 29500) is None


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("old", ["eager", "no options"])
def test_a_torch_whose_groups_connect_at_once_or_take_no_address_makes_a_group_too(old: str) -> None:
    ended = finish(start_ranks([JOB], 3, environ={"OLD_TORCH": old, "GLOO_SOCKET_IFNAME": "lo"}), 120)
    assert [rank.code for rank in ended] == [0] * 3, [rank.err[-2000:] for rank in ended]
    assert [json.loads(rank.out).get("heard") for rank in ended] == [[[0], [1], [2]]] * 3


# --- real hosts -----------------------------------------------------------------------------------------------------


def gathered(there: Hosts, **environ: str) -> tuple[list[dict[str, Any]], str]:
    """Return what each host's rank said, and all that they wrote to stderr."""
    settings = {"MASTER_ADDR": there.address, **environ}
    ended = finish(start_ranks([JOB], len(there.names), environ=settings, prefixes=there.prefixes), 120)
    assert [rank.code for rank in ended] == [0] * len(ended), [rank.err[-2000:] for rank in ended]
    return [json.loads(rank.out) for rank in ended], "".join(rank.err for rank in ended)


def made(count: int, **options: Any) -> Any:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    return hosts(count, **options)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("count", "name", "told"),
    [
        (2, LOOPBACK, WIRE),
        (2, LOOPBACK, ""),
        (2, None, f"gone0,{WIRE}"),
        pytest.param(2, None, "", marks=pytest.mark.full),
        (3, NOWHERE, ""),
        pytest.param(3, NOWHERE, WIRE, marks=pytest.mark.full),
        pytest.param(3, LOOPBACK, WIRE, marks=pytest.mark.full),
    ],
    ids=lambda value: "nothing" if value is None else str(value) or "the store",
)
def test_hosts_gather_whatever_their_name_resolves_to(count: int, name: str | None, told: str) -> None:
    with made(count, name=name) as there:
        answers, noise = gathered(there, GLOO_SOCKET_IFNAME=told)
    assert [answer.get("refused") for answer in answers] == [None] * count
    assert [answer["address"] for answer in answers] == [f"10.78.0.{rank + 1}" for rank in range(count)]
    assert [answer["heard"] for answer in answers] == [[[rank] for rank in range(count)]] * count
    assert noise == ""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("told", [pytest.param(WIRE, marks=pytest.mark.full), ""], ids=["interface", "store"])
def test_hosts_that_have_ipv6_alone_gather(told: str) -> None:
    with made(2, ipv6=True) as there:
        answers, noise = gathered(there, GLOO_SOCKET_IFNAME=told)
    assert [answer.get("address") for answer in answers] == ["fd78::1", "fd78::2"], answers
    assert noise == ""


@pytest.mark.slow
@pytest.mark.distributed
def test_the_host_of_the_store_is_not_at_loopback_though_it_calls_the_store_so() -> None:
    """As the first node under torchrun, and the master of some operators, whose MASTER_ADDR is localhost."""
    with made(2) as there:
        there.prefixes[0] = [*there.prefixes[0], "env", "MASTER_ADDR=localhost"]
        answers, noise = gathered(there)
    assert [answer.get("address") for answer in answers] == ["10.78.0.1", "10.78.0.2"], answers
    assert noise == ""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("told", "words"),
    [
        (NOWHERE, "rank 1 cannot reach rank 0 at 10.79.0.1 (of e9, by GLOO_SOCKET_IFNAME=e9)"),
        ("lo", "rank 0 is at 127.0.0.1 (of lo, by GLOO_SOCKET_IFNAME=lo), and others elsewhere"),
        ("gone0", "rank 0: GLOO_SOCKET_IFNAME=gone0 names no interface with an address (there are lo, "),
    ],
)
def test_an_interface_that_leads_nowhere_is_refused_by_all_ranks_in_the_same_words(told: str, words: str) -> None:
    with made(2) as there:
        answers, noise = gathered(there, GLOO_SOCKET_IFNAME=told)
    assert answers[0]["refused"].startswith(words)
    assert answers[0]["refused"] == answers[1]["refused"]
    assert max(answer["seconds"] for answer in answers) < 20.0
    assert noise == "", "gloo has tried nothing"


@pytest.mark.slow
@pytest.mark.distributed
def test_with_a_store_in_a_file_a_name_that_resolves_to_loopback_is_refused(tmp_path: Path) -> None:
    with made(2) as there:
        answers, noise = gathered(there, STORE=str(tmp_path / "store"))
    for answer in answers:
        assert f"rank 0 is at {LOOPBACK} (of the host name {socket.gethostname()}), and others" in answer["refused"]
        assert "set GLOO_SOCKET_IFNAME" in answer["refused"]
    assert noise == ""
