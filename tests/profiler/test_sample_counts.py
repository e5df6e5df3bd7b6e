"""Which samples a step is said to have trained on, by what the loop drew and what its forwards saw."""

from __future__ import annotations

from pacecar.profiler.timing.sample_counts import SeenBatches, StepCounts


def step(batches: SeenBatches, *draws: int, seen: int | None, loader: int = 1) -> int | None:
    """One step: the draws, a forward that trains on them, its end."""
    for samples in draws:
        batches.draw(loader, samples)
    return batches.spend(batches.train() if batches.waiting else None, seen)


def test_a_step_counts_what_was_drawn_for_it_however_often_the_model_is_called() -> None:
    batches = SeenBatches()
    assert [step(batches, 16, seen=48), step(batches, 16, seen=48), step(batches, 4, 4, seen=8)] == [16, 16, 8]


def test_a_batch_that_is_cut_for_several_steps_counts_with_each_as_much_as_its_forwards_see() -> None:
    batches = SeenBatches()
    assert [step(batches, 64, seen=16), *(step(batches, seen=16) for _ in range(3))] == [16] * 4
    assert step(batches, seen=16) is None, "nothing is left of it: no loader knows"


def test_what_forwards_do_not_see_counts_with_the_next_step() -> None:
    batches = SeenBatches()  # dimension 0 is 10 time steps of 20 sequences
    assert [step(batches, 20, seen=10) for _ in range(3)] == [10, 20, 20]


def test_a_batch_that_was_only_looked_at_does_not_count() -> None:
    batches = SeenBatches()  # next(iter(loader)), then a loop over the loader
    batches.draw(1, 16)
    assert [step(batches, 16, seen=16) for _ in range(3)] == [16, 16, 16]


def test_batches_to_evaluate_or_to_look_through_do_not_count() -> None:
    batches = SeenBatches()
    batches.draw(2, 64)
    batches.evaluate()
    assert step(batches, 16, seen=16) == 16
    for _ in range(100):
        batches.draw(3, 1)
    batches.end(3)
    assert step(batches, 16, seen=16) == 16
    batches.draw(4, 10_000)  # looked through, but not to its end
    assert [step(batches, 16, seen=16), step(batches, 16, seen=16)] == [16, 16]
    batches.draw(1, 16)
    batches.forget()
    assert step(batches, seen=16) is None


def test_what_the_script_says_goes_before_the_loader_and_that_before_a_guess() -> None:
    counts = StepCounts()
    assert counts.drain(35, True) == (35, None, True)
    counts.draw(20, None)
    assert counts.drain(35, True) == (20, None, False)
    counts.draw(35, None, is_guess=True)
    assert counts.drain(None, False) == (35, None, True)
    counts.draw(35, 7, is_guess=True)
    counts.add(5, None)
    assert counts.drain(35, True) == (5, 7, False)
