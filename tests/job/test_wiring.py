"""The parts of a training process start in order, and if one cannot start nothing of the others stays."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from torch import nn

import pacecar
from pacecar.job import wiring
from pacecar.records import JobRecord
from tests.job.test_attach import make_job, plain_losses, train
from tests.kit.waiting import until


class Logger:
    """A logger of the script's own."""

    dropped = 0

    def __init__(self) -> None:
        self.records: list[JobRecord] = []
        self.is_closed = False

    def put(self, record: JobRecord) -> None:
        self.records.append(record)

    def close(self, timeout_seconds: float) -> None:
        self.is_closed = True


def hooks_of(model: nn.Module, optimizer: object) -> list[object]:
    """Return the hooks; torch keeps an empty dictionary where there were some."""
    kept = [vars(optimizer)[name] for name in vars(optimizer) if "hooks" in name]
    for module in model.modules():
        kept += [vars(module)[name] for name in vars(module) if "hooks" in name and "id" not in name]
    return [hook for hooks in kept for hook in hooks]


@pytest.mark.parametrize(
    ("part", "when"),
    [
        ("JobKnobs", "made"), ("Tuner", "made"), ("Tuner", "started"), ("CommandHandler", "made"),
        ("RankMonitor", "made"), ("RankMonitor", "started"),
    ],
)  # fmt: skip
def test_a_part_that_cannot_start_leaves_none_of_the_others(
    part: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("planted")

    before = set(threading.enumerate())
    model, optimizer = make_job()
    own = hooks_of(model, optimizer)
    logger = Logger()
    options = {"tune": "exact", "socket": str(tmp_path / "none"), "run_dir": tmp_path / "run", "loggers": [logger]}
    with monkeypatch.context() as patch:
        if when == "made":
            patch.setattr(wiring, part, fail)
        else:
            patch.setattr(getattr(wiring, part), "start", fail)
        pacer = pacecar.attach(model, optimizer, **options)
    assert pacer.inert_because == "could not start: OSError: planted"
    assert hooks_of(model, optimizer) == own
    until(lambda: set(threading.enumerate()) <= before, "a thread stays")  # they are told to end and not waited for
    assert not logger.is_closed, "it is the script's, and another attach may get it"
    with pacer:
        assert train(pacer, model, optimizer) == plain_losses()
    model, optimizer = make_job()
    with pacecar.attach(model, optimizer, **options) as again:
        assert again.is_active
        assert train(again, model, optimizer) == plain_losses()
    assert logger.is_closed
