"""Files that a user names are replaced as a whole, through the user's own links, or give one clear error."""

from __future__ import annotations

import ast
import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pacecar.path_walk import UnsafePathError, Walk, mounted_by, unnameable_uid
from pacecar.safe_files import appending, output, own_folder, replacing
from tests.kit.ours import ROOMS
from tests.kit.users import STRANGER, as_user, commons, needs_root


def put(path: str | Path, text: bytes = b"new") -> None:
    with output(path) as stream:
        stream.write(text)


def test_a_file_of_ones_own_is_replaced_and_keeps_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    put(file, b"old")
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    with file.open("rb") as reader:
        put(file)
        assert reader.read() == b"old", "whoever reads goes on in the old one"
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"new", 0o644)
    assert os.listdir(tmp_path) == ["page.html"]


def test_what_goes_wrong_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "page.html"
    put(file, b"old")
    with pytest.raises(TypeError), output(file) as stream:
        stream.writelines([b"half", "no bytes"])  # type: ignore[list-item]

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        put(file)
    assert (file.read_bytes(), os.listdir(tmp_path)) == (b"old", ["page.html"])


def test_errors_name_what_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for name in ("file/x", "none/x", "folder", "l/x"):
        if name == "l/x":
            (tmp_path / "l").symlink_to("l")
        with pytest.raises(OSError, match=str(tmp_path / name)):
            put(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "l"]


@pytest.mark.slow
def test_standard_output_in_all_its_names_and_a_pipe_of_ones_own_are_written_as_they_are(tmp_path: Path) -> None:
    for name in ("/dev/stdout", "/proc/self/fd/1", "/dev/fd/1"):
        code = f"from tests.pacecar.test_safe_files import put; put({name!r}, b'text')"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
        assert (done.stdout, done.returncode) == (b"text", 0), done.stderr
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        heard: list[bytes] = []
        reader = threading.Thread(target=lambda heard=heard: heard.append((tmp_path / "pipe").read_bytes()))  # type: ignore[misc]
        reader.start()
        put(tmp_path / name)
        reader.join(30)
        assert heard == [b"new"]
    put("/dev/null")
    assert (tmp_path / "link").is_symlink()


def test_relative_paths_dots_and_links_of_ones_own_lead_where_they_do_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a/b")
    monkeypatch.chdir(tmp_path)
    for path in ("one", "./a/../two", "link/../three", "a//b/./four", f"{tmp_path}/link/five"):
        put(path, path.encode())
        assert Path(path).read_bytes() == path.encode()
    os.close(appending("fresh/deep/log"))
    assert Path("fresh/deep/log").stat().st_mode & 0o777 == 0o600
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    put(tmp_path / "one", b"from nowhere")
    assert (tmp_path / "one").read_bytes() == b"from nowhere"
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@needs_root
def test_a_strangers_pipe_is_replaced_or_refused_but_gets_nothing(tmp_path: Path) -> None:
    with commons() as public:
        as_user(STRANGER, lambda: os.mkfifo(public / "pipe"))
        with pytest.raises(UnsafePathError, match=f"uid {STRANGER}"):
            put(public / "pipe")
        (public / "roots").mkdir(mode=0o700)
        as_user(STRANGER, lambda: (public / "link").symlink_to("/dev/null"))
        put(public / "link")
        assert not (public / "link").is_symlink()


@needs_root
def test_a_folder_of_ones_own_is_neither_anothers_nor_open_to_others() -> None:
    with commons() as public:
        os.close(own_folder(public / "ours/deeper"))
        assert [(public / name).stat().st_mode & 0o777 for name in ("ours", "ours/deeper")] == [0o700, 0o700]
        (public / "ours").chmod(0o770)
        with pytest.raises(UnsafePathError, match="others may write"):
            own_folder(public / "ours")
        as_user(STRANGER, lambda: (public / "his").mkdir())
        for name in ("his", "his/deeper"):
            with pytest.raises(UnsafePathError, match=f"uid {STRANGER}"):
                own_folder(public / name)


@needs_root
def test_a_walk_holds_no_descriptor_when_it_is_over() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    with commons() as public:
        (public / "link").symlink_to("/proc/self/fd")
        as_user(STRANGER, lambda: (public / "his").symlink_to("/"))
        before = count()
        for path in ("x", "link/1", "his/x", "none/x", "x/y", "/", "/dev/stdout", "a/../.."):
            try:
                with Walk(public / path) as walk:
                    walk.entry(follow=True)
            except OSError:
                pass
        assert count() == before


def test_the_number_of_those_whom_a_user_namespace_does_not_map(tmp_path: Path) -> None:
    file = tmp_path / "uid_map"
    for text, expected in (
        ("         0          0 4294967295\n", None),
        ("      1000       1000          1\n", 65534),
        ("0 100000 65536\n", 65534),
        ("0 0 1000\n1000 1000 4294966295\n", None),
        ("", 65534),
        ("odd", 65534),
    ):
        file.write_text(text)
        assert unnameable_uid(str(file)) == expected
    assert unnameable_uid(str(tmp_path / "none")) is None


def test_who_mounted_what_lies_in_the_way() -> None:
    """The kernel tells which user mounted a FUSE file system, whatever owners and name it shows."""
    mounts = [
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw",
        "40 22 0:35 / /tmp rw,nosuid - tmpfs tmpfs rw,mode=1777",
        "41 40 8:1 /run/pacecar /tmp/with\\040space ro - ext4 /dev/sda1 rw",
        "42 40 0:50 / /tmp/pacecar-7 rw shared:3 - fuse.sshfs host: rw,user_id=61003,group_id=61003,allow_other",
        "43 40 0:51 / /tmp/odd rw - fuse odd rw",
        "44 40 0:52 / /tmp/twice rw - fuse.x x rw,user_id=61003",
        "45 40 0:53 / /tmp/twice rw - tmpfs tmpfs rw",
        "46 40 0:54 / /tmp/pacecar-7\x0cx rw - fuse.sshfs host: rw,user_id=61003",
        "47 40 0:55 / /tmp/pacecar-7\x85x rw - fuse.sshfs host: rw,user_id=61003",
        "48 40 0:56 / /tmp/pacecar-7\rx rw - fuse.sshfs host: rw,user_id=61003",
        "49 40 0:57 / /tmp/named rw - fuse.x user_id=0,x rw,user_id=61003",
        "50 40 0:58 / /tmp/nameless rw - fuse.x  rw,user_id=61003",
    ]
    for path, expected in (
        ("/tmp/with space", 0),
        ("/tmp/pacecar-7", 61003),
        ("/tmp/odd", 65534),
        ("/tmp/twice", 0),
        ("/tmp/named", 61003),
        ("/tmp/nameless", 61003),
        ("/tmp/none", None),
    ):
        assert mounted_by(path, "\n".join(mounts) + "\n") == expected


def test_a_new_file_is_nobody_elses_while_it_is_written(tmp_path: Path) -> None:
    with replacing(tmp_path / "x") as stream:
        stream.write(b"x")
        (draft,) = tmp_path.iterdir()
        assert draft.stat().st_mode & 0o777 == 0o600


# --- the rule, in the source ---

ROOT = Path(__file__).resolve().parents[2]

WRITERS = {
    "pacecar/safe_files.py", "pacecar/path_walk.py",
    "profiler/hook/commands/trace_file.py",  # makes the folder for torch, by descriptor
    "commands/demo/runfolder.py",  # a new folder, and the link `latest`
    "commands/demo/processes.py",  # a file that says stop, and mkdtemp, in new folders of mode 0700
    "profiler/ranks/cross_rank/cross_rank_window.py", "profiler/ranks/cross_rank/temporary_folder.py",  # as above
    "analysis/reading/rank_window.py",  # the kernel's file of its own process
    "commands/doctor/reference.py", "dashboards/__main__.py",  # for the developer, in a checkout
}  # fmt: skip
"""Code that creates files or folders without `safe_files`, and why that is safe."""

CALLERS = {
    "pacecar/daemon_peer.py",
    "monitor/ingest/unix_socket.py",  # listens, and asks whether anybody else does
    "monitor/systemd.py",  # takes a socket over from the service manager, and tells it at the address that it gave
}
"""Where Unix sockets are made."""

_MAKES = {
    "write_text", "write_bytes", "mkdir", "makedirs", "symlink_to", "symlink", "mkfifo", "touch", "copyfile", "copy",
    "copy2", "copytree", "mkdtemp", "mkstemp", "NamedTemporaryFile", "TemporaryDirectory", "hardlink_to",
}  # fmt: skip


def calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            found.append((name, node))
    return found


def is_write(name: str, call: ast.Call) -> bool:
    if name in _MAKES:
        receiver = getattr(call.func, "value", None)  # copy() of a list or of the module copy is none
        return name != "copy" or getattr(receiver, "id", "") == "shutil"
    if name != "open":
        return False
    modes = [one.value for one in (*call.args, *(k.value for k in call.keywords)) if isinstance(one, ast.Constant)]
    return "O_CREAT" in ast.dump(call) or any(
        isinstance(mode, str) and len(mode) <= 3 and set(mode) & set("wax+") and set(mode) <= set("rwaxbt+")
        for mode in modes
    )


@pytest.mark.slow
def test_files_are_made_and_daemons_are_called_only_where_it_is_known_how() -> None:
    writers, callers = set(), set()
    for room in ("pacecar", *ROOMS):
        for file in (ROOT / room).rglob("*.py"):
            if any(part.is_symlink() for part in (file, *file.parents) if part.is_relative_to(ROOT)):
                continue  # pacecar/monitor and the like are links to the rooms
            path = str(file.relative_to(ROOT))
            source = file.read_text(encoding="utf-8")
            if "AF_UNIX" in source and "socket(" in source:
                callers.add(path)
            may_write = any(f"{name}(" in source for name in (*_MAKES, "open"))
            if may_write and any(is_write(name, call) for name, call in calls(ast.parse(source))):
                writers.add(path)
    assert writers <= WRITERS, f"by pacecar.safe_files, or with a reason here: {writers - WRITERS}"
    assert callers == CALLERS
