"""Start scripts that know nothing of pacecar, bare and under `pacecar run`, and compare what they say and how they end.

All pythons of a run are forked from one that has torch loaded, also the launcher's ranks: a run costs tenths of a
second of CPU instead of ten.  There the start-up of `pacecar run` finds torch loaded and listens at once.  What it does
in a fresh python, before and while torch is imported, `test_startup.py` asks, and of whole jobs, torchrun and signals
the tests that say FRESH.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.kit.forking_python import forking_python
from tests.kit.net import free_port

JOBS = Path(__file__).resolve().parents[2] / "jobs"
NANOGPT, RESNET, TRAINER = JOBS / "nanogpt_like.py", JOBS / "resnet_like.py", JOBS / "trainer_like.py"
PLAIN = {name: value for name, value in os.environ.items() if not name.startswith("PACECAR_") and name != "PYTHONPATH"}
FRESH = sys.executable
"""A python that imports torch itself: what a user starts."""

TIMEOUT_SECONDS = 300
# DeepSpeed, which accelerate imports where it is installed, would say with a time stamp that it found no GPU.
SAME = {"OMP_NUM_THREADS": "1", "PACECAR_TUNE_REMEMBER": "false", "DS_ACCELERATOR": "cpu"}

END = re.compile(r"pacecar: (\d+ steps? of |measured no step)")
"""What the line begins with that says, at the end, what was measured and kept."""

EACH_STEP = {"PACECAR_HOOK_OVERHEAD_BUDGET": "1.0"}
"""Each step has a record: on a busy machine the usual budget pays for one in some."""


@dataclass
class Done:
    """What a run left behind: its exit code, its lines, pacecar's own lines and the one of its end, records by rank."""

    code: int
    out: str
    errors: list[str]
    pacecar: list[str]
    end: list[str]
    records: list[list[dict[str, Any]]]

    def of(self, rank: int, kind: str) -> list[dict[str, Any]]:
        """Return a rank's records of one type."""
        return [record for record in self.records[rank] if record["type"] == kind]

    @property
    def ended(self) -> tuple[int, str, list[str]]:
        """What a user sees of the script, with and without pacecar."""
        return self.code, self.out, self.errors


def command(
    script: Path,
    *arguments: str,
    ranks: int,
    watched: tuple[str, ...] | None,
    python: str | None = None,
    is_torchrun: bool = True,
) -> list[str]:
    """Return the command line; `watched` holds the options of `pacecar run`, None is the bare script.

    Where not `is_torchrun`, a shell starts the ranks.  `python` is a forked one, unless said.
    """
    python = python or forking_python()
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
    start = [python, *(launcher if ranks > 1 else []), str(script), *arguments]
    if ranks > 1 and not is_torchrun:
        lines = [f"export WORLD_SIZE={ranks} MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()}"]
        lines += [f'RANK={rank} LOCAL_RANK={rank} "$0" "$@" & p{rank}=$!' for rank in range(ranks)]
        lines += [" && ".join(f"wait $p{rank}" for rank in range(ranks))]
        start = ["sh", "-c", "\n".join(lines), python, str(script), *arguments]
    return start if watched is None else [python, "-m", "pacecar", "run", *watched, "--", *start]


def run(
    script: Path,
    *arguments: str,
    ranks: int = 2,
    watched: tuple[str, ...] | None = None,
    python: str | None = None,
    is_torchrun: bool = True,
    **environ: str,
) -> Done:
    """Run a script to its end."""
    done = subprocess.run(
        command(script, *arguments, ranks=ranks, watched=watched, python=python, is_torchrun=is_torchrun),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
        env=PLAIN | SAME | environ,
    )
    lines = done.stderr.splitlines()
    own = [line for line in lines if line.startswith("pacecar:")]
    folder = Path(watched[watched.index("--run-dir") + 1]) if watched and "--run-dir" in watched else None
    return Done(
        done.returncode,
        done.stdout,
        sorted(neutral(line) for line in lines if line not in own and not is_chance(line)),
        [line for line in own if not END.match(line)],
        [line for line in own if END.match(line)],
        [] if folder is None else [read_records(folder / f"rank{rank}.jsonl") for rank in range(ranks)],
    )


@cache
def bare_run(script: Path, *arguments: str, ranks: int = 2) -> Done:
    """Run a script without pacecar, once for all tests that compare with it."""
    return run(script, *arguments, ranks=ranks)


def run_both(script: Path, *arguments: str, watched: tuple[str, ...], **options: Any) -> tuple[Done, Done]:
    """Run a script bare and watched, side by side."""
    options["python"] = options.get("python") or forking_python()  # not by both threads
    with ThreadPoolExecutor(2) as both:
        bare = both.submit(run, script, *arguments, **options)
        seen = both.submit(run, script, *arguments, watched=watched, **options)
        return bare.result(), seen.result()


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return what a rank wrote; a rank that was killed may have left half a line."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def neutral(line: str) -> str:
    """Leave out times, process ids, ports and addresses."""
    return re.sub(r"0x[0-9a-f]+|\d+", "N", line)


def is_chance(line: str) -> bool:
    """What gloo and torchrun say of peers that are gone depends on who noticed first; two profilers mix their lines."""
    return not line.strip() or bool(re.match(r"\[[WEI]\d|[WEI]\d{4}|\[rank|\[c10d|\[Gloo|USDT:", line))
