"""Users share the bounds of the job table: no user is kept below an equal share, whatever another holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.monitor.fair_share import yielding_holder
from pacecar.monitor.ingest.command_routing import REQUESTS_MAX, CommandRouting, RankSteps, Target
from pacecar.monitor.jobs.state import DaemonState
from pacecar.monitor.jobs.tracked_job import JOB_BYTES_MAX, RANK_BYTES_MAX, REASON_CHARACTERS_MAX
from pacecar.records import Goodbye, Request, Straggler, TunerStatus
from pacecar.wire import FrameError, Refusal
from tests.kit.fake_clock import FakeClock
from tests.kit.own_samples import values_of
from tests.kit.records import decision

ATTACKER, VICTIM, THIRD = 1000, 1001, 1002


@pytest.fixture
def board(clock):
    return DaemonState(clock, jobs_max=8, ranks_max=16, job_forget_seconds=900)


@pytest.fixture
def come(board, clock, make_hello):
    """Have a rank say hello; returns what made room, or why there was none."""

    def one(uid, job, rank=0, **changes):
        clock.advance(1)
        hello = make_hello(job=job, rank=rank, world_size=1000, **changes)
        try:
            return [str(left) for left in board.record(hello, hello=hello, uid=uid, owner=rank)]
        except FrameError as error:
            return str(error) if error.refusal is Refusal.LIMIT else repr(error)

    return one


def names(board):
    return {job.job for job in board.jobs()}


def leave(board, make_hello, uid, job, rank=0):
    hello = make_hello(job=job, rank=rank)
    board.record(Goodbye(job=job, rank=rank, reason="", wall_ns=1), hello=hello, uid=uid, owner=0)


@pytest.mark.slow
@given(st.dictionaries(st.integers(0, 5), st.integers(0, 20)), st.integers(0, 5), st.integers(1, 5))
def test_whoever_is_below_an_equal_share_finds_a_giver_and_two_equals_never_do(held, asker, amount):
    giver = yielding_holder(asker, held, amount)
    mine = held.get(asker, 0)
    if giver is not None:
        assert giver != asker
        assert held[giver] > mine + amount
        assert held[giver] == max(count for holder, count in held.items() if holder != asker)
        after = held | {giver: held[giver] - amount, asker: mine + amount}
        assert yielding_holder(giver, after, amount) is None, "it does not come back at once"
    elif amount == 1 and held:
        total = sum(held.values())
        assert mine + 1 >= total // len(held.keys() | {asker}), "below an equal share somebody gives"


def test_names_of_jobs_that_one_user_took_make_room_for_another_up_to_half(board, come):
    for number in range(8):
        assert come(ATTACKER, f"a{number}") == []
    assert come(ATTACKER, "a8") == "job 'a8' is beyond jobs_max = 8, and uid 1000 has 8 of them"
    for number in range(4):
        (said,) = come(VICTIM, f"v{number}")
        assert said.startswith(f"job 'a{7 - number}' of uid 1000 made room for uid 1001: the youngest")
    assert names(board) == {f"a{n}" for n in range(4)} | {f"v{n}" for n in range(4)}
    assert "has 4 of them" in come(VICTIM, "v4")
    assert "has 4 of them" in come(ATTACKER, "a4"), "and it does not take them back"
    assert values_of(board, "pacecar_inbox_displaced_total") == {"job": 4, "rank": 0}


def test_a_third_user_takes_from_whoever_has_most(board, come):
    for number in range(6):
        come(ATTACKER, f"a{number}")
    come(VICTIM, "v0")
    come(VICTIM, "v1")
    assert [come(THIRD, f"t{number}")[0][:7] for number in range(2)] == ["job 'a5", "job 'a4"]
    assert {"v0", "v1"} <= names(board)


def test_what_has_ended_goes_first_and_of_the_user_above_his_share(board, come, make_hello):
    for number in range(6):
        come(ATTACKER, f"a{number}")
    leave(board, make_hello, ATTACKER, "a1")
    come(VICTIM, "v0")
    come(VICTIM, "v1")
    leave(board, make_hello, VICTIM, "v0")
    (said,) = come(THIRD, "t0")
    assert "'a1'" in said
    assert said.endswith("it had ended")
    assert "v0" in names(board), "a finished job of a user within his share stays to be seen"


def test_a_flood_of_finished_jobs_pushes_out_only_itself(board, come, make_hello):
    come(VICTIM, "v0")
    leave(board, make_hello, VICTIM, "v0")
    for number in range(100):
        come(ATTACKER, f"a{number}")
        leave(board, make_hello, ATTACKER, f"a{number}")
    assert "v0" in names(board)
    assert len(board.jobs()) == 8


def test_departed_ranks_beside_one_that_lives_make_room(board, come, make_hello):
    come(ATTACKER, "a", 0)
    for rank in range(1, 16):
        come(ATTACKER, "a", rank)
        board.leave(make_hello(job="a", rank=rank), rank)
    for rank in range(8):
        assert "had ended" in come(VICTIM, "v", rank)[0]
    ranks = {job.job: [rank.hello.rank for rank in job.ranks] for job in board.jobs()}
    assert ranks["v"] == list(range(8))
    assert 0 in ranks["a"], "the one that runs stays"


def test_a_job_that_made_room_comes_back_when_there_is_room_again(board, come, make_hello, make_step):
    for number in range(8):
        come(ATTACKER, f"a{number}")
    come(VICTIM, "v0")
    hello = make_hello(job="a7")
    with pytest.raises(FrameError, match="beyond jobs_max"):
        board.record(make_step(job="a7"), hello=hello, uid=ATTACKER, owner=0)
    leave(board, make_hello, ATTACKER, "a0")
    board.record(make_step(job="a7"), hello=hello, uid=ATTACKER, owner=0)
    assert "a7" in names(board)


def test_long_names_are_shared_out_by_their_bytes(come, board):
    """Each is within its bound; all together they would fill every page, of each rank in seventy series."""
    board.limit(jobs_max=1000, ranks_max=16, job_forget_seconds=900)
    refused = 0
    for number in range(16):
        refused += isinstance(come(ATTACKER, f"{number:0256d}"), str)
    assert refused > 0
    assert isinstance(come(VICTIM, f"{99:0256d}"), list)
    assert isinstance(come(VICTIM, "short"), list)


def test_what_is_kept_of_a_rank_and_of_a_job_is_bounded_in_bytes(board, make_hello, make_step):
    hello = make_hello()
    board.record(hello, hello=hello, uid=1, owner=1, size=1000)
    board.record(make_step(), hello=hello, uid=1, owner=1, size=RANK_BYTES_MAX - 1000)
    with pytest.raises(FrameError, match="bytes of records to keep of one rank"):
        board.record(make_step(step=42), hello=hello, uid=1, owner=1, size=RANK_BYTES_MAX - 999)
    with pytest.raises(FrameError, match="more than is kept of one rank"):
        board.record(hello, hello=hello, uid=1, owner=1, size=RANK_BYTES_MAX + 1)
    status = TunerStatus(job="run-7", rank=0, state="off", detail="", step=0, wall_ns=0, exploration_ns=0, trials=0)
    goodbye = Goodbye(job="run-7", rank=0, reason="", wall_ns=1)
    board.record(status, hello=hello, uid=1, owner=1, size=JOB_BYTES_MAX)
    with pytest.raises(FrameError, match="of one rank"):
        board.record(goodbye, hello=hello, uid=1, owner=1, size=2000)
    said = "r" * 4000
    for number in range(100):
        board.record(decision(number, job="run-7", reason=said), hello=hello, uid=1, owner=1, size=4100)
        board.record(
            Straggler(
                job="run-7", late_rank=number, cause="compute", phase="forward", since_step=1, step=1, wall_ns=1,
                excess_ns=1, evidence=said,
            ), hello=hello, uid=1, owner=1, size=4100,
        )  # fmt: skip
    (job,) = board.jobs()
    assert {len(decision.reason) for decision in job.decisions} == {REASON_CHARACTERS_MAX}
    assert {len(late.evidence) for late in job.health.stragglers} == {400}


def test_requests_of_one_user_push_out_his_own_and_not_anothers(make_hello):
    sent = []
    requests = CommandRouting(lambda connection, message: sent.append((connection, message)) or True)

    def ask(uid, asker, serial):
        job = f"j{uid}"
        targets = [Target(uid, make_hello(job=job), uid)]
        asked = Request(serial=serial, job=job, action="tune")
        requests.route(asked, asker=asker, uid=uid, targets=targets, steps_of=lambda _: RankSteps())

    ask(VICTIM, 1, 1)
    for serial in range(3 * REQUESTS_MAX):
        ask(ATTACKER, 2, serial)
    assert [message.state for connection, message in sent if connection == 1] == ["accepted"]
    assert len(requests._pending) == REQUESTS_MAX
    assert requests.displaced == 2 * REQUESTS_MAX + 1
    for serial in range(2, 20):
        ask(VICTIM, 1, serial)
    assert sum(out.uid == VICTIM for out in requests._pending.values()) == 19


def test_time_gives_back_what_a_flood_used_up():
    from pacecar.monitor.ingest.frame_rate_limit import BURST_TOKENS, TURN_TOKENS, FrameRateLimits

    clock = FakeClock()
    budgets = FrameRateLimits(clock)
    flood = budgets.of(ATTACKER, {})
    turns = frames = 0
    while not flood.is_paused:
        budgets.begin_turn()
        turns += 1
        while not flood.is_spent:
            flood.spend(100)
            frames += 1
    assert frames == BURST_TOKENS
    assert turns == -(-BURST_TOKENS // TURN_TOKENS)
    assert not budgets.of(VICTIM, {}).is_spent
    assert budgets.of(ATTACKER, {}) is flood, "who connects anew has no new tokens"
    assert budgets.resume() == []
    clock.advance(10**9)
    assert budgets.resume() == [ATTACKER]
    assert not flood.is_spent
