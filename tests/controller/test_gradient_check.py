"""Gradients are compared one or more boundaries after they were sent: no rank waits, and all ranks send the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from pacecar.controller.knobs.ddp.gradient_check import CHECKS, GradientCheck

Answer = Callable[[], list[list[float]] | None]

DIFFERENCE = "the gradient of weight has norm 0 on one rank and 1.73205 on another"


class Line:
    """What two ranks send, in order; the answer to a message exists once both have sent it."""

    def __init__(self) -> None:
        self.sent: list[list[list[float]]] = [[], []]
        self.answered = 0
        self.is_late = [False, False]

    def sender(self, rank: int) -> Callable[[Sequence[float]], Answer]:
        def send(norms: Sequence[float]) -> Answer:
            number = len(self.sent[rank])
            self.sent[rank].append(list(norms))

            def answer() -> list[list[float]]:
                if self.is_late[rank]:
                    raise TimeoutError
                assert all(len(sent) > number for sent in self.sent), "this rank would wait here"
                self.answered += 1
                return [sent[number] for sent in self.sent]

            return answer

        return send


def make_checks(*weights: torch.Tensor) -> list[GradientCheck]:
    """Return a check for each rank, of a model whose one parameter has that gradient."""
    checks = []
    for gradient in weights:
        model = nn.Linear(3, 1, bias=False)
        model.weight.grad = gradient
        checks.append(GradientCheck(model))
    return checks


def prepared(line: Line, checks: list[GradientCheck]) -> list[GradientCheck]:
    """Send what is compared before the first switch, and arm all ranks at that switch."""
    for rank, check in enumerate(checks):
        line.is_late[rank] = rank == 0  # which sends first, so that there is no answer yet
        check.prepare(line.sender(rank))
    line.is_late = [False, False]
    for check in checks:
        check.arm()
    line.answered = 0
    return checks


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def ranks(line: Line) -> list[GradientCheck]:
    return prepared(line, make_checks(torch.ones(1, 3), torch.ones(1, 3)))


def lose_gradient(check: GradientCheck) -> None:
    check._parameters[0].grad = torch.zeros(1, 3)


def test_no_rank_waits_however_far_apart_they_come_to_a_boundary(line: Line, ranks: list[GradientCheck]) -> None:
    for _ in range(CHECKS + 1):
        for rank, check in enumerate(ranks):
            assert check.is_armed
            assert check.check(line.sender(rank)) is None
    assert not any(check.is_armed for check in ranks)
    assert line.answered == CHECKS * len(ranks), "every one was compared on every rank"


@pytest.mark.parametrize("bad_step", range(CHECKS))
def test_all_ranks_find_a_difference_at_the_same_boundary(
    line: Line, ranks: list[GradientCheck], bad_step: int
) -> None:
    found = []
    for step in range(CHECKS + 1):
        if step == bad_step:
            lose_gradient(ranks[1])
        found.append([check.check(line.sender(rank)) for rank, check in enumerate(ranks) if check.is_armed])
        if any(found[-1]):
            break
    assert len(found) == bad_step + 2
    assert found[-1] == [DIFFERENCE] * 2
    for check in ranks:
        check.arm(is_on=False)
        assert not check.is_armed


@pytest.mark.parametrize("late_steps", range(1, CHECKS + 4))
@pytest.mark.parametrize("bad_step", [None, *range(CHECKS)])
def test_a_rank_whose_answers_are_late_sends_as_often_and_finds_the_same_later(
    line: Line, ranks: list[GradientCheck], bad_step: int | None, late_steps: int
) -> None:
    before = len(line.sent[0])
    found: list[list[tuple[int, str]]] = [[], []]
    for step in range(CHECKS + late_steps + 2):
        line.is_late[1] = 1 <= step <= late_steps
        if step == bad_step:
            lose_gradient(ranks[1])
        for rank, check in enumerate(ranks):
            difference = check.check(line.sender(rank)) if check.is_armed else None
            if difference is not None:
                found[rank].append((step, difference))
        assert len(line.sent[0]) == len(line.sent[1]), "the next message of a rank is matched with the other's next"
    assert len(line.sent[0]) == before + CHECKS
    assert not any(check.is_armed for check in ranks)
    if bad_step is None:
        assert found == [[], []]
        assert line.answered == CHECKS * len(ranks), "what was late was compared as well"
    else:
        assert found[0] == [(bad_step + 1, DIFFERENCE)]
        assert found[1] == [(max(bad_step, late_steps) + 1, DIFFERENCE)]


def test_a_job_whose_gradients_differ_before_the_first_switch_is_not_judged_on_any_rank(line: Line) -> None:
    ranks = prepared(line, make_checks(torch.ones(1, 3), torch.zeros(1, 3)))
    assert not any(check.is_armed for check in ranks)
    for rank, check in enumerate(ranks):
        check.prepare(line.sender(rank))
        assert check.check(line.sender(rank)) is None
    assert [len(sent) for sent in line.sent] == [1, 1], "it was looked at once"
