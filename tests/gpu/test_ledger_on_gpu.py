"""Ledgers of steps whose work is known: what each heading says against what was launched."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from pacecar.records import JobRecord, StepRecord
from tests.gpu.conftest import Figures
from tests.gpu.jobs import run_json
from tests.gpu.ledger_job import SCENES

pytestmark = [pytest.mark.gpu, pytest.mark.exclusive, pytest.mark.slow]

Spans = list[tuple[str, float, float]]

SMALL_MS = 0.4
"""What the linear layer, its backward and its optimizer add, and a piece that is under way at a step's end."""

RATIO = 0.02


def covered_ms(spans: Spans, within: tuple[float, float], kind: str, *, beside: str | None = None) -> float:
    """Return for how long within an interval something of `kind` ran, less where something of `beside` did."""
    first, last = within
    clipped = [(what, max(begin, first), min(end, last)) for what, begin, end in spans if begin < last and end > first]
    edges = sorted({edge for _, begin, end in clipped for edge in (begin, end)})
    total = 0.0
    for left, right in pairwise(edges):
        there = {what for what, begin, end in clipped if begin <= left and right <= end}
        if kind in there and beside not in there:
            total += right - left
    return 1e3 * total


@pytest.mark.parametrize("scene", SCENES)
def test_ledger(scene: str, tmp_path: Path, is_real: bool, figures: Figures) -> None:
    """Compute and exposed copies of profiled steps are what events around each kernel and copy say."""
    steps = 80 if is_real else 24
    found = run_json("tests.gpu.ledger_job", scene, "--steps", str(steps), "--run-dir", str(tmp_path), seconds=60)
    spans = found["spans"]
    decoder = msgspec.json.Decoder(JobRecord)
    records = [decoder.decode(line) for line in (tmp_path / "rank0.jsonl").read_bytes().splitlines()]
    told = [record for record in records if isinstance(record, StepRecord)]
    truth = [(kind, begin, end) for kind, begin, end in spans]
    rows = []
    for record in told:
        within = (record.ended_wall_ns - record.wall_ns) / 1e9, record.ended_wall_ns / 1e9
        rows.append({
            "step": record.step, "source": record.source, "wall_ms": record.wall_ns / 1e6,
            "overhead_ms": record.overhead_ns / 1e6,
            "compute_ms": record.ledger.compute_ns / 1e6, "true_compute_ms": covered_ms(truth, within, "compute"),
            "exposed_copy_ms": record.ledger.exposed_copy_ns / 1e6,
            "true_exposed_copy_ms": covered_ms(truth, within, "copy", beside="compute"),
            "host_bound_ms": record.ledger.host_bound_ns / 1e6, "unknown_ms": record.ledger.unknown_ns / 1e6,
        })  # fmt: skip
    exact = [row for row in rows if row["source"] == "exact"]
    estimates = [row for row in rows if row["source"] == "estimate" and row["unknown_ms"] < 0.01 * row["wall_ms"]]
    figures(exact=exact[-4:], windows=len(exact), estimates=estimates[-3:], log=found["log"][:20])
    figures(estimate_errors={
        kind: sum(row[f"{kind}_ms"] - row[f"true_{kind}_ms"] for row in estimates)
        / max(1e-9, sum(row["wall_ms"] for row in estimates))
        for kind in ("compute", "exposed_copy")
    })  # fmt: skip
    assert exact, [record.uncalibrated for record in told]
    wrong = [
        row
        for row in exact
        for kind in ("compute", "exposed_copy")
        if abs(row[f"{kind}_ms"] - row[f"true_{kind}_ms"]) > SMALL_MS + RATIO * row[f"true_{kind}_ms"]
    ]
    if is_real:
        assert not wrong
