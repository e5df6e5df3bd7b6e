"""Gradients are compared one boundary after they were sent, by when no rank has to wait for another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from pacecar.controller.knobs.ddp.gradient_check import CHECKS, GradientCheck

Answer = Callable[[], list[list[float]] | None]


class Line:
    """What two ranks send, in order; the answer to a message exists once both have sent it."""

    def __init__(self) -> None:
        self.sent: list[list[list[float]]] = [[], []]
        self.heard = 0

    def tell(self, rank: int) -> Callable[[Sequence[float]], Answer]:
        def send(norms: Sequence[float]) -> Answer:
            number = len(self.sent[rank])
            self.sent[rank].append(list(norms))

            def answer() -> list[list[float]]:
                assert all(len(sent) > number for sent in self.sent), "this rank would wait here"
                self.heard += 1
                return [sent[number] for sent in self.sent]

            return answer

        return send


@pytest.fixture
def ranks() -> list[GradientCheck]:
    checks = []
    for _ in range(2):
        model = nn.Linear(3, 1, bias=False)
        model.weight.grad = torch.ones(1, 3)
        check = GradientCheck(model)
        check.prepare(lambda norms: [list(norms), list(norms)])
        check.arm()
        checks.append(check)
    return checks


def test_no_rank_waits_however_far_apart_they_come_to_a_boundary(ranks: list[GradientCheck]) -> None:
    line = Line()
    for _ in range(CHECKS + 1):
        for rank, check in enumerate(ranks):
            assert check.is_armed
            assert check.look(line.tell(rank)) is None
    assert not any(check.is_armed for check in ranks)
    assert line.heard == CHECKS * len(ranks), "every one was compared on every rank"


@pytest.mark.parametrize("bad_step", range(CHECKS))
def test_all_ranks_find_a_difference_at_the_same_boundary(ranks: list[GradientCheck], bad_step: int) -> None:
    line, found = Line(), []
    for step in range(CHECKS + 1):
        if step == bad_step:
            ranks[1]._parameters[0].grad = torch.zeros(1, 3)
        found.append([check.look(line.tell(rank)) for rank, check in enumerate(ranks) if check.is_armed])
        if any(found[-1]):
            break
    assert len(found) == bad_step + 2
    assert found[-1] == ["the gradient of weight has norm 0 on one rank and 1.73205 on another"] * 2
    for check in ranks:
        check.arm(is_on=False)
        assert not check.is_armed
