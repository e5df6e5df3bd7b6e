"""Real gloo jobs that hang or pause: who holds them up is named within 15 s, and nobody while they are merely slow.

`bench/bench_hangs.py` injects many more.
"""

from __future__ import annotations

import pytest

from pacecar.analysis.hang.document import hang_document
from pacecar.clock import SystemClock
from tests.kit.shaping import why_not
from tests.kit.waiting import until
from tests.profiler.hangs.injection import ALL, Case, inject

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

NAMED_SECONDS = 25.0
"""15 s, and what a machine that is busy with other tests adds."""

HANGS = [
    Case("stop", 1, 3, ("stopped",)),
    Case("loader", 1, 2, ("not_joined",)),
    pytest.param(Case("stop", 0, 2, ("stopped",)), marks=pytest.mark.full),
    pytest.param(Case("gil", 1, 2, ("no_answer",)), marks=pytest.mark.full),
    pytest.param(Case("lock", 0, 3, ("not_joined",)), marks=pytest.mark.full),
    pytest.param(Case("skip", 2, 3, ("skipped",)), marks=pytest.mark.full),
    pytest.param(Case("other", 0, 3, ("mismatched",)), marks=pytest.mark.full),
    pytest.param(Case("skip", 1, 2, ("skipped",)), marks=pytest.mark.full),
    pytest.param(Case("extra", 0, 2, ("extra",)), marks=pytest.mark.full),
    pytest.param(Case("receive", 1, 2, ("not_joined",)), marks=pytest.mark.full),
    pytest.param(Case("leave", 0, 3, ("no_answer",)), marks=pytest.mark.full),
]


@pytest.mark.parametrize("case", HANGS, ids=str)
def test_the_rank_that_holds_a_job_up_is_named_and_no_other(tmp_path, case):
    folder = tmp_path / "job"
    outcome = inject(folder, case, lambda: until(lambda: [*folder.glob("hang-step*.json")], "the evidence is kept"))
    assert outcome.judged(case) == "right", f"{outcome.verdicts}\n{outcome.log}"
    again = hang_document(folder, SystemClock()).verdict
    assert (again.kind, again.culprits) == (case.kinds[0], (case.rank,)), "pacecar analyze --hang says the same"
    begun = [verdict for verdict in outcome.verdicts if not verdict["ended"]]
    assert len(begun) == 1, "it is said once, by one rank"
    assert begun[0]["seconds"] < NAMED_SECONDS
    assert begun[0]["summary"] in outcome.log


@pytest.mark.full
@pytest.mark.skipif(why_not() is not None, reason="needs network namespaces")
@pytest.mark.parametrize(
    "case", [Case("unplug", 1, 2, ("link",), hosts=2), Case("lossy", 2, 3, ("link",), hosts=3)], ids=str
)
def test_a_dead_link_is_said_on_both_of_its_sides_and_names_no_rank(tmp_path, case):
    outcome = inject(tmp_path / "job", case)
    assert outcome.judged(case) == "right", f"{outcome.verdicts}\n{outcome.log}"


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        Case("pause", 0, 2),
        Case("write", 1, 2, pause_seconds=20.0),
        Case("evaluate", 0, 2, pause_seconds=20.0),
        Case("checkpoint", 0, 2, pause_seconds=20.0),
        Case("none", ALL, 2, stop_all_seconds=20.0),
        Case("pause_all", ALL, 2, pause_seconds=20.0),
        Case("pause_loader", ALL, 2, pause_seconds=20.0),
    ],
    ids=str,
)
def test_nobody_is_named_while_a_job_is_merely_slow(tmp_path, case):
    outcome = inject(tmp_path / "job", case)
    assert outcome.judged(case) == "right", f"{outcome.verdicts}\n{outcome.log}"
    assert "(0)" in outcome.log, "the job ended"
