"""No guesser keeps another client's right password from being checked."""

import random
import threading

import bcrypt
import pytest

from pacecar.clock import NS_PER_SECOND
from pacecar.monitor.http.security.password_queue import (
    GUESSES_AT_ONCE,
    REST_RATIO,
    SOURCES_MAX,
    WAITING_MAX,
    PasswordQueue,
)
from pacecar.monitor.http.security.web_config import Security
from tests.kit.fake_clock import FakeClock
from tests.kit.net import basic, get
from tests.kit.web import web_server


@pytest.fixture
def clock():
    return FakeClock(monotonic_ns=NS_PER_SECOND)


@pytest.fixture
def queue(clock):
    return PasswordQueue(clock, random.Random(1))


def drain(queue, most=10_000):
    taken = []
    while len(taken) < most and (item := queue.pop()[0]) is not None:
        taken.append(item)
    return taken


def test_sources_take_turns_whoever_has_more_waiting(queue):
    for number in range(6):
        queue.put(f"a{number}", "attacker", "me")
    for number in range(3):
        queue.put(f"v{number}", "victim", "me")
    assert [item[0] for item in drain(queue)] in (list("avavavaaa"), list("vavavaaaa"))


def test_names_of_one_source_take_turns_too(queue):
    for number in range(5):
        queue.put(f"a{number}", "127.0.0.1", "other")
    queue.put("v", "127.0.0.1", "me")
    assert "v" in drain(queue, 2)


def test_guesses_use_up_their_own_sources_allowance_and_wait(queue, clock):
    for number in range(GUESSES_AT_ONCE + 4):
        queue.put(number, "attacker", "me")
    assert len(drain(queue)) == GUESSES_AT_ONCE
    assert queue.pop() == (None, 0.5)
    queue.put("right", "victim", "me")
    assert drain(queue) == ["right"]
    clock.advance(NS_PER_SECOND)
    assert len(drain(queue)) == 2, "they wait, and are not refused"


def test_a_right_password_gives_its_turn_back(queue):
    for number in range(100):
        queue.put(number, "proxy", f"user {number}")
        assert queue.pop()[0] == number
        queue.checked("proxy", is_right=True, took_ns=1)


def test_after_a_wrong_one_nothing_is_checked_for_a_while(queue, clock):
    queue.put(1, "a", "me")
    queue.put(2, "b", "me")
    assert queue.pop()[0] is not None
    queue.checked("a", is_right=False, took_ns=NS_PER_SECOND)
    assert queue.pop() == (None, float(REST_RATIO))
    clock.advance(REST_RATIO * NS_PER_SECOND)
    assert queue.pop()[0] is not None


def test_when_all_places_are_taken_the_source_and_name_with_most_lose_one(queue):
    queue.put("other", "victim", "me")
    queue.put("same source", "attacker", "her name")
    gone = [queue.put(number, "attacker", "me") for number in range(500)]
    gone = [one for one in gone if one is not None]
    assert len(gone) == 500 + 2 - WAITING_MAX
    assert {"other", "same source"}.isdisjoint(gone)
    assert max(gone) > 400, "the newcomer as likely as any other"
    assert min(gone) < 100


@pytest.mark.slow
def test_memory_is_bounded_however_many_sources_and_names(queue):
    for number in range(3 * SOURCES_MAX):
        queue.put(number, f"s{number}", f"u{number}")
        queue.put(number, "one", f"u{number}")
        queue.pop()
        queue.pop()
    assert len(queue._sources) <= SOURCES_MAX
    assert len(queue._sources["one"].users) <= WAITING_MAX
    assert len(queue._waiting) <= WAITING_MAX


def test_waiting_ends_with_the_queue(clock):
    queue, got = PasswordQueue(clock), []
    thread = threading.Thread(target=lambda: got.append(queue.wait()))
    thread.start()
    queue.close()
    thread.join(10)
    assert got == [None]


# --- with a server ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("guessed", ["me", "nobody"])
def test_a_right_new_password_comes_in_while_others_guess_from_the_same_address(guessed):
    stored = bcrypt.hashpw(b"right", bcrypt.gensalt(4))
    numbers, stop, said = iter(range(10**9)), threading.Event(), []
    with web_server(security=Security(users={"me": stored}, verify=bcrypt.checkpw)) as server:

        def ask(user, password):
            return get(server.port, "/", Authorization=basic(user, password)).status

        def guess():
            while not stop.is_set():
                said.append(ask(guessed, f"wrong {next(numbers)}"))

        guessers = [threading.Thread(target=guess) for _ in range(4)]
        try:
            for thread in guessers:
                thread.start()
            while len(said) < GUESSES_AT_ONCE:
                stop.wait(0.01)
            assert ask("me", "right") == 200
            assert ask("me", "right") == 200, "and is remembered"
        finally:
            stop.set()
            for thread in guessers:
                thread.join(60)
    assert set(said) <= {401, 429}
