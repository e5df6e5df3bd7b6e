"""The model's timeline is DDP's, its fits recover what made the data, and it forecasts nothing without data."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.controller.experiment.ab_trial import refill_steps
from pacecar.controller.forecast.bucket_model import pack_buckets, play
from pacecar.controller.forecast.forecast import Forecast
from pacecar.controller.forecast.gain_model import GainModel
from pacecar.controller.forecast.setting_history import SETTINGS_MAX
from pacecar.controller.observation import JobFacts, KnobSpace, Observation
from pacecar.controller.policy.geometric_search import GeometricSearch
from pacecar.records import Ledger

MIB = 2**20
MS = 1_000_000
GRADIENTS = (MIB,) * 64
FACTS = JobFacts(job="job", world_size=2, gradient_bytes=GRADIENTS, batch_samples=32)
COMPUTE_NS = 300 * MS  # two thirds of it backward


def _exact(
    values: dict[str, int], alpha_ns: float, ns_per_byte: float, stretch: float = 1.0
) -> tuple[Observation, float]:
    """A step of a job that really is as the model assumes, with the ledger that a window would read.

    The step, window and all, took `stretch` times as long as the pace that is returned.
    """
    played = play(pack_buckets(GRADIENTS, values["bucket_bytes"]), COMPUTE_NS * 2 / 3, alpha_ns, ns_per_byte)
    exposed, communication = round(played.exposed_ns * stretch), round(played.communication_ns * stretch)
    compute = round(COMPUTE_NS * stretch)
    ledger = Ledger(
        wall_ns=compute + exposed, compute_ns=compute, exposed_communication_ns=exposed, communication_ns=communication,
        overlapped_communication_ns=communication - exposed,
    )  # fmt: skip
    step = Observation(
        step=1, wall_ns=1, values=values, pace_ns=ledger.wall_ns, ledger=ledger, exact=True, micro_batches=1
    )
    return step, COMPUTE_NS + played.exposed_ns


@pytest.mark.slow
@given(st.lists(st.integers(1, 9 * MIB), min_size=1, max_size=60), st.integers(1, 40 * MIB))
def test_buckets_hold_every_byte_and_close_at_the_cap(sizes: list[int], cap: int) -> None:
    buckets = pack_buckets(sizes, cap)
    assert sum(buckets) == sum(sizes)
    assert all(bucket >= cap for bucket in buckets[:-1])


@pytest.mark.slow
@given(st.lists(st.integers(1, MIB), min_size=1, max_size=30), st.floats(0, 1e9), st.floats(0, 1e7), st.floats(0, 10))
def test_exposed_communication_is_between_the_last_bucket_and_all(
    buckets: list[int], backward: float, alpha: float, ns_per_byte: float
) -> None:
    played = play(buckets, backward, alpha, ns_per_byte)
    last = alpha + buckets[-1] * ns_per_byte
    assert last * (1 - 1e-6) - 1e-3 <= played.exposed_ns <= played.communication_ns


def test_one_bucket_overlaps_nothing_and_many_leave_their_tail() -> None:
    backward, ns_per_byte = 200e6, 1.0
    one = play([64 * MIB], backward, 0.0, ns_per_byte)
    many = play([MIB] * 64, backward, 0.0, ns_per_byte)
    assert one.exposed_ns == pytest.approx(64 * MIB)
    assert one.overlapped_ns == pytest.approx(0, abs=1)
    assert many.exposed_ns == pytest.approx(MIB)


def test_nothing_is_expected_before_a_pace_and_of_buckets_before_a_ledger_was_read() -> None:
    model, values = GainModel(FACTS), {"bucket_bytes": 32 * MIB, "micro_batch": 4}
    assert model.expect("micro_batch", values, 8) is None
    model.history.note_pace(values, 3e8)
    assert model.expect("bucket_bytes", values, 16 * MIB) is None
    assert model.exposed_ratio is None


def test_nothing_is_expected_of_buckets_without_gradients() -> None:
    model, values = GainModel(JobFacts(job="job", world_size=2)), {"bucket_bytes": 32 * MIB}
    step, pace = _exact(values, 3e5, 4.0)
    model.learn(step)
    model.history.note_pace(values, pace)
    assert model.expect("bucket_bytes", values, 16 * MIB) is None


def test_with_two_sizes_seen_the_gain_of_a_third_is_forecast_within_one_percent() -> None:
    alpha, ns_per_byte = 5e6, 3.0
    model = GainModel(FACTS)
    for size in (32 * MIB, 16 * MIB):
        step, pace = _exact({"bucket_bytes": size}, alpha, ns_per_byte)
        model.learn(step)
        model.history.note_pace({"bucket_bytes": size}, pace)
    for size in (8 * MIB, 4 * MIB, MIB):
        _, here = _exact({"bucket_bytes": 16 * MIB}, alpha, ns_per_byte)
        _, there = _exact({"bucket_bytes": size}, alpha, ns_per_byte)
        forecast = model.expect("bucket_bytes", {"bucket_bytes": 16 * MIB}, size)
        assert forecast.gain_ratio == pytest.approx(1 - there / here, abs=0.01)


def test_one_size_seen_gives_the_right_sign_with_the_prior() -> None:
    model, values = GainModel(FACTS), {"bucket_bytes": 32 * MIB}
    step, pace = _exact(values, 3e5, 3.0)
    model.learn(step)
    model.history.note_pace(values, pace)
    smaller, larger = (model.expect("bucket_bytes", values, size) for size in (8 * MIB, 64 * MIB))
    assert smaller.gain_ratio > 0 > larger.gain_ratio
    assert "assumed" in smaller.basis


def test_no_more_is_expected_of_buckets_than_is_exposed() -> None:
    model, values = GainModel(FACTS), {"bucket_bytes": 64 * MIB}
    step, pace = _exact(values, 3e5, 0.5)
    model.learn(step)
    model.history.note_pace(values, pace)
    forecast = model.expect("bucket_bytes", values, MIB)
    assert forecast.gain_ratio <= model.exposed_ratio


def _compressed(stretch: float = 1.0) -> tuple[float, float]:
    """Expected gain of bf16 and the true one; the only window took `stretch` times as long as a typical step."""
    alpha, ns_per_byte, values = 3e5, 10.0, {"bucket_bytes": 8 * MIB, "compression": 0}
    step, pace = _exact(values, alpha, ns_per_byte, stretch)
    model = GainModel(FACTS)
    model.learn(step)
    model.history.note_pace(values, pace)
    forecast = model.expect("compression", values, 1)
    assert forecast is not None
    _, there = _exact(values, alpha, ns_per_byte / 2)
    return forecast.gain_ratio, 1 - there / pace


def test_half_the_bytes_are_worth_what_the_timeline_says() -> None:
    expected, true = _compressed()
    assert true == pytest.approx(0.42, abs=0.01)
    assert expected == pytest.approx(true, abs=0.03)


def test_half_the_bytes_save_no_more_than_half_of_the_communication_however_disturbed_the_window() -> None:
    """Others had the cores in the first windows of a real job: 63 % of a step were expected, 35 measured."""
    expected, true = _compressed(stretch=2.0)
    assert expected == pytest.approx(true, abs=0.08)


def test_twice_the_bytes_cost_little_where_they_pass_under_backward() -> None:
    """From bf16 back to none on a fast link: what is not exposed is not lost."""
    model, values = GainModel(FACTS), {"bucket_bytes": 8 * MIB, "compression": 1}
    step, pace = _exact(values, 0.0, 1.0)
    model.learn(step)
    model.history.note_pace(values, pace)
    forecast = model.expect("compression", values, 0)
    assert forecast is not None
    _, there = _exact(values, 0.0, 2.0)
    assert 1 - there / pace == pytest.approx(-0.03, abs=0.01)
    assert forecast.gain_ratio == pytest.approx(1 - there / pace, abs=0.03)


def _micro_batches(*sizes: int, error_ratio: float = 0.0) -> GainModel:
    """The step takes 100 ms, and 10 ms for each of 32 / size micro-batches."""
    model = GainModel(FACTS)
    for size in sizes:
        model.history.note_pace({"micro_batch": size}, (100 + 10 * 32 / size) * MS, error_ratio)
    return model


def test_two_micro_batch_sizes_forecast_a_third() -> None:
    forecast = _micro_batches(4, 8).expect("micro_batch", {"micro_batch": 8}, 16)
    assert forecast.gain_ratio == pytest.approx(1 - 120 / 140, abs=0.05)
    assert forecast.spread_ratio < 0.12


def _learn_host_bound(model: GainModel, size: int, pace_ns: int, host_bound_ns: int) -> None:
    ledger = Ledger(wall_ns=pace_ns, compute_ns=pace_ns - host_bound_ns, host_bound_ns=host_bound_ns)
    values = {"micro_batch": size}
    model.learn(Observation(step=1, wall_ns=1, values=values, pace_ns=pace_ns, ledger=ledger, exact=True))


def test_nothing_is_expected_of_one_micro_batch_size_without_a_window() -> None:
    assert _micro_batches(4).expect("micro_batch", {"micro_batch": 4}, 8) is None


def test_one_micro_batch_size_forecasts_little_and_the_farther_the_less_surely() -> None:
    model, values = _micro_batches(4), {"micro_batch": 4}
    _learn_host_bound(model, 4, 180 * MS, 0)
    near, far = (model.expect("micro_batch", values, size) for size in (8, 32))
    assert 0 < near.gain_ratio < far.gain_ratio
    assert near.gain_ratio < near.spread_ratio < far.spread_ratio


def test_host_bound_time_is_what_larger_micro_batches_save_at_least() -> None:
    gains = []
    for host_bound_ns in (0, 80 * MS):
        model = GainModel(FACTS)
        model.history.note_pace({"micro_batch": 4}, 200 * MS)
        _learn_host_bound(model, 4, 200 * MS, host_bound_ns)
        gains.append(model.expect("micro_batch", {"micro_batch": 4}, 8).gain_ratio)
    assert gains[1] - gains[0] == pytest.approx(4 * 10 / 200)


def test_one_noisy_trial_is_not_believed_far_away() -> None:
    """A trial of half the size was 30 % slower, give or take 20: a line through both would save nine tenths."""
    model, values = GainModel(FACTS), {"micro_batch": 8}
    model.history.note_pace(values, 100 * MS)
    model.history.note_pace({"micro_batch": 4}, 130 * MS, 0.2)
    forecast = model.expect("micro_batch", values, 32)
    assert forecast.gain_ratio < 0.2
    assert forecast.spread_ratio > 0.1


def test_what_smaller_sizes_cost_says_little_of_larger_ones() -> None:
    """A cache ends somewhere: the error toward larger sizes is as before, and that between timed sizes small."""
    one, model = _micro_batches(8), _micro_batches(8, 4, 2)
    _learn_host_bound(one, 8, 140 * MS, 0)
    before = one.expect("micro_batch", {"micro_batch": 8}, 32)
    assert model.expect("micro_batch", {"micro_batch": 8}, 32).spread_ratio > 0.7 * before.spread_ratio
    assert model.expect("micro_batch", {"micro_batch": 8}, 4).spread_ratio < 0.04


def test_estimated_ledgers_teach_nothing() -> None:
    model, values = GainModel(FACTS), {"bucket_bytes": 32 * MIB}
    step, _ = _exact(values, 3e5, 3.0)
    model.learn(Observation(step=2, wall_ns=2, values=values, pace_ns=step.pace_ns, ledger=step.ledger, exact=False))
    assert model.exposed_ratio is None


def test_forecasts_that_were_wrong_widen_the_next() -> None:
    model = _micro_batches(4, 8)
    before = model.expect("micro_batch", {"micro_batch": 8}, 16)
    wrong = Forecast(0.15, 0.1, "three errors off")
    model.history.remember("micro_batch", wrong, -0.15)
    after = model.expect("micro_batch", {"micro_batch": 8}, 16)
    assert after.spread_ratio == pytest.approx(before.spread_ratio * ((1 + 3**2) / 2) ** 0.5)
    assert model.history.forecasts == [("micro_batch", wrong, -0.15)]


def test_the_settings_that_are_remembered_are_bounded() -> None:
    model = GainModel(JobFacts(job="job", world_size=2, batch_samples=10**6))
    for size in range(1, 3 * SETTINGS_MAX):
        model.history.note_pace({"micro_batch": size}, 1e8)
    assert model.expect("micro_batch", {"micro_batch": 1}, 2) is None
    assert model.expect("micro_batch", {"micro_batch": 3 * SETTINGS_MAX - 1}, 1) is not None


# --- the data loader ---------------------------------------------------------------------------------


def waiting_model(wait_ratio: float, workers: int) -> tuple[GainModel, dict[str, int]]:
    values = {"loader_workers": workers, "loader_prefetch": 2}
    model = GainModel(JobFacts(job="job", world_size=1))
    for step in range(1, 9):
        model.learn(
            Observation(step=step, wall_ns=0, values=values, pace_ns=1000, data_wait_ns=round(1000 * wait_ratio))
        )
    return model, values


def test_more_workers_are_worth_the_wait_for_data_and_no_more() -> None:
    model, values = waiting_model(0.6, workers=2)
    gains = {to: model.expect("loader_workers", values, to) for to in (1, 3, 4, 8, 32)}
    assert {to: round(gain.gain_ratio, 3) for to, gain in gains.items() if gain} == {
        1: -1.0, 3: 0.333, 4: 0.5, 8: 0.6, 32: 0.6
    }  # fmt: skip


def test_without_workers_the_load_is_hidden_behind_the_rest_of_the_step() -> None:
    model, values = waiting_model(0.6, workers=0)
    gains = [model.expect("loader_workers", values, to) for to in (1, 2, 8)]
    assert [round(gain.gain_ratio, 3) for gain in gains if gain] == [0.4, 0.6, 0.6]


def test_a_loader_that_is_not_waited_for_is_left_alone_and_the_reason_is_said_once() -> None:
    model, values = waiting_model(0.01, workers=2)
    screen = GeometricSearch([KnobSpace("loader_workers", 2, (1, 2, 4, 8))])
    found, left_out = screen.candidates(values, model.expect, None)
    assert found == []
    assert left_out == ["loader_workers: waiting for data is 1.0% of the step, nothing to win"]


def test_a_rank_that_never_waits_for_data_may_wait_for_one_that_does() -> None:
    values = {"loader_workers": 2}
    model = GainModel(JobFacts(job="job", world_size=2))
    for step in range(1, 9):
        model.learn(Observation(step=step, wall_ns=0, values=values, pace_ns=1000, data_wait_ns=100))
    forecast = model.expect("loader_workers", values, 4)
    assert forecast.is_floor
    assert forecast.gain_ratio == pytest.approx(0.1)


def test_steps_that_are_fed_by_two_sets_of_workers_at_once_are_not_judged() -> None:
    two, four = {"loader_workers": 2, "loader_prefetch": 2}, {"loader_workers": 4, "loader_prefetch": 2}
    assert refill_steps(two, four) == refill_steps(four, two) == 12
    assert refill_steps(four, {"loader_workers": 32, "loader_prefetch": 2}) == 16, "bounded"
    assert refill_steps(four, {**four, "bucket_bytes": 1}) == refill_steps({}, {}) == 0
