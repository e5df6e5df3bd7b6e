"""What one user's jobs report flushes neither the host's ticks, nor a real Xid's file, nor another user's records."""

import os

import pytest

from pacecar.clock import NS_PER_SECOND
from pacecar.monitor.recorder.fair_queue import HOST, FairQueue
from pacecar.monitor.recorder.pending_triggers import AFTER_SECONDS, INTERVAL_SECONDS, TRIGGERS_MAX, PendingTriggers
from pacecar.monitor.recorder.user_buffers import UserBuffers
from pacecar.monitor.recorder.writer import FILES_MAX, RecordingFolder, RecordingFolderFullError
from pacecar.records import Goodbye, Ok, Sample, Snapshot
from pacecar.records.recording import RecordingEvent, RecordingHeader, Trigger, parts, read_recording
from pacecar.wire import encode_frame, payload_of

ATTACKER, VICTIM = 1000, 1001


def snapshot(second):
    samples = tuple(Sample("pacecar_host_network_up", (f"eth{n}",), (second * n) % 7) for n in range(50))
    return Snapshot(second, second * NS_PER_SECOND, second * NS_PER_SECOND, 0, {"net": Ok(samples)}, {"net": 1})


def record(job, reason):
    return payload_of(encode_frame(Goodbye(job=job, rank=0, reason=reason, wall_ns=1)))


def read(tapes, tmp_path, now_ns):
    header = RecordingHeader(host="h", pacecar_version="0", written_wall_ns=0, window_ns=1, triggers=())
    (tmp_path / "r").write_bytes(b"".join(parts(header, tapes.seal(now_ns))))
    return read_recording(tmp_path / "r")


@pytest.mark.slow
def test_a_flood_of_one_users_records_flushes_neither_ticks_nor_anothers_records(tmp_path):
    tapes = UserBuffers(window_ns=600 * NS_PER_SECOND, bytes_max=2_000_000)
    for second in range(120):
        at_ns = second * NS_PER_SECOND
        tapes.host.tick(snapshot(second), at_ns)
        tapes.of_user(VICTIM).record(record("victim", f"step {second}"), at_ns)
        for number in range(20):
            tapes.of_user(ATTACKER).record(record("attacker", os.urandom(2000).hex()), at_ns + number)
            tapes.fit()
    assert tapes.memory_bytes <= 2_000_000
    assert tapes.dropped > 0
    recording = read(tapes, tmp_path, 120 * NS_PER_SECOND)
    assert [tick.tick for tick in recording.ticks()] == list(range(120)), "every tick of the window"
    said = [found for _, found in recording.records()]
    assert [one.reason for one in said if one.job == "victim"] == [f"step {second}" for second in range(120)]
    assert any(one.job == "attacker" for one in said), "it has what is left"


def test_users_who_say_nothing_any_more_take_nothing():
    tapes = UserBuffers(window_ns=60 * NS_PER_SECOND, bytes_max=10**6)
    for uid in range(100):
        tapes.of_user(uid).record(record("j", "r"), 1)
        tapes.of_user(uid).event(RecordingEvent(1, "trigger hang", "x"))
    assert (tapes.entries, len(tapes._users)) == (200, 100)
    tapes.expire(50 * NS_PER_SECOND)
    assert len(tapes._users) == 100
    tapes.expire(100 * NS_PER_SECOND)
    assert (tapes.entries, len(tapes._users), tapes.memory_bytes) == (200, 0, 0)


def test_the_queue_keeps_half_for_the_host_and_shares_out_the_rest():
    queue = FairQueue(100, 10**6)
    for number in range(300):
        queue.put(f"a{number}", number, ATTACKER, 10)
    assert (queue.entries, queue.dropped) == (100, 200)
    assert all(queue.put(f"h{number}", 1000 + number, HOST, 10) for number in range(50)), "half is the host's"
    assert not queue.put("h50", 2000, HOST, 10)
    assert sum(queue.put(f"v{number}", 3000 + number, VICTIM, 10) for number in range(100)) == 25, "half of the rest"
    owners = [one.owner for one in queue.drain()]
    assert (owners.count(HOST), owners.count(VICTIM), owners.count(ATTACKER)) == (50, 25, 25)
    assert queue.entries == queue.bytes == 0


def test_the_queue_is_shared_out_in_bytes_too():
    queue = FairQueue(10_000, 100_000)
    while queue.put("large", 1, ATTACKER, 10_000):
        pass
    assert all(queue.put("small", 2, VICTIM, 100) for _ in range(300))
    assert all(queue.put("tick", 3, HOST, 1000) for _ in range(50))
    assert queue.bytes <= 100_000


# --- triggers and files -----------------------------------------------------------------------------


def trigger(kind, uid=None, xid=None, subject="s"):
    return Trigger(kind=kind, subject=subject, detail=f"{kind} {subject}", wall_ns=1, uid=uid, xid=xid)


def test_made_up_hangs_do_not_hide_an_xid_that_comes_among_them():
    pending = PendingTriggers()
    for number in range(500):
        pending.add(trigger("hang", ATTACKER, subject=f"j{number}"), 0)
    pending.add(trigger("xid", xid="79"), NS_PER_SECOND)
    for number in range(500):
        pending.add(trigger("hang", ATTACKER, subject=f"k{number}"), 2 * NS_PER_SECOND)
    due = pending.due((AFTER_SECONDS + 1) * NS_PER_SECOND)
    assert (due.label, due.triggers[0].kind, len(due.triggers)) == ("xid", "xid", TRIGGERS_MAX)
    assert due.left_out == 1000 - (TRIGGERS_MAX - 1), "the node's file names what users reported meanwhile"
    assert pending.due(1000 * NS_PER_SECOND) is None


def test_a_users_hang_just_before_does_not_delay_the_nodes_file():
    pending = PendingTriggers()
    pending.add(trigger("hang", ATTACKER), 0)
    at_ns = AFTER_SECONDS * NS_PER_SECOND
    assert pending.due(at_ns).label == f"hang-uid{ATTACKER}"
    pending.add(trigger("gpu_lost"), at_ns)
    assert pending.due(2 * at_ns).label == "gpu_lost"


def test_users_take_turns_and_a_person_is_served_at_once():
    pending, labels = PendingTriggers(), []
    for second in range(1, 6 * INTERVAL_SECONDS):
        pending.add(trigger("hang", ATTACKER), second * NS_PER_SECOND)
        if second > INTERVAL_SECONDS:
            pending.add(trigger("stall", VICTIM), second * NS_PER_SECOND)
        due = pending.due(second * NS_PER_SECOND)
        labels += [due.label] if due else []
    assert labels[1:5] == ["stall-uid1001", "hang-uid1000"] * 2
    pending.add(trigger("request"), 0)
    assert pending.due(1).label == "request"


def test_an_xid_that_any_program_can_cause_is_no_nodes_xid():
    pending = PendingTriggers()
    pending.add(trigger("xid", xid="31"), 0)
    assert pending.due(AFTER_SECONDS * NS_PER_SECOND).label == "xid_of_program"


def put(shelf, label, size=300, second=0):
    path = shelf.put([b"x" * size], size, label, second * NS_PER_SECOND)
    put.moment += 1
    os.utime(path, (put.moment, put.moment))
    return path


put.moment = 0


@pytest.mark.slow
@pytest.mark.parametrize("faked", ["hang-uid1000", "stall-uid1000", "xid_of_program", "hang"])
def test_what_users_can_make_up_evicts_no_real_xid_and_no_other_users_file(tmp_path, faked):
    shelf = RecordingFolder(tmp_path / "rec", bytes_max=3000)
    kept = [put(shelf, "xid"), put(shelf, "gpu_lost"), put(shelf, "request"), put(shelf, "hang-uid1001")]
    for _ in range(200):
        put(shelf, faked)
    assert all(path.exists() for path in kept)
    assert shelf.size() <= 3000
    assert len(list((tmp_path / "rec").glob(f"*-{faked}.recording"))) == 6
    victims = [put(shelf, "hang-uid1001") for _ in range(3)]
    assert all(path.exists() for path in victims), "the other user gets his share"


@pytest.mark.slow
def test_xids_push_out_what_users_reported_but_leave_them_a_quarter(tmp_path):
    shelf = RecordingFolder(tmp_path / "rec", bytes_max=4000)
    for _ in range(10):
        put(shelf, "hang-uid1000", 400)
    for _ in range(50):
        put(shelf, "xid", 400)
    names = [path.name for path in (tmp_path / "rec").iterdir()]
    assert sum("hang" in name for name in names) == 2
    assert sum("xid" in name for name in names) == 8


@pytest.mark.slow
def test_many_small_files_are_shared_out_by_number(tmp_path):
    shelf = RecordingFolder(tmp_path / "rec", bytes_max=10**9)
    first = put(shelf, "xid", 1)
    for _ in range(2 * FILES_MAX):
        put(shelf, "hang-uid1000", 1)
    assert first.exists()
    for _ in range(20):
        put(shelf, "hang-uid1001", 1)
    names = [path.name for path in (tmp_path / "rec").iterdir()]
    assert len(names) == FILES_MAX
    assert sum("uid1001" in name for name in names) == 20


def test_where_the_nodes_leave_no_room_a_users_recording_is_given_up(tmp_path):
    shelf = RecordingFolder(tmp_path / "rec", bytes_max=1000)
    kept = put(shelf, "xid", 700)
    with pytest.raises(RecordingFolderFullError, match="leave no room"):
        put(shelf, "hang-uid1000", 700)
    assert kept.exists()
