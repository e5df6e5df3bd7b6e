"""Bad input: each fault is named with its place, what is sound is reported, and where nothing is, that is said."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from pacecar.commands.report.document import Report, ReportLosses
from pacecar.commands.report.output.html import report_page
from pacecar.commands.report.output.markdown import report_markdown
from pacecar.commands.report.output.tables import facts, headline
from pacecar.commands.report.output.utilization_tables import incidents
from pacecar.commands.report.reading.notices import NOTICES_MAX, ReportError, ReportNotices
from pacecar.commands.report.sections.hangs import hang_sentences
from pacecar.commands.report.sections.recorded_utilization import Hosts
from pacecar.formatting.plain_text import clean
from pacecar.records import Goodbye, HangSuspicion, HangVerdict, JobRecord, ProcessStop
from pacecar.records.hangs import HangKind
from pacecar.records.rank_file import LINE_BYTES_MAX
from pacecar.records.recording import Chunk, RecordingHeader, RecordRow, Tick, TickRow, pack, parts
from tests.commands.report.runs import MS, START_NS, append, hello, lines, report_of, step, untuned


def said(report: Report) -> str:
    return "\n".join(f"{notice.place}: {notice.text} x{notice.count}" for notice in report.notices)


def is_damaged(report: Report) -> bool:
    return any(notice.is_damage for notice in report.notices)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return untuned(tmp_path / "run", steps=60)


def test_half_a_last_line_is_normal_and_said(folder: Path) -> None:
    file = folder / "rank1.jsonl"
    file.write_bytes(file.read_bytes()[:-40])
    report = report_of(folder)
    assert "rank1.jsonl: line 61: the last line is cut off" in said(report)
    assert not is_damaged(report)
    assert (report.compared_steps, report.incomplete_steps) == (59, 1)


def test_a_record_of_a_newer_version_is_left_out_and_named(folder: Path) -> None:
    with (folder / "rank0.jsonl").open("ab") as stream:
        stream.write(b'{"type":"weather","job":"j","rank":0}\n' * 3)
    report = report_of(folder)
    assert "rank0.jsonl: line 62: records of type 'weather' are unknown here" in said(report)
    assert "x3" in said(report)
    assert not is_damaged(report)


def test_new_fields_of_known_records_are_no_fault(folder: Path) -> None:
    file = folder / "rank0.jsonl"
    file.write_bytes(file.read_bytes().replace(b'"disturbed":false', b'"disturbed":false,"mood":"good"'))
    report = report_of(folder)
    assert report.notices == ()
    assert report.compared_steps == 60


@pytest.mark.parametrize(
    ("junk", "words"),
    [
        (b"\x00\xff\xfe\x01 binary\n", "not a record"), (b'{"type":"step","job":"j"}\n', "missing required field"),
        (b'{"type":"step"\n', "not a record"), (b'{"no":"type"}\n', "not a record"),
        (b"[" * 100_000 + b"\n", "not a record"), (b'"type":"step"' * 9 + b"\n", "not a record"),
    ],
)  # fmt: skip
def test_junk_is_named_with_its_line_and_costs_only_itself(folder: Path, junk: bytes, words: str) -> None:
    file = folder / "rank0.jsonl"
    first, rest = file.read_bytes().split(b"\n", 1)
    file.write_bytes(first + b"\n" + junk + rest)
    report = report_of(folder)
    assert "rank0.jsonl: line 2: " in said(report)
    assert words in said(report)
    assert is_damaged(report)
    assert report.compared_steps == 60


def test_a_ledger_that_does_not_add_up_is_refused(folder: Path) -> None:
    file = folder / "rank0.jsonl"
    file.write_bytes(file.read_bytes().replace(b'"compute_ns":80000000', b'"compute_ns":80000001', 1))
    report = report_of(folder)
    assert "ledger parts sum to" in said(report)
    assert report.compared_steps == 59


def test_a_number_that_no_step_can_have_is_refused(folder: Path) -> None:
    file = folder / "rank0.jsonl"
    huge = b'"samples":' + b"9" * 400
    file.write_bytes(file.read_bytes().replace(b'"samples":16', huge, 1).replace(b'"samples":16', b'"samples":-1', 1))
    report = report_of(folder)
    assert "rank0.jsonl: line " in said(report)
    assert is_damaged(report)
    assert report.compared_steps == 58


def test_a_rank_that_ended_no_step_does_not_hide_the_others(folder: Path) -> None:
    (folder / "rank1.jsonl").write_bytes(lines([hello(1)]))
    report = report_of(folder)
    assert "ranks 1 of 2 left no step here" in said(report)
    assert report.compared_steps == 60


def test_a_line_without_end_is_not_kept_in_memory(folder: Path) -> None:
    with (folder / "rank0.jsonl").open("ab") as stream:
        stream.write(b"x" * (3 * LINE_BYTES_MAX) + b"\n" + lines([step(0, 60)]))
    report = report_of(folder)
    assert "rank0.jsonl: line 62: longer than" in said(report)
    assert report.ranks[0].records == 61


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    folder = untuned(tmp_path / "run", ranks=8, steps=60)
    for rank in (1, 4, 5, 6):
        (folder / f"rank{rank}.jsonl").unlink()
    report = report_of(folder)
    assert "ranks 1, 4-6 of 8 left no step here" in said(report)
    assert is_damaged(report)
    assert (report.ranks_seen, report.compared_steps) == (4, 60)


def test_an_empty_file_is_a_missing_rank(folder: Path) -> None:
    (folder / "rank1.jsonl").write_bytes(b"")
    report = report_of(folder)
    assert "rank1.jsonl: the file is empty" in said(report)
    assert "ranks 1 of 2 left no step" in said(report)
    assert report.before is not None


def test_a_rank_without_its_hello_is_reported_all_the_same(folder: Path) -> None:
    for rank in (0, 1):
        file = folder / f"rank{rank}.jsonl"
        file.write_bytes(file.read_bytes().split(b"\n", 1)[1])
    report = report_of(folder)
    assert "no rank introduced itself" in said(report)
    assert report.world_size is None
    assert report.compared_steps == 60


def test_records_of_another_rank_are_left_out_and_named(folder: Path) -> None:
    append(folder, 0, step(1, 60))
    report = report_of(folder)
    assert "rank0.jsonl: line 62: a record of rank 1" in said(report)
    assert report.ranks[0].records == 60


def test_steps_that_repeat_or_go_back_are_named(folder: Path) -> None:
    append(folder, 0, step(0, 59), step(0, 3))
    report = report_of(folder)
    assert "step 59 appears twice" in said(report)
    assert "step 3 comes after step 59" in said(report)
    assert report.compared_steps == 60


@pytest.mark.parametrize("content", [b"", b"\x00\x01junk\n", b'{"type":"weather"}\n', b"{}"])
def test_without_a_single_record_there_is_no_report(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rank0.jsonl").write_bytes(content)
    with pytest.raises(ReportError, match=r"not one record can be read \(rank0.jsonl"):
        report_of(tmp_path)


def test_a_run_that_never_stepped_is_reported_as_far_as_it_went(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"rank{rank}.jsonl").write_bytes(lines([hello(rank), hung(rank, 0)]))
    report = report_of(tmp_path)
    assert is_damaged(report), "so the command exits with 1"
    assert "2 of 2 ranks introduced themselves, and none ended a step" in said(report)
    assert [(row.rank, row.steps, row.host) for row in report.ranks] == [(0, 0, "node-a"), (1, 0, "node-a")]
    first, *_, last = headline(report).split(". ")
    assert first.startswith("The run hung for 1 min 30 s: all 2 ranks ended no step from")
    assert last == "No step was recorded: there is nothing to measure."
    for text in (report_page(report), report_markdown(report)):
        assert "none ended a step" in text
        assert "node-a" in text


def hung(rank: int, at: int, *, ended: bool = False) -> HangSuspicion:
    return HangSuspicion(
        job="j", rank=rank, step=at, phase="backward", wall_ns=START_NS + 90 * 10**9, silent_ns=90 * 10**9,
        last_collective=None, collectives=None, stack=None, ended=ended,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("more", "is_over"),
    [
        ([hung(0, 60)], False),
        ([hung(0, 60), Goodbye(job="j", rank=0, reason="failed: DistBackendError", wall_ns=1)], False),
        ([hung(0, 60), hung(0, 60, ended=True)], True),
        ([hung(0, 60), step(0, 60)], True),
        ([hung(0, 60), Goodbye(job="j", rank=0, reason="finished", wall_ns=1)], True),
        ([hung(0, 60), hello(0)], False),
        ([hung(0, 60), hello(0), step(0, 0)], True),
    ],
)
def test_a_rank_that_hung_and_was_not_seen_to_go_on_is_damage(
    folder: Path, more: list[JobRecord], is_over: bool
) -> None:
    append(folder, 0, *more)
    report = report_of(folder)
    assert [hang.is_over for hang in report.hangs] == [is_over]
    assert ("rank 0 hung and was not seen to go on" in said(report)) is not is_over
    assert report.before is not None, "what was before is there"


@pytest.mark.parametrize("is_over", [False, True])
def test_a_verdict_on_a_hang_takes_the_place_of_the_suspicions(folder: Path, *, is_over: bool) -> None:
    verdict = HangVerdict(
        job="j", rank=0, wall_ns=START_NS + 20 * 10**9, kind=HangKind.NOT_JOINED, culprits=(1,), waiting=(0,),
        waited_ns=12 * 10**9, summary="rank 1 never joined all_reduce #9", step=60,
    )  # fmt: skip
    ended = structs.replace(verdict, wall_ns=START_NS + 38 * 10**9, ended=True)
    append(folder, 0, hung(0, 60), verdict, *([ended] if is_over else []))
    report = report_of(folder)
    (one,) = report.hang_verdicts
    assert (one.culprits, one.is_over, one.waited_ns) == ((1,), is_over, (30 if is_over else 12) * 10**9)
    (sentence,) = hang_sentences(report)
    lasted = "30.0 s" if is_over else "12.0 s"
    assert sentence.startswith(f"The run hung for {lasted}: rank 1 never joined all_reduce #9, from ")
    assert sentence.endswith("was not seen to go on.") is not is_over
    table = incidents(report)
    assert table is not None
    row = [column.cells[0][0] for column in table.columns]
    assert row[:3] == ["hang (not joined)", "rank 1", "60"]
    assert (
        row[3]
        == f"for {lasted}; {'went on' if is_over else 'was not seen to go on'}. rank 1 never joined all_reduce #9"
    )


def test_a_rank_that_others_kept_off_the_processors_and_where_it_was(folder: Path) -> None:
    stop = ProcessStop(job="j", rank=1, step=9, phase="outside", wall_ns=START_NS, stopped_ns=1500 * MS,
                       cause="preempted")  # fmt: skip
    append(folder, 1, stop)
    report = report_of(folder)
    said = "The run hung for 1.5 s: rank 1 was kept off the processors by others from"
    assert headline(report).startswith(said)
    assert "in step 9 (the loop's own code)." in headline(report)
    table = incidents(report)
    assert table.rows[0][-1] == "kept off the processors by others for 1.5 s in the loop's own code"


def test_many_short_stops_are_said_where_they_take_a_hundredth_of_the_run(folder: Path) -> None:
    def stop(at: int, lasted_ms: int) -> ProcessStop:
        return ProcessStop(job="j", rank=1, step=at, phase="forward", wall_ns=START_NS + at * MS,
                           stopped_ns=lasted_ms * MS, cause="throttled")  # fmt: skip

    append(folder, 1, stop(9, 50))
    assert "CPU quota" not in headline(report_of(folder)), "of a run of 6 s"
    append(folder, 1, stop(10, 50))
    words = (
        "Rank 1 was held back by its CPU quota for 0.1 s in all, 1.7 % of the run, in 2 stops of less than a second."
    )
    assert headline(report_of(folder)).startswith(words)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "no such run folder"),
        (lambda path: path.mkdir(), r"not a run folder: no readable rank<r>\.jsonl"),
        (lambda path: path.symlink_to("gone"), "a link to gone, which does not exist"),
        (lambda path: path.write_bytes(b"hello"), "not a pacecar recording"),
        (lambda path: path.write_bytes(b""), "not a pacecar recording"),
        (lambda path: (path / "rank0.jsonl").mkdir(parents=True), "not a file"),
    ],
)
def test_a_path_that_is_not_a_run_is_named(tmp_path: Path, make: Callable[[Path], object], words: str) -> None:
    path = tmp_path / "what"
    make(path)
    with pytest.raises(ReportError, match=words):
        report_of(path)


def test_files_with_similar_names_are_not_ranks(folder: Path) -> None:
    for name in ("rank00.jsonl", "rank-1.jsonl", "rank1.jsonl.bak", "xrank2.jsonl", "rank99999999.jsonl"):
        (folder / name).write_bytes(b"junk\n")
    assert report_of(folder).notices == ()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read_is_named(folder: Path) -> None:
    (folder / "rank1.jsonl").chmod(0)
    assert "rank1.jsonl: " in said(report_of(folder))


def test_names_from_files_are_one_clean_line() -> None:
    assert clean("a\nb\x1b[31m\tc") == "a\ufffdb\ufffd[31m\ufffdc"
    notices = ReportNotices()
    notices.add("place", "kind", "x" * 10_000)
    assert len(notices.list()[0].text) == 300


def test_a_million_faults_are_a_hundred_notices() -> None:
    notices = ReportNotices()
    for number in range(1000):
        notices.add("here", f"kind {number}", "bad", is_damage=number == 999)
    found = notices.list()
    assert len(found) == NOTICES_MAX + 1
    assert found[-1].count == 1000 - NOTICES_MAX
    assert found[-1].is_damage


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_bytes_are_changed_there_is_a_report_or_a_reason(tmp_path: Path, data: st.DataObject) -> None:
    """Flip, cut and insert anywhere: nothing but ReportError comes out, and no other number of ranks."""
    folder = tmp_path / "run"
    untuned(folder, steps=14)
    file = folder / "rank0.jsonl"
    whole = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(whole) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "insert"])):
            case "flip":
                whole[at] ^= data.draw(st.integers(1, 255))
            case "cut":
                del whole[at : at + data.draw(st.integers(1, 3000))]
            case _:
                whole[at:at] = data.draw(st.binary(max_size=40))
        if not whole:
            break
    file.write_bytes(whole)
    try:
        report = report_of(folder)
    except ReportError:
        return
    assert report.ranks_seen <= 2
    assert report.compared_steps <= 14


def recording(path: Path, **jobs: int) -> Path:
    """A recording of one node: `jobs` name -> steps of two ranks each, a GPU that draws 300 W, and its counters."""
    import msgspec

    series = [
        ("pacecar_gpu_info", ("0", "GPU-0", "H", "d", "b", "a", "c", "v", "m")),
        ("pacecar_gpu_utilization_ratio", ("0",)),
        ("pacecar_gpu_energy_joules_total", ("0",)),
        ("pacecar_host_network_transmit_bytes_total", ("eth0",)),
        ("pacecar_host_network_transmit_bytes_total", ("lo",)),
        ("pacecar_gpu_memory_used_bytes", ("0",)),
        ("pacecar_gpu_memory_size_bytes", ("0",)),
        ("pacecar_gpu_utilization_ratio", ("7",)),
    ]
    ticks = [
        TickRow(n * 10**9, n, 0, {0: 1, 1: 0.5, 2: n * 300_000, 3: n * 10**9, 4: n * 7, 5: 40, 6: 80, 7: 0.9}, {}, {})
        for n in range(30)
    ]
    rows = []
    for name, steps in jobs.items():
        for number in range(steps):
            for rank in (0, 1):
                record = step(rank, number, 100 * MS, job=name, total_wall_ns=(number + 1) * 100 * MS)
                payload = msgspec.Raw(msgspec.msgpack.encode(record))
                rows.append(RecordRow((number + 1) * 100 * MS, payload))
    hellos = tuple(hello(rank, job=name, uuid="GPU-0") for name in jobs for rank in (0, 1))
    header = RecordingHeader(
        host="node-a", pacecar_version="0.1.0", written_wall_ns=9, window_ns=300, triggers=(), hellos=hellos
    )
    chunk = Chunk(0, 30 * 10**9, START_NS, tuple(series), tuple(ticks), (), tuple(rows), ())
    path.write_bytes(b"".join(parts(header, [pack(chunk)])))
    return path


def test_a_gpu_that_missed_a_tick_still_drew_power() -> None:
    hosts = Hosts({"before": (0, 100 * 10**9)})
    for second in range(11):
        gpus = ("0", "1") if second % 4 else ("0",)
        values = {("pacecar_gpu_energy_joules_total", (gpu,)): second * 300_000 for gpu in gpus}
        hosts.add("node-a", Tick(second * 10**9, second, 0, values, {}, {}))
    watts, gpus_seen, covered_ns = hosts.watts("before") or (None, None, None)
    assert (watts, gpus_seen) == (pytest.approx(600.0), 2)
    assert covered_ns == 5 * 10**9


def test_a_recording_alone_is_a_report_with_what_the_node_saw(tmp_path: Path) -> None:
    report = report_of(recording(tmp_path / "a.recording", j=200))
    assert report.notices == ()
    assert (report.steps, report.ranks_seen) == (200, 2)
    rows = {row.name: row for row in report.utilization}
    before = rows["pacecar_gpu_utilization_ratio"].before
    assert before.mean == pytest.approx(0.5)  # GPU 7 is another job's
    sent = rows["pacecar_host_network_transmit_bytes_total"].before
    assert sent.mean == pytest.approx(1e9)  # loopback is not what the ranks go through
    memory = rows["gpu_memory_used"].before
    assert memory.mean == pytest.approx(0.5)
    energy = report.energy_before
    assert (energy.source, energy.gpus) == ("recording", 1)
    assert energy.watts == pytest.approx(300.0)
    assert energy.joules_per_step == pytest.approx(30.0)
    assert energy.joules_per_sample == pytest.approx(300 / 320)


def test_a_recording_beside_a_run_says_what_the_node_saw(tmp_path: Path) -> None:
    folder = untuned(tmp_path / "run")
    (folder / "recordings").mkdir()
    recording(folder / "recordings" / "pacecar-1.recording", other=3)
    recording(folder / "recordings" / "pacecar-2.recording", other=3)
    report = report_of(folder)
    assert report.job == "j"
    row = next(row for row in report.utilization if row.name == "pacecar_host_network_transmit_bytes_total")
    # Both files hold the same moments; each counts once.
    assert row.before.count <= 20


def test_a_damaged_recording_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    whole = recording(tmp_path / "a.recording", j=200).read_bytes()
    (tmp_path / "b.recording").write_bytes(whole[:-9])
    report = report_of(tmp_path / "b.recording")
    assert "truncated" in said(report)
    assert is_damaged(report)
    assert report.steps == 200
    (tmp_path / "c.recording").write_bytes(whole[: len(whole) // 2])
    without = report_of(tmp_path / "c.recording")
    assert is_damaged(without)
    assert (without.steps, without.ranks[0].steps) == (0, 0)


def test_two_jobs_in_a_recording_are_named(tmp_path: Path) -> None:
    path = recording(tmp_path / "a.recording", j=50, k=50)
    with pytest.raises(ReportError, match="2 jobs"):
        report_of(path)
    assert report_of(path, job="k").job == "k"


def test_energy_of_the_daemons_last_answer_is_taken_and_a_broken_one_named(tmp_path: Path) -> None:
    folder = untuned(tmp_path / "run")
    (folder / "metrics.txt").write_text(
        "# TYPE pacecar_job_energy_per_step_joules gauge\n"
        'pacecar_job_energy_per_step_joules{training_job="j"} 12.5\n'
        'pacecar_job_energy_per_step_joules{training_job="other"} 99\n'
        'pacecar_job_energy_per_step_joules{launch="3f2a9c01d4e5b678",training_job="j"} 77\n'  # of that name only
        "# TYPE pacecar_job_energy_per_token_joules gauge\n"
        'pacecar_job_energy_per_token_joules{training_job="j"} 0\n'
    )
    energy = report_of(folder).energy_before
    assert (energy.source, energy.joules_per_step, energy.joules_per_token) == ("metrics", 12.5, 0.0)
    assert energy.joules_per_sample is None
    (folder / "metrics.txt").write_bytes(b'pacecar_job_energy_per_step_joules{training_job="j 12.5\n\xff')
    report = report_of(folder)
    assert "metrics.txt: cannot be read" in said(report)
    assert report.energy_before is None


def test_losses_are_first_and_last_and_bad_lines_are_named(tmp_path: Path) -> None:
    folder = untuned(tmp_path / "run", steps=60)
    (folder / "losses.jsonl").write_text('{"loss": 5.0}\nnonsense\n{"loss": NaN}\n{"other": 1}\n{"loss": 2.5}\n{"loss"')
    report = report_of(folder)
    assert report.losses == ReportLosses(first=5.0, last=2.5)
    assert "losses.jsonl: line 2" in said(report)
    held_out = '{"step": 0, "validation_bits_per_byte": 8.0}\n{"step": 20, "loss": 0.0}\n'
    (folder / "losses.jsonl").write_text(held_out)
    report = report_of(folder)
    assert report.losses == ReportLosses(first=0.0, last=0.0, validation_first=8.0, validation_last=8.0)
    assert ("held-out text", "8 → 8 bits per byte") in facts(report)
    (folder / "losses.jsonl").write_text("")
    assert report_of(folder).losses is None
