"""A slow link is named where other groups show how fast it could be; where none does, "nobody" is not claimed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pacecar.analysis.output.words import no_late_rank_words, untold_words
from pacecar.analysis.trace.columns import Trace
from tests.analysis.models import analyzed
from tests.kit.selection import decisive
from tests.kit.simulated_jobs import Fault, FaultKind, Job, Layout, Links, Model, simulate, truth_of

pytestmark = pytest.mark.slow

SPANNING = Job(Layout(tensor=4, data=2, ranks_per_host=2), Model(layers=2), Links(nic_shares=2), seed=71)
"""Tensor parallel groups lie across two of four hosts each, data parallel ones across the others."""


def with_link(job: Job, host: int, size: float) -> Job:
    return replace(job, faults=(Fault(FaultKind.SLOW_LINK, job.layout.ranks_of_host(host), size),))


STAGES = Job(
    Layout(pipeline=4, data=4, ranks_per_host=4),
    Model(layers=1, microbatches=4, activation_bytes=16_000_000),
    Links(nic_shares=2),
    seed=74,
)
"""Each host has a stage, and only messages go between hosts: four pipelines' on two network cards."""


@pytest.mark.parametrize("host", decisive(range(4), 1))
@pytest.mark.parametrize("shares", [1, 2, None])
def test_the_slow_link_of_a_host_is_named_where_messages_of_all_pipelines_share_it(
    host: int, shares: int | None
) -> None:
    job = replace(STAGES, links=Links(nic_shares=shares))
    truth = truth_of(with_link(job, host, 1.0))
    [culprit] = truth.culprits
    [straggler] = analyzed(truth.run.traces()).stragglers
    assert (straggler.kind, straggler.cause, tuple(straggler.ranks)) == ("link", "link", culprit.ranks)
    assert straggler.saved_ns == pytest.approx(culprit.saved_step_ns, abs=0.02 * truth.run.step_ns)


@pytest.mark.parametrize("shares", [1, 2])
def test_healthy_stages_that_share_the_links_of_their_hosts_name_nobody(shares: int) -> None:
    assert analyzed(simulate(replace(STAGES, links=Links(nic_shares=shares))).traces()).stragglers == []


@pytest.mark.parametrize("host", range(4))
def test_the_slow_link_of_a_host_is_named_where_each_of_its_ranks_is_in_a_slow_group_of_its_own(host: int) -> None:
    truth = truth_of(with_link(SPANNING, host, 2.0))
    [culprit] = truth.culprits
    [straggler] = analyzed(truth.run.traces()).stragglers
    assert (straggler.kind, straggler.cause, tuple(straggler.ranks)) == ("link", "link", culprit.ranks)
    assert straggler.saved_ns == pytest.approx(culprit.saved_step_ns, abs=0.02 * truth.run.step_ns)


def test_healthy_groups_across_hosts_name_nobody() -> None:
    assert analyzed(simulate(SPANNING).traces()).stragglers == []


def without_numbers(trace: Trace) -> Trace:
    """Return the trace of a rank that sees one device only."""
    return replace(trace, device=replace(trace.device, device=np.zeros_like(trace.device.device)))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("has_numbers", [True, False], ids=["numbered devices", "one device each"])
def test_a_message_to_another_host_is_no_slow_link_where_hosts_have_no_names(schedule: str, has_numbers: bool) -> None:
    job = Job(
        Layout(pipeline=4, data=2, ranks_per_host=4),
        Model(layers=1, microbatches=4, activation_bytes=16_000_000, schedule=schedule),
        seed=72, has_host_names=False,
    )  # fmt: skip
    traces = simulate(job).traces()
    assert analyzed(traces if has_numbers else [without_numbers(trace) for trace in traces]).stragglers == []


def test_a_slow_link_between_two_stages_is_named_beside_that_of_another_replica_without_names() -> None:
    layout = Layout(pipeline=2, data=4, ranks_per_host=4)
    job = Job(layout, Model(layers=1, microbatches=4, activation_bytes=16_000_000), seed=73, has_host_names=False)
    slow = replace(job, faults=(Fault(FaultKind.SLOW_DEVICE_LINK, (5,), 3.0),))
    found = [one for one in analyzed(simulate(slow).traces()).stragglers if one.kind == "link"]
    assert [5 in one.ranks for one in found] == [True]


@pytest.mark.parametrize(("size", "is_told"), [(9.0, False), (0.0, True)])
def test_that_nobody_holds_the_job_up_is_not_claimed_where_all_groups_use_the_same_slow_link(
    size: float, is_told: bool
) -> None:
    job = Job(Layout(tensor=2, data=4, ranks_per_host=4), Model(layers=2, layer_bytes=12_000_000), seed=74)
    found = analyzed(simulate(with_link(job, 1, size) if size else job).traces())
    assert found.stragglers == []
    assert (untold_words(found) is None) is is_told
    if not is_told:
        assert no_late_rank_words(found) == "Who holds the job up cannot be told"
        assert "links" in (untold_words(found) or "")
