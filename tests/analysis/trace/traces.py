"""Where are the real traces that tests read?

They are not in the repository: thirty megabytes that belong to others.  `PACECAR_TRACES` names their folder, else it is
looked for beside the repository.  A test that needs a trace which is not there is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

__all__ = ["dumps_folder", "each_kind", "folder", "manifest", "names", "trace_file"]

REPOSITORY = Path(__file__).resolve().parents[3]


@cache
def folder() -> Path | None:
    """Return the folder with `manifest.json`, None when there is none here."""
    places = [REPOSITORY.parent / "shared/traces"]
    if given := os.environ.get("PACECAR_TRACES"):
        places.insert(0, Path(given))
    git = subprocess.run(  # a worktree stands elsewhere than the repository it belongs to
        ["git", "-C", str(REPOSITORY), "rev-parse", "--git-common-dir"], capture_output=True, text=True, check=False
    )
    if git.returncode == 0:
        places.append((REPOSITORY / git.stdout.strip()).resolve().parents[1] / "shared/traces")
    return next((place for place in places if (place / "manifest.json").is_file()), None)


def dumps_folder(name: str) -> Path:
    """Return the folder of an incident's flight recorder dumps, beside the traces; skips the test without it."""
    where = folder()
    found = None if where is None else where.parent / "fr_dumps" / name
    if found is None or not found.is_dir():
        pytest.skip(f"no flight recorder dumps of {name} here")
    return found


@cache
def manifest() -> dict[str, dict[str, Any]]:
    """Return the manifest's entries by `file`, empty when there are no traces here."""
    where = folder()
    if where is None:
        return {}
    return {entry["file"]: entry for entry in json.loads((where / "manifest.json").read_text())}


def names() -> list[str]:
    """Return every trace of the manifest, for `pytest.mark.parametrize`; a single missing one when there are none."""
    return sorted(manifest()) or ["no traces here"]


OF_EACH_KIND = (
    "hta_amd_mi250/", "hta_cpu_only/", "hta_event_sync/", "hta_nccl_data/", "hta_simple_add/",
    "hta_trace_filter_128ranks/sampled_rank-0", "hta_triton/", "kineto_tb_nw4", "param_dlrm_8xV100/worker0",
    "tl_b200", "tl_h100_gaunernst", "tl_inf_vllm", "tl_mi210", "tl_mi300",
)  # fmt: skip
"""The smallest trace of each maker's device, torch, writer and communication: others are another rank or job of one."""


def each_kind() -> list[Any]:
    """Return `names()` for `pytest.mark.parametrize`; those that are like another one are left to `full`."""
    return [name if name.startswith(OF_EACH_KIND) else pytest.param(name, marks=pytest.mark.full) for name in names()]


def trace_file(name: str) -> Path:
    """Return the path of one trace, named as in the manifest or by its folder there; skip the test if it is absent."""
    where = folder()
    if where is not None:
        path = where / name
        if path.is_dir():
            path = min(path.iterdir())
        if path.is_file():
            return path
    pytest.skip(f"the trace {name} is not here")
