"""The outbox against a real SEQPACKET listener: there, absent, full, killed and restarted, and in a forked child."""

import logging
import os
import socket
import threading
import time

import msgspec
import pytest

from pacecar.profiler.transport.daemon_socket import DaemonSocket
from pacecar.profiler.transport.record_queue import LOOK_SECONDS, RecordQueue, RecordRefused
from pacecar.profiler.transport.run_log import RunLog
from pacecar.records import Answer, Goodbye, HelloRefused, JobRecord, TunerReport
from pacecar.wire import decode_frame, encode_frame
from tests.kit.records import job_hello
from tests.kit.waiting import until

WAIT_SECONDS = 10.0


def record(number):
    return Goodbye(job="j", rank=0, reason=f"r{number}", wall_ns=number)


class Listener:
    """A daemon that keeps what it reads."""

    def __init__(self, path, *, reading=True):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.bind(str(path))
        self.socket.listen(4)
        self.path, self.frames, self.peers = path, [], []
        if reading:
            self.thread = threading.Thread(target=self._read, daemon=True)
            self.thread.start()

    def _read(self):
        try:
            while True:
                peer, _ = self.socket.accept()
                self.peers.append(peer)
                while frame := peer.recv(65536):
                    self.frames.append(decode_frame(frame))
        except OSError:
            pass

    def kill(self):
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        for peer in self.peers:
            peer.shutdown(socket.SHUT_RDWR)
            peer.close()
        os.unlink(self.path)


def test_hello_comes_first_and_records_in_order(tmp_path):
    daemon = Listener(tmp_path / "s")
    outbox = DaemonSocket(str(tmp_path / "s"), job_hello())
    for number in range(50):
        outbox.put(record(number))
    outbox.close(WAIT_SECONDS)
    until(lambda: len(daemon.frames) == 51)
    assert daemon.frames == [job_hello(), *map(record, range(50))]
    assert outbox.dropped == 0
    daemon.kill()


@pytest.mark.slow
def test_a_restarted_daemon_gets_a_new_hello_and_the_records_again(tmp_path, caplog):
    first = Listener(tmp_path / "s")
    outbox = DaemonSocket(str(tmp_path / "s"), job_hello())
    outbox.put(record(0))
    until(lambda: len(first.frames) == 2)
    first.kill()
    for number in range(1, 20):
        outbox.put(record(number))
    until(lambda: [r for r in caplog.records if r.name.startswith("pacecar")], "nobody missed the daemon")
    second = Listener(tmp_path / "s")
    until(lambda: record(19) in second.frames)
    assert second.frames[0] == job_hello()
    assert second.frames[1:] == list(map(record, range(1, 20)))
    outbox.close(WAIT_SECONDS)
    assert outbox.dropped == 0
    assert len([r for r in caplog.records if r.name.startswith("pacecar")]) == 1, "one complaint, not one a retry"
    second.kill()


@pytest.mark.slow
def test_without_a_daemon_the_oldest_are_dropped_and_counted_and_put_returns(tmp_path):
    outbox = DaemonSocket(str(tmp_path / "nobody"), job_hello(), queue_length_max=10)
    for number in range(100):
        outbox.put(record(number))
    assert 85 <= outbox.dropped <= 90, "ten queued, at most one more in the thread's hands"
    daemon = Listener(tmp_path / "nobody")
    until(lambda: record(99) in daemon.frames)
    outbox.close(WAIT_SECONDS)
    assert len(daemon.frames) - 1 + outbox.dropped == 100, "each record was delivered or counted"
    daemon.kill()


def test_a_daemon_that_does_not_read_blocks_nobody(tmp_path):
    daemon = Listener(tmp_path / "s", reading=False)
    outbox = DaemonSocket(str(tmp_path / "s"), job_hello(), queue_length_max=50)
    puts = []

    def put_all():
        for number in range(5000):
            outbox.put(record(number))
        puts.append(5000)

    thread = threading.Thread(target=put_all, daemon=True)
    thread.start()
    thread.join(WAIT_SECONDS)
    assert puts == [5000]
    assert outbox.dropped > 4000
    outbox.close(0.2)
    daemon.socket.close()


def test_a_record_that_cannot_be_framed_is_dropped_and_the_rest_goes_on(tmp_path):
    daemon = Listener(tmp_path / "s")
    outbox = DaemonSocket(str(tmp_path / "s"), job_hello())
    report = TunerReport(
        mode="exact", policy="pacecar", state="off", detail="", step=0, knobs={}, began={}, domains={}, by_hand=(),
        refused={}, trials=0, exploration_ns=0, elapsed_ns=0, budget_ratio=0.0, advice=("x" * 4000,) * 20,
    )  # fmt: skip
    outbox.put(Answer(job="j", rank=0, number=1, state="done", detail="", report=report))
    outbox.put(record(1))
    outbox.close(WAIT_SECONDS)
    until(lambda: record(1) in daemon.frames)
    assert outbox.dropped == 1
    daemon.kill()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_neither_sends_nor_hangs(tmp_path):
    outbox = DaemonSocket(str(tmp_path / "nobody"), job_hello())
    outbox.put(record(0))
    child = os.fork()
    if child == 0:
        outbox.put(record(1))
        outbox.close(5.0)
        os._exit(7)
    deadline = time.monotonic() + WAIT_SECONDS
    done, status = 0, 0
    while not done and time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(status) == 7
    assert done == child
    outbox.close(0.1)


@pytest.mark.slow
def test_the_thread_wakes_by_its_own_timer_and_not_for_each_record():
    class Counting:
        destination = "here"
        delivered = 0

        def deliver(self, record, timeout_seconds):
            self.delivered += 1

        def listen(self):
            pass

        def close(self):
            pass

    carrier = Counting()
    courier = RecordQueue(carrier)
    waits = []
    wait = courier._closing.wait

    def counted(timeout=None):
        waits.append(time.monotonic())
        return wait(timeout)

    courier._closing.wait = counted
    begun = time.monotonic()
    for number in range(200):
        courier.put(record(number))
        time.sleep(0.005)
    elapsed = time.monotonic() - begun
    assert len(waits) <= elapsed / LOOK_SECONDS + 2
    courier.close(WAIT_SECONDS)
    assert carrier.delivered == 200


def test_close_does_not_wait_for_a_daemon_that_never_was_there_and_counts_what_it_leaves(tmp_path):
    outbox = DaemonSocket(str(tmp_path / "nobody"), job_hello())
    for number in range(5):
        outbox.put(record(number))
    begun = time.monotonic()
    outbox.close(10 * WAIT_SECONDS)
    assert time.monotonic() - begun < WAIT_SECONDS
    outbox.put(record(6))
    assert outbox.dropped == 6
    assert "pacecar-records" not in {t.name for t in threading.enumerate()}


@pytest.mark.slow
@pytest.mark.parametrize("comes_back", [True, False])
def test_close_waits_for_a_daemon_that_is_being_restarted_but_not_for_ever(tmp_path, comes_back):
    first = Listener(tmp_path / "s")
    outbox = DaemonSocket(str(tmp_path / "s"), job_hello())
    outbox.put(record(0))
    until(lambda: len(first.frames) == 2)
    first.kill()
    outbox.put(record(1))
    closing = threading.Thread(target=outbox.close, args=(WAIT_SECONDS if comes_back else 0.5,))
    closing.start()
    time.sleep(0.3)
    assert closing.is_alive()
    if comes_back:
        second = Listener(tmp_path / "s")
        until(lambda: second.frames == [job_hello(), record(1)])
        second.kill()
    closing.join()
    assert outbox.dropped == (0 if comes_back else 1)


def lines_of(path):
    return [msgspec.json.decode(line, type=JobRecord) for line in path.read_bytes().splitlines()]


def test_a_run_log_holds_the_hello_and_every_record(tmp_path):
    log = RunLog(tmp_path / "runs" / "1", job_hello(rank=3))
    for number in range(20):
        log.put(record(number))
    log.close(WAIT_SECONDS)
    assert log.path == tmp_path / "runs" / "1" / "rank3.jsonl"
    assert lines_of(log.path) == [job_hello(rank=3), *map(record, range(20))]
    assert log.dropped == 0


@pytest.mark.slow
@pytest.mark.parametrize("is_optional", [True, False])
def test_where_no_socket_is_configured_a_node_without_a_daemon_is_no_reason_to_warn(tmp_path, caplog, is_optional):
    caplog.set_level(logging.INFO, logger="pacecar")
    outbox = DaemonSocket(str(tmp_path / "s"), job_hello(), is_optional=is_optional)
    outbox.put(record(0))
    until(lambda: caplog.records)
    time.sleep(3 * LOOK_SECONDS)
    said = [(one.levelno, one.getMessage()) for one in caplog.records]
    path = tmp_path / "s"
    if is_optional:
        assert said == [
            (logging.INFO, f"pacecar does not find the daemon at {path}; it measures without it and keeps looking")
        ]
    else:
        assert [level for level, _ in said] == [logging.WARNING]
    daemon = Listener(path)
    until(lambda: len(daemon.frames) == 2, "it has kept looking")
    daemon.kill()
    outbox.put(record(1))
    until(lambda: caplog.records[-1].levelno == logging.WARNING, "a daemon that is gone is missed")
    outbox.close(0.0)


@pytest.mark.slow
def test_a_full_disk_drops_counts_and_complains_once(caplog, tmp_path):
    (tmp_path / "rank0.jsonl").symlink_to("/dev/full")
    log = RunLog(tmp_path, job_hello(), queue_length_max=4)
    for number in range(30):
        log.put(record(number))
    until(lambda: caplog.records)
    log.close(0.2)
    assert log.dropped == 30
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text


@pytest.mark.slow
def test_an_error_inside_a_carrier_ends_the_thread_and_not_the_job(caplog):
    class Broken:
        destination = "nowhere"

        def deliver(self, record, timeout_seconds):
            if record.wall_ns == 0:
                raise RecordRefused("no zeros")
            raise ZeroDivisionError

        def close(self):
            pass

    courier = RecordQueue(Broken())
    for number in range(3):
        courier.put(record(number))
    until(lambda: courier.dropped >= 2)
    courier.put(record(4))
    courier.close(1.0)
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.slow
def test_that_the_daemon_does_not_show_the_rank_is_said_once_in_the_jobs_log(tmp_path, caplog):
    daemon = Listener(tmp_path / "s")
    outbox = DaemonSocket(str(tmp_path / "s"), job_hello())
    outbox.put(record(0))
    until(lambda: daemon.peers and len(daemon.frames) == 2, "connected", WAIT_SECONDS)
    for _ in range(3):
        daemon.peers[0].send(encode_frame(HelloRefused(reason="job 'j' is beyond jobs_max = 1")))
    until(lambda: "does not show this rank" in caplog.text, "it was said", WAIT_SECONDS)
    outbox.put(record(1))
    until(lambda: len(daemon.frames) == 3, "and the rank goes on", WAIT_SECONDS)
    outbox.close(WAIT_SECONDS)
    daemon.kill()
    assert caplog.text.count("does not show this rank: job 'j' is beyond jobs_max = 1") == 1
