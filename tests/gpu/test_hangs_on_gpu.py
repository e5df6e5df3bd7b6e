"""Two ranks on one GPU over gloo, one of which gets stuck: whom pacecar names, as what, and after how long."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import Figures
from tests.profiler.hangs.injection import Case, Outcome, inject

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

STUCK_RANK = 1
WORLD = 2
SECONDS_MAX = 15.0
"""From the moment when it gets stuck to the verdict."""


def stuck(fault: str, kinds: tuple[str, ...], folder: Path, device: torch.device, figures: Figures) -> Outcome:
    """Let `fault` happen to STUCK_RANK, keep as figures what was said, and check that nobody else is named."""
    case = Case(fault, STUCK_RANK, WORLD, kinds, device=device.type)
    outcome = inject(folder / "job", case)
    judged = outcome.judged(case)
    figures(judged=judged, has_ended=outcome.has_ended, log=outcome.log)
    if outcome.verdicts:
        first = outcome.verdicts[0]
        figures(seconds=round(first["seconds"], 1), kind=first["kind"], culprits=first["culprits"],
                summary=first["summary"], evidence=first["evidence"])  # fmt: skip
    assert judged != "wrong", outcome.log
    return outcome


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "kind"),
    [("loader_pipe", "not_joined"), ("stop", "stopped"), ("gil", "no_answer"), ("late", "not_joined")],
)
def test_host(fault: str, kind: str, tmp_path: Path, device: torch.device, figures: Figures) -> None:
    """A rank whose host is stuck is named within 15 s, and the other one is not."""
    outcome = stuck(fault, (kind,), tmp_path, device, figures)
    named = [verdict for verdict in outcome.verdicts if verdict["culprits"]]
    assert [verdict["culprits"] for verdict in named[:1]] == [[STUCK_RANK]]
    assert named[0]["seconds"] < SECONDS_MAX


@pytest.mark.full
def test_kernel(tmp_path: Path, device: torch.device, figures: Figures) -> None:
    """The rank that waits for one with a kernel that does not end is not named."""
    stuck("kernel", ("not_joined", "no_answer"), tmp_path, device, figures)
