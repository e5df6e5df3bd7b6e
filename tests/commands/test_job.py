"""`pacecar job`: which rank is asked, and what is shown of the replies."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pacecar.commands import daemon_client
from pacecar.commands.daemon_client import AskError, ask_job
from pacecar.commands.job_text import job_document, lines
from pacecar.commands.main import cli
from pacecar.records import Answer, Cause, JobLedger, Knobs, Straggler
from pacecar.records.job_orders import AttemptSoFar, JobAnswer, JobNews, RankReply
from pacecar.wire import decode_frame, encode_frame
from tests.analysis.tracefiles import write_trace

CONNECTIONS = 3
"""Each rank once, and one of them again."""

DONE = Answer(job="j", rank=1, number=1, state="done", detail="here")


def answers(replies: list[RankReply], world_size: int) -> list[JobAnswer]:
    return [JobAnswer(job="j", rank=1, number=1, world_size=world_size, replies=tuple(replies))]


def test_the_job_may_be_left_out_before_a_command_and_be_called_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(daemon_client, "ask_job", lambda *given: asked.append(given[1:]) or iter([DONE]))
    for words in (["show"], ["j", "show"], ["show", "show"], ["tune", "freeze"], ["show", "tune", "freeze"],
                  ["dump", "--directory", "dump"]):  # fmt: skip
        CliRunner().invoke(cli, ["job", *words])
    assert [given[0] for given in asked] == ["", "j", "show", "", "show", ""]
    assert asked[4][1:] == ("tune", {"order": "freeze"})


@pytest.mark.parametrize("words", [["set", "micro_batch"], ["freeze", "micro_batch", "4"], ["set", "nothing", "4"]])
def test_an_order_that_cannot_be_one_is_not_sent(words: list[str]) -> None:
    assert CliRunner().invoke(cli, ["job", "j", "tune", *words]).exit_code == 2


def test_a_dump_does_not_go_to_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_client, "ask_job", lambda *_: pytest.fail("an order was sent"))
    said = CliRunner().invoke(cli, ["job", "j", "dump", "--directory", "s3://bucket/hang"])
    assert said.exit_code == 2
    assert "--directory: dumps are written into a folder, not to a URL" in said.output


def test_what_is_not_known_is_said_beside_what_is() -> None:
    ledger = JobLedger(
        job="j", ranks=4, step=9, pace_ns=50_000_000, median_ns=48_000_000, total_steps=9, total_wall_ns=100,
        total_phases_ns={"forward": 40, "backward": 60},
    )  # fmt: skip
    late = Straggler(
        job="j", late_rank=3, cause=Cause.DATA_WAIT, phase="data_wait", since_step=4, step=9, wall_ns=1,
        excess_ns=12_000_000, evidence="of 8 ranges",
    )  # fmt: skip
    attempt = AttemptSoFar(
        attempt=2, wall_ns=600 * 10**9, global_step=4209, unsaved_steps=7,
        headings_ns={"start_up_preparation": 30 * 10**9, "productive": 540 * 10**9, "data_wait": 30 * 10**9},
    )  # fmt: skip
    news = JobNews(ledger=ledger, late=(late,), attempt=attempt)
    here = RankReply(rank=0, host="n0", step=9, pace_ns=50_000_000, knobs=Knobs(2, {"micro_batch": 8}), news=news)
    silent = RankReply(
        rank=1, host="10.0.0.1", state="silent", silent_ns=7_200_000_000, detail="no answer within 0.4 s"
    )
    other = RankReply(rank=3, host="n1", step=10, knobs=Knobs(1, {"micro_batch": 4}), has_daemon=False)
    document = job_document(DONE, answers([here, silent, other], 4))
    assert (document.is_whole, document.lost) == (False, [2])
    assert list(lines(document, width=100)) == [
        "j: 2 of 4 ranks answer, steps 9 to 10",
        "  rank 3 is late since step 4: data_wait costs 12.00 ms a step (of 8 ranges)",
        "  rank 1 (10.0.0.1): last heard from 7.2 s ago: no answer within 0.4 s",
        "  the replies of 1 rank from 2 on were lost: ask again",
        "  attempt 2, 10 min 0 s old: productive 90.0 %, start-up: preparation 5.0 %, data wait 5.0 %; step 4209 of the"
        " training; 7 steps since the last checkpoint",
        "  pace 50.00 ms (median 48.00 ms); time of all ranks: backward 60.0 %, forward 40.0 %",
        "  knobs on 1 rank from 3 on: micro_batch 4",
        "  knobs on 1 rank from 0 on: micro_batch 8",
        "",
        "host                      ranks              step       pace",
        "n0                        0                     9   50.00 ms",
        "n1                        3                    10          -  without a daemon",
    ]


@pytest.mark.slow
def test_traces_that_are_here_are_analyzed_at_once_and_others_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write_trace(tmp_path / f"rank{rank}.json", "cccAA", rank=rank) for rank in (0, 1)]
    given: list[Any] = []

    def ask(wanted: list[str], files: list[str]) -> tuple[int, str, str]:
        replies = [RankReply(rank=rank, host=f"n{rank}", detail=file) for rank, file in enumerate(files)]
        said = [*answers(replies, len(files)), DONE]
        monkeypatch.setattr(daemon_client, "ask_job", lambda *words: given.append(words[3]) or iter(said))
        ran = CliRunner().invoke(cli, ["job", "trace", *wanted])
        return ran.exit_code, ran.stdout, ran.stderr

    code, printed, _ = ask(["--analyze", "--json"], [*map(str, paths)])
    assert code == 0
    assert [trace["rank"] for trace in json.loads(printed)["traces"]] == [0, 1]
    code, printed, _ = ask(["--analyze", "--directory", f"file://{tmp_path}"], [f"file://{path}" for path in paths])
    assert code == 0
    assert "2 of 2 ranks" in printed
    assert given[-1]["directory"] == f"file://{tmp_path}"
    code, printed, said = ask(["--analyze", "--json"], [str(paths[0]), "/there/rank1.json"])
    assert code == 1
    assert "1 of 2 traces are on other hosts (n1:/there/rank1.json): --directory names a folder that all" in said
    assert len(json.loads(printed)["traces"]) == 1
    code, printed, _ = ask(["--directory", "here"], ["/there/a.json", "s3://bucket/b.json"])
    assert (code, printed) == (0, "n0:/there/a.json\ns3://bucket/b.json\n")
    assert given[-1]["directory"] == str(Path("here").absolute())


@pytest.mark.parametrize("order", ["show", "hang"])
def test_json_has_every_field_of_a_reply(monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    """`jq '.replies[] | select(.state == "done")'` must find those that are done."""
    said = [*answers([RankReply(rank=0, step=0), RankReply(rank=1, state="silent")], 2), DONE]
    monkeypatch.setattr(daemon_client, "ask_job", lambda *given: iter(said))
    replies = json.loads(CliRunner().invoke(cli, ["job", order, "--json"]).stdout)["replies"]
    assert [(one["state"], one["step"], one["has_daemon"]) for one in replies] == [
        ("done", 0, True), ("silent", None, True)
    ]  # fmt: skip


def test_each_host_has_a_line_with_its_ranks() -> None:
    there = [RankReply(rank=rank, host="n0", step=4) for rank in (0, 1, 2, 4, 6, 7)]
    assert "  0-2,4,6-7 " in list(lines(job_document(DONE, answers(there, 6))))[-1]


def test_a_daemon_that_drops_the_replies_is_said_to_be_older() -> None:
    document = job_document(DONE, [])
    assert "older version" in str(document.problem)
    assert not document.is_whole


def serve(path: Path, *, running: int) -> list[dict[str, Any]]:
    """Serve as a daemon of the ranks 0 and 1, of which only `running` answers; return what is asked."""
    asked: list[dict[str, Any]] = []
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen()

    def answer() -> None:
        with listener:
            for _ in range(CONNECTIONS):
                connection, _ = listener.accept()
                with connection:
                    request = decode_frame(connection.recv(65536))
                    asked.append(request.arguments)
                    rank = request.arguments["attempt"] % 2
                    first = Answer(job="j", rank=None, number=1, state="accepted", detail="", ranks=(rank,))
                    connection.send(encode_frame(first))
                    if rank == running:
                        connection.send(encode_frame(DONE))
                        return
                    connection.recv(1)  # until the asker hangs up

    threading.Thread(target=answer, daemon=True).start()
    return asked


@pytest.mark.slow
def test_another_rank_is_asked_with_the_same_id_where_one_shows_no_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_client, "LAST_SIGN_SECONDS", 0.5)
    asked = serve(tmp_path / "s", running=1)
    assert list(ask_job(str(tmp_path / "s"), "j", "show", {})) == [DONE]
    assert [one["attempt"] for one in asked] == [0, 1]
    assert len({one["id"] for one in asked}) == 1
    serve(tmp_path / "t", running=9)
    with pytest.raises(AskError, match="no answer from rank 0, 1 of j"):
        list(ask_job(str(tmp_path / "t"), "j", "show", {}))
