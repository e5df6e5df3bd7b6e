"""How do tests start scripts that know nothing of pacecar, bare and under `pacecar run`, and compare what they say?"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JOBS = Path(__file__).resolve().parents[1] / "jobs"
NANOGPT, RESNET = JOBS / "nanogpt_like.py", JOBS / "resnet_like.py"
PLAIN = {name: value for name, value in os.environ.items() if not name.startswith("PACECAR_") and name != "PYTHONPATH"}
TIMEOUT_SECONDS = 300


@dataclass
class Done:
    """What a run left behind: its exit code, its lines, pacecar's own lines, its records by rank."""

    code: int
    out: str
    errors: list[str]
    pacecar: list[str]
    records: list[list[dict[str, Any]]]

    def of(self, rank: int, kind: str) -> list[dict[str, Any]]:
        """Return a rank's records of one type."""
        return [record for record in self.records[rank] if record["type"] == kind]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(script: Path, *arguments: str, ranks: int, watched: tuple[str, ...] | None) -> list[str]:
    """Return the command line; `watched` holds the options of `pacecar run`, None is the bare script."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
    start = [sys.executable, *(launcher if ranks > 1 else []), str(script), *arguments]
    return start if watched is None else [sys.executable, "-m", "pacecar", "run", *watched, "--", *start]


def run(script: Path, *arguments: str, ranks: int = 2, watched: tuple[str, ...] | None = None, **environ: str) -> Done:
    """Run a script to its end."""
    done = subprocess.run(
        command(script, *arguments, ranks=ranks, watched=watched),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
        env=PLAIN | {"OMP_NUM_THREADS": "1", "PACECAR_TUNE_REMEMBER": "false"} | environ,
    )
    lines = done.stderr.splitlines()
    own = [line for line in lines if line.startswith("pacecar:")]
    folder = Path(watched[watched.index("--run-dir") + 1]) if watched and "--run-dir" in watched else None
    return Done(
        done.returncode,
        done.stdout,
        sorted(neutral(line) for line in lines if line not in own and not is_chance(line)),
        own,
        [] if folder is None else [read_records(folder / f"rank{rank}.jsonl") for rank in range(ranks)],
    )


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return what a rank wrote; a rank that was killed may have left half a line."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def neutral(line: str) -> str:
    """Leave out times, process ids, ports and addresses."""
    return re.sub(r"0x[0-9a-f]+|\d+", "N", line)


def is_chance(line: str) -> bool:
    """What gloo and torchrun say of peers that are gone depends on who noticed first."""
    return bool(re.match(r"\[[WEI]\d|[WEI]\d{4}|\[rank|\[c10d|\[Gloo", line))
