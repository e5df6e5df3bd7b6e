"""What NCCL's RAS and log say about a hang stands beside the verdict, and never changes it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import msgspec
import pytest
from torch.distributed import HashStore

from pacecar.clock import NS_PER_SECOND
from pacecar.nccl_ras import RANKS_SHOWN, RasError, ask_ras_twice, compare, parse_ras
from pacecar.profiler.hangs.hang_watch import EVIDENCE_MAX, HangWatch
from pacecar.profiler.hangs.nccl_witness import (
    LogWitness,
    NcclWitness,
    RasWitness,
    has_nccl_log,
    may_have_ras,
    ras_words,
)
from pacecar.profiler.hangs.rank_account import TrainingProgress
from pacecar.records import HangVerdict
from pacecar.records.hangs import HangEvidence
from tests.kit.fake_clock import FakeClock
from tests.kit.nccl_files import call_line, init_line
from tests.kit.ras_server import ras_answer, serve_ras
from tests.kit.records import job_hello
from tests.kit.waiting import until

STUCK = compare(*[parse_ras(ras_answer({0: 7, 1: 6, 2: 7}, missing={3: False}))] * 2)
SECONDS_MAX = 20.0


def words_of(witness: NcclWitness) -> tuple[str, ...]:
    end = time.monotonic() + SECONDS_MAX
    while not witness.is_done and time.monotonic() < end:
        time.sleep(0.01)
    return witness.take()


def test_a_finding_names_process_host_and_the_jobs_own_rank() -> None:
    missing, behind = ras_words(STUCK, {("10.0.0.1", 1001): 9})
    assert missing == (
        "NCCL's RAS, asked twice: rank 3 (pid 1003 on 10.0.0.3) of communicator 0xa1 of 4 ranks did not answer"
    )
    assert behind == (
        "NCCL's RAS, asked twice: on communicator 0xa1 of 4 ranks others launched 8 collectives, rank 1 (pid 1001 on"
        " 10.0.0.1), which is rank 9 of the job, only 7"
    )


def test_many_ranks_are_counted() -> None:
    answer = parse_ras(ras_answer({0: 7}, missing=dict.fromkeys(range(1, 9), False)))
    (missing,) = ras_words(compare(answer, answer), {})
    assert f"rank {RANKS_SHOWN} (pid" in missing
    assert f", and {8 - RANKS_SHOWN} more of communicator" in missing


def test_it_does_not_call_a_job_healthy() -> None:
    (words,) = ras_words((), {})
    assert "cannot see a hang" in words


@pytest.mark.parametrize(
    ("backend", "environ", "may"),
    [("nccl", {}, True), ("cpu:gloo,cuda:nccl", {}, True), ("gloo", {}, False), (None, {}, False),
     ("nccl", {"NCCL_RAS_ENABLE": "0"}, False)],
)  # fmt: skip
def test_it_is_asked_only_where_it_may_be(backend: str | None, environ: dict[str, str], may: bool) -> None:
    assert may_have_ras(backend, environ) is may


def test_what_fails_is_said_or_left_out() -> None:
    def nonsense() -> None:
        raise RasError("127.0.0.1:28028: sent nonsense")

    def crash() -> None:
        raise ZeroDivisionError

    assert words_of(RasWitness({}, nonsense)) == ("NCCL's RAS cannot be read: 127.0.0.1:28028: sent nonsense",)
    assert words_of(RasWitness({}, crash)) == ()
    assert words_of(RasWitness({}, lambda: None)) == ()


def test_what_it_said_is_taken_once() -> None:
    witness = RasWitness({}, lambda: STUCK)
    assert len(words_of(witness)) == 2
    assert witness.take() == ()


def test_a_verdict_does_not_wait_for_it_and_gets_its_words_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock, said = FakeClock(), list[HangVerdict]()
    is_free = threading.Event()

    def ask() -> object:
        assert is_free.wait(SECONDS_MAX)
        return ask_ras_twice(ras.address, pause=lambda _: None)

    def keep(record: object) -> None:
        assert isinstance(record, HangVerdict)
        said.append(record)

    watch = HangWatch(
        job_hello(0, 1, backend="nccl"), keep, clock, hang_ns=NS_PER_SECOND,
        training=(threading.get_ident(), threading.get_native_id()),
        progress=lambda: TrainingProgress(7, "tail", 4000 * NS_PER_SECOND, 0), is_measuring=lambda: True,
        is_closing=lambda: False, run_dir=str(tmp_path),
        answer_others=lambda _: pytest.fail("nobody asks"),
    )  # fmt: skip
    monkeypatch.setattr("pacecar.profiler.hangs.nccl_witness.RasWitness.__init__.__defaults__", (ask,))
    with serve_ras(ras_answer({0: 7}, missing={1: False})) as ras:
        watch.open(HashStore(), "127.0.0.1", "test", time.sleep)
        try:
            for _ in range(10):
                watch.check(clock.monotonic_ns(), is_suspected=True)
                clock.advance(1000 * NS_PER_SECOND)
            (before,) = said
            assert not any("RAS" in each for each in before.evidence)
            is_free.set()
            end = time.monotonic() + SECONDS_MAX
            while len(said) < 2 and time.monotonic() < end:
                watch.check(clock.monotonic_ns(), is_suspected=True)
                time.sleep(0.01)
        finally:
            is_free.set()
            watch.close()
    _, after = said
    assert (after.kind, after.culprits, after.summary) == (before.kind, before.culprits, before.summary)
    assert "rank 1 (pid 1001 on 10.0.0.1)" in after.evidence[-1]
    assert len(after.evidence) == min(EVIDENCE_MAX, len(before.evidence) + 1)
    file = tmp_path / "hang-step7.json"
    until(lambda: file.exists() and kept_verdict(file) == after, "the file has the words as well")


def test_the_log_of_the_job_is_found_by_its_variable_and_names_the_jobs_ranks(tmp_path: Path) -> None:
    for rank, count in enumerate((3, 2)):
        lines = [init_line(rank, ranks=2), *[call_line(rank, ranks=2)] * count]
        (tmp_path / f"nccl.node-a.{100 + rank}").write_text("".join(lines))
    (tmp_path / "nccl.node-a.99").write_text(init_line(1, ranks=2))  # of an earlier run
    environ = {"NCCL_DEBUG_FILE": f"{tmp_path}/nccl.%h.%p"}
    assert has_nccl_log("cuda:nccl", environ)
    assert not has_nccl_log("gloo", environ)
    assert not has_nccl_log("nccl", {})
    (words,) = words_of(LogWitness([55, 101, 100, 55], environ))
    assert "rank 1 (pid 101 on node-a), which is rank 1 of the job, only 2" in words
    (words,) = words_of(LogWitness([100, 101, 101], environ))
    assert "of the job" not in words, "two hosts have this pid"
    assert words_of(LogWitness([3], environ)) == ()


def test_after_a_verdict_the_log_is_quoted_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, said = FakeClock(), list[HangVerdict]()
    pid = os.getpid()
    for rank, count in enumerate((3, 2)):
        lines = "".join([init_line(rank, ranks=2), *[call_line(rank, ranks=2)] * count])
        with (tmp_path / f"log.{pid}").open("a") as file:
            file.write(lines.replace(f"node-a:{100 + rank}:", f"node-a:{pid + rank}:"))
    monkeypatch.setenv("NCCL_DEBUG_FILE", f"{tmp_path}/log.%p")
    monkeypatch.setenv("NCCL_RAS_ENABLE", "0")
    watch = HangWatch(
        job_hello(0, 1, backend="nccl"), said.append, clock, hang_ns=NS_PER_SECOND,  # type: ignore[arg-type]  # verdicts
        training=(threading.get_ident(), threading.get_native_id()),
        progress=lambda: TrainingProgress(7, "tail", 4000 * NS_PER_SECOND, 0), is_measuring=lambda: True,
        is_closing=lambda: False,
        answer_others=lambda _: pytest.fail("nobody asks"),
    )  # fmt: skip
    watch.open(HashStore(), "127.0.0.1", "test", time.sleep)
    try:
        end = time.monotonic() + SECONDS_MAX
        while len(said) < 2 and time.monotonic() < end:
            watch.check(clock.monotonic_ns(), is_suspected=True)
            clock.advance(1000 * NS_PER_SECOND)
            time.sleep(0.01)
    finally:
        watch.close()
    before, after = said
    assert not any("NCCL" in each for each in before.evidence)
    assert f"rank 1 (pid {pid + 1} on node-a) only 2" in after.evidence[-1]
    assert (after.kind, after.culprits, after.summary) == (before.kind, before.culprits, before.summary)


def kept_verdict(file: Path) -> HangVerdict:
    return msgspec.json.decode(file.read_bytes(), type=HangEvidence).verdict
