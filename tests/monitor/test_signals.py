"""What a job hears about its node: rates, levels and faults that were read, and only if it asked."""

import os
import time

import pytest

from pacecar.clock import NS_PER_SECOND, SystemClock
from pacecar.monitor.collectors.gpu import GpuCollector
from pacecar.monitor.collectors.network import NetworkCollector
from pacecar.monitor.gpu.nvml import PyNvml
from pacecar.monitor.jobs.node_signals import FAULT_SECONDS, SIGNAL_TICKS, NodeSignalsSource
from pacecar.records import Absent, Ok, Sample, Snapshot, Throttling
from pacecar.records.host_signals import NAMES_MAX, HostSignals
from pacecar.wire import FrameError, Refusal, decode_frame, encode_frame
from tests.kit.daemons import running_daemon, running_inbox
from tests.kit.fake_clock import FakeClock
from tests.kit.waiting import until

S = NS_PER_SECOND
GPU = ("0", "GPU-a", *[""] * 7)


def samples(table):
    return tuple(
        Sample(f"pacecar_{metric}", labels, value)
        for (metric, *labels), value in table.items()
        for labels in [tuple(labels)]
    )


class Node:
    """A daemon's ticks, a second apart."""

    def __init__(self):
        self.signals, self.tick, self.told = NodeSignalsSource(S), 0, None

    def pass_ticks(self, table, ticks=SIGNAL_TICKS, absent=False):
        """Let all ticks read what `table(second)` says."""
        for _ in range(ticks):
            self.tick += 1
            outcome = Absent("gone") if absent else Ok(samples(table(self.tick)))
            told = self.signals.update(Snapshot(self.tick, self.tick * S, 0, 0, {"one": outcome}, {}))
            self.told = told or self.told
        return self


def link(second):
    return {
        ("host_network_receive_bytes_total", "eth0"): 7000 + 100 * second,
        ("host_network_transmit_bytes_total", "eth0"): 9000 + 250 * second,
        ("host_network_transmit_bytes_total", "lo"): 10**9 * second,
        ("host_network_link_bytes_per_second", "eth0"): 1250,
        ("host_network_transmit_utilization_ratio", "eth0"): 0.2,
        ("host_memory_available_bytes",): 300,
        ("host_memory_size_bytes",): 1000,
        ("host_pressure_stalled_seconds_total", "memory", "some"): S // 4 * second,
        ("host_pressure_stalled_seconds_total", "memory", "full"): S * second,
        ("host_pressure_stalled_seconds_total", "cpu", "some"): 5,
    }


def test_a_rank_hears_the_rates_of_its_own_interface_and_the_memory(make_hello):
    node = Node().pass_ticks(link, 2 * SIGNAL_TICKS)
    assert node.told.of(make_hello(interface="eth0"), None) == HostSignals(
        period_ns=SIGNAL_TICKS * S, taken_ns=2 * SIGNAL_TICKS * S, interface="eth0", receive_bytes_per_second=100.0,
        transmit_bytes_per_second=250.0, link_bytes_per_second=1250, host_available_bytes=300, host_total_bytes=1000,
        memory_stalled_ratio=0.25, cpu_stalled_ratio=0.0,
    )  # fmt: skip


def test_the_first_signal_has_levels_and_no_rates(make_hello):
    told = Node().pass_ticks(link).told.of(make_hello(interface="eth0"), None)
    assert told.host_available_bytes == 300
    assert (told.interface, told.receive_bytes_per_second, told.memory_stalled_ratio) == (None, None, None)


def test_nothing_is_said_between_the_periods():
    assert Node().pass_ticks(link, SIGNAL_TICKS - 1).told is None


def test_a_daemon_without_the_collectors_says_that_it_does_not_know(make_hello):
    told = Node().pass_ticks(link, 2 * SIGNAL_TICKS, absent=True).told.of(make_hello(interface="eth0"), None)
    assert told == HostSignals(period_ns=SIGNAL_TICKS * S, taken_ns=2 * SIGNAL_TICKS * S)


def test_what_was_read_once_and_is_gone_is_forgotten(make_hello):
    node = Node().pass_ticks(link, 2 * SIGNAL_TICKS).pass_ticks(link, absent=True)
    assert node.told.of(make_hello(interface="eth0"), None).host_available_bytes is None


def test_zero_is_a_measurement(make_hello):
    def idle(second):
        return {
            **dict.fromkeys(link(second), 0),
            ("gpu_memory_free_bytes", "0"): 0,
            ("gpu_info", *GPU): 1,
            ("gpu_up", "0"): 1,
        }

    told = Node().pass_ticks(idle, 2 * SIGNAL_TICKS).told.of(make_hello(interface="eth0", device_uuid="GPU-a"), None)
    assert (told.receive_bytes_per_second, told.transmit_bytes_per_second, told.memory_stalled_ratio) == (0.0, 0.0, 0.0)
    assert (told.host_available_bytes, told.device_free_bytes, told.faults) == (0, 0, ())


def test_a_counter_that_went_back_has_no_rate(make_hello):
    node = Node().pass_ticks(link)
    node.pass_ticks(lambda second: {("host_network_receive_bytes_total", "eth0"): 5})
    assert node.told.of(make_hello(interface="eth0"), None).receive_bytes_per_second is None


def test_an_interface_that_is_no_link_has_rates_and_no_speed(make_hello):
    def veth(second):
        return {key: value for key, value in link(second).items() if "utilization" not in key[0]}

    told = Node().pass_ticks(veth, 2 * SIGNAL_TICKS).told.of(make_hello(interface="eth0"), None)
    assert (told.receive_bytes_per_second, told.link_bytes_per_second) == (100.0, None)


def test_an_interface_that_is_not_there_is_not_known(make_hello):
    told = Node().pass_ticks(link, 2 * SIGNAL_TICKS).told.of(make_hello(interface="ib0"), None)
    assert (told.interface, told.link_bytes_per_second) == (None, None)


def test_nccl_without_an_interface_has_the_sum_of_the_active_rdma_ports(make_hello):
    def ports(second):
        table = {("rdma_port_active", "mlx5_9", "1"): 0, ("rdma_receive_bytes_total", "mlx5_9", "1"): 10**6 * second}
        for port in ("mlx5_0", "mlx5_1"):
            table |= {
                ("rdma_port_active", port, "1"): 1, ("rdma_receive_bytes_total", port, "1"): 10 * second,
                ("rdma_transmit_bytes_total", port, "1"): 30 * second,
                ("rdma_port_link_bytes_per_second", port, "1"): 500,
            }  # fmt: skip
        return table

    told = Node().pass_ticks(ports, 2 * SIGNAL_TICKS).told
    nccl = told.of(make_hello(backend="cpu:gloo,cuda:nccl"), None)
    assert (nccl.interface, nccl.receive_bytes_per_second, nccl.transmit_bytes_per_second) == ("RDMA", 20.0, 60.0)
    assert nccl.link_bytes_per_second == 1000
    assert told.of(make_hello(backend="gloo"), None).interface is None


def gpus(second, **changes):
    table = {
        ("gpu_info", *GPU): 1, ("gpu_up", "0"): 1, ("gpu_down", "0", "lost"): 0, ("gpu_memory_free_bytes", "0"): 3,
        ("gpu_memory_size_bytes", "0"): 8, ("gpu_xid_errors_total", "0", "79"): 0,
        ("gpu_ecc_errors_total", "0", "corrected", "volatile"): second,
        ("gpu_ecc_errors_total", "0", "uncorrected", "volatile"): 4,
        ("gpu_ecc_errors_total", "0", "uncorrected", "aggregate"): second,
    }  # fmt: skip
    return table | {tuple(key.split("__")): value for key, value in changes.items()}


@pytest.fixture
def rank(make_hello):
    return make_hello(device="cuda:0", device_uuid="GPU-a")


def test_a_device_is_told_its_memory_and_clocks(rank, make_hello):
    node = Node().pass_ticks(gpus, 2 * SIGNAL_TICKS)
    told = node.told.of(rank, Throttling(device_uuid="GPU-a", reasons=("hw_slowdown",)))
    assert (told.device_free_bytes, told.device_total_bytes, told.faults) == (3, 8, ())
    assert told.throttled_by == ("hw_slowdown",)
    assert node.told.of(rank, None).throttled_by is None, "not known is not unthrottled"
    assert node.told.of(make_hello(device_uuid="GPU-z"), None).faults is None


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"gpu_xid_errors_total__0__79": 1}, "Xid 79"),
        ({"gpu_xid_errors_total__0__109": 1}, "Xid 109"),
        ({"gpu_ecc_errors_total__0__uncorrected__volatile": 5}, "ECC error"),
        ({"gpu_down__0__lost": 1}, "down: lost"),
    ],
)
def test_a_fault_is_told_for_a_minute_and_then_no_more(rank, change, fault):
    node = Node().pass_ticks(gpus)
    assert node.told.of(rank, None).faults == (), "errors that could be corrected are none"
    node.pass_ticks(lambda second: gpus(second, **change), 1)
    counts = {key: value for key, value in change.items() if "down" not in key}
    node.pass_ticks(lambda second: gpus(second, **counts), SIGNAL_TICKS - 1)
    assert node.told.of(rank, None).faults == (fault,)
    node.pass_ticks(lambda second: gpus(second, **counts), FAULT_SECONDS // SIGNAL_TICKS * SIGNAL_TICKS - SIGNAL_TICKS)
    assert node.told.of(rank, None).faults == (fault,)
    node.pass_ticks(lambda second: gpus(second, **counts))
    assert node.told.of(rank, None).faults == ()


def test_a_gpu_of_which_nothing_is_read_any_more_is_still_this_rank_s(rank):
    node = Node().pass_ticks(gpus)
    node.pass_ticks(lambda second: {("gpu_up", "0"): 0, ("gpu_down", "0", "hung"): 1})
    assert node.told.of(rank, None).faults == ("down: hung",)


def test_errors_from_before_the_daemon_are_not_new(rank):
    node = Node().pass_ticks(lambda second: gpus(second, gpu_ecc_errors_total__0__uncorrected__volatile=4))
    assert node.told.of(rank, None).faults == ()


def test_more_faults_than_a_frame_holds_are_cut(rank):
    node = Node().pass_ticks(gpus)
    node.pass_ticks(lambda second: gpus(second, **{f"gpu_xid_errors_total__0__{code}": 1 for code in range(100, 140)}))
    told = node.told.of(rank, None)
    assert len(told.faults) == NAMES_MAX
    assert decode_frame(encode_frame(told)) == told


def test_the_real_collector_s_numbers_are_understood(files, make_hello):
    clock = FakeClock(monotonic_ns=S)
    collector, signals, told = NetworkCollector(files, clock), NodeSignalsSource(S), None
    for tick in range(2 * SIGNAL_TICKS):
        clock.advance(S)
        outcomes = {"network": collector.collect()}
        told = signals.update(Snapshot(tick, clock.monotonic_ns(), 0, 0, outcomes, {})) or told
    links = [labels[0] for metric, labels in told.levels if metric == "host_network_transmit_utilization_ratio"]
    assert links, "the recorded machine has a link"
    said = told.of(make_hello(interface=links[0]), None)
    assert (said.receive_bytes_per_second, said.transmit_bytes_per_second) == (0.0, 0.0)
    assert said.link_bytes_per_second > 0


# --- frames and sockets ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        {"taken_ns": -1},
        {"transmit_bytes_per_second": float("nan")},
        {"memory_stalled_ratio": -0.5},
        {"device_free_bytes": "much"},
        {"throttled_by": ["x"] * (NAMES_MAX + 1)},
        {"faults": ["x" * 65]},
        {"taken_ns": None},
    ],
)
def test_a_bad_signal_is_refused_as_a_frame(bad):
    good = HostSignals(period_ns=1, taken_ns=2)
    frame = encode_frame(good)
    assert decode_frame(frame) == good
    record = HostSignals(**{"period_ns": 1, "taken_ns": 2, **bad})
    with pytest.raises(FrameError) as refused:
        decode_frame(encode_frame(record))
    assert refused.value.refusal is Refusal.MALFORMED


def test_only_ranks_that_asked_are_told_and_a_hook_that_says_such_a_thing_is_refused(hooks, make_hello, tmp_path):
    with running_inbox(tmp_path / "s") as inbox:
        asked, silent = hooks(tmp_path / "s"), hooks(tmp_path / "s")
        asked.say(make_hello(pid=os.getpid(), interface="eth0", hears_signals=True))
        silent.say(make_hello(pid=os.getpid(), rank=1, interface="eth0"))
        until(lambda: inbox.frames == 2, "both are there")
        inbox.tell({}, None)
        inbox.tell({}, Node().pass_ticks(link, 2 * SIGNAL_TICKS).told)
        heard = decode_frame(asked.socket.recv(65536))
        assert isinstance(heard, HostSignals)
        assert heard.transmit_bytes_per_second == 250.0
        silent.socket.setblocking(False)
        with pytest.raises(BlockingIOError):
            silent.socket.recv(1)
        asked.say(heard)
        until(lambda: inbox.refused()[Refusal.MALFORMED] == 1, "refused")


def test_a_rank_that_does_not_read_costs_the_tick_nothing(hooks, make_hello, tmp_path):
    with running_inbox(tmp_path / "s") as inbox:
        hooks(tmp_path / "s").say(make_hello(pid=os.getpid(), hears_signals=True))
        until(lambda: inbox.frames == 1, "it is there")
        told = Node().pass_ticks(link, 2 * SIGNAL_TICKS).told
        begun = time.monotonic()
        for _ in range(3000):
            inbox.tell({}, told)
        assert time.monotonic() - begun < 5
        assert inbox.connections == 1


@pytest.mark.slow
def test_a_real_daemon_tells_a_rank_of_its_own_gpu_over_the_real_pynvml(standin, hooks, make_hello, tmp_path):
    """The stand-in driver's GPU 1 is hot, then faulty; a rank on GPU 0 hears of neither."""
    collector = GpuCollector(PyNvml(), SystemClock(), kernel_log=str(tmp_path / "kmsg"))
    with running_daemon(tmp_path, [collector]):
        lines = [hooks(tmp_path / "s") for _ in range(2)]
        for gpu, line in enumerate(lines):
            line.say(
                make_hello(
                    pid=os.getpid(), rank=gpu, device=f"cuda:{gpu}", device_uuid=f"GPU-{gpu}", hears_signals=True
                )
            )
        for gpu, line in enumerate(lines):
            said = hear(line, lambda told: told.throttled_by is not None and told.device_free_bytes is not None)
            assert (said.device_uuid, said.throttled_by, said.faults) == (f"GPU-{gpu}", (), ())
            assert 0 < said.device_free_bytes < said.device_total_bytes
        standin.page.reasons[1] = 0x8
        assert hear(lines[1], lambda told: told.throttled_by).throttled_by == ("hw_slowdown",)
        standin.xid(1, 79)
        faulty = hear(lines[1], lambda told: told.faults)
        assert faulty.faults == ("Xid 79",)
        cool = hear(lines[0], lambda told: told.taken_ns > faulty.taken_ns)
        assert (cool.throttled_by, cool.faults) == ((), ())


def hear(line, claim):
    """Return the first signal for which `claim` holds; skip everything else."""
    for _ in range(400):
        told = decode_frame(line.socket.recv(65536))
        if isinstance(told, HostSignals) and claim(told):
            return told
    raise AssertionError("it was never told")
