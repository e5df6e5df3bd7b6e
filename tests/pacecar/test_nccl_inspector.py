"""NCCL's Inspector: what its files say is read, and what cannot be is left out, counted and located."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacecar.nccl_inspector import (
    FILE_BYTES_MIN,
    LINE_BYTES_MAX,
    ROWS_MAX,
    CommunicatorBandwidth,
    InspectorFigures,
    find_inspector_files,
    inspector_folder,
    read_inspector,
)
from tests.kit.nccl_files import MIB, inspector_line, prom_lines, write_inspector

GB = 1e9


def read(folder: Path) -> InspectorFigures:
    return read_inspector(find_inspector_files([folder]))


def rows_of(folder: Path) -> dict[str, CommunicatorBandwidth]:
    return {row.operation: row for row in read(folder).rows}


def test_ranks_of_a_communicator_are_one_row_with_the_medians_of_the_rank_that_waited_least(tmp_path: Path) -> None:
    for rank, times in enumerate(([1000, 1000, 5000], [1400, 1600, 1500], [2000, 2000, 2000])):
        write_inspector(tmp_path, [inspector_line(rank, time_us=time) for time in times], pid=rank)
    figures = read(tmp_path)
    (row,) = figures.rows
    assert (figures.files, figures.notes) == (3, ())
    assert (row.communicator, row.name, row.operation) == ("0x7f8c496ae9f661", "dp", "all_reduce")
    assert (row.bytes, row.ranks, row.nodes, row.count, row.seen) == (25 * MIB, 8, 1, 3, 3)
    assert (row.highest, row.lowest, row.median_ns) == ("rank 0 on node-a", "rank 2 on node-a", 1_000_000)
    assert row.algorithm_bandwidth == pytest.approx(25 * MIB / 1e-3)
    assert row.bus_bandwidth == pytest.approx(25 * MIB / 1e-3 * 14 / 8)
    assert row.lowest_bus_bandwidth == pytest.approx(25 * MIB / 2e-3 * 14 / 8)


def test_communicators_operations_and_sizes_are_apart_and_p2p_is_read(tmp_path: Path) -> None:
    write_inspector(
        tmp_path,
        [
            inspector_line(),
            inspector_line(id="0xb2", name="tp", ranks=2),
            inspector_line(operation="AllGather", size=4 * MIB),
            inspector_line(operation="ReduceScatter", size=4 * MIB),
            inspector_line(size=100 * MIB, number=2),
            inspector_line(operation="Send", p2p=True, id="0xc3", name="pp"),
            inspector_line(operation="Recv", p2p=True, id="0xc3", name="pp"),
        ],
    )
    figures = read(tmp_path)
    said = [(row.name, row.operation, row.bytes // MIB) for row in figures.rows]
    assert sorted(said) == [
        ("dp", "all_gather", 4), ("dp", "all_reduce", 25), ("dp", "all_reduce", 100), ("dp", "reduce_scatter", 4),
        ("pp", "recv", 25), ("pp", "send", 25), ("tp", "all_reduce", 25),
    ]  # fmt: skip
    assert not figures.notes
    assert said[0] == ("dp", "all_reduce", 100), "the most traffic comes first"


def test_versions_differ(tmp_path: Path) -> None:
    """2.28.3 has no communicator's name; 2.30 says `unknown` for none; verbose lines are long; keys may be new."""
    later = inspector_line(3).replace('"coll_sn"', '"coll_color":{"of":["the","future"]},"coll_sn"')
    lines = [inspector_line(0, name=None), inspector_line(1, name="unknown"), later.replace('"dp"', '"unknown"')]
    write_inspector(tmp_path, [*lines, inspector_line(2, name=None, verbose=True)])
    (row,) = read(tmp_path).rows
    assert (row.name, row.seen) == (None, 4)


def test_all_to_all_has_a_time_and_no_bandwidth(tmp_path: Path) -> None:
    write_inspector(tmp_path, [inspector_line(operation="All2All", time_us=250)])
    row = rows_of(tmp_path)["all_to_all"]
    assert (row.median_ns, row.algorithm_bandwidth, row.bus_bandwidth, row.lowest) == (250_000, None, None, None)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (inspector_line(9, ranks=8), "the rank is not below the number of ranks"),
        (inspector_line(time_us=0), "took no time"),
        (inspector_line(source="collective_cpu"), "timed by collective_cpu, not by the kernel"),
        (inspector_line(coll_busbw_gbs="nan"), "got `str`"),
        (inspector_line(coll_busbw_gbs=1e12), "<= 1000000.0"),
        (inspector_line(coll_msg_size_bytes=-1), ">= 0"),
        (inspector_line(coll_msg_size_bytes=1 << 70), "Expected `int`"),
        (inspector_line(n_ranks=0), ">= 1"),
        (inspector_line().replace("45.875200", "inf").replace("coll_busbw_gbs\":", "coll_busbw_gbs\":-inf, \"x\":"),
         "malformed"),
        (inspector_line().replace('"coll_perf"', '"later_perf"'), "neither a collective nor a send or receive"),
        (inspector_line()[:200] + "\n", "malformed"),
        ("[" * 100_000 + "\n", "too long"),
        ("{" * 5000 + "\n", "malformed"),
        ("\x00\n", "malformed"),
        ("\n", "truncated"),
        ('{"header":null}\n', "Expected `object`"),
    ],
)  # fmt: skip
def test_a_bad_line_is_left_out_with_its_place_and_the_rest_counts(line: str, reason: str, tmp_path: Path) -> None:
    path = write_inspector(tmp_path, [inspector_line(), line, inspector_line(number=3)])
    figures = read(tmp_path)
    (note,) = figures.notes
    assert note.startswith(f"{path}:2: left out: ")
    assert reason in note
    assert figures.rows[0].count == 2


def test_equal_faults_are_counted_and_many_kinds_are_one(tmp_path: Path) -> None:
    lines = [inspector_line(), *[inspector_line(time_us=0)] * 3]
    lines += [inspector_line(source=f"source{one}") for one in range(20)]
    path = write_inspector(tmp_path, lines)
    notes = read(tmp_path).notes
    assert notes[0] == f"{path}:2, and 2 more: left out: took no time"
    assert notes[-1] == f"{path}:8, and 16 more: left out: other reasons"
    assert len(notes) == 5


def test_a_cut_last_line_is_that_of_a_job_that_still_writes(tmp_path: Path) -> None:
    write_inspector(tmp_path, [inspector_line(), inspector_line()[:100]])
    figures = read(tmp_path)
    assert (figures.rows[0].count, figures.notes) == (1, ())


def test_of_a_large_file_the_end_is_read_and_that_is_said(tmp_path: Path) -> None:
    old, new = inspector_line(time_us=9000), inspector_line(time_us=1000)
    path = write_inspector(tmp_path, [old * (FILE_BYTES_MIN // len(old)), new * (FILE_BYTES_MIN // len(new) - 1)])
    figures = read_inspector([path], bytes_max=FILE_BYTES_MIN)
    assert figures.rows[0].median_ns == 1_000_000
    assert figures.notes == (f"{path}: only the last 1 MiB were read, from which lines are counted",)


@pytest.mark.slow
def test_rows_are_bounded(tmp_path: Path) -> None:
    path = write_inspector(tmp_path, [inspector_line(id=hex(one)) for one in range(ROWS_MAX + 5)])
    figures = read(tmp_path)
    assert len(figures.rows) == ROWS_MAX
    assert figures.notes == (f"{path}: 5 rows beyond {ROWS_MAX} were left out",)


def test_prom_files_of_both_versions_are_read(tmp_path: Path) -> None:
    (tmp_path / "nccl_inspector_metrics_aa.prom").write_text(
        "# HELP later\n"
        + prom_lines(45.5, 998.5)
        + prom_lines(12.25, 500, operation="Send", p2p=True, size="512-513KB")
        + prom_lines(1, 2, name='a "quoted", name', size="0B")
    )
    (tmp_path / "nccl_inspector_metrics_bb.prom").write_text(prom_lines(30, 1500, gpu=1))
    figures = read(tmp_path)
    assert (figures.files, figures.notes) == (2, ())
    rows = {(row.name, row.operation): row for row in figures.rows}
    row = rows["dp", "all_reduce"]
    assert (row.communicator, row.count, row.bytes, row.ranks, row.nodes) == (None, None, 25 * MIB, 8, 1)
    assert (row.bus_bandwidth, row.algorithm_bandwidth, row.median_ns) == (45.5 * GB, None, 998_500)
    assert (row.highest, row.lowest, row.lowest_bus_bandwidth) == ("GPU0 on node-a", "GPU1 on node-a", 30 * GB)
    assert rows["dp", "send"].bytes == 512 << 10
    assert rows['a "quoted", name', "all_reduce"].bytes == 0
    (tmp_path / "nccl_inspector_metrics_aa.prom").write_text(prom_lines(45.5, 998.5, old=True))
    row = next(row for row in read(tmp_path).rows if row.communicator == "0xa1")
    assert (row.algorithm_bandwidth, row.bus_bandwidth, row.highest) == (26 * GB, 45.5 * GB, "rank 0 on node-a")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (prom_lines().replace("45.5", "nan"), "cannot be"),
        (prom_lines().replace("45.5", "-1"), "cannot be"),
        (prom_lines().replace("45.5", "many"), "could not convert"),
        (prom_lines().replace('nranks="8",', ""), "lacks a label"),
        (prom_lines().replace('nranks="8"', 'nranks="-8"'), "lacks a label"),
        (prom_lines().replace("25-26MB", "large"), "lacks a label"),
        (prom_lines(size="9" * 400 + "TB"), "lacks a label"),
        (prom_lines(1e30), "cannot be"),
        (prom_lines(name='a="' * 2000), "too long"),
        ("node_load1 0.5\n", "not a sample"),
        ("\udcff\n", "decode"),
    ],
)
def test_bad_samples_are_left_out_with_their_place(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "nccl_inspector_metrics_aa.prom"
    path.write_bytes((prom_lines(name="tp") + text).encode("utf-8", "surrogateescape"))
    figures = read(tmp_path)
    assert figures.notes[0].startswith(f"{path}:3")
    assert reason in figures.notes[0]
    assert "tp" in [row.name for row in figures.rows]


def test_a_zero_mean_is_no_bandwidth(tmp_path: Path) -> None:
    (tmp_path / "nccl_inspector_metrics_aa.prom").write_text(prom_lines(0, 0))
    (row,) = read(tmp_path).rows
    assert (row.bus_bandwidth, row.median_ns) == (None, 0)


def test_only_the_inspectors_own_files_are_read(tmp_path: Path) -> None:
    write_inspector(tmp_path / "nccl-inspector-17", [inspector_line()])
    write_inspector(tmp_path / "deeper" / "nccl-inspector-17", [inspector_line()])
    (tmp_path / "server-pid3.log").write_text("started\n")
    (tmp_path / "empty-pid4.log").write_text("")
    (tmp_path / "node_load.prom").write_text("node_load1 1\n")
    os.mkfifo(tmp_path / "pipe-pid5.log")
    (tmp_path / "folder-pid6.log").mkdir()
    figures = read(tmp_path)
    assert (figures.files, figures.notes, len(figures.rows)) == (1, (), 1)
    assert find_inspector_files([tmp_path / "absent"]) == []


def test_what_cannot_be_opened_is_said(tmp_path: Path) -> None:
    figures = read_inspector([tmp_path / "gone-pid1.log"])
    assert figures.notes == (f"{tmp_path}/gone-pid1.log: No such file or directory",)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, None),
        ({"NCCL_INSPECTOR_ENABLE": "0"}, None),
        ({"NCCL_INSPECTOR_ENABLE": "1"}, "/job/nccl-inspector-unknown-jobid"),
        ({"NCCL_INSPECTOR_ENABLE": "1", "SLURM_JOBID": "17"}, "/job/nccl-inspector-17"),
        ({"NCCL_INSPECTOR_DUMP_DIR": "here"}, "/job/here"),
        ({"NCCL_INSPECTOR_DUMP_DIR": "/there"}, "/there"),
    ],
)
def test_the_folder_follows_the_variables(environ: dict[str, str], name: str | None) -> None:
    assert inspector_folder(environ, Path("/job")) == (None if name is None else Path(name))


GOOD = inspector_line().encode()
CUTS = st.tuples(st.integers(0, len(GOOD)), st.integers(0, 60), st.binary(max_size=9))


def torn(cut: tuple[int, int, bytes]) -> bytes:
    return GOOD[: cut[0]] + cut[2] + GOOD[cut[0] + cut[1] :]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(lines=st.lists(st.one_of(st.just(GOOD), st.builds(torn, CUTS), st.binary(max_size=200)), max_size=12))
def test_any_bytes_are_read_or_left_out(lines: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever is in a file, nothing is raised, and what is read makes sense."""
    folder = tmp_path_factory.mktemp("fuzz")
    path = folder / "n-pid1.log"
    path.write_bytes(GOOD + b"".join(lines))
    figures = read_inspector([path])
    assert figures.files == 1
    assert all(row.bytes >= 0 and (row.bus_bandwidth is None or row.bus_bandwidth > 0) for row in figures.rows)
    prom = folder / "nccl_inspector_metrics_x.prom"
    prom.write_bytes(b"".join([prom_lines().encode(), *lines]))
    assert len(read_inspector([prom]).notes) <= 5


def test_a_line_longer_than_allowed_does_not_hide_the_next(tmp_path: Path) -> None:
    path = write_inspector(tmp_path, [inspector_line(), "{" + " " * LINE_BYTES_MAX * 2 + "}\n", inspector_line()])
    figures = read(tmp_path)
    assert figures.rows[0].count == 2
    assert figures.notes == (f"{path}:2: left out: too long",)
