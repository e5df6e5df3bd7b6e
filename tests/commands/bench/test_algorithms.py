"""`pacecar bench net --algorithms`: processes of real ranks for each setting, and rows where one won for certain."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.ranks import ROOT, finish, start_ranks

pytest.importorskip("torch", reason="the extra `torch` is not installed")

from pacecar.commands.bench.document import (
    AlgorithmsBench,
    BenchPlace,
    MeasuredOperation,
    NetBench,
    Rated,
    Row,
    SettingBench,
)
from pacecar.commands.bench.text import winner_lines
from pacecar.commands.bench.tuner_csv import NcclSetting, SettingError, find_winners, parse_setting, tuner_csv

SIZES = (1024, 4096, 16384, 65536)


def bench(times: dict[str, tuple[int, ...]], *, width: int = 2, hosts: int = 1) -> NetBench:
    """Return what was measured; `times` are those of SIZES by operation, and the quartiles are `width` % off."""
    return NetBench(
        backend="nccl", ranks=4, rated=Rated(bytes_per_second=None, basis=""), warmup=1, iterations=3,
        pacecar_version="0", torch_version="0",
        places=tuple(
            BenchPlace(rank=rank, host=f"host{rank % hosts}", pid=rank, device="cuda", interface=None)
            for rank in range(4)
        ),
        operations=tuple(
            MeasuredOperation(
                operation=operation, bus_factor=1.0,
                rows=tuple(
                    Row(
                        bytes=size, count=size // 4, iterations=3, time_ns=ns, low_ns=ns * (100 - width) // 100,
                        high_ns=ns * (100 + width) // 100, algorithm_bytes_per_second=1.0, bus_bytes_per_second=1.0,
                        wrong=0,
                    )
                    for size, ns in zip(SIZES, row, strict=True)
                ),
            )
            for operation, row in times.items()
        ),
    )  # fmt: skip


def result(*runs: tuple[str, NetBench | None]) -> AlgorithmsBench:
    settings = tuple(
        SettingBench(setting=name, environment={}, bench=one, failure=None if one else "no NVSwitch")
        for name, one in runs
    )
    return AlgorithmsBench(settings=settings, winners=find_winners(settings))


def read_as_the_plugin_does(text: str) -> list[tuple[str, ...]]:
    """LoadConfig in plugins/tuner/example/plugin.c: lines of up to 255 characters, '#' first is a comment."""
    rows = []
    for line in text.splitlines():
        assert len(line) < 255
        if line.startswith("#") or not line:
            continue
        fields = tuple(field.strip() for field in line.split(","))
        assert 8 <= len(fields) <= 10
        rows.append(fields)
    return rows


OWN = {"all_reduce": (1000, 2000, 4000, 8000), "all_gather": (1000, 1000, 1000, 1000)}


def test_what_won_becomes_rows_with_borders_between_the_sizes_that_were_measured() -> None:
    compared = result(
        ("default", bench(OWN, hosts=2)),
        ("tree/ll", bench({"all_reduce": (500, 1000, 9000, 9000)})),
        ("ring/simple/16", bench({"all_reduce": (900, 2000, 3000, 9000), "all_gather": (990, 990, 990, 500)})),
        ("nvls/simple", None),
        ("default", bench(OWN)),
    )
    assert read_as_the_plugin_does(tuner_csv(compared)) == [
        ("allreduce", "1024", "8192", "tree", "ll", "-1", "2", "4"),
        ("allreduce", "8193", "32768", "ring", "simple", "16", "2", "4"),
        ("allgather", "32769", "65536", "ring", "simple", "16", "2", "4"),
    ]
    first = compared.winners[0]
    assert (first.setting, first.time_ns, first.default_ns, first.gain_ratio) == ("tree/ll", 500, 1000, 0.5)
    assert first.gain_low == pytest.approx(1 - 510 / 980)
    assert first.gain_high == pytest.approx(1 - 490 / 1020)
    lines = "\n".join(winner_lines(compared))
    assert "# nvls/simple not measured: no NVSwitch" in lines
    assert "50.0 % (48.0 % .. 52.0 %)" in lines


@pytest.mark.parametrize(
    ("own", "again", "tried", "width"),
    [
        (OWN, OWN, (970, 1970, 3970, 7970), 2),  # within the quartiles
        (OWN, {"all_reduce": (400, 800, 1000, 2000)}, (500, 1000, 2000, 4000), 2),  # the link became faster by itself
        (OWN, OWN, (1100, 2100, 4100, 8100), 0),
    ],
)
def test_what_does_not_win_for_certain_has_no_row(own, again, tried, width) -> None:
    compared = result(
        ("default", bench(own, width=width)),
        ("ring/ll", bench({"all_reduce": tried}, width=width)),
        ("default", bench(again, width=width)),
    )
    assert read_as_the_plugin_does(tuner_csv(compared)) == []
    assert "# nothing measured beats NCCL's own choice for certain" in list(winner_lines(compared))


def test_settings_are_named_as_the_plugin_names_them_and_made_as_nccl_reads_them() -> None:
    assert parse_setting(" Tree/LL128/8 ") == NcclSetting("tree", "ll128", 8)
    assert str(NcclSetting("tree", "ll128", 8)) == "tree/ll128/8"
    assert NcclSetting("nvls_tree", "simple").environment() == {"NCCL_ALGO": "NVLSTree", "NCCL_PROTO": "Simple"}
    made = NcclSetting("ring", "ll", 2).environment()
    assert (made["NCCL_MIN_CTAS"], made["NCCL_MAX_CTAS"]) == ("2", "2")
    for wrong in ("", "ring", "ring/", "star/simple", "nvls/ll", "ring/ll/0", "ring/ll/65", "ring/ll/x"):
        with pytest.raises(SettingError):
            parse_setting(wrong)


def run_alone(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    return subprocess.run(
        [sys.executable, "-m", "pacecar", "bench", "net", *arguments],
        env=environ, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--algorithms", "ring/simple", "--backend", "gloo"], "does not apply to gloo"),
        (["--algorithms", "ring/fast"], "ring has the protocols ll, ll128, simple"),
        (["--tuner-csv", "file"], "--tuner-csv needs --algorithms"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_reason(arguments, words) -> None:
    ran = run_alone(*arguments)
    assert ran.returncode == 2
    assert words in ran.stderr
    assert ran.stdout == ""


RANK_OF_NCCL = """
import os, sys, time
from pacecar.commands.bench import operations
real = operations.BenchOperation.__init__
def init(self, operation, size_max, device):
    real(self, operation, size_max, device)
    run = self.run
    algorithm = os.environ.get("NCCL_ALGO")
    if algorithm == "NVLS":
        raise RuntimeError("no NVSwitch")
    def slow():
        run()
        time.sleep({None: 0.1, "Ring": 0.001, "Tree": 0.2}[algorithm])
    self.run = slow
operations.BenchOperation.__init__ = init
from pacecar.commands.main import main
main()
"""
"""Stands in for a rank on NCCL: gloo, with a time of its own for each algorithm."""

COMPARER = f"""
import sys
from pacecar.commands.bench import algorithms
algorithms.choose_backend = lambda backend: "nccl"
algorithms.PROGRAM = (sys.executable, "-c", {RANK_OF_NCCL!r}, "bench", "net", "--backend", "gloo")
from pacecar.commands.main import main
main()
"""


@pytest.mark.distributed
@pytest.mark.slow
def test_real_ranks_are_started_anew_for_each_setting_and_the_fastest_is_written(tmp_path: Path) -> None:
    csv = tmp_path / "tuner.csv"
    arguments = (
        "bench", "net", "--algorithms", "tree/ll,ring/simple/4,nvls/simple", "--tuner-csv", str(csv), "--json",
        "--op", "all_reduce", "-b", "4K", "-e", "64K", "-f", "16", "-n", "7", "-w", "0",
    )  # fmt: skip
    started = start_ranks(["-c", COMPARER, *arguments], 2, environ={"GLOO_SOCKET_IFNAME": "lo"})
    (code, out, err), (other, silence, _) = finish(started, 300)
    assert code == other == 0, err
    assert silence == ""
    found = json.loads(out)
    assert [one["setting"] for one in found["settings"]] == [
        "default", "tree/ll", "ring/simple/4", "nvls/simple", "default"
    ]  # fmt: skip
    assert [one["failure"] is None for one in found["settings"]] == [True, True, True, False, True]
    assert "no NVSwitch" in found["settings"][3]["failure"]
    assert {winner["setting"] for winner in found["winners"]} == {"ring/simple/4"}
    assert read_as_the_plugin_does(csv.read_text()) == [("allreduce", "4096", "65536", "ring", "simple", "4", "1", "2")]
