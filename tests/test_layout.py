"""The house stands as it is drawn: packages, links, sizes; and it never takes the names `monitor` and `profiler`."""

from __future__ import annotations

import ast
import graphlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import grimp
import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("adapters", "commands", "controller", "dashboards", "deploy", "job", "monitor", "profiler")
MODULES_MAX = 12
CATALOGUES = {"commands", "dashboards/boards", "monitor/collectors", "pacecar"}
"""Folders whose modules are one of a kind each, so that there are no parts; `pacecar` has the public names."""

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages_on_disk() -> set[str]:
    found = {"pacecar"}
    for folder in (ROOT / "pacecar", *(ROOT / room for room in ROOMS)):
        prefix = "" if folder.name == "pacecar" else "pacecar."
        for init in folder.rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT).parts
            # The links in pacecar/ lead to the rooms, which are counted where they stand.
            if len(parts) > 1 and parts[0] == "pacecar" and parts[1] in ROOMS:
                continue
            found.add(prefix + ".".join(parts))
    return found


def modules() -> list[Path]:
    tops = [ROOT / "pacecar" / name for name in ("formatting", "metrics", "records")] + [ROOT / room for room in ROOMS]
    return sorted([*(ROOT / "pacecar").glob("*.py"), *(path for top in tops for path in top.rglob("*.py"))])


def imported(text: str) -> set[str]:
    """Return the first names of the absolute imports of a module."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    whole = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0]
    return {
        name.partition(".")[0]
        for name in [*whole, *(a.name for n in nodes if isinstance(n, ast.Import) for a in n.names)]
    }


@pytest.mark.slow
def test_rooms_are_imported_by_their_names_in_the_package() -> None:
    """`import monitor` would take a user's own module of that name."""
    files = [*modules(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").rglob("*.py")]
    texts = {str(path): path.read_text() for path in files}
    may = re.compile(rf"\b(?:import|from) +(?:{'|'.join(ROOMS)})\b")  # a statement names one module: ruff E401
    found = {name: imported(text) & {*ROOMS} for name, text in texts.items() if may.search(text)}
    assert {name: rooms for name, rooms in found.items() if rooms} == {}


def test_no_module_imports_another_that_imports_it_in_turn() -> None:
    """Nor by a third, nor within a function, nor for types alone."""
    graph = grimp.build_graph("pacecar", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert {"pacecar.job.attach", "pacecar.kernel_files"} < imports.keys()
    graphlib.TopologicalSorter(imports).prepare()


def test_every_package_on_disk_is_listed_and_every_listed_one_is_there() -> None:
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages_on_disk()


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_is_mounted_and_linked(room: str) -> None:
    assert PROJECT["tool"]["setuptools"]["package-dir"][f"pacecar.{room}"] == room
    link = ROOT / "pacecar" / room
    assert link.is_symlink()
    assert os.readlink(link) == f"../{room}"
    assert (ROOT / room / "py.typed").exists()


def test_modules_say_what_they_are_for() -> None:
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in modules()}
    assert len(texts) > 300, "they are found"
    silent = [name for name, text in texts.items() if not text.lstrip("r").startswith('"""')]
    assert silent == [], "a module docstring says what the module does"


def test_a_folder_has_no_more_modules_than_a_newcomer_can_keep_in_view() -> None:
    counted = Counter(str(path.parent.relative_to(ROOT)) for path in modules() if path.name != "__init__.py")
    assert {name: count for name, count in counted.items() if count > MODULES_MAX and name not in CATALOGUES} == {}


def test_hooks_before_a_commit_run_what_make_lint_runs() -> None:
    lint = (ROOT / "Makefile").read_text().split("\nlint:")[1].split("\n\n")[0].splitlines()[1:]
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook["entry"] for repository in config["repos"] for hook in repository["hooks"]]
    assert hooks == [line.strip().replace("$(BIN)", ".venv/bin") for line in lint]


def test_no_file_of_the_project_is_named_twice_among_the_tests() -> None:
    """`--import-mode=importlib` allows it, but people who run one file by name do not."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_the_command_and_the_version_are_the_packages_own() -> None:
    import pacecar

    assert PROJECT["project"]["scripts"] == {"pacecar": "pacecar.commands.main:main"}
    assert PROJECT["project"]["version"] == pacecar.__version__


TRAIN = """
import monitor, profiler
assert monitor.MINE == profiler.MINE == "the user's own"

import pacecar, pacecar.profiler, pacecar.monitor, pacecar.controller, pacecar.dashboards
import torch
assert pacecar.profiler is not profiler and pacecar.__file__.startswith(EXPECTED), pacecar.__file__
assert pacecar.profiler.__file__.startswith(EXPECTED), pacecar.profiler.__file__

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with pacecar.attach(model, optimizer, tune="off") as pacer:
    assert pacer.is_active, pacer.inert_because
    for batch in pacer.data([torch.ones(2, 4)] * 3):
        model(batch).mean().backward()
        optimizer.step()
print("trained")
"""


def train_beside_own_modules(folder: Path, expected: Path, **environ: str) -> None:
    """Run a training script in a folder that has its own profiler.py and monitor.py."""
    for name in ("profiler.py", "monitor.py"):
        (folder / name).write_text('MINE = "the user\'s own"\n')
    script = folder / "train.py"
    script.write_text(f"EXPECTED = {str(expected)!r}\n{TRAIN}")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env={**os.environ, "PACECAR_HOOK_SOCKET": str(folder / "none"), **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained\n"


@pytest.mark.slow
def test_the_users_own_profiler_and_monitor_stay_theirs_beside_an_editable_install(tmp_path: Path) -> None:
    user = tmp_path / "user"
    user.mkdir()
    train_beside_own_modules(user, ROOT)


@pytest.mark.full
def test_the_users_own_profiler_and_monitor_stay_theirs_beside_an_installed_wheel(tmp_path: Path) -> None:
    source = tmp_path / "source"
    # Built from a copy: setuptools leaves build/ behind, and a stale one would go into the wheel.
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "pacecar", *ROOMS):
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.exists():
            shutil.copy(path, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    wheels, target = tmp_path / "wheels", tmp_path / "target"
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(source)]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    (wheel,) = wheels.glob("pacecar-*.whl")
    install = [*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    assert sorted(path.name for path in target.iterdir() if "dist-info" not in path.name) == ["bin", "pacecar"]
    assert (target / "pacecar" / "py.typed").exists()
    assert list((target / "pacecar" / "dashboards" / "generated").glob("*.json"))
    assert list((target / "pacecar" / "dashboards" / "generated").glob("*.rules.yml"))
    user = tmp_path / "user"
    user.mkdir()
    train_beside_own_modules(user, target, PYTHONPATH=str(target))
