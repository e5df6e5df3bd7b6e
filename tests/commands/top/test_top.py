"""The terminal view fits every size, obeys its keys, trusts no text, and leaves the terminal as it was."""

import http.server
import io
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from fcntl import ioctl

import msgspec
import pytest

from pacecar.commands.top.daemon_poller import FetchError, address, fetch
from pacecar.commands.top.key_decoder import Keys
from pacecar.commands.top.panes import alarm_lines, calibration_lines, recorder_lines, where_words
from pacecar.commands.top.screen import GPU_SORTS, ScreenView, compose, everything, on_key, shown_jobs
from pacecar.commands.top.table import PaneColumn, gauge, rows
from pacecar.formatting.plain_text import clean
from pacecar.records import status_document
from pacecar.records.job_identity import JobKey

rich_console = pytest.importorskip("rich.console", reason="rich is not installed: pip install 'pacecar[top]'")


def rank(number):
    return status_document.Rank(
        rank=number, host="node-a", pid=7, device=f"cuda:{number}", device_uuid=None, connected=True, finished=False,
        step=41, step_duration_seconds=0.4, last_record_age_seconds=0.1,
        ledger_seconds={"compute": 0.3, "data_wait": 0.1}, ledger_source="exact", mfu_ratio=0.4,
    )  # fmt: skip


def job(name="run-7", ranks=8, **changes):
    move = status_document.Move(
        decision=1, time_seconds=5.0, kind="trial", knob="bucket_bytes", from_value=1 << 20, to_value=1 << 21, step=5,
        reason="because", expected_gain_ratio=0.1, outcome="kept", outcome_reason="measured", measured_gain_ratio=0.0,
    )  # fmt: skip
    late = status_document.LateRank(
        rank=3, cause="data_wait", phase="forward", since_step=2, excess_seconds=0.06, evidence="slow"
    )
    rung = status_document.Saving(scenario="at_most_data_free", step_seconds=0.3, gain_ratio=0.2, bound="rest")
    given = {
        "job": name, "world_size": 16, "ranks": tuple(map(rank, range(ranks))), "ranks_left_out": 0, "finished": False,
        "step": 41, "pace_seconds": 0.4, "ledger_seconds": {"compute": 3.0, "data_wait": 1.0}, "moves": (move,),
        "stragglers": (late,),
        "what_if": status_document.Ladder(
            step=41, steps=40, pace_seconds=0.4, source="exact", calibration_age_steps=0, rungs=(rung,)
        ),
    }  # fmt: skip
    return status_document.JobStatus(**(given | changes))


def document(jobs=2, gpus=8, links=2):
    own = status_document.DaemonStatus(
        pacecar_version="1", start_time_seconds=0.0, period_seconds=1.0, cpu_utilization_ratio=0.0,
        recorder=status_document.RecorderStatus(
            span_seconds=300.0, memory_bytes=6 << 20, triggers_total={"xid": 2, "hang": 0}, files_total=1,
            files_bytes=3 << 20, write_failures_total=0, lost_total=0,
        ),
    )  # fmt: skip
    return status_document.StatusDocument(
        version=status_document.VERSION, node="node-a", time_seconds=1_700_000_000.0, tick=3, snapshot_age_seconds=0.1,
        daemon=own,
        host=status_document.Host(
            cpus_online=64, cpu_utilization_ratio=0.4, memory_size_bytes=1 << 40, memory_used_bytes=1 << 38
        ),
        gpus=tuple(
            status_document.GpuStatus(gpu=str(n), name="H200", up=1, utilization_ratio=n / 10, power_watts=700.0 - n)
            for n in range(gpus)
        ),
        links=tuple(status_document.LinkStatus(kind="host_network", name=f"eth{n}", up=1) for n in range(links)),
        jobs=tuple(job(f"job-{n:02}") for n in range(jobs)),
    )  # fmt: skip


def sick(said):
    """The document with GPU 1 degraded, 2 and 3 failed, 4 lost, 5 with Xids of programs, 6 cut, and one missing."""
    narrow = status_document.HealthReasonStatus(
        reason="pcie_width", verdict="degraded", words="PCIe link: 4 of 16 lanes", remedy="reseat the card"
    )
    link = status_document.HealthReasonStatus(
        reason="nvlink_down", verdict="failed", words="NVLink: 17 links up; down: 3", remedy="drain the node"
    )
    lost = status_document.HealthReasonStatus(
        reason="down", verdict="failed", words="down: lost", remedy="restart the node"
    )
    instance = status_document.MigInstance(
        gpu_instance="2", compute_instance="0", name="3g.71gb", uuid="MIG-a", memory_size_bytes=71 << 30,
        memory_used_bytes=0, processes=0,
    )  # fmt: skip
    changes = {
        "0": {"health": "ok"},
        "1": {"health": "degraded", "health_reasons": (narrow,), "uuid": "GPU-bbb", "pci_bus_id": "0000:5d:00.0"},
        "2": {"health": "failed", "health_reasons": (link, narrow)},
        "3": {"health": "failed", "health_reasons": (link,)},
        "4": {"health": "failed", "health_reasons": (lost,), "up": 0, "down_reason": "lost", "uuid": "GPU-\x1b[2J"},
        "5": {"health": "ok", "xid_errors_total": 2, "mps_processes": 3},
        "6": {"health": "ok", "mig_enabled": 1, "instances": (instance,)},
        "7": {"health": "unknown", "up": 0},
    }
    gpus = tuple(msgspec.structs.replace(gpu, **changes.get(gpu.gpu, {})) for gpu in said.gpus)
    gone = status_document.MissingGpu(
        gpu="8", name="H200", uuid="GPU-ccc", pci_bus_id="0000:9d:00.0", seen_time_seconds=1_000_000_000.0
    )
    return msgspec.structs.replace(said, gpus=gpus, gpus_missing=(gone,))


def console(width=80, height=24, **options):
    return rich_console.Console(file=io.StringIO(), width=width, height=height, **options)


def screen(view=None, width=80, height=24, said=None):
    lines = compose(said or document(), view or ScreenView(), width, height, console(width, height))
    return [line.plain for line in lines]


@pytest.mark.parametrize("page", ["overview", "job", "help"])
@pytest.mark.parametrize("size", [(80, 24), (200, 60), (20, 5), (100, 30), (132, 43), (1, 1), (300, 100)])
@pytest.mark.parametrize("many", [(0, 0, 0), (1, 1, 1), (2, 8, 2), (64, 64, 64)])
def test_every_screen_is_exactly_as_large_as_the_terminal(page, size, many):
    width, height = size
    said = sick(document(*many)) if many[1] > 2 else document(*many)
    view = ScreenView(page=page, job=said.jobs[-1].job if said.jobs else None, rank=99)
    lines = compose(said, view, width, height, console(width, height))
    assert len(lines) == height
    assert max(line.cell_len for line in lines) <= width


def test_80_by_24_shows_gpus_links_jobs_bars_stragglers_and_decisions():
    text = "\n".join(screen())
    for word in (
        "CPU",
        "Mem",
        "GPU",
        "  7 ",
        "eth0",
        "job-00",
        "job-01",
        "####",
        "rank 3 is late",
        "kept",
        "F1 Help",
    ):
        assert word in text, word
    assert "bucket bytes" in text
    assert "rec 5min, 1 written  daemon 0.0%" in text


def states(said, width=200):
    console_ = console(width)
    lines = [line.plain for line in everything(said, width, console_)]
    head = next(place for place, line in enumerate(lines) if line.startswith("GPU "))
    at = lines[head].index("State")
    return [line[at:].strip() for line in lines[head + 1 : head + 9]], lines


def test_each_gpus_state_is_its_verdict():
    found, _ = states(sick(document()))
    assert found == [
        "ok",
        "degraded: PCIe link: 4 of 16 lanes",
        "failed: NVLink: 17 links up; down: 3, PCIe link: 4 of 16 lanes",
        "failed: NVLink: 17 links up; down: 3",
        "failed: down: lost",
        "ok, 2 Xid, MPS: 3 clients",
        "ok, MIG: 1 instance",
        "not read yet",
    ]
    assert states(document())[0] == ["ok"] * 8, "of a daemon that gives no verdicts"


def test_instances_that_could_not_be_read_are_not_none_of_them():
    said = sick(document())
    gpus = tuple(msgspec.structs.replace(gpu, instances=()) for gpu in said.gpus)
    assert states(msgspec.structs.replace(said, gpus=gpus))[0][6] == "ok, MIG"


def test_what_is_wrong_with_gpus_is_said_with_what_to_do_and_where_the_board_is():
    _, lines = states(sick(document()), width=120)
    text = " ".join(" ".join(lines).split())
    for words in (
        "! GPU 2, 3 failed: NVLink: 17 links up; down: 3. To do: drain the node.",
        "! GPU 1, 2 degraded: PCIe link: 4 of 16 lanes. To do: reseat the card.",
        "! GPU 4 (H200, GPU-\N{REPLACEMENT CHARACTER}[2J) failed: down: lost. To do: restart the node.",
        "! A GPU is missing: H200, 0000:9d:00.0, GPU-ccc, last read as GPU 8 at 2001-09-09 01:46:40 UTC.",
    ):
        assert words in text, words
    assert text.index("failed: NVLink") < text.index("! GPU 1, 2 degraded"), "the worst first"
    assert "6:2/0" in text
    assert "3g.71gb MIG-a" in text
    small = "\n".join(screen(said=sick(document())))
    assert "! GPU 2, 3 failed" in small, "80 x 24 has room for the worst"


def test_200_by_60_leaves_nothing_out():
    text = "\n".join(screen(width=200, height=60))
    for word in (
        "eth1",
        "Rec last 5min",
        "NVLink",
        "data wait 25.0%",
        "What if",
        "data for free",
        "Ledger of the last step",
        "cuda:7",
    ):
        assert word in text, word


def test_the_recorder_line_has_what_was_written_why_and_what_failed():
    recorder = document().daemon.recorder
    (line,) = recorder_lines(recorder, 80)
    assert line.plain == "Rec last 5min in 6.0M  1 recording written, 3.0M on disk  for xid 2"
    bad = msgspec.structs.replace(recorder, lost_total=1, write_failures_total=3)
    assert recorder_lines(bad, 100)[0].plain.endswith("  3 writes failed, 1 lost")
    assert recorder_lines(None, 80) == []


def test_a_rank_is_where_its_node_pod_and_slurm_job_are():
    assert where_words(rank(3)) == "node-a cuda:3"
    placed = msgspec.structs.replace(rank(3), pod_name="t-0", pod_namespace="ml", slurm_job="7")
    assert where_words(placed) == "node-a cuda:3  pod ml/t-0  Slurm 7"


def test_the_chosen_job_is_on_the_screen_however_many_there_are():
    said, view = document(jobs=40), ScreenView()
    for _ in range(33):
        on_key("down", view, said)
    assert view.job == JobKey("job-32", "")
    assert any(line.startswith("job-32") for line in screen(view, said=said))


def test_the_chosen_rank_is_on_the_screen_however_many_there_are():
    said = msgspec.structs.replace(document(), jobs=(job("a", ranks=200),))
    view = ScreenView()
    for key in ("enter", "end"):
        on_key(key, view, said)
    assert (view.page, view.rank) == ("job", 199)
    assert any(line.startswith("  199") for line in screen(view, said=said))


def test_keys_do_what_the_help_says():
    view, said = ScreenView(), document()
    first, second = JobKey("job-00", ""), JobKey("job-01", "")
    for key, (field, value) in {
        "h": ("page", "help"), "escape": ("page", "overview"), "P": ("gpu_sort", "utilization"),
        "M": ("gpu_sort", "memory"), "s": ("gpu_sort", "power"), "o": ("job_sort", "pace"), "f5": ("is_held", True),
        "down": ("job", first), "j": ("job", second), "k": ("job", first), "G": ("job", second),
        "enter": ("page", "job"), "tab": ("job", second), "left": ("page", "overview"), "/": ("is_typing", True),
    }.items():  # fmt: skip
        assert on_key(key, view, said)
        assert getattr(view, field) == value, key
    for letter in "q-01":
        assert on_key(letter, view, said)
    assert view.filter == "q-01"
    for key in ("backspace",) * 4:
        on_key(key, view, said)
    for letter in "B-01".lower():
        on_key(letter, view, said)
    on_key("enter", view, said)
    assert [one.job for one in shown_jobs(said, view)] == ["job-01"]
    assert [on_key(key, view, said) for key in ("q", "f10", "interrupt")] == [False] * 3


@pytest.mark.parametrize("by", GPU_SORTS)
def test_gpus_are_sorted_and_what_is_unknown_comes_last(by):
    text = screen(ScreenView(gpu_sort=by))
    order = [int(line.split()[0]) for line in text if line[:3].strip().isdigit()]
    assert sorted(order) == list(range(8))
    assert order[0] == {"utilization": 7}.get(by, 0)


def test_no_text_of_a_job_reaches_the_terminal_as_a_command():
    evil = "\x1b[2Jgone\r\n\x07"
    said = msgspec.structs.replace(document(), node=evil, jobs=(job(evil),))
    for page in ("overview", "job"):
        text = "".join(screen(ScreenView(page=page, job=evil), said=said))
        assert "\x1b" not in text
        assert "\r" not in text
        assert "\x07" not in text
    assert clean(evil) == "\ufffd[2Jgone\ufffd\ufffd\ufffd"
    assert not any("\x1b" in line.plain for line in everything(said, 100, console(100)))


def test_a_gauge_is_empty_where_nothing_is_known():
    assert gauge(None, 10).plain == "[        ]"
    assert gauge(0.5, 12, "50%").plain == "[|||||  50%]"


def test_columns_leave_in_order_when_room_is_short():
    columns = [PaneColumn("a", 5, str), PaneColumn("b", 5, str, rank=2), PaneColumn("c", 5, str, rank=1)]
    assert [line.plain.split() for line in rows(columns, [1], 17)] == [["a", "b", "c"], ["1"] * 3]
    assert rows(columns, [1], 12)[0].plain.split() == ["a", "c"]
    assert rows(columns, [1], 5)[0].plain.split() == ["a"]


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        ([b"q"], ["q"]),
        ([b"\x1b[A\x1bOB"], ["up", "down"]),
        ([b"\x1b", b"[", b"A"], ["up"]),
        ([b"\x1b[15~\x1b[17~"], ["f5", "f6"]),
        ([b"\x1b[200~x"], ["x"]),
        ([b"\x1bz"], []),
        ([b"\xc3", b"\xa9"], ["é"]),
        ([b"\xff\xfe\x00"], []),
        ([b"\x7f\r\t\x03"], ["backspace", "enter", "tab", "interrupt"]),
    ],
)
def test_bytes_become_keys_however_they_are_cut(data, keys):
    reader = Keys()
    assert [key for part in data for key in reader.decode(part)] == keys


def test_escape_alone_is_escape_once_nothing_follows():
    reader = Keys()
    assert (reader.decode(b"\x1b"), reader.quiet(), reader.quiet()) == ([], ["escape"], [])


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("9999", "http://127.0.0.1:9999"),
        ("node-a", "http://node-a:9850"),
        ("node-a:80", "http://node-a:80"),
        ("[::1]:80", "http://[::1]:80"),
        ("https://u:p@gate/node/a/", "https://u:p@gate/node/a"),
        ("http://gate:8080/a/api/snapshot", "http://gate:8080/a"),
    ],
)
def test_addresses_as_people_write_them(text, url):
    assert address(text) == url


@pytest.mark.parametrize("text", ["ftp://a", "http://", "a:b", "file:///etc/passwd"])
def test_an_address_that_is_none_is_named(text):
    with pytest.raises(FetchError, match=text.split(":", maxsplit=1)[0]):
        address(text)


@pytest.fixture
def serve():
    """Serve one answer at /p/api/snapshot; returns the root and what was asked."""
    servers = []

    def start(body, status=200):
        asked = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                asked.append((self.path, self.headers["Authorization"]))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                """Log nothing."""

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        servers.append((server, thread))
        return f"127.0.0.1:{server.server_port}/p", asked

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.slow
def test_a_remote_daemon_behind_a_prefix_and_a_password(serve):
    where, asked = serve(msgspec.json.encode(document()))
    assert fetch(address(f"http://me:p%40ss@{where}")) == document()
    assert asked == [("/p/api/snapshot", "Basic bWU6cEBzcw==")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"<html>", 200, "not a daemon's answer"),
        (b'{"version": 1}', 200, "not a daemon's answer"),
        (b'{"version": 99}', 200, "version 99"),
        (b"\xff\xfe", 200, "not a daemon's answer"),
        (b"no", 401, "401"),
        (b"no", 503, "503"),
    ],
)
def test_an_answer_that_is_not_a_document_is_named_with_its_address(serve, body, status, words):
    where, _ = serve(body, status)
    with pytest.raises(FetchError, match=words) as caught:
        fetch(address(where))
    assert "/p/api/snapshot" in str(caught.value)


def run(*arguments, **options):
    command = [sys.executable, "-m", "pacecar", "top", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


@pytest.mark.slow
def test_once_is_plain_text_for_scripts(serve):
    where, _ = serve(msgspec.json.encode(document()))
    done = run(where, "--once")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "job-01" in done.stdout
    assert all(line == line.rstrip() for line in done.stdout.splitlines())


@pytest.mark.slow
def test_no_daemon_is_one_line_and_an_exit_code():
    done = run("127.0.0.1:1", "--once")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "pacecar daemon" in done.stderr
    assert run("127.0.0.1:1").returncode == 2  # not a terminal


@pytest.mark.slow
def test_in_a_terminal_it_draws_obeys_and_gives_the_terminal_back(serve):
    where, _ = serve(msgspec.json.encode(document()))
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        [sys.executable, "-m", "pacecar", "top", where], stdin=theirs, stdout=theirs, stderr=theirs,
        env=os.environ | {"TERM": "xterm-256color"}, start_new_session=True,
    )  # fmt: skip
    seen = b""

    def until(words, limit=60.0):
        nonlocal seen
        end = time.monotonic() + limit
        while words not in seen:
            assert time.monotonic() < end, (words, seen[-2000:])
            if select.select([ours], [], [], 0.2)[0]:
                seen += os.read(ours, 65536)

    try:
        until(b"job-01")
        os.write(ours, b"h")
        until(b"this help")
        os.write(ours, b"\x1b")
        os.write(ours, b"\r")
        ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        process.send_signal(signal.SIGWINCH)
        os.write(ours, b"q")
        until(b"\x1b[?1049l")
        assert process.wait(30) == 0
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def test_the_help_names_every_letter_that_does_something():
    text = "\n".join(screen(ScreenView(page="help"), width=130))
    for word in ("Up, Down", "PgUp", "Enter", "Esc", "F3", "F5", "F6", "N P M W T", "q  F10"):
        assert word in text


def test_a_ledger_without_an_exact_window_is_said_to_be_so_and_why():
    waiting = msgspec.structs.replace(rank(0), ledger_uncalibrated="price")
    assert calibration_lines(job(ranks=2), 100) == []
    (line,) = calibration_lines(status_document.JobStatus(
        job="j", world_size=2, ranks=(waiting, rank(1)), ranks_left_out=0,
                                               finished=False), 120)  # fmt: skip
    assert line.plain.startswith("not calibrated on 1 of 2 ranks: an exact window would cost more than")


def test_why_a_job_hangs_is_the_first_alarm():
    (line,) = alarm_lines([job(hangs=(), stragglers=(), hang_verdict="rank 1 never joined all_reduce #9")], 100)
    assert line.plain == "! run-7 hangs: rank 1 never joined all_reduce #9"
