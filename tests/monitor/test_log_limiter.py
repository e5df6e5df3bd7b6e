"""Clients cannot fill our log."""

import logging

from pacecar.clock import NS_PER_SECOND
from pacecar.monitor.ingest.log_limiter import KINDS_MAX, LogLimiter
from tests.kit.fake_clock import FakeClock


def test_each_kind_has_its_lines_a_minute_and_the_rest_is_counted(caplog):
    clock = FakeClock(monotonic_ns=1)
    notices = LogLimiter(logging.getLogger("x"), 3, clock)
    for number in range(1000):
        notices.warn("flood", "fault %d", number)
    notices.warn("other", "once")
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:3] == ["fault 0", "fault 1", "fault 2"]
    assert lines[3].startswith("more flood follow; they are counted")
    assert lines[4:] == ["once"]
    clock.advance(61 * NS_PER_SECOND)
    notices.warn("flood", "again")
    lines = [record.getMessage() for record in caplog.records]
    assert lines[5:] == ["997 more like this in the minute before: flood", "again"]


def test_memory_is_bounded_however_many_kinds_there_are(caplog):
    notices = LogLimiter(logging.getLogger("x"), 1, FakeClock())
    for number in range(10 * KINDS_MAX):
        notices.warn(number, "a")
    assert len(notices._kinds) <= KINDS_MAX
