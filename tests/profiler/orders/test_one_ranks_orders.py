"""One rank's part in orders to the job: once each, for whom, and through a real daemon to the real command."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from pacecar.clock import NS_PER_SECOND, SystemClock
from pacecar.commands.daemon_client import ask_job
from pacecar.commands.job_text import job_document
from pacecar.monitor.jobs.state import DaemonState
from pacecar.profiler.hangs.account_road import Question, RankReplies
from pacecar.profiler.orders import job_orders
from pacecar.profiler.orders.job_news import LatestNews
from pacecar.profiler.orders.job_orders import ORDER_NUMBERS, UNDER_WAY_MAX, JobOrders, RankState, _first_step
from pacecar.profiler.transport.daemon_socket import DaemonSocket
from pacecar.records import Answer, Command, JobLedger, Knobs, Ledger, TunerStatus
from pacecar.records.job_orders import AttemptSoFar, JobAnswer, JobOrder, RankReply
from tests.kit.daemons import running_inbox
from tests.kit.fake_clock import FakeClock
from tests.kit.records import job_hello, step_record
from tests.kit.waiting import until
from tests.profiler.orders.simulated_ranks import SimulatedJob

UID = os.geteuid()
KNOBS = Knobs(2, {"micro_batch": 4})
STATE = RankState(step=lambda: 7, pace_ns=lambda: 5, knobs=lambda: KNOBS, has_daemon=lambda: True)
TUNE = JobOrder(id="a", action="tune", arguments={"order": "freeze"}, uid=UID, rank_uid=UID)


class Rank:
    """The parts around `orders`: commands for the training thread, what the daemon gets."""

    def __init__(self, world_size: int = 1, refusal: str | None = None) -> None:
        self.commands: list[Command] = []
        self.said: list[Answer | JobAnswer] = []
        self.refusal = refusal
        self.orders = JobOrders(
            job_hello(0, world_size), STATE, SystemClock(),
            accept=self.accept, reply=self.said.append, charge=lambda _: None,
        )  # fmt: skip

    def accept(self, command: Command) -> Answer | None:
        self.commands.append(command)
        return None if self.refusal is None else self.answer(command, "refused", self.refusal)

    def answer(self, command: Command, state, detail: str) -> Answer:
        return Answer(job="j", rank=0, number=command.number, state=state, detail=detail)

    def asked(self, order: JobOrder):
        self.orders._passing = self.orders._passing or SimulatedJob(1).passing(0)
        answer = self.orders.answer(Question(what="order", order=order))
        assert isinstance(answer, RankReplies)
        return answer.replies[0]


def order_command(number: int = 3, **arguments):
    return Command(number=number, action="job", at_step=0, arguments={"id": "x", **arguments}, uid=UID)


def test_an_order_that_comes_twice_is_carried_out_once_and_says_how_far_it_is():
    rank = Rank()
    assert [rank.asked(TUNE).state for _ in range(2)] == ["accepted", "accepted"]
    (command,) = rank.commands
    assert (command.action, command.arguments, command.uid) == ("tune", {"order": "freeze"}, UID)
    assert command.number >= ORDER_NUMBERS
    assert rank.orders.take(rank.answer(command, "done", "frozen"))
    assert (rank.asked(TUNE).state, rank.asked(TUNE).detail) == ("done", "frozen")
    rank.asked(JobOrder(id="b", action="tune", rank_uid=UID, uid=UID))
    assert len(rank.commands) == 2
    assert not rank.orders.take(Answer(job="j", rank=0, number=12, state="done", detail="")), "the daemon's own"
    assert rank.said == [], "answers go to the rank that asked"


def test_a_refusal_of_the_hook_is_the_ranks_reply():
    assert Rank(refusal="16 commands are waiting already").asked(TUNE).detail == "16 commands are waiting already"


@pytest.mark.parametrize("words", ["<html>" * 2000, "/data/\udcff: no space left on device"])
def test_words_that_no_frame_takes_do_not_silence_the_rank(words: str):
    reply = Rank(refusal=words).asked(TUNE)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(RankReplies((reply,))), type=RankReplies)
    assert again.replies[0].state == "refused"
    assert again.replies[0].detail[:6] == words[:6]


def test_a_rank_of_another_user_refuses_and_says_so_but_obeys_root():
    rank = Rank()
    other = JobOrder(id="c", action="show", uid=UID + 1, rank_uid=UID + 1)
    reply = rank.asked(other)
    assert (reply.state, reply.step) == ("refused", None)
    assert reply.detail == f"it runs as uid {UID}, and the order came to a rank of uid {UID + 1}"
    assert rank.asked(JobOrder(id="d", action="show", uid=0, rank_uid=UID + 1)).step == 7


@pytest.mark.slow
def test_a_job_of_one_process_is_shown_and_tuned():
    rank = Rank()
    assert rank.orders.receive(order_command(job_order="show")) is None
    until(lambda: len(rank.said) == 3)
    _, replies, final = rank.said
    assert [(one.rank, one.step, one.knobs) for one in replies.replies] == [(0, 7, KNOBS)]
    assert (final.state, final.detail, final.number) == ("done", "1 of 1 ranks answer", 3)
    assert rank.orders.receive(order_command(4, job_order="tune", order="resume")) is None
    until(lambda: rank.commands)
    rank.orders.take(rank.answer(rank.commands[0], "done", "tuning goes on"))
    until(lambda: (rank.said[-1].state, rank.said[-1].detail) == ("done", "tuning goes on"))


def test_the_first_rank_tells_where_the_time_of_its_attempt_went():
    """It began 9 s before the first step, which took 2 s; nothing was said of the last second."""
    second, clock = NS_PER_SECOND, FakeClock()
    begun_ns = clock.wall_ns() - 31 * second
    hello = job_hello(0, 2, attempt=3, process_wall_ns=begun_ns, rendezvous_wall_ns=begun_ns + 5 * second)
    news = LatestNews(hello, clock)
    assert news.news() is None
    later = Ledger(wall_ns=21 * second, compute_ns=16 * second, data_wait_ns=3 * second, checkpoint_ns=2 * second)
    told = {"saved_steps": 8, "global_step": 110, "total_evaluation_ns": second}
    for number, ended, totals, more in (
        (1, 11, Ledger(wall_ns=2 * second, compute_ns=2 * second), {}),
        (2, 12, Ledger(wall_ns=3 * second, compute_ns=3 * second), {}),
        (10, 30, later, told),
    ):
        ended_ns = begun_ns + ended * second
        news.put(step_record(0, step=number, total_steps=number, totals=totals, ended_wall_ns=ended_ns, **more))
    found = news.news()
    assert found is not None
    assert found.attempt == AttemptSoFar(
        attempt=3, wall_ns=31 * second, global_step=110, unsaved_steps=2,
        headings_ns={
            "start_up_rendezvous": 5 * second, "start_up_preparation": 4 * second, "start_up_first_step": 2 * second,
            "checkpoint_save": 2 * second, "evaluation": second, "data_wait": 3 * second, "productive": 13 * second,
            "unrecorded": second,
        },
    )  # fmt: skip
    other = LatestNews(job_hello(1, 2), clock)
    other.put(step_record(1))
    assert other.news() is None, "one rank tells it"


@pytest.mark.slow
def test_who_waits_for_a_long_step_is_told_that_the_order_waits_too(monkeypatch: pytest.MonkeyPatch):
    """A person's command gives up after a minute without a word, and takes the rank for stopped."""
    monkeypatch.setattr(job_orders, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(job_orders, "SAY_SECONDS", 0.1)
    monkeypatch.setattr(job_orders, "TUNE_SECONDS", 1)
    rank = Rank()
    assert rank.orders.receive(order_command(job_order="tune", order="freeze")) is None
    until(lambda: rank.said[-1].state == "refused")
    assert rank.said[-1].detail == "at its next step; it may still carry the order out"
    assert [one.detail for one in rank.said[1:-1]] == ["rank 0: at its next step"] * (len(rank.said) - 2)
    assert len(rank.said) >= 5


@pytest.mark.parametrize(
    ("world_size", "arguments", "words"),
    [
        (1, {"job_order": "reboot"}, "a job takes show, tune, trace, hang and dump, not 'reboot'"),
        (1, {"job_order": "show", "id": ""}, "an order to a job needs an id"),
        (4, {"job_order": "show"}, "its ranks do not listen to each other"),
    ],
)
def test_what_cannot_be_passed_on_is_refused_at_once(world_size, arguments, words):
    rank = Rank(world_size)
    refusal = rank.orders.receive(order_command(**arguments))
    assert refusal is not None
    assert refusal.state == "refused"
    assert refusal.detail.startswith(words)
    assert rank.said == []


def test_more_orders_at_once_are_refused_and_those_under_way_end_with_the_job():
    rank = Rank()
    for number in range(UNDER_WAY_MAX):
        assert rank.orders.receive(order_command(number, job_order="tune", order="freeze")) is None
    refusal = rank.orders.receive(order_command(9, job_order="show"))
    assert refusal is not None
    assert refusal.detail == f"this rank passes on {UNDER_WAY_MAX} orders already"
    rank.orders.close()
    until(lambda: [one.detail for one in rank.said].count("the job ended first") == UNDER_WAY_MAX)
    until(lambda: rank.orders.receive(order_command(9, job_order="show")) is None, "there is room again")


def test_the_first_step_of_a_trace_is_far_enough_ahead_for_an_order_to_go_round():
    assert _first_step(100, NS_PER_SECOND // 100, 5)[0] == 400
    assert _first_step(100, 60 * NS_PER_SECOND, 5) == (104, 60.0 + (4 + 25) * 60.0)
    assert _first_step(100, None, 5) == (104, 360.0)


def test_the_trace_of_a_rank_that_has_left_since_is_not_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(job_orders, "TRACE_POLL_SECONDS", 0.0)
    monkeypatch.setattr(job_orders, "TRACE_SILENT_POLLS_MAX", 2)
    polls = [("done", "accepted"), *[("silent", "accepted")] * 3, ("silent", "done")]

    class Passing:
        def to_all(self, order: JobOrder) -> list[RankReply]:
            if order.action == "show":
                return [RankReply(rank=rank, step=7, pace_ns=5) for rank in (0, 1)]
            states = polls.pop(0)
            return [RankReply(rank=rank, state=state, detail=f"{rank}.json") for rank, state in enumerate(states)]

    rank = Rank(2)
    rank.orders._passing = Passing()
    assert rank.orders.receive(order_command(job_order="trace", steps=1)) is None
    until(lambda: "written" in getattr(rank.said[-1], "detail", ""))
    assert rank.said[-1].detail.startswith("2 of 2 ranks have written")


@pytest.mark.slow
def test_the_replies_of_1024_ranks_come_through_a_daemon_to_the_command(tmp_path: Path):
    """Each frame of the daemon has 64 KiB, and it drops what the command's socket has no room for."""
    rank = Rank(1024)
    hello = job_hello(0, 1024, pid=os.getpid())

    class Inbox:
        def receive_command(self, command):
            return rank.orders.receive(command)

        def receive_news(self, news):
            """Nobody needs any."""

    news = rank.orders.news
    news.put(
        JobLedger(
            job=hello.job, ranks=1024, step=7, pace_ns=5, median_ns=4, total_steps=7, total_wall_ns=0,
            total_phases_ns={},
        )
    )  # fmt: skip
    rank.orders._passing = SimulatedJob(1024, frozenset({9, 512})).passing(0)
    board = DaemonState(SystemClock(), jobs_max=3, ranks_max=4, job_forget_seconds=900)
    outbox = DaemonSocket(str(tmp_path / "s"), hello, inbox=Inbox())
    rank.orders._reply = outbox.put
    with running_inbox(tmp_path / "s", board) as inbox:
        outbox.put(
            TunerStatus(
                job=hello.job, rank=0, state="off", detail="", step=1, wall_ns=1, exploration_ns=0, trials=0
            )
        )  # fmt: skip
        try:
            until(lambda: inbox.frames == 2)
            *parts, final = ask_job(str(tmp_path / "s"), hello.job, "show", {})
        finally:
            outbox.close(1.0)
    assert final.detail == "1022 of 1024 ranks answer"
    document = job_document(final, [part for part in parts if isinstance(part, JobAnswer)])
    assert (len(document.replies), document.lost) == (1024, [])
    assert [reply.rank for reply in document.replies if reply.state == "silent"] == [9, 512]
