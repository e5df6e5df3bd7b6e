"""A gather that another rank never joins neither keeps its rank from closing nor kills it when it ends."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.kit.forking_python import forking_python

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

JOB = Path(__file__).parent / "job_exit.py"


def start(rank: int, store: Path) -> subprocess.Popen[str]:
    environ = {"RANK": str(rank), "STORE": str(store), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [forking_python(), str(JOB)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | environ | {"FORKED_FINALIZES": "1"},  # python's whole end is what the test is about
    )


def test_an_abandoned_gather_neither_blocks_the_close_nor_aborts_the_end(tmp_path: Path) -> None:
    abandoned, absent = start(0, tmp_path / "store"), start(1, tmp_path / "store")
    try:
        assert absent.stdout.readline() == "ready\n"
        line = abandoned.stdout.readline()  # its interpreter ends now, slowly
        assert line.startswith("closed in "), line
        assert float(line.split()[2]) < 30.0, "who waits for the gather waits for a minute, or half an hour"
        absent.communicate("go\n", timeout=60)
        output, _ = abandoned.communicate(timeout=60)
        assert (abandoned.returncode, output) == (0, "")
    finally:
        for process in (abandoned, absent):
            if process.poll() is None:
                process.kill()
                process.communicate()
