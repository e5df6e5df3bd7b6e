"""What is installed from a wheel, or from an sdist, stands on its own: page, dashboards, unit files, and the demo."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import urllib.request
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.kit.net import free_port
from tests.kit.ours import ROOMS

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


pytestmark = [pytest.mark.slow, pytest.mark.full]


ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("PACECAR_", "PYTHON"))}
"""Without what would lead back to the checkout."""


def ran(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True, text=True, timeout=900, check=False, env=ENVIRONMENT, **options,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist of a copy of the sources, and the wheel that is made of the sdist alone."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "pacecar", *ROOMS):
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source / name)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist"]
    ran(*build, "--sdist", source)
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    ran(*build, "--wheel", unpacked)
    (wheel,) = (folder / "dist").glob("*.whl")
    return sdist, wheel


def environment(folder: Path, wheel: Path, requirements: list[str] | None) -> Path:
    """Make an environment with the wheel; of what else is installed here only `requirements`, or all of it (None)."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    (site,) = (folder / "lib").glob("python*/site-packages")
    ran(sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", python, "install",
        "--no-deps", "--no-index", "--no-compile", wheel)  # fmt: skip
    if requirements is None:
        ours = str(Path(metadata.distribution("click").locate_file("")).resolve())
        (site / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
        return python
    for requirement in requirements:
        distribution = metadata.distribution(requirement)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(distribution.locate_file(top)).resolve())
    return python


def required() -> list[str]:
    return [requirement.split(">=")[0] for requirement in PROJECT["project"]["dependencies"]]


@pytest.fixture(scope="module")
def bare(built, tmp_path_factory):
    """An environment with the wheel and its base dependencies, and an empty folder to be in."""
    folder = tmp_path_factory.mktemp("bare")
    return environment(folder / "venv", built[1], required()), folder


def pacecar(python: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return ran(python.parent / "pacecar", *arguments, cwd=folder)


def test_the_wheel_of_the_sdist_has_every_file_that_is_no_source_of_ours(built):
    sdist, wheel = built
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    for room in ("dashboards/generated", "deploy", "monitor/page"):
        for path in (ROOT / room).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert f"pacecar/{path.relative_to(ROOT)}" in inside, f"{path}: name it in package-data"
    assert not [name for name in inside if "__pycache__" in name or name.endswith(".pyc")]
    tops = {name.split("/")[0] for name in inside}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"pacecar"}
    with tarfile.open(sdist) as archive:
        given = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "pacecar/deploy/README.md", "pacecar/monitor/daemon.py"} <= given


def test_the_installed_command_is_the_wheels_and_needs_no_torch(bare):
    python, folder = bare
    code = "import pacecar, importlib.util as u; print(pacecar.__file__); print(u.find_spec('torch'))"
    file, torch = ran(python, "-c", code, cwd=folder).stdout.splitlines()
    assert Path(file).is_relative_to(folder)
    assert torch == "None"
    assert pacecar(python, folder, "version").stdout == f"pacecar {PROJECT['project']['version']}\n"


def test_dashboards_and_unit_files_come_out_of_the_wheel_as_they_are_here(bare):
    python, folder = bare
    unit = pacecar(python, folder, "deploy", "show", "systemd/pacecar.service").stdout
    assert unit == (ROOT / "deploy/systemd/pacecar.service").read_text()
    for topic in ("systemd", "deb", "compose", "kubernetes", "helm", "slurm", "prometheus", "container"):
        shown = pacecar(python, folder, "deploy", "show", topic).stdout
        assert shown.startswith(f"# ---- deploy/{topic}/")
    lines = pacecar(python, folder, "deploy", "export", str(folder / "out")).stdout.splitlines()
    assert len(lines) > 25
    for line in lines:
        path = Path(line).relative_to(folder / "out")
        assert Path(line).read_text() == (ROOT / path).read_text(), path
    assert os.access(folder / "out/deploy/slurm/prolog.sh", os.X_OK)
    exported = pacecar(python, folder, "dashboards", "export", str(folder / "boards")).stdout.splitlines()
    assert all(Path(line).exists() for line in exported)
    assert exported


@pytest.mark.distributed
def test_the_daemon_of_the_wheel_serves_metrics_and_its_page(bare):
    python, folder = bare
    port = free_port()
    daemon = subprocess.Popen(
        [python.parent / "pacecar", "daemon", "--port", str(port), "--socket", str(folder / "s")],
        cwd=folder, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        answers: dict[str, str] = {}
        limit = time.monotonic() + 30
        while len(answers) < 3:
            assert time.monotonic() < limit
            assert daemon.poll() is None, daemon.stderr.read()
            try:
                for path in ("/", "/metrics", "/api/snapshot"):
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                        answers[path] = answer.read().decode()
            except OSError:
                time.sleep(0.1)
        assert "pacecar_build_info" in answers["/metrics"]
        assert "page.js" in answers["/"]
        assert json.loads(answers["/api/snapshot"])
    finally:
        daemon.terminate()
        daemon.communicate(timeout=20)


@pytest.mark.distributed
def test_the_demo_runs_from_the_wheel_outside_of_the_checkout(built, tmp_path):
    pytest.importorskip("torch", reason="the extra `torch` is not installed")
    pytest.importorskip("rich", reason="the extra `demo` is not installed")
    python = environment(tmp_path / "venv", built[1], None)
    where = ran(python, "-c", "import pacecar; print(pacecar.__file__)", cwd=tmp_path).stdout.strip()
    assert Path(where).is_relative_to(tmp_path), "not the checkout's"
    done = pacecar(
        python,
        tmp_path,
        "demo",
        "--steps",
        "8",
        "--world-size",
        "1",
        "--port",
        "0",
        "--run-dir",
        str(tmp_path / "runs"),
    )
    assert "records" in done.stdout, done.stdout[-2000:]
    assert (tmp_path / "runs/latest/rank0.jsonl").stat().st_size > 0
