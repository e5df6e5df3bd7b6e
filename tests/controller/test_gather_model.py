"""What FSDP2's knobs save is forecast from bytes, a window and what was timed, with bounds that hold the truth."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.controller.forecast.gain_model import GainModel
from pacecar.controller.forecast.gather_model import UNIFORM_ERROR, expect_prefetch, expect_reshard
from pacecar.controller.forecast.setting_history import SettingReading, TypicalPace
from pacecar.controller.observation import JobFacts, KnobSpace, Observation, ShardedBytes
from pacecar.controller.policy.geometric_search import GeometricSearch
from pacecar.records import Ledger

MIB = 2**20
BLOCKS = ShardedBytes((4 * MIB,) * 8, (4 * MIB,))
COMPUTE_NS = 100_000_000


def reading(
    modules: ShardedBytes, here: int, *, alpha_ns: float, ns_per_byte: float, reduce_bytes: int, hidden_ns: float
) -> SettingReading:
    """What a window sees of a link of that cost where `hidden_ns` of the communication run under compute."""
    communication = communication_ns(modules, here, alpha_ns, ns_per_byte, reduce_bytes)
    exposed = max(0.0, communication - hidden_ns)
    return SettingReading(
        wall_ns=round(COMPUTE_NS + exposed), communication_ns=round(communication), exposed_ns=round(exposed),
        compute_ns=COMPUTE_NS, host_bound_ns=0, micro_batches=1, backward=None,
    )  # fmt: skip


def communication_ns(modules: ShardedBytes, here: int, alpha_ns: float, ns_per_byte: float, reduce_bytes: int) -> float:
    every = (*modules.freeable_bytes, *modules.other_bytes)
    gathered = sum(every) + sum(modules.freeable_bytes[:here])
    sent = gathered + reduce_bytes * sum(every)
    return alpha_ns * (2 * len(every) + here) + ns_per_byte * sent


def test_where_all_communication_is_exposed_each_gather_saved_is_its_time() -> None:
    link = {"alpha_ns": 0.0, "ns_per_byte": 1.0, "reduce_bytes": 1}
    seen = reading(BLOCKS, 8, hidden_ns=0.0, **link)
    wall_ns = seen.wall_ns
    for to in (0, 4, 7):
        forecast = expect_reshard(BLOCKS, {}, 8, to, seen)
        truth = (8 - to) * 4 * MIB / wall_ns
        assert forecast.gain_ratio == pytest.approx(truth, rel=0.15), "reductions may send twice as much"
        assert abs(forecast.gain_ratio - truth) < 2 * forecast.spread_ratio
    few = expect_reshard(BLOCKS, {}, 8, 7, seen)
    assert few.basis == "1 gather fewer in each backward"
    back = expect_reshard(BLOCKS, {}, 4, 8, reading(BLOCKS, 4, hidden_ns=0.0, **link))
    assert back.gain_ratio < 0
    assert back.basis == "4 gathers more in each backward"


def test_a_model_on_the_host_waits_for_every_gather_and_copies_it() -> None:
    host = replace(BLOCKS, on_host=True)
    seen = reading(BLOCKS, 8, alpha_ns=0.0, ns_per_byte=1.0, reduce_bytes=2, hidden_ns=5e7)
    device, forecast = (expect_reshard(modules, {}, 8, 0, seen) for modules in (BLOCKS, host))
    truth = 8 * 4 * MIB * (1.0 + 0.6) / seen.wall_ns
    assert device.gain_ratio < truth
    assert forecast.gain_ratio > 1.4 * 8 * 4 * MIB / seen.wall_ns, "more than the link takes"
    assert abs(forecast.gain_ratio - truth) < 1.6 * forecast.spread_ratio
    assert (
        expect_reshard(
            host, {}, 4, 8, reading(BLOCKS, 4, alpha_ns=0.0, ns_per_byte=1.0, reduce_bytes=2, hidden_ns=0.0)
        ).gain_ratio
        < 0
    )


def test_gathers_that_are_hidden_save_nothing() -> None:
    seen = reading(BLOCKS, 8, alpha_ns=0.0, ns_per_byte=0.1, reduce_bytes=1, hidden_ns=1e12)
    forecast = expect_reshard(BLOCKS, {}, 8, 0, seen)
    assert (forecast.gain_ratio, forecast.spread_ratio) == (0.0, 0.0)
    assert "nothing to win" in forecast.basis


SIZES = st.lists(st.integers(MIB, 64 * MIB), min_size=2, max_size=20)


@pytest.mark.slow
@given(
    SIZES, st.integers(0, 64 * MIB), st.floats(0, 1e6), st.floats(0.01, 10), st.sampled_from((1, 2)), st.floats(0, 1),
    st.data(),
)  # fmt: skip
def test_the_bounds_hold_what_any_link_saves_whichever_gathers_are_hidden(
    sizes: list[int],
    other: int,
    alpha: float,
    ns_per_byte: float,
    reduce_bytes: int,
    hidden: float,
    data: st.DataObject,
) -> None:
    modules = ShardedBytes(tuple(sizes), (other,))
    to = data.draw(st.integers(0, len(sizes) - 1))
    all_ns = communication_ns(modules, len(sizes), alpha, ns_per_byte, reduce_bytes)
    seen = reading(
        modules, len(sizes), alpha_ns=alpha, ns_per_byte=ns_per_byte, reduce_bytes=reduce_bytes,
        hidden_ns=hidden * all_ns,
    )  # fmt: skip
    saved_ns = all_ns - communication_ns(modules, to, alpha, ns_per_byte, reduce_bytes)
    least, most = max(0.0, saved_ns - (seen.communication_ns - seen.exposed_ns)), min(saved_ns, seen.exposed_ns)
    forecast = expect_reshard(modules, {}, len(sizes), to, seen)
    if forecast.spread_ratio == 0.0:
        assert seen.exposed_ns <= 1
        return
    width = forecast.spread_ratio / UNIFORM_ERROR + 1e-6
    for gain in (least / seen.wall_ns, most / seen.wall_ns):
        assert forecast.gain_ratio - width <= gain <= forecast.gain_ratio + width


def test_a_setting_that_was_timed_says_how_much_of_the_model_is_true() -> None:
    seen = reading(BLOCKS, 8, alpha_ns=0.0, ns_per_byte=1.0, reduce_bytes=1, hidden_ns=5e7)
    blind = expect_reshard(BLOCKS, {8: TypicalPace(seen.wall_ns, 0.015)}, 8, 0, seen)
    paces = {8: TypicalPace(seen.wall_ns, 0.015), 4: TypicalPace(seen.wall_ns, 0.015)}
    poor = expect_reshard(BLOCKS, paces, 8, 0, seen)
    assert 0 < poor.gain_ratio < 0.6 * blind.gain_ratio, "four blocks gained nothing"
    assert poor.spread_ratio < blind.spread_ratio
    good = expect_reshard(BLOCKS, {**paces, 4: TypicalPace(0.9 * seen.wall_ns, 0.015)}, 8, 0, seen)
    assert good.gain_ratio > blind.gain_ratio


def test_prefetching_hides_no_more_than_the_link_can_overlap() -> None:
    seen = reading(BLOCKS, 8, alpha_ns=0.0, ns_per_byte=0.5, reduce_bytes=1, hidden_ns=0.0)
    more, less = expect_prefetch(0, 2, seen), expect_prefetch(2, 0, seen)
    assert more.gain_ratio == -less.gain_ratio > 0
    busy = replace(seen, exposed_ns=seen.communication_ns, wall_ns=seen.communication_ns)
    assert expect_prefetch(0, 2, busy).gain_ratio == 0.0
    assert "no exposed communication could be hidden" in expect_prefetch(0, 2, busy).basis


def test_the_model_forecasts_from_windows_of_the_setting_in_force_and_only_where_blocks_are_known() -> None:
    values = {"fsdp_reshard": 8, "fsdp_prefetch": 0}
    seen = reading(BLOCKS, 8, alpha_ns=0.0, ns_per_byte=1.0, reduce_bytes=1, hidden_ns=0.0)
    ledger = Ledger(
        wall_ns=seen.wall_ns, compute_ns=seen.compute_ns, exposed_communication_ns=seen.exposed_ns,
        communication_ns=seen.communication_ns,
    )  # fmt: skip
    step = Observation(step=1, wall_ns=1, values=values, pace_ns=seen.wall_ns, ledger=ledger, exact=True)
    model = GainModel(JobFacts("j", 2, sharded=BLOCKS))
    assert model.expect("fsdp_reshard", values, 0) is None
    model.learn(step)
    assert model.expect("fsdp_reshard", values, 0) == expect_reshard(BLOCKS, {}, 8, 0, seen)
    assert model.expect("fsdp_prefetch", values, 2) == expect_prefetch(0, 2, seen)
    assert model.expect("fsdp_reshard", {**values, "fsdp_prefetch": 1}, 0) is None
    unknown = GainModel(JobFacts("j", 2))
    unknown.learn(step)
    assert unknown.expect("fsdp_reshard", values, 0) is None
    found, left_out = GeometricSearch([KnobSpace("fsdp_reshard", 8, (0, 2, 4, 6, 8))]).candidates(
        values, model.expect, 0.02
    )
    assert found == []
    assert left_out == ["fsdp_reshard: less communication would save 2.0% at most, nothing to win"]
