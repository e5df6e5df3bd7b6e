"""Labels that name a kind of thing come from closed sets, and what hooks really send is in them."""

import pytest

from pacecar import __version__
from pacecar.knobs import KNOBS
from pacecar.metrics.catalog import by_name as metric
from pacecar.monitor.export import metric_writer, pages
from pacecar.monitor.ingest.frame_validation import FrameValidation, Peer
from pacecar.profiler.ranks.exchange.phase_sums_message import PHASES
from pacecar.profiler.windows.collective_stats import SeenCollective, sum_collectives
from pacecar.records import (  # fmt: skip
    PHASES_OF_JOBS,
    CollectiveSum,
    CollectiveWindow,
    Decision,
    JobLedger,
    Knobs,
    KnobSwitch,
    Rung,
    Sample,
    TunerOrder,
    Verdict,
    Vitals,
    WhatIf,
)
from pacecar.records.measurements.collectives import OPERATIONS
from pacecar.records.measurements.device_utilization import ARITHMETICS
from pacecar.records.measurements.what_if import RUNG_NAMES, Bound
from pacecar.wire import FrameError, Refusal, encode_frame

FRESH = "x" * 200
JOB = {"job": "run-7"}
VITALS = {"rank": 0, "step": 1, "ended_wall_ns": 1, "steps": 1, "wall_ns": 1, "samples": None, "tokens": None}
VERDICT = {
    "measured_gain_ratio": None, "gain_low": None, "gain_high": None, "evidence": None, "trial_steps": 1,
    "exploration_ns": 1, "reason": "",
}  # fmt: skip
DECISION = {
    "decision": 1, "kind": "trial", "from_value": 1, "to_value": 2, "step": 1, "wall_ns": 1, "reason": "",
    "expected_gain_ratio": None,
}  # fmt: skip
LADDER = {
    "of_rank": None, "step": 1, "wall_ns": 1, "steps": 1, "pace_ns": 1, "source": "exact", "calibration_age_steps": 0,
}  # fmt: skip
LEDGER = {
    "ranks": 1, "step": 1, "pace_ns": 1, "median_ns": 1, "total_steps": 1, "total_wall_ns": 1,
}  # fmt: skip


def operation(name):
    sums = (CollectiveSum(operation=name, count=1, duration_ns=1),)
    return CollectiveWindow(**JOB, rank=0, step=1, ended_wall_ns=1, sums=sums)


def records(make_step, knob, phase, name, rung, arithmetic):
    yield make_step(knobs=Knobs(1, {knob: 1}))
    yield KnobSwitch(**JOB, rank=0, decision=1, epoch=1, step=1, knobs=Knobs(1, {knob: 1}), duration_ns=1)
    yield Decision(**JOB, knob=knob, **DECISION)
    yield Verdict(**JOB, decision=1, knob=knob, outcome="kept", step=1, wall_ns=1, **VERDICT)
    yield TunerOrder(**JOB, action="set", outcome="done", uid=1, values={knob: 1}, step=1, wall_ns=1, detail="")
    yield JobLedger(**JOB, total_phases_ns={phase: 1}, **LEDGER)
    yield operation(name)
    yield WhatIf(**JOB, rungs=(Rung(rung, 1, 0.1, Bound.REST),), **LADDER)
    yield Vitals(**JOB, arithmetic=arithmetic, **VITALS)


@pytest.fixture
def conversation(make_hello):
    conversation = FrameValidation(Peer(4242, 1000, 1000), own_pid=lambda pid: None)
    conversation.decode(encode_frame(make_hello()))
    return conversation


@pytest.mark.parametrize("name", [FRESH, "", "bucket_bytes ", "BUCKET_BYTES", "all_reduce\n", "\x1b[2J"])
def test_a_name_of_no_closed_set_is_refused_and_named(conversation, make_step, name):
    for record in records(make_step, name, name, name, name, name):
        with pytest.raises(FrameError, match="there is no ") as refused:
            conversation.decode(encode_frame(record))
        assert refused.value.refusal is Refusal.MALFORMED
        assert repr(name[:40]) in str(refused.value)


def test_every_name_that_there_is_passes(conversation, make_step):
    names = [
        [knob.name for knob in KNOBS], PHASES_OF_JOBS, sorted(OPERATIONS), sorted(RUNG_NAMES), sorted(ARITHMETICS)
    ]  # fmt: skip
    for number in range(max(map(len, names))):
        for record in records(make_step, *(some[number % len(some)] for some in names)):
            conversation.decode(encode_frame(record))


def test_what_hooks_send_is_in_the_closed_sets():
    assert set(PHASES) == {"wall", *PHASES_OF_JOBS}
    rows = [SeenCollective("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 0, 1), SeenCollective("gloo:something", 1, 2),
            SeenCollective("k", 2, 3, '"Collective name": "my_own_thing", "In msg nelems": 1')]  # fmt: skip
    assert {one.operation for one in sum_collectives(rows, (0, 10))} <= OPERATIONS


def test_a_value_that_is_text_is_bounded_too(conversation):
    given = DECISION | {"from_value": "v" * 300}
    with pytest.raises(FrameError, match="length <= 256"):
        conversation.decode(encode_frame(Decision(**JOB, knob="compression", **given)))


def test_what_is_no_record_here_is_refused_with_both_versions_where_they_differ(make_hello):
    unknown = encode_frame(Decision(**JOB, knob="compression", **DECISION | {"from_value": "v" * 300}))
    for version, hint in ((__version__, ""), ("9.0", f"the job runs pacecar 9.0, this daemon {__version__}: upgrade")):
        conversation = FrameValidation(Peer(4242, 1000, 1000), own_pid=lambda pid: None)
        conversation.decode(encode_frame(make_hello(pacecar_version=version)))
        with pytest.raises(FrameError, match="length <= 256") as refused:
            conversation.decode(unknown)
        assert refused.value.refusal is Refusal.MALFORMED
        assert ("the job runs" in str(refused.value)) is bool(hint)
        assert hint in str(refused.value)


def test_a_second_hello_is_the_first_again(conversation, make_hello):
    conversation.decode(encode_frame(make_hello()))
    for changed in ({"host": "fresh"}, {"device": "fresh"}, {"framework": "fresh"}, {"backend": "fresh"}):
        with pytest.raises(FrameError, match="a different hello") as refused:
            conversation.decode(encode_frame(make_hello(**changed)))
        assert refused.value.refusal is Refusal.IDENTITY


@pytest.mark.slow
def test_the_page_remembers_no_more_bytes_of_lines_than_it_may(monkeypatch):
    monkeypatch.setattr(metric_writer, "LINES_BYTES_MAX", 200_000)
    pen = metric_writer.MetricWriter(pages.text_line)
    empty = [""] * (len(metric("pacecar_rank_info").labels) - 2)
    for number in range(3000):
        pen.write([Sample("pacecar_rank_info", ("x" * 250, str(number), *empty), 1)])
        assert pen._bytes <= 200_000 + 2000
    kept = [Sample("pacecar_host_network_up", (f"eth{number}",), 1) for number in range(10)]
    for _ in range(3):
        families = pen.write(kept)
    assert families["pacecar_host_network_up"].count(b"\n") == 10
