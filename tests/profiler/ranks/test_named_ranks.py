"""What is told of late ranks, when the detector and cross-rank windows say different things."""

from __future__ import annotations

import pytest
from msgspec import structs

from pacecar.analysis.reading.rank_window import WindowFinding, WindowVerdict
from pacecar.profiler.ranks.cross_rank.named_ranks import NamedRanks
from pacecar.records import Cause, Straggler
from tests.kit.fake_clock import FakeClock

MS = 1_000_000


class Told:
    """What somebody who hears all records knows."""

    def __init__(self, *, on_device: bool = False) -> None:
        self.now: dict[tuple[int | None, str], int] = {}
        self.records: list[Straggler] = []
        self.names = NamedRanks("j", self.hear, FakeClock(), on_device=on_device)

    def hear(self, late: Straggler) -> None:
        self.records.append(late)
        key = (late.late_rank, str(late.cause))
        if late.ended:
            del self.now[key]
        else:
            self.now[key] = late.excess_ns // MS

    def detects(self, rank: int, cause: str, *, ms: int = 40, ended: bool = False) -> bool:
        late = Straggler(
            job="j", late_rank=rank, cause=Cause(cause), phase="forward", since_step=60, step=72, wall_ns=0,
            excess_ns=ms * MS, evidence="", ended=ended,
        )  # fmt: skip
        return self.names.detected([late])

    def judges(self, *found: tuple[int, str, int], doubt: str | None = None) -> bool:
        findings = [finding([rank], cause, ms) for rank, cause, ms in found]
        return self.names.judged(WindowVerdict(findings, 6, 120 * MS, doubt), 80)


def finding(ranks: list[int], cause: str, ms: int, kind: str = "rank") -> WindowFinding:
    return WindowFinding(kind, ranks, cause, ms * MS, 2 * MS, 80, "evidence")


def test_a_name_is_confirmed_with_what_it_costs() -> None:
    told = Told()
    assert told.detects(1, "compute")
    assert not told.judges((1, "compute", 35))
    assert told.now == {(1, "compute"): 35}
    assert told.records[-1].since_step == 60
    assert told.records[-1].phase == "forward"


@pytest.mark.parametrize("doubt", ["clocks are apart", None])
def test_a_verdict_that_names_nobody_does_not_take_a_name_from_the_detector(doubt: str | None) -> None:
    told = Told()
    told.detects(1, "compute")
    assert not told.judges(doubt=doubt)
    assert told.now == {(1, "compute"): 40}
    told.detects(1, "compute", ended=True)
    assert told.now == {}


def test_a_rank_that_explains_it_takes_the_place_of_the_named_one() -> None:
    told = Told(on_device=True)
    told.detects(0, "compute")
    assert told.judges((1, "link", 30))
    assert told.now == {(1, "link"): 30}
    told.detects(0, "compute", ended=True)
    assert told.now == {}, "with the reason for the window its name ends"


def test_a_rank_that_explains_little_is_named_beside_it() -> None:
    told = Told(on_device=True)
    told.detects(0, "compute")
    told.judges((1, "data_wait", 5))
    assert told.now == {(0, "compute"): 40, (1, "data_wait"): 5}


@pytest.mark.parametrize(("error_ms", "is_named"), [(5, False), (3, True)])
def test_what_a_window_finds_beside_the_worst_rank_must_be_certain(error_ms: int, is_named: bool) -> None:
    told = Told()
    told.detects(1, "host_bound")
    worst, other = finding([1], "host_bound", 39), finding([0], "host_bound", 8)
    worst, other = (structs.replace(found, error_ns=error_ms * MS) for found in (worst, other))
    told.names.judged(WindowVerdict([worst, other], 6, 175 * MS), 80)
    assert set(told.now) == {(1, "host_bound"), *([(0, "host_bound")] if is_named else [])}
    told.detects(0, "host_bound", ms=9)
    told.names.judged(WindowVerdict([worst, other], 6, 175 * MS), 88)
    assert (0, "host_bound") in told.now, "the detector suspects it, too"


def test_a_slow_host_is_no_reason_to_take_its_rank_back() -> None:
    told = Told()
    told.detects(1, "compute")
    told.names.judged(WindowVerdict([finding([0, 1], "host_bound", 30, "host"), finding([2], "link", 30)], 6, MS), 80)
    assert set(told.now) == {(1, "compute"), (2, "link")}


@pytest.mark.parametrize(
    ("timers", "trace", "on_device", "cause"),
    [
        ("compute", "host_bound", False, "compute"),  # the passes as a whole
        ("host_bound", "compute", False, "host_bound"),  # it waits for a processor
        ("compute", "host_bound", True, "host_bound"),
        ("throttled", "compute", True, "throttled"),
        ("imbalance", "compute", True, "imbalance"),
        ("gc", "host_bound", True, "gc"),
        ("data_wait", "data_wait", True, "data_wait"),
    ],
)
def test_the_cause_is_of_whom_can_know_it(timers: str, trace: str, on_device: bool, cause: str) -> None:
    told = Told(on_device=on_device)
    told.detects(1, timers)
    told.judges((1, trace, 35))
    assert told.now == {(1, cause): 35}
    told.detects(1, timers, ended=True)
    assert told.now == {}


@pytest.mark.parametrize(("ms", "is_named"), [(5, False), (40, True)])
def test_compute_that_costs_less_than_uneven_work_names_no_rank(ms: int, is_named: bool) -> None:
    told = Told(on_device=True)
    found = [finding([1], "imbalance", 20, "imbalance"), finding([3], "compute", ms)]
    told.names.judged(WindowVerdict(found, 6, 100 * MS), 80)
    assert set(told.now) == ({(3, "compute")} if is_named else set())


def test_a_rank_that_the_detector_cleared_since_the_order_is_not_named_for_what_was() -> None:
    told = Told()
    told.detects(1, "compute")
    told.names.ordered()
    told.detects(1, "compute", ended=True)
    told.judges((1, "compute", 35))
    assert told.now == {}
    told.names.ordered()
    told.judges((1, "compute", 35))
    assert told.now == {(1, "compute"): 35}


def test_a_name_that_only_a_window_gave_lasts_until_the_job_has_recovered_or_a_window_takes_it_back() -> None:
    told = Told()
    assert told.judges((3, "compute", 30))
    told.detects(1, "data_wait")
    told.detects(1, "data_wait", ended=True)
    assert told.now == {(3, "compute"): 30}
    told.judges(doubt="few steps")
    assert told.now == {(3, "compute"): 30}
    told.names.recovered(200)
    assert told.now == {}
    assert (told.records[-1].ended, told.records[-1].step) == (True, 200)
    told.judges((3, "compute", 30))
    assert told.judges()
    assert told.now == {}
