"""What a job, a file or another process wrote reaches no terminal as it stands: every command that shows it."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from pacecar.clock import SystemClock
from pacecar.commands.main import cli
from pacecar.commands.shared_options import fail
from pacecar.commands.tune_text import lines as tune_lines
from pacecar.monitor.catalog_sample import sample
from pacecar.monitor.ingest.socket_server import SocketServer
from pacecar.monitor.ingest.unix_socket import UnixSocket
from pacecar.monitor.jobs.state import DaemonState
from pacecar.monitor.recorder.ring_buffer import RingBuffer
from pacecar.profiler.transport.daemon_socket import DaemonSocket
from pacecar.records import Answer, Goodbye, HangSuspicion, Ok, Request, Snapshot, Straggler, TunerOrder, TunerStatus
from pacecar.records.commands import TunerChange, TunerReport
from pacecar.records.recording import RecordingEvent, RecordingHeader, Trigger, parts
from pacecar.wire import FRAME_BYTES_MAX, decode_frame, encode_frame, payload_of
from tests.commands.report import runs
from tests.kit.records import job_hello, step_record
from tests.kit.waiting import until

EVIL = "e\x1b[2Jvil\nFORGED\r\x9b31m\u202e\x07"
SHOWN = "e\ufffd[2Jvil\ufffdFORGED\ufffd\ufffd31m\ufffd\ufffd"


def is_plain(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n")) and "\nFORGED" not in text


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli, list(arguments))


def report() -> TunerReport:
    change = TunerChange(
        decision=1, kind="trial", knob=EVIL, from_value=1, to_value=2, step=1, expected_gain_ratio=None,
        measured_gain_ratio=None, outcome=EVIL, reason=EVIL,
    )  # fmt: skip
    order = TunerOrder(job=EVIL, action="set", outcome="done", uid=1, values={}, step=1, wall_ns=1, detail=EVIL)
    return TunerReport(
        mode=EVIL, policy=EVIL, state=EVIL, detail=EVIL, step=1, knobs={EVIL: 1}, began={EVIL: 1}, domains={},
        by_hand=(EVIL,), refused={EVIL: EVIL}, trials=0, exploration_ns=0, elapsed_ns=0, budget_ratio=0.1,
        changes=(change,), orders=(order,), advice=(EVIL,), node=(EVIL,),
    )  # fmt: skip


class EvilDaemon:
    """Answers every request with what a hostile job says; of another user, or of a socket that is not the daemon's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            request = decode_frame(peer.recv(FRAME_BYTES_MAX))
            assert isinstance(request, Request)
            is_status = request.arguments["order"] == "status"
            said = report() if is_status else None
            answers: list[dict[str, Any]] = [
                {"rank": None, "state": "accepted", "detail": EVIL, "ranks": (0,)},
                {"rank": 0, "state": "accepted", "detail": EVIL},
                {"rank": 0, "state": "done" if is_status else "refused", "detail": EVIL, "report": said},
            ]
            for answer in answers:
                peer.send(encode_frame(Answer(job=EVIL, number=request.serial, **answer)))
            peer.close()

    def close(self) -> None:
        self._listener.close()


@pytest.mark.parametrize("arguments", [("status",), ("freeze",), ("resume",), ("rollback",), ("status", "--json")])
def test_tune_shows_what_a_job_says_as_text(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    daemon = EvilDaemon(tmp_path / "s")
    try:
        done = run("tune", *arguments, EVIL, "--socket", str(daemon.path))
    finally:
        daemon.close()
    assert "vil" in done.output
    assert is_plain(done.output)
    assert is_plain("\n".join(tune_lines(EVIL, report())))


def recording(folder: Path) -> Path:
    tape = RingBuffer(window_ns=10**12, bytes_max=10**7)
    tape.tick(Snapshot(1, 1, 1, 0, {"x": Ok((sample("pacecar_host_cpus_online", 1),))}, {"x": 1}), 1)
    for record in (
        step_record(job=EVIL),
        Goodbye(job=EVIL, rank=0, reason=EVIL, wall_ns=1),
        HangSuspicion(job=EVIL, rank=0, step=1, phase=EVIL, wall_ns=1, silent_ns=1, last_collective=EVIL,
                      collectives=None, stack=EVIL),
    ):  # fmt: skip
        tape.record(payload_of(encode_frame(record)), 2)
    tape.event(RecordingEvent(3, EVIL, EVIL))
    header = RecordingHeader(
        host=EVIL, pacecar_version=EVIL, written_wall_ns=1, window_ns=1,
        triggers=(Trigger(kind="hang", subject=EVIL, detail=EVIL, wall_ns=1),),
        hellos=(job_hello(job=EVIL, host=EVIL, device=EVIL),), dropped={EVIL: 1},
    )  # fmt: skip
    path = folder / "evil.recording"
    path.write_bytes(b"".join(parts(header, [chunk.body for chunk in tape.seal(4)])))
    return path


def test_dump_shows_a_recording_as_text_and_json_gives_it_back_whole(tmp_path: Path) -> None:
    path = recording(tmp_path)
    shown = run("dump", "--show", str(path))
    assert shown.exit_code == 0
    assert shown.output.count(SHOWN) > 5
    assert is_plain(shown.output)
    as_json = run("dump", "--show", str(path), "--json")
    assert is_plain(as_json.output)
    assert json.loads(as_json.output)["host"] == EVIL, "a program gets what is there"


@pytest.mark.parametrize("form", ["--json", "--markdown", "html"])
def test_the_report_shows_a_run_as_text(tmp_path: Path, form: str) -> None:
    folder = runs.tuned(tmp_path / "run")
    evil: list[Any] = [
        Goodbye(job="j", rank=0, reason=EVIL, wall_ns=runs.START_NS),
        Straggler(job="j", late_rank=1, cause="compute", phase=EVIL, since_step=1, step=2, wall_ns=runs.START_NS,
                  excess_ns=1, evidence=EVIL),
        HangSuspicion(job="j", rank=0, step=1, phase=EVIL, wall_ns=runs.START_NS, silent_ns=1, last_collective=EVIL,
                      collectives=None, stack=EVIL),
        TunerStatus(job="j", rank=0, state="off", detail=EVIL, step=1, wall_ns=runs.START_NS, exploration_ns=0,
                    trials=0),
        TunerOrder(job="j", action="set", outcome="done", uid=1, values={EVIL: 1}, step=1, wall_ns=runs.START_NS,
                   detail=EVIL),
    ]  # fmt: skip
    path = folder / "rank0.jsonl"
    hello, _, rest = path.read_bytes().partition(b"\n")
    named = msgspec.json.decode(hello)
    named |= {"host": EVIL, "device": EVIL, "framework": EVIL, "backend": EVIL, "pacecar_version": EVIL}
    path.write_bytes(msgspec.json.encode(named) + b"\n" + rest + runs.lines(evil))
    with (folder / "rank1.jsonl").open("ab") as other:
        other.write(b'{"type":"' + EVIL.encode() + b'"}\nnot \x1b[2J json\n')
    if form == "html":
        done = run("report", str(folder))
        text = (folder / "report.html").read_text()
        text = "".join(one for one in text if one != "\t")
    else:
        done = run("report", str(folder), form)
        text = done.output
    assert "vil" in text
    assert is_plain(text)
    assert is_plain(done.output)


def test_a_command_that_fails_says_so_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fail(f"no file {EVIL}")
    said = capsys.readouterr().err + run("dump", "--show", f"/nowhere/{EVIL}").output
    assert said.count("vil") == 2
    assert all(line.isprintable() for line in said.split("\n")), "not ESC alone, which click leaves out here"


def test_the_analysis_names_a_trace_as_text(tmp_path: Path) -> None:
    (tmp_path / f"{EVIL}.json").write_text("no trace")
    said = run("analyze", str(tmp_path), "--json").output + run("analyze", str(tmp_path / EVIL), "--json").output
    assert said.count("vil") == 2
    assert all(line.isprintable() for line in said.split("\n"))


@pytest.mark.slow
def test_the_inbox_logs_what_hooks_say_as_text_and_a_refused_hook_has_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SystemClock()
    inbox = SocketServer(
        UnixSocket(tmp_path / "s"), DaemonState(clock, jobs_max=1, ranks_max=1, job_forget_seconds=900), clock
    )
    inbox.start()
    outboxes = [
        DaemonSocket(str(tmp_path / "s"), job_hello(job=job, host=EVIL, device=EVIL, pid=os.getpid()))
        for job in (EVIL, "late")
    ]
    try:
        with caplog.at_level(logging.DEBUG, logger="pacecar"):
            for box in outboxes:
                box.put(step_record(job=EVIL))
                until(lambda: inbox.frames + sum(inbox.refused().values()) >= 2, "it was heard")
            until(lambda: "does not show this rank" in caplog.text, "the hook has a line")
            for number in range(20):
                outboxes[1].put(step_record(job="late", step=number))
            until(lambda: sum(inbox.refused().values()) >= 20, "refused again and again")
            outboxes[0].close(5)
    finally:
        outboxes[1].close(5)
        inbox.close()
    said = [record.getMessage() for record in caplog.records]
    assert all(line.isprintable() for line in said), said
    (line,) = [line for line in said if "beyond jobs_max = 1" in line and "does not show this rank" in line]
    assert "'late' is beyond jobs_max = 1, and uid" in line
