"""A line of the kernel's files ends where the kernel ends it, whatever names users choose."""

from pathlib import Path

from pacecar.kernel_lines import lines_of
from pacecar.monitor.collectors.cgroup import parse_cgroup_line
from pacecar.monitor.collectors.source_reader import Files, SourceReading


def test_a_line_ends_at_a_line_feed_only() -> None:
    assert lines_of("") == []
    assert lines_of("\n") == [""]
    assert lines_of("a\nb\n") == lines_of("a\nb") == ["a", "b"]
    name = "".join(map(chr, range(1, 0x3000))).replace("\n", "")
    assert lines_of(f"0::/{name}\n") == [f"0::/{name}"]


def test_the_name_of_a_control_group_puts_its_processes_into_no_other(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_bytes(b"0::/user/x\x0c0::/kubepods/pod1\x0d0::/y\n")
    rows = SourceReading(Files()).lines(tmp_path / "cgroup", parse_cgroup_line)
    assert rows == [[("", "/user/x\x0c0::/kubepods/pod1\r0::/y")]]
