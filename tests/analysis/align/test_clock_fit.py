"""Offsets and drifts of many clocks are found from the ends of collectives, with errors that are right."""

from __future__ import annotations

import numpy as np
import pytest

from pacecar.analysis.align.clock_fit import ClockFit, Meetings, fit_clocks

SPAN_NS = 2_000_000_000


def met(
    random: np.random.Generator,
    members: list[list[int]],
    offsets: np.ndarray,
    drifts: np.ndarray,
    noise_ns: float,
    *,
    ranks: int = 8,
    outliers: float = 0.02,
) -> Meetings:
    """Return the ends of collectives of these clocks, of `ranks` ranks on each; some ranks leave much later."""
    columns: list[tuple[int, int, int, int, int]] = []
    for number, (when, clocks) in enumerate(
        zip(np.sort(random.uniform(0, SPAN_NS, len(members))), members, strict=True)
    ):
        for clock in clocks:
            late = random.normal(0, noise_ns, ranks)
            late += np.where(random.random(ranks) < outliers, random.exponential(20 * noise_ns, ranks), 0)
            shown = when + late - offsets[clock] - drifts[clock] * (when - SPAN_NS / 2)
            columns += [(number, clock, 10**18 + int(time), 0, 0) for time in shown]
    return Meetings(*np.array(columns, dtype=np.int64).T)


def apart(fit: ClockFit, truth: np.ndarray, clock: int) -> float:
    return float(fit.offset_ns[clock] - fit.offset_ns[0] - truth[clock] + truth[0])


@pytest.mark.slow
@pytest.mark.parametrize("noise_ns", [2_000, 10_000, 30_000])
def test_intervals_of_two_standard_errors_hold_the_offsets(noise_ns: int) -> None:
    """Of 95 % intervals at least 88 % hold in 4 x 40 jobs of 4 hosts, and they are not wide for nothing."""
    random = np.random.default_rng(noise_ns)
    held, errors, stated = 0, [], []
    for _ in range(40):
        offsets, drifts = random.normal(0, 1e6, 4), random.normal(0, 5e-6, 4)
        fit = fit_clocks(met(random, [[0, 1, 2, 3]] * 60, offsets, drifts, noise_ns), 4)
        for clock in (1, 2, 3):
            error = fit.error_ns(0, clock)
            assert error is not None
            errors.append(abs(apart(fit, offsets, clock)))
            stated.append(error)
            held += errors[-1] <= 1.96 * error
    assert held / len(errors) >= 0.88
    assert np.median(errors) <= 0.3 * noise_ns
    assert np.median(stated) <= 6 * np.median(errors)


def test_drifts_are_found() -> None:
    random = np.random.default_rng(1)
    drifts = np.array([0.0, 20e-6, -10e-6])
    fit = fit_clocks(met(random, [[0, 1, 2]] * 200, np.zeros(3), drifts, 5_000), 3)
    assert fit.drift - fit.drift[0] == pytest.approx(drifts, abs=2e-6)


def test_clocks_that_meet_only_by_way_of_others_are_tied_and_less_well() -> None:
    random = np.random.default_rng(2)
    offsets = random.normal(0, 1e8, 8)
    fit = fit_clocks(met(random, [[at, at + 1] for at in range(7)] * 40, offsets, np.zeros(8), 2_000), 8)
    near, far = fit.error_ns(0, 1), fit.error_ns(0, 7)
    assert near is not None
    assert far is not None
    assert far > near
    assert abs(apart(fit, offsets, 7)) <= 4 * far


def test_clocks_that_never_meet_cannot_be_told() -> None:
    random = np.random.default_rng(3)
    fit = fit_clocks(met(random, [[0, 1], [2, 3]] * 20, np.zeros(4), np.zeros(4), 1_000), 5)
    assert fit.error_ns(0, 1) is not None
    assert fit.error_ns(1, 2) is None
    assert fit.error_ns(0, 4) is None
    assert fit.island.tolist() == [0, 0, 2, 2, 4]


def test_no_clock_is_privileged() -> None:
    """Numbered the other way round, the same clocks have the same offsets and errors."""
    random = np.random.default_rng(4)
    some = met(random, [[0, 1, 2]] * 50, random.normal(0, 1e6, 3), np.zeros(3), 5_000)
    one = fit_clocks(some, 3)
    other = fit_clocks(Meetings(some.meeting, 2 - some.clock, some.end_ns, some.kind, some.label), 3)
    assert other.offset_ns[::-1] == pytest.approx(one.offset_ns, abs=5)
    assert other.error_ns(2, 0) == pytest.approx(one.error_ns(0, 2), rel=0.01)


def test_a_link_that_always_makes_one_host_late_widens_its_error() -> None:
    """It cannot be told from a clock that is ahead; skewed residuals are all that shows it."""
    random = np.random.default_rng(5)
    some = met(random, [[0, 1]] * 200, np.zeros(2), np.zeros(2), 2_000, ranks=1)
    late = np.where(some.clock == 1, random.exponential(50_000, len(some.end_ns)), 0).astype(np.int64)
    plain, skewed = (
        fit_clocks(m, 2) for m in (some, Meetings(some.meeting, some.clock, some.end_ns + late, some.kind, some.label))
    )
    errors = [fit.error_ns(0, 1) for fit in (plain, skewed)]
    assert errors[0] is not None
    assert errors[1] is not None
    assert errors[1] > 5 * errors[0]


def test_nothing_is_no_error() -> None:
    nothing = np.empty(0, dtype=np.int64)
    fit = fit_clocks(Meetings(nothing, nothing, nothing, nothing, nothing), 2)
    assert fit.offset_ns.tolist() == [0, 0]
    assert fit.error_ns(0, 1) is None


def test_an_operation_whose_ends_are_always_apart_does_not_move_clocks_that_others_tie() -> None:
    """Some ranks have work of their own after it: 0.8 ms in ten collectives; a hundred messages show no difference."""
    random = np.random.default_rng(6)
    some = met(random, [[0, 1], [2, 3]] * 30, np.zeros(4), np.zeros(4), 100, ranks=1, outliers=0)
    late = met(random, [[0, 1, 2, 3]] * 10, np.zeros(4), np.zeros(4), 100, ranks=1, outliers=0)
    pairs = met(random, [[1, 2], [0, 3]] * 50, np.zeros(4), np.zeros(4), 20_000, ranks=1, outliers=0)
    late_ns = np.where(late.clock < 2, 800_000, 0)
    parts = [
        (each.meeting + 100 * at, each.clock, each.end_ns + more, each.kind + (each is pairs), each.label + at)
        for at, (each, more) in enumerate(((some, 0), (late, late_ns), (pairs, 0)))
    ]
    fit = fit_clocks(Meetings(*map(np.concatenate, zip(*parts, strict=True))), 4)
    assert [abs(apart(fit, np.zeros(4), clock)) for clock in (1, 2, 3)] == pytest.approx([0, 0, 0], abs=20_000)
