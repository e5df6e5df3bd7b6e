"""A rank reports its own node's disturbance and learns others'; old signals do not count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pacecar.clock import NS_PER_SECOND
from pacecar.controller.consensus.capabilities import KnobOffer, Offer
from pacecar.controller.consensus.protocol import DISTURBANCE_MAX, ProtocolMember
from pacecar.controller.guards.node_monitor import (
    AGE_PERIODS,
    SIGNALS_MAX,
    WORDS,
    Disturbance,
    NodeMonitor,
    ranks_on_node,
)
from pacecar.controller.guards.tuning_pause import TuningPause
from pacecar.controller.knobs.batch.oom_safe_trial import MemoryForecast
from pacecar.controller.observation import KnobSpace, NodeView
from pacecar.controller.policy.geometric_search import (
    FULL_LINK_RATIO,
    ROOM_RATIO_MIN,
    STALLED_CPU_RATIO,
    GeometricSearch,
)
from pacecar.kernel_files.reader import KernelFiles
from pacecar.records.host_signals import HostSignals
from tests.controller.held import HeldRun
from tests.kit.fake_clock import FakeClock
from tests.kit.records import job_hello

S = NS_PER_SECOND
GIB = 2**30
LINK = 125_000_000


class Bench:
    def __init__(self, **changes: Any) -> None:
        self.clock = FakeClock(monotonic_ns=1000 * S)
        options = {"gradient_bytes": 10_000_000, "environ": {"LOCAL_WORLD_SIZE": "1"}} | changes
        self.node = NodeMonitor(options.pop("hello", job_hello(world_size=4)), self.clock, **options)

    def say(self, **changes: Any) -> Disturbance | None:
        self.clock.advance(3 * S)
        told: dict[str, Any] = {"period_ns": 3 * S, "taken_ns": self.clock.monotonic_ns()}
        self.node.record(HostSignals(**(told | changes)))
        return self.node.update()


def traffic(ratio: float) -> dict[str, Any]:
    return {
        "interface": "eth0", "receive_bytes_per_second": 0.0, "transmit_bytes_per_second": ratio * LINK,
        "link_bytes_per_second": LINK,
    }  # fmt: skip


def test_without_a_daemon_nothing_is_known_and_nothing_held() -> None:
    node = Bench().node
    assert node.update() is None
    assert (node.reason(), node.room_bytes(), node.view) == (None, None, NodeView())
    assert node.describe() == ("its state is unknown: no daemon reports it",)


def test_what_disturbs_the_own_node_is_said_and_ends() -> None:
    bench = Bench()
    assert bench.say(faults=("Xid 79",)) is Disturbance.FAULT
    assert bench.node.reason() == "this node's device has a fault: Xid 79"
    assert bench.node.describe()[-1] == "holds tuning: this node's device has a fault: Xid 79"
    assert bench.say(faults=()) is None
    assert bench.node.reason() is None


@pytest.mark.parametrize(
    ("device", "environ", "files", "is_crowded"),
    [
        ("cpu", {}, {}, False),
        ("cuda:0", {}, {"proc/pressure/cpu": "some avg10=0.00 avg60=19.99 avg300=0.00 total=1\n"}, False),
        ("cuda:0", {}, {"proc/pressure/cpu": "some avg10=0.00 avg60=20.00 avg300=0.00 total=1\n"}, True),
        ("cuda:0", {}, {"proc/pressure/cpu": "some avg10=0.00\n", "proc/loadavg": "1.0 99999.0 1.0 2/9 5\n"}, True),
        ("cuda:0", {}, {"proc/loadavg": "99999.0 0.0 99999.0 2/9 5\n"}, False),
        ("cuda:0", {}, {"proc/loadavg": "\n", "sys/fs/cgroup/cpu.max": "plenty\n"}, False),
        ("cuda:0", {"OMP_NUM_THREADS": "1"}, {"sys/fs/cgroup/cpu.max": "100000 100000\n"}, False),
        ("cuda:0", {"OMP_NUM_THREADS": "2,1"}, {"sys/fs/cgroup/cpu.max": "100000 100000\n"}, True),
        ("cuda:0", {"LOCAL_WORLD_SIZE": "4"}, {"sys/fs/cgroup/cpu.max": "100000 100000\n"}, False),
        ("cpu", {"LOCAL_WORLD_SIZE": "4"}, {"sys/fs/cgroup/cpu.max": "100000 100000\n"}, True),
    ],
)
def test_a_node_is_crowded_by_the_doctor_s_rule_and_what_cannot_be_read_proves_nothing(
    tmp_path: Path, device: str, environ: dict[str, str], files: dict[str, str], is_crowded: bool
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    node = Bench(
        hello=job_hello(world_size=4, device=device),
        environ={"LOCAL_WORLD_SIZE": "1"} | environ,
        files=KernelFiles(tmp_path / "proc", tmp_path / "sys"),
    ).node
    assert node.is_crowded() is is_crowded


def test_what_disturbs_another_rank_s_node_is_named_with_the_rank() -> None:
    node = Bench().node
    node.update()
    node.others = {0: 2, 3: int(Disturbance.THROTTLED)}
    assert node.reason() == "rank 3: its device is throttled", "what it told itself is what it knows better"
    node.others = {2: DISTURBANCE_MAX}
    assert node.reason() is None, "of a later version, perhaps"


def test_a_daemon_that_falls_silent_is_not_believed_and_one_that_hangs_up_at_once() -> None:
    bench = Bench()
    assert bench.say(throttled_by=("hw_slowdown",), host_available_bytes=7, host_total_bytes=9) is not None
    bench.clock.advance(AGE_PERIODS * 3 * S)
    assert bench.node.update() is Disturbance.THROTTLED
    assert bench.node.room_bytes() == 7
    bench.clock.advance(1)
    assert bench.node.update() is None
    assert (bench.node.room_bytes(), bench.node.view) == (None, NodeView())
    assert bench.node.describe() == ("its state is unknown: the daemon's last report is 9.0 s old",)
    assert bench.say(throttled_by=("hw_slowdown",)) is not None
    bench.node.record(None)
    assert bench.node.update() is None


def test_signals_that_wait_are_bounded_and_the_newest_counts() -> None:
    bench = Bench()
    for number in range(3 * SIGNALS_MAX):
        told = HostSignals(period_ns=3 * S, taken_ns=bench.clock.monotonic_ns(), host_available_bytes=number)
        bench.node.record(told)
    assert len(bench.node._queued) == SIGNALS_MAX
    bench.node.update()
    assert bench.node.room_bytes() == 3 * SIGNALS_MAX - 1


def test_the_job_s_own_gradients_are_nobody_else_s_traffic() -> None:
    """15 MB leave each of 4 nodes in a step of 0.2 s: 60 % of the link."""
    bench = Bench()
    for _ in range(20):
        bench.node.note(S // 5)
    assert [bench.say(**traffic(0.6)) for _ in range(5)] == [None] * 5
    assert bench.node.view.link_ratio == pytest.approx(0.6)
    for _ in range(20):
        bench.node.note(10 * S)  # now it sends next to nothing
    assert [bench.say(**traffic(0.6)) for _ in range(2)] == [None, Disturbance.TRAFFIC]


@pytest.mark.parametrize("options", [{"environ": {}}, {"gradient_bytes": None}, {"environ": {"LOCAL_WORLD_SIZE": "4"}}])
def test_traffic_disturbs_no_job_that_has_one_node_or_sends_nobody_knows_what(options: dict[str, Any]) -> None:
    bench = Bench(**options)
    bench.node.note(S)
    assert [bench.say(**traffic(0.9)) for _ in range(5)] == [None] * 5


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [({}, 8), ({"LOCAL_WORLD_SIZE": "2"}, 2), ({"SLURM_NTASKS_PER_NODE": "4"}, 4), ({"LOCAL_WORLD_SIZE": "99"}, 8),
     ({"LOCAL_WORLD_SIZE": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, 1), ({"SLURM_NTASKS_PER_NODE": "4(x2)"}, 8)],
)  # fmt: skip
def test_the_launcher_says_how_many_ranks_a_node_has(environ: dict[str, str], ranks: int) -> None:
    assert ranks_on_node(8, environ) == ranks


def test_room_is_the_device_s_with_what_this_process_holds_unused_or_a_share_of_the_host_s() -> None:
    memory = {"host_available_bytes": 6 * GIB, "host_total_bytes": 16 * GIB}
    device = {"device_free_bytes": 2 * GIB, "device_total_bytes": 80 * GIB}
    gpu = Bench(hello=job_hello(world_size=4, device="cuda:1", device_uuid="GPU-1"), spare_bytes=lambda: GIB)
    gpu.say(**memory, **device)
    assert gpu.node.room_bytes() == 3 * GIB
    assert gpu.node.view.headroom_ratio == pytest.approx(3 / 80)
    cpu = Bench(environ={"LOCAL_WORLD_SIZE": "2"})
    cpu.say(**memory)
    assert cpu.node.room_bytes() == 3 * GIB
    assert cpu.node.view.headroom_ratio == pytest.approx(3 / 16)
    gpu.say(**memory)
    assert gpu.node.room_bytes() is None


def test_what_is_known_is_said_in_words() -> None:
    bench = Bench()
    bench.say(
        **traffic(0.1), throttled_by=(), faults=(), host_available_bytes=GIB, host_total_bytes=2 * GIB,
        memory_stalled_ratio=0.0, cpu_stalled_ratio=0.125,
    )  # fmt: skip
    assert bench.node.describe() == (
        "0.0 s ago: eth0 receives and sends 0.0 and 12.5 of 125 MB/s, throttled: no, faults: none,"
        " 1.0 of 2.0 GiB host memory free, tasks wait for memory 0% of the time,"
        " tasks wait for a processor 12% of the time",
    )


# --- what the others hear ---------------------------------------------------------------------------


def test_each_rank_s_disturbance_reaches_all_with_its_paces_and_is_gone_with_the_next() -> None:
    ranks = [ProtocolMember(rank, 3) for rank in range(3)]
    for member in ranks:
        member.offer(Offer((KnobOffer("bucket_bytes", 1, (1, 2), None, ""),)))
    offers = [member.next_vector() or [] for member in ranks]
    for member in ranks:
        member.receive_offers(offers)
    ranks[0].propose(1, (2,))
    for numbers in ((None, int(Disturbance.TRAFFIC), DISTURBANCE_MAX), (None, None, None)):
        for member, number in zip(ranks, numbers, strict=True):
            member.disturbance = number
            member.close_range(1, [5, 6, 7, 8], [False] * 4)
        vectors = [member.next_vector() or [] for member in ranks]
        paces = [member.receive(vectors) for member in ranks]
        told = {rank: number for rank, number in enumerate(numbers) if number is not None}
        assert [dict(member.disturbed) for member in ranks] == [told] * 3
        assert [[pace.pace_ns for pace in one] for one in paces] == [[5, 6, 7, 8]] * 3
        assert {member.held.values for member in ranks if member.held} == {(2,)}, "the flags beside it are whole"


def test_every_disturbance_crosses_and_has_words() -> None:
    assert set(WORDS) == set(Disturbance)
    assert all(0 < kind <= DISTURBANCE_MAX for kind in Disturbance)


# --- the policy ---------------------------------------------------------------------------------------


def test_a_policy_is_held_for_the_node_and_goes_on() -> None:
    bench = Bench()
    run = HeldRun(TuningPause(bench.node))
    run.run(30)
    bench.say(memory_stalled_ratio=0.5)
    run.run(30)
    assert run.said[-1].state == "frozen"
    assert run.said[-1].detail.startswith("this node is short of memory")
    bench.say(memory_stalled_ratio=0.0)
    run.run(10)
    assert run.said[-1].state != "frozen"


# --- order and room -----------------------------------------------------------------------------------

SPACES = (
    KnobSpace("bucket_bytes", 8, (2, 4, 8, 16)),
    KnobSpace("loader_workers", 4, (2, 4, 8)),
    KnobSpace("micro_batch", 8, (4, 8, 16, 32)),
)
HERE = {space.knob: space.value for space in SPACES}


def order(node: NodeView | None) -> tuple[list[tuple[str, int]], list[str]]:
    found, left_out = GeometricSearch(SPACES).candidates(dict(HERE), lambda *_: None, None, node)
    return [(candidate.knob, candidate.value) for candidate in found], left_out


def test_what_is_not_known_sways_nothing() -> None:
    assert order(None) == order(NodeView())
    assert order(None)[0][0] == ("micro_batch", 16)


def test_a_full_link_puts_the_knobs_of_communication_first() -> None:
    full, _ = order(NodeView(link_ratio=FULL_LINK_RATIO))
    assert {knob for knob, _ in full[:2]} == {"bucket_bytes"}
    assert order(NodeView(link_ratio=FULL_LINK_RATIO - 0.01)) == order(None)


def test_without_memory_no_larger_micro_batch_is_tried_and_the_reason_is_said() -> None:
    short, left_out = order(NodeView(headroom_ratio=ROOM_RATIO_MIN - 0.01))
    assert ("micro_batch", 16) not in short
    assert ("micro_batch", 4) in short
    assert left_out == ["micro_batch: nothing larger while 9.0% of the memory is free"]
    assert order(NodeView(headroom_ratio=ROOM_RATIO_MIN)) == order(None)
    assert ("micro_batch", 16) not in order(NodeView(headroom_ratio=0.0))[0], "zero is a measurement"


def test_where_tasks_wait_for_processors_more_loader_workers_come_last() -> None:
    stalled, _ = order(NodeView(cpu_stalled_ratio=STALLED_CPU_RATIO))
    assert stalled[-1] == ("loader_workers", 8)


def test_a_size_that_a_host_may_not_hold_is_not_even_tried() -> None:
    headroom = MemoryForecast(torch.device("cpu"))
    assert headroom.refuse(8, 16, None) is None, "nobody knows"
    assert headroom.refuse(8, 16, 2**50) is None
    refused = headroom.refuse(8, 2**30, 0)
    assert refused is not None
    assert "are to be had" in refused


def test_a_process_whose_own_memory_cannot_be_read_refuses_nothing(tmp_path: Any) -> None:
    for text in ("", "12", "x y z"):
        (tmp_path / "statm").write_text(text)
        assert MemoryForecast(torch.device("cpu"), statm=tmp_path / "statm").refuse(8, 2**30, 0) is None
    assert MemoryForecast(torch.device("cpu"), statm=tmp_path / "none").refuse(8, 2**30, 0) is None
