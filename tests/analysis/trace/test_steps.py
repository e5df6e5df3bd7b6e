"""Step marks, sound and odd, and steps that nobody marked."""

from itertools import pairwise

import pytest

from pacecar.analysis.trace.columns import HostKind
from pacecar.analysis.trace.steps import step_windows
from pacecar.ledger.attribution import Work
from tests.analysis.built import build

COMPUTE = Work.COMPUTE


def windows(trace):
    steps, warnings = step_windows(trace)
    return [tuple(step) for step in steps], [(warning.code, warning.count) for warning in warnings]


@pytest.mark.parametrize(
    ("marks", "expected", "warned"),
    [
        ([], [], []),
        ([(1, 0, 10)], [(1, 0, 10)], []),
        ([(1, 0, 10), (2, 12, 20)], [(1, 0, 12), (2, 12, 20)], []),
        ([(2, 12, 20), (1, 0, 10)], [(1, 0, 12), (2, 12, 20)], []),
        ([(1, 0, 10), (5, 50, 60)], [(1, 0, 10), (5, 50, 60)], []),
        ([(1, 0, 10), (2, 8, 20)], [(1, 0, 8), (2, 8, 20)], [("overlapping_steps", 1)]),
        ([(1, 0, 30), (2, 8, 20)], [(1, 0, 8), (2, 8, 20)], [("overlapping_steps", 1)]),
        ([(1, 0, 30), (7, 8, 20)], [(1, 0, 8), (7, 8, 20)], [("overlapping_steps", 1)]),
        ([(1, 0, 10), (1, 0, 12)], [(1, 0, 12)], [("duplicate_steps", 1)]),
        ([(2, 0, 10), (1, 10, 20)], [(2, 0, 10), (1, 10, 20)], [("unordered_steps", 1)]),
        ([(1, 0, 10), (1, 10, 20)], [(1, 0, 10), (1, 10, 20)], [("unordered_steps", 1)]),
        ([(1, 5, 5), (2, 10, 20)], [(2, 10, 20)], [("empty_steps", 1)]),
        ([(1, 5, 3)], [], [("empty_steps", 1)]),
    ],
)
def test_marks(marks, expected, warned):
    assert windows(build(steps=marks)) == (expected, warned)


def test_the_last_step_lasts_until_the_device_has_done_what_was_launched_in_it():
    device = [(18, 35, COMPUTE, "k", 15), (36, 50, COMPUTE, "k", 22), (19, 33, COMPUTE)]
    assert windows(build(device, steps=[(1, 0, 10), (2, 10, 20)]))[0] == [(1, 0, 10), (2, 10, 35)]
    # The same before a hole in the numbers, but never into the next mark.
    assert windows(build(device, steps=[(1, 0, 20), (5, 60, 70)]))[0] == [(1, 0, 35), (5, 60, 70)]
    assert windows(build(device, steps=[(1, 0, 20), (5, 30, 70)]))[0] == [(1, 0, 30), (5, 30, 70)]


def optimizer_rows(*rows):
    return [(start, end, HostKind.OPTIMIZER, f"Optimizer.step#{name}.step") for start, end, name in rows]


@pytest.mark.parametrize(
    ("rows", "bounds"),
    [
        ([(8, 10, "SGD"), (18, 20, "SGD"), (28, 30, "SGD")], [10, 20, 30]),
        ([(8, 10, "SGD")], None),
        ([], None),
        # two optimizers in strict turn are one step, in any other order nobody can tell
        ([(6, 8, "G"), (8, 10, "D"), (16, 18, "G"), (18, 20, "D"), (26, 28, "G"), (28, 30, "D")], [10, 20, 30]),
        ([(6, 8, "G"), (8, 10, "D"), (16, 18, "D"), (18, 20, "G")], None),
        ([(6, 8, "G"), (8, 10, "D"), (16, 18, "G")], None),
        # an optimizer inside another is one update
        ([(7, 10, "Scaled"), (8, 9, "SGD"), (17, 20, "Scaled"), (18, 19, "SGD")], [10, 20]),
    ],
)
def test_without_marks_a_step_is_an_update_of_the_optimizer(rows, bounds):
    steps, warnings = windows(build([(0, 40, COMPUTE)], optimizer_rows(*rows)))
    if bounds is None:
        assert (steps, warnings) == ([], [])
    else:
        assert steps == [(i, a, b) for i, (a, b) in enumerate(pairwise(bounds))]
        assert warnings == [("steps_inferred", len(bounds) - 1)]


def test_zeroing_gradients_is_no_update():
    host = [(8, 10, HostKind.OPTIMIZER, "Optimizer.zero_grad#SGD.zero_grad")] * 3
    assert windows(build([(0, 40, COMPUTE)], host)) == ([], [])
