"""What NCCL's RAS is asked, what is made of its answers, and what happens if it is none or gives none."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar import nccl_ras
from pacecar.nccl_ras import RasError, RasStatus, ask_ras, ask_ras_twice, compare, parse_ras, ras_address
from tests.kit.net import free_port
from tests.kit.ras_server import ras_answer, serve_ras

HEALTHY = ras_answer({0: 7, 1: 7})


def test_it_is_asked_for_json_with_a_timeout_and_answers() -> None:
    with serve_ras(HEALTHY) as ras:
        status = ask_ras(ras.address)
        asked = ras.asked
    assert asked == ["CLIENT PROTOCOL 2", "TIMEOUT 5", "SET FORMAT json", "VERBOSE STATUS"]
    assert status.nccl_version == "2.28.9"
    (communicator,) = status.communicators
    assert communicator.size == 2
    assert [(rank.rank, rank.pid, rank.launched) for rank in communicator.ranks] == [(0, 1000, 8), (1, 1001, 8)]


def test_where_nothing_listens_there_is_no_status_and_no_error() -> None:
    address = ("127.0.0.1", free_port())
    assert ask_ras(address) is None
    assert ask_ras_twice(address, pause=lambda _: pytest.fail("there is nothing to wait for")) is None


@pytest.mark.parametrize(("factor", "seconds"), [(None, 20), ("1", 20), ("3", 40), ("0", 20), ("-1", 20), ("999", 20)])
def test_a_status_may_take_as_long_as_nccl_waits(factor: str | None, seconds: int) -> None:
    """NCCL waits 5 s for a process, and 5 s times the factor for those that wait for it, in each of two collections."""
    environ = {} if factor is None else {"NCCL_RAS_TIMEOUT_FACTOR": factor}
    assert nccl_ras._status_seconds(environ) == seconds
    with serve_ras(HEALTHY) as ras:
        assert ask_ras(ras.address, environ=environ) is not None


@pytest.mark.parametrize("has_comma", [True, False])
def test_a_rank_that_is_missing_both_times_is_found(has_comma: bool) -> None:
    """NCCL 2.28.7 writes JSON without a comma wherever a rank is missing."""
    answer = ras_answer({0: 7, 2: 7}, missing={1: False}, has_comma=has_comma)
    with serve_ras(answer) as ras:
        found = ask_ras_twice(ras.address, pause=lambda _: None)
    assert found is not None
    (one,) = found
    assert [(rank.rank, rank.is_dead) for rank in one.missing] == [(1, False)]
    assert one.behind == {}
    assert one.pids == {1: ("10.0.0.1", 1001)}


def test_a_rank_that_launched_less_is_behind_only_where_all_stand_still() -> None:
    stuck = parse_ras(ras_answer({0: 7, 1: 6, 2: 7}))
    (one,) = compare(stuck, stuck)
    assert (one.behind, one.most, one.pids) == ({1: 7}, 8, {1: ("10.0.0.1", 1001)})
    assert compare(stuck, parse_ras(ras_answer({0: 8, 1: 7, 2: 8}))) == ()
    assert compare(parse_ras(ras_answer({0: 7, 1: 7, 2: 7})), stuck) == ()


def test_a_rank_that_works_on_another_communicator_is_not_behind() -> None:
    """Tensor parallel collectives go on while the gradients of a long accumulation wait."""

    def status(other: int) -> RasStatus:
        both = parse_ras(ras_answer({0: 7, 1: 6})), parse_ras(ras_answer({1: other, 2: other}, hash="0xb2"))
        return RasStatus("2.30.7", [communicator for one in both for communicator in one.communicators])

    assert compare(status(100), status(140)) == ()
    assert [one.behind for one in compare(status(100), status(100))] == [{1: 7}]


def test_a_process_that_answers_without_the_communicator_is_not_missing() -> None:
    status = parse_ras(ras_answer({0: 7}, missing={1: False}, unresponsive=False))
    assert compare(status, status) == ()


def test_equal_counts_that_stand_still_accuse_nobody() -> None:
    """RAS calls such a job healthy, and it may hang."""
    status = parse_ras(HEALTHY)
    assert compare(status, status) == ()


def test_a_communicator_that_is_new_and_a_rank_that_came_back_are_no_findings() -> None:
    missing = parse_ras(ras_answer({0: 7}, missing={1: False}))
    assert compare(missing, parse_ras(HEALTHY)) == ()
    assert compare(missing, parse_ras(ras_answer({0: 7}, missing={1: False}, hash="0xb2"))) == ()


ODD = {
    "another service": ({"client": b"HTTP/1.1 400 Bad Request\r\n"}, "not RAS, it answers 'HTTP/1.1 400 Bad Request'"),
    "a first line without an end": ({"client": b"x" * 5000}, "its first line does not end"),
    "a version without JSON": ({"set": b"ERROR: Unknown command SET FORMAT json\n"}, "2.28.7 was the first"),
    "no timeout": ({"timeout": b"ERROR: Unknown command\n"}, "refuses a timeout"),
    "a closed connection": ({"timeout": b""}, "closed the connection"),
}


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_service_is_named_with_its_address(odd: str) -> None:
    replies, words = ODD[odd]
    with serve_ras(HEALTHY, replies=replies) as ras, pytest.raises(RasError) as raised:
        ask_ras(ras.address)
    assert words in str(raised.value)
    assert f"127.0.0.1:{ras.port}" in str(raised.value)


@pytest.mark.slow
def test_silence_ends_at_a_deadline() -> None:
    ticks = itertools.count(step=0.6)
    with serve_ras(HEALTHY, is_silent=True) as ras, pytest.raises(RasError, match="does not answer in time"):
        ask_ras(ras.address, clock=lambda: next(ticks))


def test_an_endless_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ras, "ANSWER_BYTES_MAX", 1 << 20)
    with serve_ras(b"[" * (2 << 20)) as ras, pytest.raises(RasError, match="more than 1 MiB"):
        ask_ras(ras.address)


@pytest.mark.parametrize(
    ("true", "forged"),
    [
        (b'"10.0.0.1"', rb'"x\nrm -rf ~"'),
        (b'"0xa1"', rb'"\u001b[2J"'),
        (b'"AllReduce": 7', b'"AllReduce": 1' + b"0" * 5000),
    ],
)
def test_an_answer_that_could_not_be_shown_is_refused(true: bytes, forged: bytes) -> None:
    """Any user's program can listen on the port, and what it says would be printed, in a command too."""
    assert true in HEALTHY
    with pytest.raises(RasError, match="cannot be read"):
        parse_ras(HEALTHY.replace(true, forged, 1))


@pytest.mark.slow
@given(st.data())
def test_a_damaged_answer_is_an_error_or_still_a_status(data: st.DataObject) -> None:
    whole = ras_answer({0: 7, 1: 6}, missing={2: True})
    cut, at = data.draw(st.integers(0, len(whole))), data.draw(st.integers(0, len(whole) - 1))
    damaged = (whole[:at] + data.draw(st.binary(max_size=3)) + whole[at + 1 :])[:cut]
    with contextlib.suppress(RasError):
        status = parse_ras(damaged)
        assert all(one.most >= max(one.behind.values(), default=0) for one in compare(status, status))


def test_the_address_is_in_the_variable_that_nccl_reads() -> None:
    assert ras_address({}) == ("localhost", 28028)
    assert ras_address({"NCCL_RAS_ADDR": "[::1]:9"}) == ("::1", 9)
    for text in ("localhost", ":1", "localhost:0", "localhost:x", "localhost:70000"):
        with pytest.raises(RasError, match=f"NCCL_RAS_ADDR={text}: not HOST:PORT"):
            ras_address({"NCCL_RAS_ADDR": text})
