"""What a stranger put where we write: his links are not followed, his pipes not waited for, his files not filled."""

from __future__ import annotations

import logging
import os
import stat
import time
from pathlib import Path

import pytest

from pacecar import dashboards, deploy
from pacecar.analysis.output.merged_trace.perfetto import write_perfetto
from pacecar.analysis.output.page.picture import write_picture
from pacecar.analysis.reading.parallel_reading import Options, analyze
from pacecar.commands.report.build import BuildOptions
from pacecar.commands.report.run_report import ReportOptions, run_report
from pacecar.controller.memory.knob_store import KnobsFileError, KnobStore, remembered
from pacecar.monitor.ingest.unix_socket import UnixSocket, UnixSocketError
from pacecar.monitor.recorder.writer import RecordingFolder
from pacecar.profiler.transport.run_log import RunLog
from pacecar.records import Goodbye
from tests.analysis.tracefiles import write_trace
from tests.commands.report.runs import tuned
from tests.controller.test_knob_store import entry
from tests.kit.records import job_hello
from tests.kit.users import OWNER, STRANGER, as_user, commons, needs_root

pytestmark = needs_root

ROOT = 0
PRECIOUS = b"mine, and long enough to be missed\n" * 100
SECONDS = 30.0
"""No write takes so long; a pipe on which somebody waits does."""


def write_run_log(folder):
    log = RunLog(folder, job_hello())
    log.put(Goodbye(job="j", rank=0, reason="secret", wall_ns=1))
    log.close(0.5)


def write_report(folder):
    assert run_report(ReportOptions(runs=(RUN,), build=BuildOptions(), output=Path(folder, "page.html"))) in (0, 1)


def write_ledger_trace(folder):
    write_perfetto(analyze([TRACE], Options(keeps_tables=True)), Path(folder, "out.json"))


def write_drawing(folder):
    write_picture(analyze([TRACE], Options(keeps_tables=True)), Path(folder, "out.svg"))


def write_knobs(folder):
    KnobStore(Path(folder, "knobs.json"), is_ours=True).change(lambda others: remembered(others, entry()))


def write_dashboards(folder):
    dashboards.export(Path(folder))


def write_deploy(folder):
    deploy.export(Path(folder), force=True)


WRITES = {
    write_run_log: ("rank0.jsonl", 0o600),
    write_report: ("page.html", 0o600),
    write_ledger_trace: ("out.json", 0o600),
    write_drawing: ("out.svg", 0o600),
    write_knobs: ("knobs.json", 0o600),
    write_dashboards: ("job.json", 0o644),
    write_deploy: ("deploy/systemd/pacecar.service", 0o644),
}
"""What is written into a folder, and under which name and mode."""

MAKE_FOLDERS = (write_run_log, write_knobs, write_dashboards, write_deploy)

RUN = TRACE = Path()


@pytest.fixture(scope="module", autouse=True)
def inputs(tmp_path_factory):
    global RUN, TRACE
    folder = tmp_path_factory.mktemp("inputs")
    RUN = tuned(folder / "run", steps=40)
    TRACE = write_trace(folder / "rank3.json", ("dccc.mm..ccoo", "..AAAAAA....."), rank=3, steps=[(0, 6), (6, 13)])


@pytest.fixture
def public():
    with commons() as folder:
        yield folder


@pytest.fixture
def precious(public):
    """A file of root's, in a folder of root's on the same file system."""
    folder = public / "roots"
    folder.mkdir(mode=0o700)
    file = folder / "precious"
    file.write_bytes(PRECIOUS)
    file.chmod(0o600)
    return file


def written(write, folder):
    """Write as root, in a fork, for a pipe may hold it; return what was complained of."""

    def act():
        os.umask(0)  # as some containers have it
        logging.disable(logging.CRITICAL)
        try:
            write(folder)
        except (OSError, KnobsFileError) as error:
            return str(error)
        return ""

    return as_user(ROOT, act, seconds=SECONDS)


def modes(file):
    found = file.lstat()
    return stat.S_ISREG(found.st_mode), stat.S_IMODE(found.st_mode), found.st_uid


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_what_is_written_is_new_and_its_users(public, write):
    name, mode = WRITES[write]
    if write not in MAKE_FOLDERS:
        (public / "fresh/deeper").mkdir(parents=True)
    assert written(write, public / "fresh/deeper") == ""
    assert modes(public / "fresh/deeper" / name) == (True, mode, ROOT)
    assert stat.S_IMODE((public / "fresh").stat().st_mode) in (0o700, 0o755)
    names = {path.name for path in (public / "fresh/deeper" / name).parent.iterdir()}
    assert not [one for one in names if one.startswith(".") and one != ".dockerignore"], "no temporary file is left"


@pytest.mark.slow
@pytest.mark.parametrize("is_dangling", [False, True])
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_planted_link_to_a_file_is_not_followed(public, precious, write, is_dangling):
    name, mode = WRITES[write]
    target = public / name
    aim = precious.with_name("new") if is_dangling else precious

    def plant():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(aim)

    as_user(STRANGER, plant)
    said = written(write, public)
    assert precious.read_bytes() == PRECIOUS
    assert os.listdir(precious.parent) == ["precious"]
    if not target.is_symlink():
        assert modes(target) == (True, mode, ROOT)
    elif write is write_knobs:
        assert f"uid {STRANGER}" in said


@pytest.mark.slow
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_second_name_of_a_file_is_not_written_through(public, precious, write):
    name, _ = WRITES[write]
    (public / name).parent.mkdir(parents=True, exist_ok=True)
    os.link(precious, public / name)  # as a stranger could where protected_hardlinks is off
    written(write, public)
    assert precious.read_bytes() == PRECIOUS


@pytest.mark.slow
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_planted_pipe_holds_nobody_and_hears_nothing(public, write):
    name, mode = WRITES[write]
    target = public / name

    def plant():
        target.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(target, 0o666)

    as_user(STRANGER, plant)
    begun = time.monotonic()
    written(write, public)
    assert time.monotonic() - begun < SECONDS
    if not stat.S_ISFIFO(target.lstat().st_mode):
        assert modes(target) == (True, mode, ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_strangers_file_is_not_filled(public, write):
    name, mode = WRITES[write]
    target = public / name

    def plant():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
        target.chmod(0o666)

    as_user(STRANGER, plant)
    with target.open("rb") as his:
        written(write, public)
        assert his.read() == b""
    if target.lstat().st_uid == ROOT:
        assert modes(target) == (True, mode, ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_planted_link_to_a_folder_is_not_entered(public, precious, write):
    as_user(STRANGER, lambda: (public / "out").symlink_to(precious.parent))
    said = written(write, public / "out")
    assert os.listdir(precious.parent) == ["precious"]
    if write not in (write_run_log, write_report):  # these say it in the log and on stderr
        assert f"uid {STRANGER}" in said


@pytest.mark.slow
def test_a_link_of_ones_own_or_of_root_is_followed(public):
    (public / "real").mkdir(mode=0o755)
    os.chown(public / "real", OWNER, OWNER)
    (public / "of-root").symlink_to("real")
    write_dashboards(public / "imported-as-root")
    as_user(OWNER, lambda: (public / "own").symlink_to("real"))
    for name in ("of-root", "own"):
        as_user(OWNER, lambda name=name: write_dashboards(public / name))
        assert (public / "real/job.json").exists()
        (public / "real/job.json").unlink()


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_run_log, write_knobs], ids=lambda write: write.__name__)
def test_a_link_of_a_member_of_the_folders_group_leads_into_no_file_of_ours(public, precious, write):
    folder = public / "team"
    folder.mkdir()
    os.chown(folder, OWNER, STRANGER)
    folder.chmod(0o775)
    as_user(STRANGER, lambda: (folder / WRITES[write][0]).symlink_to(precious))
    precious.write_bytes(b"")
    written(write, folder)
    assert precious.read_bytes() == b""


@pytest.mark.slow
def test_the_log_of_a_run_says_why_there_is_none(public, caplog):
    as_user(STRANGER, lambda: (public / "rank0.jsonl").symlink_to("/root/x"))
    write_run_log(public)
    assert [record.getMessage() for record in caplog.records] == [
        f"pacecar cannot write to {public}/rank0.jsonl: a symbolic link that uid {STRANGER} made, which is not"
        " followed; it keeps trying"
    ]


def test_a_run_that_goes_on_adds_to_its_file_and_its_mode_stays(tmp_path):
    write_run_log(tmp_path)
    file = tmp_path / "rank0.jsonl"
    file.chmod(0o640)
    before = file.read_bytes()
    write_run_log(tmp_path)
    assert file.read_bytes() == before * 2
    assert modes(file)[1] == 0o640


# --- recordings, knobs, the socket's folder -----------------------------------------------------------


def test_recordings_go_into_no_folder_that_somebody_else_could_exchange(public, precious):
    def plant():
        (public / "his").mkdir()
        (public / "his/rec").symlink_to(precious.parent)
        (public / "rec").symlink_to(precious.parent)

    as_user(STRANGER, plant)
    (precious.parent / "pacecar-left.tmp").write_text("root's, and not half a recording")
    for folder in (public / "rec", public / "his/rec", public / "his/new"):
        with pytest.raises(OSError, match=f"uid {STRANGER}"):
            RecordingFolder(folder, bytes_max=1000).put([b"x"], 1, "xid", 0)
    assert set(os.listdir(precious.parent)) == {"precious", "pacecar-left.tmp"}
    assert RecordingFolder(public / "ours", bytes_max=1000).put([b"x"], 1, "xid", 0).read_bytes() == b"x"


def test_knobs_in_a_users_folder_give_that_user_nothing_of_roots(public, precious):
    """Root's job keeps its knobs in a folder of a user, who has put second names of root's files there."""
    folder = public / "home"
    folder.mkdir(mode=0o755)
    os.chown(folder, OWNER, OWNER)
    for name in ("knobs.json.lock", ".knobs.json.1.draft", f".knobs.json.{os.getpid()}.draft"):
        os.link(precious, folder / name)
    before = precious.stat()
    write_knobs(folder)
    after = precious.stat()
    assert (after.st_uid, after.st_mode, precious.read_bytes()) == (before.st_uid, before.st_mode, PRECIOUS)
    assert modes(folder / "knobs.json") == (True, 0o600, OWNER), "the user can read his knobs"


@pytest.mark.slow
def test_a_planted_lock_is_neither_followed_nor_waited_for(public, precious):
    lock = public / "knobs.json.lock"
    for plant in (lambda: lock.symlink_to(precious), lambda: os.mkfifo(lock)):
        as_user(STRANGER, plant)
        assert written(write_knobs, public) != ""
        assert precious.read_bytes() == PRECIOUS
        lock.unlink()
    assert written(write_knobs, public) == ""
    assert modes(lock) == (True, 0o600, ROOT)


def test_a_shared_knobs_file_has_a_shared_lock(public):
    (public / "knobs.json").touch()
    (public / "knobs.json").chmod(0o660)
    assert written(write_knobs, public) == ""
    assert [modes(public / name)[1] for name in ("knobs.json", "knobs.json.lock")] == [0o660, 0o660]


def test_no_daemon_meets_in_a_folder_that_a_stranger_put_there(public):
    def plant():
        (public / "his").mkdir()
        (public / "link").symlink_to("his")

    as_user(STRANGER, plant)
    for name in ("his/s", "link/s", "his/deeper/s"):
        with pytest.raises(UnixSocketError, match=f"uid {STRANGER}"):
            UnixSocket(public / name).open()
    assert not list((public / "his").rglob("s*")), "nothing listens there"
    meeting = UnixSocket(public / "ours/s")
    meeting.open().close()
    assert stat.S_IMODE((public / "ours").stat().st_mode) == 0o700
