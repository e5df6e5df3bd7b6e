"""Xid errors: two sources, each error counted once."""

import os

import pytest

from pacecar.monitor.gpu.xid import CODES_MAX, KNOWN_XIDS, PAIR_SECONDS, KernelLog, XidTally, bus_of, parse_xid

SECOND = 1_000_000_000
LINE = "3,1217,9123456,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python3, GPU has fallen off the bus.\n"


def test_one_spelling_of_a_pci_address():
    assert bus_of("00000000:3B:00.0") == bus_of("0000:3b:00") == "0000:3b:00"
    assert bus_of("0001:3b:00.0") != bus_of("0000:3b:00.0")
    assert bus_of("nonsense") == "nonsense"


def test_an_xid_is_found_in_a_record_and_nothing_else_is():
    assert parse_xid(LINE) == ("0000:3b:00", 79)
    assert parse_xid("6,1,2,-;NVRM: loading NVIDIA UNIX Kernel Module") is None
    assert parse_xid("6,1,2,-;NVRM: Xid (PCI:0000:3b:00): what") is None


@pytest.mark.parametrize(("first", "second"), [("event", "log"), ("log", "event")])
def test_an_error_that_both_tell_of_counts_once_and_one_that_either_tells_of_counts(first, second):
    tally = XidTally()
    assert tally.record(first, "0", 79, 0)
    assert not tally.record(second, "0", 79, SECOND)
    assert tally.record(first, "0", 79, 2 * SECOND)  # again, and so it is another
    assert tally.record(second, "1", 79, 2 * SECOND)
    assert tally.record(second, "0", 13, 2 * SECOND)
    assert tally.counts() == {("0", 79): 2, ("1", 79): 1, ("0", 13): 1}


def test_two_bursts_of_both_witnesses_pair_up_in_any_order():
    tally = XidTally()
    for source in ("log", "log", "event", "event", "event", "log"):
        tally.record(source, "0", 31, 0)
    assert tally.counts() == {("0", 31): 3}


def test_reports_far_apart_are_different_errors():
    tally = XidTally()
    tally.record("event", "0", 79, 0)
    assert tally.record("log", "0", 79, (PAIR_SECONDS + 1) * SECOND)


def test_well_known_codes_are_zero_before_they_happen_and_codes_are_bounded():
    tally = XidTally()
    tally.start_at_zero("2")
    assert tally.counts() == {("2", code): 0 for code in KNOWN_XIDS}
    for code in range(1000, 1000 + 2 * CODES_MAX):
        tally.record("log", "2", code, 0)
    assert len(tally.counts()) == CODES_MAX


def test_the_kernel_log_is_read_from_its_end_on_and_never_waits(tmp_path):
    path = tmp_path / "kmsg"
    path.write_text(LINE)
    log = KernelLog(str(path))
    log.open()
    assert log.read() == []
    with path.open("a") as file:
        file.write("6,1218,9123457,-;something else\n" + LINE.replace("79", "13"))
    assert log.read() == [("0000:3b:00", 13)]
    assert log.read() == []
    log.close()


def test_a_pipe_with_nothing_in_it_does_not_block(tmp_path):
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDWR)
    log = KernelLog.__new__(KernelLog)
    log.__init__(str(path))
    log._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a fifo cannot be sought, which open() does
    assert log.read() == []
    os.write(reader, LINE.encode())
    assert log.read() == [("0000:3b:00", 79)]
    log.close()
    os.close(reader)
