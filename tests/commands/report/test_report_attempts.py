"""All attempts of a job in one report: damaged, in folders of their own, with hangs, late ranks and trials."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from pacecar.commands.report.build import BuildOptions, build_report
from pacecar.commands.report.document import Report
from pacecar.commands.report.output.life_tables import attempts_table
from pacecar.commands.report.reading import attempts, inputs
from pacecar.commands.report.reading.attempts import ROWS_MAX
from pacecar.commands.report.reading.inputs import find_inputs
from pacecar.ledger.attempts import JobLife
from pacecar.records import Goodbye, HangSuspicion, JobHello, JobRecord, Ledger, StepRecord, Straggler
from tests.commands.report.runs import MS, START_NS, decision, hello, lines, step, verdict

S = 1000 * MS


def started(rank: int, at_ns: int, *, attempt: int | None = None, ranks: int = 1) -> JobRecord:
    return msgspec.structs.replace(
        hello(rank, ranks), started_wall_ns=START_NS + at_ns, process_wall_ns=START_NS + at_ns - 2 * S,
        rendezvous_wall_ns=START_NS + at_ns - S, attempt=attempt,
    )  # fmt: skip


def stepped(rank: int, number: int, at_ns: int, **changes: object) -> StepRecord:
    """Step `number` of an attempt that attached at `at_ns`; all are 100 ms long."""
    return msgspec.structs.replace(step(rank, number, ended_ns=START_NS + at_ns + (number + 1) * 100 * MS), **changes)


def attempt(at_ns: int, steps: int, *, resumed: int | None = 0, rank: int = 0, ranks: int = 1) -> list[JobRecord]:
    return [
        started(rank, at_ns, ranks=ranks),
        *(
            stepped(rank, number, at_ns, global_step=None if resumed is None else resumed + number + 1)
            for number in range(steps)
        ),
    ]


def goodbye(at_ns: int, rank: int = 0) -> Goodbye:
    return Goodbye(job="j", rank=rank, reason="finished", wall_ns=START_NS + at_ns)


def written(folder: Path, *files: Sequence[JobRecord]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for rank, records in enumerate(files):
        (folder / f"rank{rank}.jsonl").write_bytes(lines(records))
    return folder


def report_of(folder: Path) -> Report:
    return build_report(find_inputs(folder), BuildOptions()).report


def life_of(folder: Path) -> JobLife:
    life = report_of(folder).life
    assert life is not None
    assert sum(life.headings_ns.values()) == life.wall_ns
    return life


def test_a_job_that_was_restarted_in_one_folder(tmp_path: Path) -> None:
    again = attempt(10 * S, 20, resumed=12)
    life = life_of(written(tmp_path / "run", [*attempt(0, 20), *again, goodbye(13 * S)]))
    assert [one.lost_steps for one in life.attempts] == [8, 0]
    assert life.wall_ns == 2 * S + 13 * S
    assert life.headings_ns["lost_steps"] == 800 * MS
    assert life.headings_ns["start_up_rendezvous"] == 2 * S
    assert life.headings_ns["start_up_preparation"] == 2 * S
    assert life.headings_ns["down"] == 6 * S
    assert life.headings_ns["unrecorded"] == 1 * S


def test_an_attempt_that_may_still_run_is_not_called_dead(tmp_path: Path) -> None:
    table = attempts_table(report_of(written(tmp_path / "run", [*attempt(0, 20), *attempt(10 * S, 20, resumed=12)])))
    assert table is not None
    assert [row[2] for row in table.rows] == ["failed or killed", "failed, killed or running"]


def test_an_attempt_that_died_before_its_first_step_had_started_up(tmp_path: Path) -> None:
    """It is known to have lived until it attached."""
    records = [*attempt(0, 20), *attempt(10 * S, 0), *attempt(20 * S, 20, resumed=20), goodbye(22 * S)]
    life = life_of(written(tmp_path / "run", records))
    assert [one.wall_ns - one.headings_ns.get("down", 0) for one in life.attempts] == [4 * S, 2 * S, 4 * S]
    assert life.headings_ns["down"] == (6 + 8) * S
    assert life.headings_ns["start_up_rendezvous"] == 3 * S


def test_each_attempt_in_a_folder_of_its_own_in_the_order_of_their_starts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    written(run / "b", attempt(0, 20))
    written(run / "a", [*attempt(10 * S, 20, resumed=12), goodbye(13 * S)])
    (run / "logs").mkdir()
    together = life_of(written(tmp_path / "one", [*attempt(0, 20), *attempt(10 * S, 20, resumed=12), goodbye(13 * S)]))
    assert life_of(run) == together


@pytest.mark.slow
def test_starts_are_numbered_alike_in_one_folder_and_in_several(tmp_path: Path) -> None:
    tuned = [decision(1, 10, 2, 4), verdict(1, 13)]
    lives = [attempt(0, 100), [*attempt(100 * S, 100, resumed=100), *tuned], attempt(200 * S, 100, resumed=200)]
    one = report_of(written(tmp_path / "one", [record for records in lives for record in records]))
    for name, records in zip("abc", lives, strict=True):
        written(tmp_path / "run" / name, records)
    several = report_of(tmp_path / "run")
    assert one.before is not None
    assert one.before.last == (2, 99)
    assert several.before == one.before
    assert [change.life for change in several.changes] == [1]


def test_an_attempt_without_a_hello_leaves_the_others_in_their_order(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for place in range(12):
        written(run / f"attempt-{place}", attempt(place * 100 * S, 20, resumed=20 * place))
    (run / "attempt-5" / "rank0.jsonl").write_bytes(b"")
    life = life_of(run)
    assert life.jumps_ns == ()
    assert [one.first_step for one in life.attempts] == [20 * place + 1 for place in range(12) if place != 5]


def test_an_attempt_that_may_not_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    written(run / "a", attempt(0, 20))
    written(run / "b", attempt(100 * S, 20))
    there = inputs.rank_files

    def refused(folder: Path) -> dict[int, Path]:
        if folder.name == "b":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return there(folder)

    monkeypatch.setattr(inputs, "rank_files", refused)
    assert [(notice.place, notice.is_damage) for notice in report_of(run).notices] == [("b", True)]


def test_another_ranks_hello_tells_when_an_attempt_began(tmp_path: Path) -> None:
    run = tmp_path / "run"
    written(run / "late", [], attempt(10 * S, 20, resumed=20, rank=1, ranks=2))
    written(run / "z", attempt(0, 20, ranks=2), attempt(0, 20, rank=1, ranks=2))
    assert [one.first_step for one in life_of(run).attempts] == [1, 21]


def test_a_fault_in_one_attempts_folder_is_named_with_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    written(run / "a", attempt(0, 20))
    file = written(run / "b", attempt(10 * S, 20)) / "rank0.jsonl"
    file.write_bytes(file.read_bytes() + b"{broken\n")
    assert [notice.place for notice in report_of(run).notices if notice.is_damage] == ["b/rank0.jsonl"]


def test_missing_files_of_an_attempt_leave_the_rest(tmp_path: Path) -> None:
    run = tmp_path / "run"
    written(run / "a", attempt(0, 20, ranks=2), attempt(0, 20, rank=1, ranks=2))
    written(run / "b", [], attempt(10 * S, 20, resumed=15, rank=1, ranks=2))
    (run / "b" / "rank0.jsonl").unlink()
    assert [one.lost_steps for one in life_of(run).attempts] == [5, None]


@pytest.mark.parametrize("tells", ["attempt", "launch", "time"])
@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_was_not_there_in_one_attempt_does_not_move_the_later_ones(
    tmp_path: Path, absent: int, tells: str
) -> None:
    """It died before it attached, or the job was smaller."""

    def told(record: JobRecord, place: int) -> JobRecord:
        if not isinstance(record, JobHello) or tells == "time":
            return record
        return msgspec.structs.replace(record, **{tells: place if tells == "attempt" else f"{place}"})

    def file(rank: int, places: Sequence[int]) -> list[JobRecord]:
        return [
            told(record, place)
            for place in places
            for record in attempt(place * 100 * S, 20, resumed=20 * place, rank=rank, ranks=3)
        ]

    files = [file(rank, (0, 2) if rank == absent else (0, 1, 2)) for rank in range(3)]
    life = life_of(written(tmp_path / "run", *files))
    assert [one.began_wall_ns - START_NS for one in life.attempts] == [-2 * S, 98 * S, 198 * S]
    assert [one.lost_steps for one in life.attempts[:2]] == [0, 0]
    assert life.headings_ns["down"] == 2 * 96 * S
    assert life.headings_ns["unrecorded"] == 0


def launched(launch: str, at_ns: int, steps: int, rank: int) -> list[JobRecord]:
    first, *rest = attempt(at_ns, steps, rank=rank, ranks=2)
    return [msgspec.structs.replace(first, launch=launch * 16), *rest]


@pytest.mark.parametrize("files", [("acd", "abd"), ("ac", "abd"), ("ad", "bd")])
def test_ranks_that_were_there_in_other_attempts_are_told_apart_and_stay_in_order(
    tmp_path: Path, files: tuple[str, str]
) -> None:
    """As many hellos of each rank need not be of the same attempts; and who is absent may not reorder them."""
    begin = {"a": 0, "b": 1000 * S, "c": 2000 * S, "d": 3000 * S}
    ranks = [
        [record for launch in its for record in launched(launch, begin[launch], 20 * (launch in "ad"), rank)]
        for rank, its in enumerate(files)
    ]
    life = life_of(written(tmp_path / "run", *ranks))
    there = sorted({launch for its in files for launch in its})
    assert [one.began_wall_ns - START_NS for one in life.attempts] == [begin[launch] - 2 * S for launch in there]
    assert life.jumps_ns == ()


@pytest.mark.parametrize("has_old_file", [True, False])
@pytest.mark.parametrize("replaced", [0, 1])
def test_a_node_that_torchrun_replaced_counts_its_own_restarts(
    tmp_path: Path, replaced: int, has_old_file: bool
) -> None:
    """The launch is the store's, so it stays; the new agent has not restarted anything yet."""
    files = []
    for rank in (0, 1):
        old, again = attempt(0, 20, rank=rank, ranks=2), attempt((1000 + rank) * S, 20, resumed=20, rank=rank, ranks=2)
        old[0] = msgspec.structs.replace(old[0], attempt=0)
        again[0] = msgspec.structs.replace(again[0], attempt=0 if rank == replaced else 1)
        files.append([*(old if has_old_file or rank != replaced else []), *again])
    life = life_of(written(tmp_path / "run", *files))
    assert [one.number for one in life.attempts] == [0, 1]
    assert [one.began_wall_ns - START_NS for one in life.attempts] == [-2 * S, 998 * S]
    assert [one.first_step for one in life.attempts] == [1, 21]
    assert report_of(tmp_path / "run").compared_steps == 40


def test_ranks_that_agreed_on_no_launch_are_one_attempt(tmp_path: Path) -> None:
    ranks = [[*launched("a", 0, 20, 0), *launched("b", 1000 * S, 20, 0)]]
    ranks += [[*launched("a", 0, 20, 1), *launched("c", 1001 * S, 20, 1)]]
    assert len(life_of(written(tmp_path / "run", *ranks)).attempts) == 2


@pytest.mark.slow
def test_a_process_that_attaches_twice_does_not_begin_twice(tmp_path: Path) -> None:
    """A script may train two models one after the other; the second attempt has no share in the first one's hours."""
    first, *steps = attempt(0, 20000)
    again, *more = attempt(2500 * S, 20)
    again = msgspec.structs.replace(again, process_wall_ns=first.process_wall_ns + MS)
    records = [first, *steps, goodbye(2001 * S), again, *more, goodbye(2503 * S)]
    life = life_of(written(tmp_path / "run", records))
    assert life.jumps_ns == ()
    assert life.wall_ns == 2505 * S


def test_an_attempt_whose_hello_is_lost_begins_with_its_first_step(tmp_path: Path) -> None:
    life = life_of(written(tmp_path / "run", attempt(0, 20)[1:]))
    assert life.wall_ns == 20 * 100 * MS
    assert life.headings_ns["start_up"] == 0


def test_clocks_that_go_back_between_attempts_are_counted(tmp_path: Path) -> None:
    records = [*attempt(7200 * S, 20), *attempt(0, 20, resumed=20), goodbye(2 * S)]
    report = report_of(written(tmp_path / "run", records))
    assert report.life is not None
    assert len(report.life.jumps_ns) == 1
    assert report.life.wall_ns == 8 * S
    assert any("went back by 2 h 0 min between two attempts" in notice.text for notice in report.notices)


@pytest.mark.parametrize("years", [-1, 1])
def test_a_host_with_a_wrong_clock_makes_no_attempt_longer(tmp_path: Path, years: int) -> None:
    apart_ns = years * 365 * 86400 * S
    wrong = attempt(apart_ns, 20, rank=2, ranks=3)
    files = [[*attempt(0, 20, rank=rank, ranks=3), goodbye(3 * S, rank)] for rank in (0, 1)]
    life = life_of(written(tmp_path / "run", *files, [*wrong, goodbye(apart_ns + 3 * S, 2)]))
    assert life.wall_ns == 5 * S
    assert life.jumps_ns == ()


def test_a_rank_that_waited_long_for_the_others_began_first(tmp_path: Path) -> None:
    first, *steps = attempt(0, 20, ranks=2)
    waited = msgspec.structs.replace(first, process_wall_ns=START_NS - 1800 * S)
    other = [*attempt(0, 20, rank=1, ranks=2), goodbye(2 * S, 1)]
    assert life_of(written(tmp_path / "run", [waited, *steps], other)).headings_ns["start_up_rendezvous"] == 1799 * S


def test_the_records_of_one_rank_may_end_early(tmp_path: Path) -> None:
    files = [[*attempt(0, 20, rank=rank, ranks=2), goodbye(3 * S, rank)] for rank in (0, 1)]
    assert life_of(written(tmp_path / "cut", files[0][:10], files[1])).wall_ns == 5 * S


def test_unknown_steps_are_said_to_be_unknown(tmp_path: Path) -> None:
    report = report_of(written(tmp_path / "run", [*attempt(0, 20, resumed=None), *attempt(10 * S, 5, resumed=None)]))
    assert report.life is not None
    assert report.life.lost_steps is None
    assert any("pacer.resume(step)" in notice.text for notice in report.notices)


def test_hangs_late_ranks_and_trials_are_taken_out_of_steps(tmp_path: Path) -> None:
    def with_exposed(record: JobRecord) -> JobRecord:
        if not isinstance(record, StepRecord):
            return record
        wall_ns = record.totals.wall_ns
        exposed = wall_ns // 2
        totals = Ledger(
            wall_ns=wall_ns, compute_ns=wall_ns - exposed, exposed_communication_ns=exposed, communication_ns=exposed
        )
        return msgspec.structs.replace(record, totals=totals)

    records = [with_exposed(record) for record in attempt(0, 20)]
    late = {
        "job": "j", "late_rank": 1, "cause": "compute", "phase": "forward", "since_step": 5, "evidence": "",
        "wall_ns": START_NS,
    }  # fmt: skip
    records += [
        HangSuspicion(
            job="j", rank=0, step=3, phase="tail", wall_ns=START_NS, silent_ns=70 * MS, last_collective=None,
            collectives=None, stack=None, ended=True,
        ),
        Straggler(step=6, excess_ns=99 * MS, **late),
        Straggler(step=8, excess_ns=10 * MS, ended=True, **late),
        decision(1, 10, 2, 4),
        msgspec.structs.replace(verdict(1, 13), exploration_ns=60 * MS),
        goodbye(2 * S),
    ]  # fmt: skip
    life = life_of(written(tmp_path / "run", records))
    assert life.headings_ns["hang"] == 70 * MS
    assert life.headings_ns["straggler_wait"] == 4 * 10 * MS
    assert life.headings_ns["trials"] == 60 * MS
    # Of 50 ms in each of 19 steps the hang covers one step's, and the wait for a late rank is a part of it.
    assert life.headings_ns["exposed_communication"] == (18 * 50 - 40) * MS
    assert life.headings_ns["productive"] == (19 * 100 - 70 - 18 * 50 - 60) * MS


def test_many_costs_are_not_all_looked_at_for_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, looked, within = 400, 0, attempts._Cost.within

    def counted(cost: attempts._Cost, first: int, last: int) -> int:
        nonlocal looked
        looked += 1
        return within(cost, first, last)

    monkeypatch.setattr(attempts._Cost, "within", counted)
    late = [
        Straggler(
            job="j", late_rank=1, cause="compute", phase="forward", evidence="", wall_ns=START_NS, since_step=since,
            step=since + 1, excess_ns=MS,
        )
        for since in range(0, steps, 4)
    ]  # fmt: skip
    life = life_of(written(tmp_path / "run", [*attempt(0, steps), *late, goodbye(41 * S)]))
    assert life.headings_ns["straggler_wait"] == (2 * len(late) - 1) * MS, "all but that of the first step"
    assert looked <= 2 * steps


def test_a_job_that_hangs_to_its_end_is_charged_to_the_hang(tmp_path: Path) -> None:
    hang = HangSuspicion(
        job="j", rank=0, step=20, phase="tail", wall_ns=START_NS + 62 * S, silent_ns=60 * S, last_collective=None,
        collectives=None, stack=None,
    )  # fmt: skip
    assert life_of(written(tmp_path / "run", [*attempt(0, 20), hang])).headings_ns["hang"] == 60 * S


def test_a_hang_that_a_timeout_ends_is_charged_to_the_hang(tmp_path: Path) -> None:
    hang = HangSuspicion(
        job="j", rank=0, step=20, phase="tail", wall_ns=START_NS + 62 * S, silent_ns=60 * S, last_collective=None,
        collectives=None, stack=None,
    )  # fmt: skip
    for reason, heading in (("failed: DistBackendError", "hang"), ("finished", "unrecorded")):
        bye = msgspec.structs.replace(goodbye(1802 * S), reason=reason)
        life = life_of(written(tmp_path / heading, [*attempt(0, 20), hang, bye]))
        assert life.headings_ns[heading] == 1800 * S


def test_a_checkpoint_and_steps_after_it_decide_what_a_failed_job_lost(tmp_path: Path) -> None:
    records = [
        msgspec.structs.replace(one, saved_steps=8) if isinstance(one, StepRecord) and one.step >= 8 else one
        for one in attempt(0, 20)
    ]
    assert life_of(written(tmp_path / "failed", records)).lost_steps == 12
    assert life_of(written(tmp_path / "ended", [*records, goodbye(2 * S)])).lost_steps == 0


@pytest.mark.slow
@pytest.mark.parametrize("lost", [900, 901])
def test_the_last_steps_of_a_long_attempt_stay_apart(tmp_path: Path, lost: int) -> None:
    steps = 3 * ROWS_MAX
    records = attempt(0, steps)
    for place, record in enumerate(records):
        if isinstance(record, StepRecord) and record.step >= steps - lost:  # each twice as long
            more = (record.step - (steps - lost) + 1) * 100 * MS
            wall_ns = record.totals.wall_ns + more
            totals = Ledger(wall_ns=wall_ns, compute_ns=wall_ns)
            records[place] = msgspec.structs.replace(
                record, totals=totals, ended_wall_ns=record.ended_wall_ns + more, wall_ns=200 * MS
            )
    again = attempt(1000 * S, 5, resumed=steps - lost)
    life = life_of(written(tmp_path / "run", [*records, *again, goodbye(1001 * S)]))
    assert life.attempts[0].lost_steps == lost
    assert life.headings_ns["lost_steps"] == lost * 200 * MS
    assert life.attempts[0].steps == steps
