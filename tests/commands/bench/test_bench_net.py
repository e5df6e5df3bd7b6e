"""`pacecar bench net`: real gloo ranks, whose results are checked, whose figures follow the link, and who may die."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from typing import IO

import pytest

from tests.kit.forking_python import forking_python
from tests.kit.ranks import ROOT, Rank, finish, start_ranks
from tests.kit.selection import decisive
from tests.kit.shaping import Link, shaped, why_not
from tests.kit.waiting import until

pytest.importorskip("torch", reason="the extra `torch` is not installed")

NET = ("-m", "pacecar", "bench", "net")
RANK_0 = {"RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
SMALL = ("-b", "4K", "-e", "64K", "-f", "4", "-n", "3", "-w", "1", "--seconds-per-size", "1")
MANY_SIZES = ("-b", "4K", "-e", "16M", "-f", "1.25", "-n", "10000", "--seconds-per-size", "0.5", "--op", "all_reduce")
"""Twenty seconds of sizes: time enough to end a rank after the first row, however late this process sees it."""


def start(
    ranks: int, *arguments: str, program: Sequence[str] = NET, present: Sequence[int] | None = None
) -> list[Rank]:
    return start_ranks([*program, *arguments], ranks, environ={"GLOO_SOCKET_IFNAME": "lo"}, present=present)


def said(stream: IO[str]) -> list[str]:
    """Return the whole lines in a file to which another writes; its place in the file stays where it is."""
    text = os.pread(stream.fileno(), 1 << 20, 0).decode()
    return text[: text.rfind("\n") + 1].splitlines()


def rows(lines: Sequence[str]) -> list[list[str]]:
    return [line.split() for line in lines if not line.startswith("#")]


def pid_of(rank: int, lines: Sequence[str]) -> int:
    (pid,) = (int(line.split()[4]) for line in lines if re.match(rf"#  Rank +{rank} ", line))
    return pid


def alone(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [forking_python(), *NET, *arguments],
        env={**plain, **environ}, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_operation_is_right_and_its_bus_bandwidth_is_nccl_tests(ranks):
    first, *others = finish(start(ranks, *SMALL, "--json"))
    code, out, err = first
    assert code == 0, err
    assert all(other == (0, "", "") or (other[0] == 0 and other[1] == "") for other in others), "only rank 0 prints"
    result = json.loads(out)
    assert (result["format"], result["ranks"], result["backend"]) == ("pacecar-bench-net-1", ranks, "gloo")
    assert result["failure"] is None
    assert result["rated"]["bytes_per_second"] is None, "memory has no rated speed"
    factors = {"all_reduce": 2 * (ranks - 1) / ranks}
    factors["all_gather"] = factors["reduce_scatter"] = (ranks - 1) / ranks
    assert [one["operation"] for one in result["operations"]] == list(factors)
    for one in result["operations"]:
        if one["missing"] is not None:
            assert "gloo does not offer it" in one["missing"]
            continue
        assert [row["bytes"] for row in one["rows"]] == [4096, 16384, 65536]
        for row in one["rows"]:
            assert row["wrong"] == 0
            # As nccl-tests: elements of one rank's part, but for all-reduce.
            assert row["count"] * (1 if one["operation"] == "all_reduce" else ranks) == row["bytes"] // 4
            assert row["low_ns"] <= row["time_ns"] <= row["high_ns"]
            assert row["algorithm_bytes_per_second"] == pytest.approx(row["bytes"] * 1e9 / row["time_ns"], rel=1e-3)
            bus = row["algorithm_bytes_per_second"] * factors[one["operation"]]
            assert row["bus_bytes_per_second"] == pytest.approx(bus)
        assert one["fit"]["alpha_ns"] >= 0


@pytest.mark.distributed
@pytest.mark.slow
def test_torchrun_prints_the_table_once_in_nccl_tests_layout():
    ran = subprocess.run(
        [forking_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         *NET, *SMALL, "--op", "all_reduce", "--rated-gigabits", "100"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    table = rows(ran.stdout.splitlines())
    assert [row[:3] for row in table] == [[str(4 * n), str(n), "float"] for n in (1024, 4096, 16384)]
    assert all(len(row) == 11 and row[8] == "0" for row in table)
    assert ran.stdout.count("Out of bounds values : 0 OK") == 1
    assert "100 Gbit/s = 12.50 GB/s one way: as given by --rated-gigabits" in ran.stdout
    assert "% of rated" in ran.stdout


@pytest.mark.distributed
@pytest.mark.slow
def test_a_size_gets_the_iterations_that_its_seconds_allow_the_same_on_all_ranks():
    code, out, err = finish(start(2, "-b", "1M", "-e", "1M", "-n", "10000", "--seconds-per-size", "0.1", "--json",
                                  "--op", "all_reduce"))[0]  # fmt: skip
    assert code == 0, err
    (row,) = json.loads(out)["operations"][0]["rows"]
    assert 3 <= row["iterations"] < 10_000


SHORT_OF_ONE = """
import sys
import torch
from pacecar.commands.bench import operations
real = operations.BenchOperation.__init__
def init(self, operation, size_max, device):
    real(self, operation, size_max, device)
    run = self.run
    def wrong():
        run()
        self._whole_view[-1] += 1
    self.run = wrong
operations.BenchOperation.__init__ = init
from pacecar.commands.main import main
main()
"""


@pytest.mark.distributed
@pytest.mark.slow
def test_one_wrong_element_is_found_and_the_exit_code_says_so():
    arguments = ("bench", "net", *SMALL, "--op", "all_reduce")
    code, out, _ = finish(start(2, *arguments, program=("-c", SHORT_OF_ONE)))[0]
    assert code == 1
    assert [row[8] for row in rows(out.splitlines())] == ["2", "2", "2"]
    assert "Out of bounds values : 6 FAILED" in out


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("how", decisive([signal.SIGKILL, signal.SIGSTOP], signal.SIGKILL))
def test_a_rank_that_dies_or_hangs_is_named_and_what_was_measured_is_shown(how):
    started = start(3, *MANY_SIZES, "--timeout-seconds", "8")
    try:
        first = started[0]
        until(lambda: rows(said(first.out)) or first.process.poll() is not None, "no row")
        lines = said(first.out)
        assert rows(lines)[0][:2] == ["4096", "1024"]
        os.kill(pid_of(2, lines), how)
        (code, out, err), (other, silence, _) = finish(started[:2], 60)
    finally:
        for rank in started:
            if rank.process.poll() is None:
                rank.process.kill()
        finish(started[2:])
    assert code == 1
    assert "Ended early: no word from rank 2" in out, out + err
    assert out.splitlines()[: len(lines)] == lines
    assert "Traceback" not in err
    assert (other, silence) == (1, "")


@pytest.mark.distributed
@pytest.mark.slow
def test_a_rank_that_waits_inside_gloo_says_its_words_at_sigterm():
    started = start(2, *MANY_SIZES, "--timeout-seconds", "300")
    try:
        first, other = started
        until(lambda: rows(said(first.out)) or first.process.poll() is not None, "no row")
        lines = said(first.out)
        os.kill(pid_of(1, lines), signal.SIGSTOP)  # nothing ends the wait for it
        os.kill(pid_of(0, lines), signal.SIGTERM)
        ((code, out, err),) = finish([first], 60)
    finally:
        for rank in started:
            if rank.process.poll() is None:
                rank.process.kill()
        finish([other])
    assert code == 1
    assert "Ended early: no word from rank 1: ended by SIGTERM" in out, out + err
    assert out.splitlines()[: len(lines)] == lines
    assert "Traceback" not in err


@pytest.mark.distributed
@pytest.mark.slow
def test_under_torchrun_too_the_lost_rank_is_named_before_all_are_ended(tmp_path):
    with (tmp_path / "out").open("w+") as out, (tmp_path / "err").open("w+") as err:
        torchrun = subprocess.Popen(
            [forking_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
             *NET, *MANY_SIZES],
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=out, stderr=err, text=True,
        )  # fmt: skip
        try:
            until(lambda: rows(said(out)) or torchrun.poll() is not None, "no row")
            os.kill(pid_of(1, said(out)), signal.SIGKILL)
            assert torchrun.wait(90) != 0
            assert "Ended early: no word from rank 1" in "\n".join(said(out))
        finally:
            if torchrun.poll() is None:
                torchrun.terminate()
                torchrun.wait()


@pytest.mark.distributed
@pytest.mark.slow
def test_a_rank_that_never_comes_is_a_message_within_the_time_out():
    (ended,) = finish(start(2, *SMALL, "--timeout-seconds", "2", present=[0]))
    assert ended[0] == 1
    assert "not all of 2 ranks met at 127.0.0.1:" in ended[2]
    assert "within 2 s" in ended[2]
    assert "Traceback" not in ended[2]


@pytest.mark.slow
def test_one_process_alone_is_told_how_it_is_started():
    done = alone()
    assert done.returncode == 2
    assert "torchrun --nproc-per-node 8 -m pacecar bench net" in done.stderr
    assert done.stdout == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "environ", "named"),
    [
        (("--op", "all_to_nobody"), {}, "--op all_to_nobody: choose from all_reduce, all_gather, reduce_scatter"),
        (("-b", "much"), {}, "'much' is not a size"),
        (("-b", "1G", "-e", "1M"), {}, "the smallest size, 1 GiB, is above the largest, 1 MiB"),
        (("-f", "1"), {}, "must be above 1"),
        (("-f", "nan"), {}, "must be above 1"),
        (("-f", "1.01"), {}, "more than 64 sizes"),
        (("-e", "99G"), {}, "out of range"),
        (("--seconds-per-size", "nan"), {}, "--seconds-per-size nan"),
        ((), {"RANK": "0"}, "WORLD_SIZE is not set"),
        ((), RANK_0 | {"WORLD_SIZE": "two"}, "WORLD_SIZE=two is not a number"),
        ((), RANK_0 | {"WORLD_SIZE": "1"}, "a single process has no peer"),
    ],
)
def test_what_is_typed_wrongly_is_named(arguments, environ, named):
    done = alone(*arguments, **environ)
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_of_all_ranks_only_the_first_says_what_is_wrong():
    done = alone("--op", "none", RANK="3", WORLD_SIZE="8", MASTER_ADDR="a", MASTER_PORT="1")
    assert (done.returncode, done.stderr, done.stdout) == (2, "", "")


@pytest.fixture(scope="module")
def _can_shape() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


def measured(link: str, *arguments: str) -> dict:
    """Bench two ranks on `link` and return the all-reduce."""
    with shaped(2, Link.parse(link)) as net:
        started = start_ranks(
            [*NET, *arguments, "-w", "1", "--seconds-per-size", "1", "--op", "all_reduce", "--json"], 2,
            address=net.address, prefixes=net.prefixes, environ={"GLOO_SOCKET_IFNAME": net.device},
        )  # fmt: skip
        code, out, err = finish(started)[0]
    assert code == 0, err
    result = json.loads(out)
    assert {place["interface"] for place in result["places"]} == {"eth0"}
    assert result["rated"]["bytes_per_second"] is None, "a veth or a TUN device does not know its speed"
    assert "eth0" in result["rated"]["basis"]
    return result["operations"][0]


@pytest.mark.distributed
@pytest.mark.full
@pytest.mark.usefixtures("_can_shape")
def test_no_figure_is_better_than_the_link():
    """A ring of two is two messages of 5 ms one after the other; 200 Mbit/s are 25 MB/s.  A busy host only adds."""
    found = measured("200/5", "-b", "4K", "-e", "2M", "-f", "8", "-n", "3")
    sizes = {row["bytes"]: row for row in found["rows"]}
    assert list(sizes) == [4096 * 8**n for n in range(4)]
    assert all(row["low_ns"] >= 10e6 for row in sizes.values()), found
    assert sizes[2 << 20]["bus_bytes_per_second"] <= 27e6, found
    assert found["fit"]["alpha_ns"] >= 5e6, found
    assert found["fit"]["bus_bytes_per_second"] <= 60e6, found


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.full
@pytest.mark.alone
@pytest.mark.usefixtures("_can_shape")
def test_beta_is_the_rate_of_a_shaped_link():
    """200 Mbit/s are 25 MB/s; TCP through a token bucket that drops gets between 60 and 100 % of it."""
    found = measured("200", "-b", "1M", "-e", "4M", "-f", "2", "-n", "3")
    assert 12e6 <= found["fit"]["bus_bytes_per_second"] <= 27e6, found


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.full
@pytest.mark.alone
@pytest.mark.usefixtures("_can_shape")
def test_alpha_is_the_delay_of_a_shaped_link():
    """A ring of two is two messages one after the other, and gloo announces each: two to four times 5 ms, and more."""
    found = measured("1000/5", "-b", "1K", "-e", "64K", "-f", "4", "-n", "5")
    assert 10e6 <= found["fit"]["alpha_ns"] <= 40e6, found
    assert found["fit"]["residual_ratio"] < 0.5
