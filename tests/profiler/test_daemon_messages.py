"""Orders: commands wait for their step, and whatever an action does the job goes on."""

import pytest

from pacecar.profiler.hook.commands.daemon_messages import ORDERS_MAX, DaemonMessages, MessageRefusal, NotYet
from pacecar.records import Command


def command(number=1, at_step=10, action="act"):
    return Command(number=number, action=action, at_step=at_step)


@pytest.fixture
def answers():
    return []


@pytest.fixture
def orders():
    return DaemonMessages("job", 3)


def said(answers):
    return [(answer.number, answer.state) for answer in answers]


def test_a_command_is_carried_out_at_its_step_or_at_once_if_that_has_gone_by(orders, answers):
    done = []
    orders.register("act", lambda command, answer: done.append(command.number))
    assert orders.receive(command(1, at_step=10)) is None
    assert orders.receive(command(2, at_step=3)) is None
    orders.boundary(9, answers.append)
    assert done == [2]
    orders.boundary(10, answers.append)
    orders.boundary(11, answers.append)
    assert done == [2, 1]
    assert answers == []


def test_what_cannot_be_done_is_answered_with_a_reason(orders, answers):
    def unwilling(command, answer):
        raise MessageRefusal("not now")

    def broken(command, answer):
        raise OSError("boom")

    orders.register("unwilling", unwilling)
    orders.register("broken", broken)
    answers.append(orders.receive(command(1, action="fly")))
    assert orders.receive(command(2, action="unwilling", at_step=0)) is None
    assert orders.receive(command(3, action="broken", at_step=0)) is None
    orders.boundary(0, answers.append)
    assert said(answers) == [(1, "refused"), (2, "refused"), (3, "refused")]
    assert "broken, unwilling" in answers[0].detail
    assert [answer.detail for answer in answers[1:]] == ["not now", "OSError: boom"]
    assert {(answer.job, answer.rank) for answer in answers} == {("job", 3)}


def test_commands_are_bounded_and_refused_when_the_job_ends(orders, answers):
    orders.register("act", lambda command, answer: answer("done", ""))
    answers.extend(filter(None, map(orders.receive, map(command, range(ORDERS_MAX + 1)))))
    assert said(answers) == [(ORDERS_MAX, "refused")]
    orders.close(answers.append)
    assert len(answers) == ORDERS_MAX + 1
    orders.boundary(100, answers.append)
    assert {answer.state for answer in answers} == {"refused"}


def test_what_cannot_be_done_yet_is_asked_again_at_the_next_boundary(orders, answers):
    tries = []

    def hesitant(command, answer):
        tries.append(command.number)
        if len(tries) < 3:
            raise NotYet
        answer("done", "")

    orders.register("act", hesitant)
    assert orders.receive(command(1, at_step=5)) is None
    for step in range(4, 10):
        orders.boundary(step, answers.append)
    assert tries == [1, 1, 1]
    assert said(answers) == [(1, "done")]
