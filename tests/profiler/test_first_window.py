"""The first exact window comes right after the warm-up, at a bounded price, unless the job is expected to end soon."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pacecar.profiler.hook.loading import JobLength
from pacecar.profiler.timing.overhead_budget import CREDIT_NS, EARLY_NS, TURNS_MAX, OverheadBudget, early_ns

MS = 1_000_000


def train(budget: OverheadBudget, *, price_ns: int, steps: int, step_ns: int = 100 * MS) -> list[int]:
    """Return the steps that were profiled, and check the bound at every step."""
    taken, is_profiled = [], False
    for step in range(steps):
        spent = price_ns if is_profiled else 0
        budget.step(step_ns + spent, spent + 20_000, profiled=False)
        if is_profiled:
            budget.window_taken(step, price_ns)
        assert budget.cost_ns <= 0.01 * budget.wall_ns + budget.start_ns + CREDIT_NS
        budget.expect(price_ns)
        is_profiled = budget.wants_window(step + 1)
        taken += [step + 1] if is_profiled else []
    return taken


@pytest.mark.parametrize(("price_ms", "is_early", "first"), [
    (242, True, 3),
    (242, False, None),
    (600, True, None),  # more than rank 0's half of a second
])  # fmt: skip
def test_a_window_that_is_not_earned_comes_right_after_the_warmup_as_part_of_the_attach(
    price_ms: int, is_early: bool, first: int | None
) -> None:
    budget = OverheadBudget(0.01, warmup_steps=3, interval_steps=50, rank=0, world_size=2)
    budget.charge_start(10 * MS)
    budget.may_be_early = is_early
    assert train(budget, price_ns=price_ms * MS, steps=30) == ([] if first is None else [first])
    assert budget.start_ns == (10 + (0 if first is None else price_ms)) * MS


def test_only_the_first_window_is_early_and_the_second_is_earned() -> None:
    budget = OverheadBudget(0.01, warmup_steps=3, interval_steps=50)
    budget.may_be_early = True
    first, second = train(budget, price_ns=300 * MS, steps=900)[:2]
    assert first == 3
    assert 0.01 * second * 100 * MS >= 300 * MS


@given(st.integers(1, 64))
def test_the_first_windows_of_all_ranks_take_a_second_of_the_job_at_most(world_size: int) -> None:
    """Ranks that share a turn are profiled in the same step, so the dearest of them counts."""
    turns = min(world_size, TURNS_MAX)
    shares = [early_ns(rank, world_size) for rank in range(world_size)]
    assert sum(max(shares[turn::turns]) for turn in range(turns)) <= EARLY_NS == 1_000_000_000
    assert min(shares) > 0


def loop(loader: object, length: JobLength, *, batches: int) -> None:
    for count, _ in enumerate(drawn := iter(loader), start=1):  # type: ignore[call-overload]
        length.drew(drawn)
        if count == batches:
            break


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(torch.zeros(100, 1))


def loader_of(batches: int, **options: object) -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.zeros(batches, 1)), batch_size=1, **options)  # type: ignore[arg-type]


def test_a_job_is_short_by_what_was_configured() -> None:
    assert JobLength(60.0).is_short(3, 100 * MS)
    assert not JobLength(61.0).is_short(3, 100 * MS)
    assert JobLength(None, 600).is_short(3, 100 * MS)
    assert not JobLength(None, 601).is_short(3, 100 * MS)
    assert not JobLength(150.0, 10).is_short(3, 100 * MS)


@pytest.mark.parametrize(("batches", "is_short"), [(600, True), (601, False)])
def test_a_job_in_its_first_epoch_is_expected_to_end_with_it(batches: int, is_short: bool) -> None:
    length = JobLength()
    loop(loader_of(batches), length, batches=3)
    assert length.is_short(3, 100 * MS) is is_short


def test_steps_of_several_batches_make_the_epoch_shorter() -> None:
    length = JobLength()
    loop(loader_of(2000), length, batches=12)
    assert length.is_short(3, 100 * MS), "500 steps"


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_a_job_in_a_later_epoch_goes_on(workers: dict[str, object]) -> None:
    length, loader, held_out = JobLength(), loader_of(4, **workers), loader_of(2)
    epoch = iter(loader)
    for step, _ in enumerate(epoch, start=1):
        length.drew(epoch)
        assert length.is_short(step, 100 * MS)
    loop(held_out, length, batches=2)
    second = iter(loader)
    next(second)
    length.drew(second)
    assert not length.is_short(5, 100 * MS)


def test_a_job_of_unknown_length_is_expected_to_be_long() -> None:
    length = JobLength()
    assert not length.is_short(3, 100 * MS)
    loop(DataLoader(Stream(), batch_size=None), length, batches=3)
    assert not length.is_short(3, 100 * MS)
    loop(zip(range(9)), length := JobLength(), batches=3)
    assert not length.is_short(3, 100 * MS)
