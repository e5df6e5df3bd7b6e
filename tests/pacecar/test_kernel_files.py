"""The kernel's files are read, malformed ones refused, and zero is a measurement."""

from __future__ import annotations

from pathlib import Path

import pytest

from pacecar.kernel_files.cgroups import levels_of, parse_memory_limit, v2_group
from pacecar.kernel_files.link_speeds import (
    ActiveRdmaPort,
    active_rdma_ports,
    is_link,
    nominal_speed,
    parse_speed,
)
from pacecar.kernel_files.memory import rows_bytes
from pacecar.kernel_files.processors import numa_nodes, parse_cpu_list, run_delay_ns
from pacecar.kernel_files.reader import KernelFiles, OpenFile, integer, lines_of, row, whole


def write(root: Path, **files: str) -> KernelFiles:
    """Write files below a folder `sys`; two underscores in a name are a slash."""
    for name, text in files.items():
        path = root / "sys" / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return KernelFiles(root / "proc", root / "sys")


def test_a_file_that_is_missing_or_unreadable_has_no_text(tmp_path: Path) -> None:
    files = write(tmp_path, here="1\n")
    assert files.text(tmp_path / "sys/here") == "1\n"
    assert files.text(tmp_path / "sys/gone") is None
    assert files.text(tmp_path / "sys") is None
    assert files.names(tmp_path / "sys") == ["here"]


def test_an_open_file_is_read_anew_from_its_start_and_opened_again_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "stat"
    file = OpenFile(path)
    with pytest.raises(FileNotFoundError):
        file.head(8)
    path.write_text("one\n")
    assert (file.head(8), file.head(2)) == (b"one\n", b"on")
    path.write_text("two\n")
    assert file.head(8) == b"two\n"
    file.close()
    file.close()
    folder = OpenFile(tmp_path)
    for _ in range(2):
        with pytest.raises(IsADirectoryError):
            folder.head(8)


@pytest.mark.parametrize("wrong", ["", "-", "-1", "+1", " 1", "1_0", "0x1", "\u0663", "1.0"])
def test_only_digits_are_a_whole_number(wrong: str) -> None:
    assert whole("0") == 0
    with pytest.raises(ValueError, match="whole number"):
        whole(wrong)


@pytest.mark.parametrize("wrong", ["", "-", "--1", "+1", "- 1", "9" * 400])
def test_an_integer_has_a_sign_or_none_and_no_more_digits_than_the_kernels(wrong: str) -> None:
    assert (integer("-1"), integer("0"), integer(str(2**64 - 1))) == (-1, 0, 2**64 - 1)
    with pytest.raises(ValueError, match=r"whole number|64 bits"):
        integer(wrong)


def test_a_line_ends_where_the_kernel_ends_it_and_not_within_a_name() -> None:
    assert lines_of("") == []
    assert lines_of("\n") == [""]
    assert lines_of("a\nb\n") == lines_of("a\nb") == ["a", "b"]
    name = "".join(map(chr, range(1, 0x3000))).replace("\n", "")
    assert lines_of(f"0::/{name}\n") == [f"0::/{name}"]
    assert v2_group("0::/user/x\x0c0::/kubepods/pod1\n") == "/user/x\x0c0::/kubepods/pod1"


def test_a_row_is_found_by_its_whole_first_word_and_a_processs_name_makes_none() -> None:
    text = "Name:\ta\x0cNSpid:\t666\nNSpidX:\t1\nNSpid:\t4711 12\nNSpid:\t1\n"
    assert row(text, "NSpid:") == ["4711", "12"]
    assert row(text, "NStgid:") == []


def test_lists_of_processors_are_the_kernels() -> None:
    assert parse_cpu_list("0-2,7\n") == {0, 1, 2, 7}
    assert parse_cpu_list("\n") == frozenset()
    for wrong in ("3-1", "x", "1-a", "1-", "-1", "0-999999999"):
        with pytest.raises(ValueError, match=r"range|whole"):
            parse_cpu_list(wrong)
    assert numa_nodes(["has_cpu", "node0", "node12", "nodes", "node1x"]) == ["node0", "node12"]


@pytest.mark.parametrize("kind", [str, bytes])
@pytest.mark.parametrize(
    ("line", "delay_ns"), [("11 22 33\n", 22), ("0 0 0\n", 0), ("", None), ("1 2\n", None), ("1 x 3\n", None)]
)
def test_the_second_number_of_three_is_the_run_delay_and_zero_is_a_measurement(
    kind: type, line: str, delay_ns: int | None
) -> None:
    assert run_delay_ns(line if kind is str else line.encode()) == delay_ns


def test_rows_of_memory_add_up_and_what_is_not_there_is_not_zero() -> None:
    text = "5581-7ffd ---p 00000000 00:00 0 [rollup]\nPrivate_Clean: 3 kB\nPrivate_Dirty: 4 kB\nShared: 9 kB\n"
    assert rows_bytes(text, "Private_Clean", "Private_Dirty") == 7 * 1024
    assert rows_bytes("MemAvailable: 0 kB\n", "MemAvailable") == 0
    assert rows_bytes(text, "MemAvailable") is None
    with pytest.raises(ValueError, match="amount kB"):
        rows_bytes("MemTotal: 3 pages\n", "MemTotal")


@pytest.mark.parametrize(
    ("text", "speed"),
    [
        ("100000", 12_500_000_000),
        ("0", 0),
        ("-1", None),
        ("4294967295", None),
        ("-2", None),
        ("x", None),
        ("9" * 400, None),
    ],
)
def test_an_interface_has_the_speed_that_it_says_or_none(tmp_path: Path, text: str, speed: int | None) -> None:
    files = write(tmp_path, class__net__eth0__speed=f"{text}\n")
    assert nominal_speed(files, "eth0") == speed
    assert nominal_speed(files, "gone") is None


def test_a_speed_that_is_no_number_is_malformed_and_one_that_is_not_known_is_not() -> None:
    assert parse_speed("-1") is None
    for wrong in ("-2", "", "fast"):
        with pytest.raises(ValueError, match=r"not a speed|whole number"):
            parse_speed(wrong)
    assert is_link(["address", "device"])
    assert is_link(["bonding"])
    assert not is_link(["address", "bridge"])


def test_of_rdma_ports_those_that_carry_traffic_count_each_by_itself(tmp_path: Path) -> None:
    files = KernelFiles(tmp_path / "proc", tmp_path / "sys")
    for card, state, rate, layer in (
        ("a", "4: ACTIVE", "200 Gb/sec (4X HDR)", "InfiniBand"),
        ("b", "4: ACTIVE", "2.5 Gb/sec (1X SDR)", ""),
        ("c", "1: DOWN", "400 Gb/sec (4X NDR)", "InfiniBand"),
        ("d", "5: ACTIVE_DEFER", "400 Gb/sec (4X NDR)", "InfiniBand"),
        ("e", "4: ACTIVE", "fast", "Ethernet"),
    ):
        write(tmp_path, **{f"class__infiniband__{card}__ports__1__{name}": f"{text}\n"
                           for name, text in (("state", state), ("rate", rate), ("link_layer", layer))})  # fmt: skip
    (tmp_path / "sys/class/infiniband/f/ports/1").mkdir(parents=True)
    assert active_rdma_ports(files) == [
        ActiveRdmaPort(25_000_000_000, "InfiniBand"),
        ActiveRdmaPort(312_500_000, None),
    ]


def test_levels_of_a_control_group_stop_at_what_is_mounted(tmp_path: Path) -> None:
    assert levels_of(tmp_path, "/", "/a/b") == (tmp_path / "a/b", tmp_path / "a", tmp_path)
    assert levels_of(tmp_path, "/a", "/a/b") == (tmp_path / "b", tmp_path)
    assert levels_of(tmp_path, "/", "/") == (tmp_path,)
    assert levels_of(tmp_path, "/a", "/ab") == ()
    assert levels_of(tmp_path, "/", "/../elsewhere") == ()
    assert parse_memory_limit("max") is None
    assert parse_memory_limit("0") == 0


def test_the_group_of_version_two_is_found_beside_those_of_version_one() -> None:
    assert v2_group("3:cpu,cpuacct:/one\n0::/two\n") == "/two"
    assert v2_group("3:cpu,cpuacct:/one\n") is None
